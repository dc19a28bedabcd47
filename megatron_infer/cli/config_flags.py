"""Flags of the command line, made from the declarations of options: `config.options`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_infer.cli.parser import Parser
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.machine_defaults import machine_defaults
from megatron_infer.config.options import Option, docs_of, options_of
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.speculative import SpeculativeConfig
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.errors import ConfigError, RequestError

ENGINE_PREFIXES: Mapping[type, str] = {
    InferenceConfig: "config_",
    SpeculativeConfig: "config_speculative_",
    LoRAConfig: "config_lora_",
}
"""Options of an engine -> what the destinations of their flags begin with."""
SAMPLING_PREFIXES: Mapping[type, str] = {SamplingParams: "sampling_", StructuredOutput: "structured_"}
SERVER_PREFIX = "server_"
METHOD_DEST = ENGINE_PREFIXES[SpeculativeConfig] + "method"
SYNTHETIC = "synthetic_acceptance_rate"
"""The option of SpeculativeConfig that only `bench` has a flag for."""


def add_flags(
    parser: argparse.ArgumentParser,
    group: Any,
    options: type,
    prefix: str,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """A flag for each option of a dataclass, with the string under the option as its help.

    prefix: what the destination of a flag begins with. defaults: what help says instead of the option's own default.
    """
    docs = docs_of(options)
    for one in options_of(options).values():
        if one.flag is None:
            continue
        default = (defaults or {}).get(one.name, one.default)
        shown, parsing = one.default_text or f"default {default_text(default)}", _parsing_of(one)
        if parsing.get("action") in ("append", "extend"):
            shown += "; repeatable"
        action = group.add_argument(
            flag_of(one),
            dest=prefix + one.name,
            default=argparse.SUPPRESS,
            help=f"{docs[one.name]} ({shown})".replace("%", "%%"),
            **parsing,
        )
        if isinstance(parser, Parser):
            parser.shorten(action, is_rare=not one.is_common)


def given_flags(args: argparse.Namespace, options: type, prefix: str) -> dict[str, Any]:
    """The options of a dataclass that a command line gives. Raises RequestError for a file that cannot be read."""
    declared = options_of(options)
    values = {name: getattr(args, prefix + name) for name in declared if hasattr(args, prefix + name)}
    return {name: _text_of(value) if declared[name].is_file else value for name, value in values.items()}


def flag_of(option: Option | str) -> str:
    """The flag of an option, or of a name: --block-size-tokens."""
    name = option if isinstance(option, str) else option.flag or option.name
    return "--" + name.replace("_", "-")


def default_text(default: object) -> str:
    """A default as help has it."""
    if isinstance(default, Enum):
        default = default.value
    return "none" if default in ((), "") else str(default).lower()


def flags_given(args: argparse.Namespace, prefixes: Mapping[type, str]) -> Iterator[tuple[str, str]]:
    """(name, flag) of each option that a command line gives. prefixes: of the dataclasses that declare them."""
    for options, prefix in prefixes.items():
        for name, one in options_of(options).items():
            if hasattr(args, prefix + name):
                yield name, flag_of(one)


# ------------------------------------------------------------------ engines


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """A flag for every option of an engine that a command line can give, in the group "engine"."""
    group = parser.add_argument_group("engine", "options of InferenceConfig")
    by_machine = dict.fromkeys(machine_defaults(is_cuda=False, available_bytes=0), "chosen for the machine")
    for options, prefix in ENGINE_PREFIXES.items():
        add_flags(parser, group, options, prefix, defaults=by_machine)


def add_bench_only_options(parser: argparse.ArgumentParser) -> None:
    """`--synthetic-acceptance-rate`."""
    parser.add_argument(
        flag_of(SYNTHETIC),
        dest=ENGINE_PREFIXES[SpeculativeConfig] + SYNTHETIC,
        default=argparse.SUPPRESS,
        help=docs_of(SpeculativeConfig)[SYNTHETIC].replace("%", "%%"),
        **_number("float", "X", is_optional=False),
    )


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The options of an engine that the command line gives."""
    values, drafts, lora = (given_flags(args, options, prefix) for options, prefix in ENGINE_PREFIXES.items())
    if "method" in drafts:
        values["speculative"] = None if drafts["method"] == "none" else drafts
    elif drafts:
        flags = ", ".join(flag_of(options_of(SpeculativeConfig)[name]) for name in drafts)
        method = "draft" if "draft_model" in drafts else "ngram"
        raise ConfigError(f"{flags}: nothing is drafted without --speculative; add --speculative {method}")
    if lora:
        values["lora"] = lora
    return values


# ------------------------------------------------------------------ requests


def add_sampling_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """A flag for every option of a request. defaults: those of this command that differ from the class's."""
    sampling = parser.add_argument_group("sampling")
    structured = parser.add_argument_group("structured output", "restricts the output; one of these")
    for group, (options, prefix) in zip((sampling, structured), SAMPLING_PREFIXES.items(), strict=True):
        add_flags(parser, group, options, prefix, defaults=defaults)
    parser.set_defaults(sampling_defaults=defaults)


def sampling_from(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of SamplingParams: those of the command line, else the command's defaults."""
    values, structured = (given_flags(args, options, prefix) for options, prefix in SAMPLING_PREFIXES.items())
    values = dict(args.sampling_defaults) | values
    if values.get("logit_bias") is not None:
        values["logit_bias"] = dict(values["logit_bias"])
    if structured := {name: value for name, value in structured.items() if value is not False}:
        values["structured"] = StructuredOutput(**structured)
    return values


# ------------------------------------------------------------------ parsing


def _parsing_of(one: Option) -> dict[str, Any]:
    """argparse's arguments for an option's type."""
    if one.words:
        return {"choices": list(one.words)}
    if one.kind == "bool" and (not one.is_optional or one.default is None):  # without the flag it is None
        return {"action": argparse.BooleanOptionalAction}
    if one.kind in _NUMBERS:
        metavar = "GIB" if one.name.endswith("_gb") else _NUMBERS[one.kind][1]
        return _number(one.kind, metavar, is_optional=one.is_optional)
    if one.is_file:
        return {"metavar": "FILE"}
    return _PARSING.get(one.kind, {}) | {"metavar": _METAVARS.get(one.kind, one.name.split("_")[-1].upper())}


def _number(kind: str, metavar: str, *, is_optional: bool) -> dict[str, Any]:
    """A number, a truth value, or none where the option may be None."""
    parse = _NUMBERS[kind][0]

    def parsed(text: str) -> Any:
        if is_optional and text.lower() == "none":
            return None
        try:
            return parse(text)
        except (KeyError, ValueError):
            expected = {"N": "an integer", "X": "a number", "GIB": "a number of GiB"}.get(metavar, metavar)
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None

    return {"type": parsed, "metavar": metavar}


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _methods(text: str) -> str | tuple[str, ...]:
    """One method, or several in the order in which they are asked."""
    names = tuple(text.split(","))
    return names if len(names) > 1 else text


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids separated by commas, got {text!r}") from None


def _bias(text: str) -> tuple[int, float]:
    token, found, bias = text.partition("=")
    try:
        if found:
            return int(token), float(bias)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected ID=BIAS such as 42=-5, got {text!r}")


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read: {error}") from None


_NUMBERS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "N"),
    "float": (float, "X"),
    "int | float": (float, "X"),
    "bool": (_boolean, "{true,false,none}"),
}
"""Type of an option -> what reads its text, and the name of the text in help."""
_PARSING: Mapping[str, dict[str, Any]] = {
    "str | tuple[str, ...]": {"type": _methods},
    "tuple[str, ...]": {"nargs": "+", "action": "extend"},
    "tuple[tuple[str, str], ...]": {"action": "append"},
    "Sequence[int]": {"type": _ids},
    "Mapping[int, float]": {"type": _bias, "action": "append"},
    "Sequence[str]": {"action": "append"},
    "str | Sequence[str]": {"action": "append"},
}
"""Type of an option -> argparse's arguments; one text for the others."""
_METAVARS: Mapping[str, str] = {
    "str | tuple[str, ...]": "METHOD[,METHOD]",
    "tuple[tuple[str, str], ...]": "NAME=PATH",
    "Sequence[int]": "ID,ID",
    "Mapping[int, float]": "ID=BIAS",
    "Sequence[str]": "TEXT",
    "str | Sequence[str]": "TEXT",
}

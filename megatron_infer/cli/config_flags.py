"""Command-line flags for the options of `InferenceConfig`, generated from the dataclass."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Any

from megatron_infer.cli.parser import Parser
from megatron_infer.config import inference as config_module
from megatron_infer.config.checks import LOGPROBS_MODES
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.machine_defaults import machine_config, machine_defaults
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.config.speculative import SpeculativeConfig
from megatron_infer.errors import ConfigError

NOT_FLAGS = ("mamba_inference_state_config", "pg_collection", "metrics_writer", "request_metadata_types", "lora")
"""Objects of a running process, which a command line cannot give; `lora` has flags of its own, LORA_FLAGS."""
LORA_FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "adapters": ("--lora", {"action": "append", "metavar": "NAME=PATH"}),
    "max_loras": ("--max-loras", {"type": int, "metavar": "N"}),
    "max_rank": ("--max-lora-rank", {"type": int, "metavar": "N"}),
}
"""Field of LoRAConfig -> its flag."""
RENAMED = {"max_tokens": "max_tokens_per_step", "seed": "engine_seed"}
"""Options whose names are sampling flags on a command line."""
BY_MODEL = ("prefix_caching_mamba_gb",)
"""Options whose defaults depend on the model, see `config.machine_defaults`."""
COMMON = frozenset(
    (
        "--buffer-size-gb",
        "--max-requests",
        "--max-tokens-per-step",
        "--max-sequence-length",
        "--kv-cache-management-mode",
        "--kv-cache-dtype",
        "--weight-dtype",
        "--enable-chunked-prefill",
        "--enable-prefix-caching",
        "--prefix-caching-coordinator-policy",
        "--attention-backend",
        "--num-cuda-graphs",
        "--overlap",
        "--speculative",
        "--num-speculative-tokens",
        "--draft-model",
        "--lora",
        "--max-loras",
        "--logprobs-mode",
        "--batch-invariant",
        "--logging-step-interval",
    )
)
"""The flags that --help shows; --help-all shows all."""
DEST_PREFIX, LORA_PREFIX = "config_", "lora_"
SPECULATIVE_DESTS = {
    item.name: f"{DEST_PREFIX}speculative_{item.name}" for item in dataclasses.fields(SpeculativeConfig)
}
"""Field of SpeculativeConfig -> where its flag's value is."""
SYNTHETIC = "synthetic_acceptance_rate"
"""Field of SpeculativeConfig that only `bench` takes."""


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """One flag for every option that a command line can give, in the group "engine"."""
    group = parser.add_argument_group("engine", "options of InferenceConfig")
    docs = field_docs()
    by_machine = machine_defaults(is_cuda=False, available_bytes=0)
    for item in dataclasses.fields(InferenceConfig):
        if item.name == "speculative":
            _add_speculative_options(group)
        if item.name in (*NOT_FLAGS, "speculative"):
            continue
        default = "chosen for the machine" if item.name in by_machine else f"default {_shown(item.default)}"
        default = "chosen for the model" if item.name in BY_MODEL else default
        group.add_argument(
            flag_of(item.name),
            dest=DEST_PREFIX + item.name,
            default=argparse.SUPPRESS,
            help=f"{docs[item.name]} ({default})".replace("%", "%%"),
            **_parsing_of(item.name, str(item.type)),
        )
    about, defaults = docs_of(LoRAConfig), {item.name: item.default for item in dataclasses.fields(LoRAConfig)}
    for name, (flag, parsing) in LORA_FLAGS.items():
        default = "" if name == "adapters" else f" (default {defaults[name]})"
        text = f"LoRA: {about[name]}{default}".replace("%", "%%")
        group.add_argument(flag, dest=f"{LORA_PREFIX}{name}", default=argparse.SUPPRESS, help=text, **parsing)
    if isinstance(parser, Parser):
        parser.show_first("engine", COMMON)


def config_from(
    args: argparse.Namespace,
    shape: ModelShape | None,
    *,
    is_cuda: bool,
    available_bytes: int,
    tensor_parallel_size: int = 1,
) -> InferenceConfig:
    """The config of a command line: its flags, and for the rest what suits the model, the device and its free memory.

    Raises ConfigError or NotImplementedError, as InferenceConfig does.
    """
    return machine_config(
        given(args),
        shape,
        is_cuda=is_cuda,
        available_bytes=available_bytes,
        tensor_parallel_size=tensor_parallel_size,
    )


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The options that the command line gives."""
    names = (item.name for item in dataclasses.fields(InferenceConfig))
    values = {name: getattr(args, DEST_PREFIX + name) for name in names if hasattr(args, DEST_PREFIX + name)}
    fields = {name: getattr(args, dest) for name, dest in SPECULATIVE_DESTS.items() if hasattr(args, dest)}
    if "method" in fields:
        values["speculative"] = None if fields["method"] == "none" else fields
    elif fields:
        given = ", ".join(speculative_flag(name) for name in fields)
        method = "draft" if "draft_model" in fields else "ngram"
        raise ConfigError(f"{given}: nothing is drafted without --speculative; add --speculative {method}")
    lora = {name: getattr(args, LORA_PREFIX + name) for name in LORA_FLAGS if hasattr(args, LORA_PREFIX + name)}
    if lora:
        values["lora"] = lora
    return values


def _add_speculative_options(group: Any) -> None:
    """`--speculative METHOD`, and a flag for each other field of SpeculativeConfig."""
    docs = docs_of(SpeculativeConfig)
    for item in dataclasses.fields(SpeculativeConfig):
        if item.name == SYNTHETIC:
            continue
        is_text = item.type in ("str", "Any")
        parsing: dict[str, Any] = {"metavar": item.name.upper()} if is_text else {}
        if item.name == "method":
            parsing = {"type": _methods, "metavar": "METHOD[,METHOD]"}
        elif not is_text:
            parsing = _parsing_of(item.name, str(item.type))
        what = field_docs()["speculative"] if item.name == "method" else docs[item.name]
        default = "none" if item.name == "method" else _shown(item.default)
        group.add_argument(
            speculative_flag(item.name),
            dest=SPECULATIVE_DESTS[item.name],
            default=argparse.SUPPRESS,
            help=f"{what} (default {default})".replace("%", "%%"),
            **parsing,
        )


def add_bench_only_options(parser: argparse.ArgumentParser) -> None:
    """`--synthetic-acceptance-rate`."""
    parsing: dict[str, Any] = {"type": _named(float, "X"), "metavar": "X", "default": argparse.SUPPRESS}
    text = docs_of(SpeculativeConfig)[SYNTHETIC].replace("%", "%%")
    parser.add_argument(f"--{SYNTHETIC.replace('_', '-')}", dest=SPECULATIVE_DESTS[SYNTHETIC], help=text, **parsing)


def _methods(text: str) -> str | tuple[str, ...]:
    """One method, or several in the order in which they are asked."""
    names = tuple(text.split(","))
    return names if len(names) > 1 else text


def speculative_flag(name: str) -> str:
    """The flag of a field of SpeculativeConfig: --speculative-adaptive."""
    if name == "method":
        return "--speculative"
    prefix = "" if name == "draft_model" or "speculative" in name or "ngram" in name else "speculative-"
    return f"--{prefix}{name.replace('_', '-')}"


def flag_of(name: str) -> str:
    """The flag of an option: --block-size-tokens."""
    return "--" + RENAMED.get(name, name).replace("_", "-")


def field_docs() -> Mapping[str, str]:
    """The docstring of each option of InferenceConfig, as one line."""
    return docs_of(InferenceConfig)


@cache
def docs_of(config: type) -> Mapping[str, str]:
    """The docstring of each field of a dataclass, as one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for field, below in pairwise(body):
        if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
            continue
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs


def _shown(default: object) -> str:
    return str(default.value if isinstance(default, Enum) else default).lower()


def _parsing_of(name: str, annotation: str) -> dict[str, Any]:
    """argparse's arguments for a field's type."""
    kind, optional = annotation.removesuffix(" | None"), annotation.endswith(" | None")
    enum = getattr(config_module, kind, None)
    if isinstance(enum, type) and issubclass(enum, Enum):
        return {"choices": [member.value for member in enum]}
    if name == "logprobs_mode":
        return {"choices": list(LOGPROBS_MODES)}
    if kind == "bool" and (not optional or name == "overlap"):  # without the flag it is None
        return {"action": argparse.BooleanOptionalAction}
    parsers: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "int | float": float, "bool": _boolean}
    parse = parsers[kind]
    metavar = {"int": "N", "float": "X", "int | float": "X", "bool": "{true,false,none}"}[kind]
    metavar = "GIB" if name.endswith("_gb") else metavar
    return {"type": _or_none(parse, metavar) if optional else _named(parse, metavar), "metavar": metavar}


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _named(parse: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except (KeyError, ValueError):
            expected = {"N": "an integer", "X": "a number", "GIB": "a number of GiB"}.get(name, name)
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None

    return parsed


def _or_none(parse: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    checked = _named(parse, name)
    return lambda text: None if text.lower() == "none" else checked(text)

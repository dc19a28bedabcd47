"""SamplingParams as command-line flags, one a field."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_infer.config.sampling_params import POOLINGS, SamplingParams
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.errors import RequestError


def add_sampling_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """A flag for every SamplingParams field; `defaults` are this command's own where they differ from the class's."""
    group = parser.add_argument_group("sampling")

    def flag(name: str, help: str, **kwargs: Any) -> None:
        default = defaults.get(name, getattr(SamplingParams(), name))
        shown = "" if default is None or default == () or isinstance(default, bool) else f" (default {default})"
        group.add_argument(f"--{name.replace('_', '-')}", help=help + shown, default=argparse.SUPPRESS, **kwargs)

    flag("max_tokens", "most new tokens of an answer", type=int, metavar="N")
    flag("min_tokens", "no end before so many new tokens", type=int, metavar="N")
    flag("temperature", "0 takes the likeliest token, higher is more random", type=float, metavar="T")
    flag("top_k", "draw from the K likeliest tokens; 0: all", type=int, metavar="K")
    flag("top_p", "draw from the likeliest tokens that make up P", type=float, metavar="P")
    flag("min_p", "draw from tokens at least P times as likely as the likeliest", type=float, metavar="P")
    flag("repetition_penalty", "above 1 discourages tokens already in prompt or answer", type=float, metavar="X")
    flag("presence_penalty", "above 0 discourages tokens already in the answer", type=float, metavar="X")
    flag("frequency_penalty", "as presence, for each time it occurred", type=float, metavar="X")
    flag("logit_bias", "add BIAS to a token's logit; repeatable", action="append", type=_bias, metavar="ID=BIAS")
    flag("allowed_token_ids", "draw from these only", type=_ids, metavar="ID,ID")
    flag("bad_token_ids", "never draw these", type=_ids, metavar="ID,ID")
    flag("seed", "same seed, same answer", type=int, metavar="S")
    flag("n", "answers to each prompt", type=int, metavar="N")
    flag("stop", "end at this text; repeatable", action="append", metavar="TEXT")
    flag("stop_token_ids", "end at these tokens", type=_ids, metavar="ID,ID")
    flag("ignore_eos", "go on after the end-of-sequence token", action="store_true")
    flag("include_stop_str_in_output", "leave the stop text in the answer", action="store_true")
    flag("logprobs", "log probability of each token, and of the K likeliest", type=int, metavar="K")
    flag("prompt_logprobs", "the same for the prompt's tokens", type=int, metavar="K")
    flag("return_sampled_logprobs", "log probability of each token, raw and as drawn", action="store_true")
    flag("return_support", "how many ids each token was drawn among", action="store_true")
    flag("return_routing", "the experts of every position (--output writes them)", action="store_true")
    how = "the prompt's hidden states as one vector (--output writes it; needs --max-tokens 1)"
    flag("pooling", how, choices=POOLINGS)
    flag("priority", "smaller is served sooner", type=int, metavar="P")
    flag("skip_special_tokens", "leave special tokens out of the text (default)", action=argparse.BooleanOptionalAction)
    flag("detokenize", "turn tokens into text (default)", action=argparse.BooleanOptionalAction)
    _add_structured_options(parser)
    parser.set_defaults(sampling_defaults=defaults)


def _add_structured_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output", "what an answer must be; one of these")

    def flag(name: str, help: str, **kwargs: Any) -> None:
        group.add_argument(name, help=help, default=argparse.SUPPRESS, **kwargs)

    flag("--json-schema", "JSON of the schema in this file", metavar="FILE", dest="structured_json_schema")
    flag("--json", "a JSON object", action="store_true", dest="structured_json_object")
    flag("--regex", "text that this regular expression matches", metavar="REGEX", dest="structured_regex")
    flag("--grammar", "text of the Lark or GBNF grammar in this file", metavar="FILE", dest="structured_grammar")
    flag("--choice", "one of these texts; repeatable", action="append", metavar="TEXT", dest="structured_choice")
    flag("--compact", "JSON without white space", action="store_true", dest="structured_compact")


def sampling_from(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says, over the command's defaults: keyword arguments of SamplingParams."""
    values = dict(args.sampling_defaults)
    for name in SamplingParams.__dataclass_fields__:
        if hasattr(args, name):
            values[name] = getattr(args, name)
    if values.get("logit_bias") is not None:
        values["logit_bias"] = dict(values["logit_bias"])
    structured = {
        name: getattr(args, f"structured_{name}")
        for name in StructuredOutput.__dataclass_fields__
        if hasattr(args, f"structured_{name}")
    }
    for name in ("json_schema", "grammar"):
        if name in structured:
            structured[name] = _content(structured[name])
    if structured:
        values["structured"] = StructuredOutput(**structured)
    return values


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read: {error}") from None


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

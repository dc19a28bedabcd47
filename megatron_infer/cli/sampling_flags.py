"""Command-line flags for the fields of SamplingParams."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_infer.config.sampling_params import POOLINGS, SamplingParams
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.errors import RequestError


def add_sampling_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """A flag for every field. defaults: those of this command that differ from the class's."""
    group = parser.add_argument_group("sampling")

    def flag(name: str, help: str, **kwargs: Any) -> None:
        default = defaults.get(name, getattr(SamplingParams(), name))
        shown = "" if default is None or default == () or isinstance(default, bool) else f" (default {default})"
        group.add_argument(f"--{name.replace('_', '-')}", help=help + shown, default=argparse.SUPPRESS, **kwargs)

    flag("max_tokens", "most output tokens", type=int, metavar="N")
    flag("min_tokens", "fewest output tokens", type=int, metavar="N")
    flag("temperature", "0 takes the most likely token; higher is more random", type=float, metavar="T")
    flag("top_k", "sample from the K most likely tokens; 0: all", type=int, metavar="K")
    flag("top_p", "sample from the most likely tokens with total probability P", type=float, metavar="P")
    flag("min_p", "sample from tokens at least P times as likely as the most likely one", type=float, metavar="P")
    flag("repetition_penalty", "above 1 discourages tokens of the prompt and the output", type=float, metavar="X")
    flag("presence_penalty", "above 0 discourages tokens of the output", type=float, metavar="X")
    flag("frequency_penalty", "as presence-penalty, for each occurrence", type=float, metavar="X")
    flag("logit_bias", "add BIAS to a token's logit; repeatable", action="append", type=_bias, metavar="ID=BIAS")
    flag("allowed_token_ids", "sample from these only", type=_ids, metavar="ID,ID")
    flag("bad_token_ids", "never sample these", type=_ids, metavar="ID,ID")
    flag("seed", "same seed, same output", type=int, metavar="S")
    flag("n", "sequences for each prompt", type=int, metavar="N")
    flag("stop", "end at this text; repeatable", action="append", metavar="TEXT")
    flag("stop_token_ids", "end at these tokens", type=_ids, metavar="ID,ID")
    flag("ignore_eos", "continue after the end-of-sequence token", action="store_true")
    flag("include_stop_str_in_output", "keep the stop text in the output", action="store_true")
    flag("logprobs", "logprobs of each token and of the K most likely ones", type=int, metavar="K")
    flag("prompt_logprobs", "the same for the prompt's tokens", type=int, metavar="K")
    flag(
        "return_sampled_logprobs", "logprob of each token before and after the sampling parameters", action="store_true"
    )
    flag("return_support", "how many token ids each token was sampled among", action="store_true")
    flag("return_routing", "the experts chosen at every position (written by --output)", action="store_true")
    how = "the prompt's hidden states as one vector (written by --output; needs --max-tokens 1)"
    flag("pooling", how, choices=POOLINGS)
    flag("priority", "a smaller value is scheduled sooner", type=int, metavar="P")
    flag("adapter", "name of the LoRA adapter to answer with, see --lora", metavar="NAME")
    flag("speculate", "draft tokens where the engine does (default)", action=argparse.BooleanOptionalAction)
    flag("skip_special_tokens", "leave special tokens out of the text (default)", action=argparse.BooleanOptionalAction)
    flag("detokenize", "turn tokens into text (default)", action=argparse.BooleanOptionalAction)
    _add_structured_options(parser)
    parser.set_defaults(sampling_defaults=defaults)


def _add_structured_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output", "restricts the output; one of these")

    def flag(name: str, help: str, **kwargs: Any) -> None:
        group.add_argument(name, help=help, default=argparse.SUPPRESS, **kwargs)

    flag("--json-schema", "JSON of the schema in this file", metavar="FILE", dest="structured_json_schema")
    flag("--json", "a JSON object", action="store_true", dest="structured_json_object")
    flag("--regex", "text that this regular expression matches", metavar="REGEX", dest="structured_regex")
    flag("--grammar", "text of the Lark or GBNF grammar in this file", metavar="FILE", dest="structured_grammar")
    flag("--choice", "one of these texts; repeatable", action="append", metavar="TEXT", dest="structured_choice")
    flag("--compact", "JSON without white space", action="store_true", dest="structured_compact")


def sampling_from(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of SamplingParams: those of the command line, else the command's defaults."""
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

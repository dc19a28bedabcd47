"""Loading a model for a command: the options that commands share, and the LLM they give."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from megatron_infer.cli.config_flags import add_config_options, add_flags, given, given_flags
from megatron_infer.config.layout import RunOptions
from megatron_infer.engine.metrics.wandb import LOGGER as METRICS_LOGGER
from megatron_infer.utils.gc_pause import is_program, no_collection
from megatron_infer.utils.process_memory import loading_for_good
from megatron_infer.utils.stderr_log import log_to_stderr

if TYPE_CHECKING:
    from megatron_infer.engine.llm import LLM


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """MODEL, --dtype, --device, --threads and the engine's options."""
    parser.add_argument("model", metavar="MODEL", help="alias (smollm2), directory, hub id, .gguf file or checkpoint")
    add_run_options(parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """--dtype, --device, --threads and the engine's options."""
    add_flags(parser, parser, RunOptions, "")
    add_config_options(parser)


def run_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `RunOptions` that a command line gives. Raises ConfigError for a wrong value."""
    options = given_flags(args, RunOptions, "")
    RunOptions(**options)
    return options


def load_llm(args: argparse.Namespace) -> LLM:
    """The LLM of a command line; reports progress on stderr."""
    note(f"loading {args.model} ...")
    config = given(args)
    if config.get("logging_step_interval"):
        log_to_stderr(METRICS_LOGGER)
    # a caller of this within a process of its own may want the model's memory back
    with loading_for_good() if is_program() else no_collection():
        from megatron_infer.engine.llm import LLM  # imports torch and megatron-core

        started = time.perf_counter()
        llm = LLM(args.model, config=config, **run_options(args))
    note(f"{describe(llm)}, loaded in {time.perf_counter() - started:.1f} s")
    return llm


def describe(llm: Any) -> str:
    """One line: parameters, dtype, threads."""
    import torch

    shape = llm.engine.shape
    return f"{shape.num_parameters / 1e6:,.0f}M parameters, {shape.dtype}, {torch.get_num_threads()} threads"


def has_chat_template(llm: Any) -> bool:
    """Whether the model takes messages."""
    return llm.tokenizer is not None and llm.tokenizer.has_chat_template


def note(text: str) -> None:
    """Print a line on standard error; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def positive_int(text: str) -> int:
    """An argparse type."""
    return _at_least(1, text)


def whole_number(text: str) -> int:
    """An argparse type: 0 or more."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a number of at least {least}, got {text}")
    return value

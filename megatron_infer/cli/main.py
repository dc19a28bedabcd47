"""`megatron-infer`: picks the subcommand and imports only its module, so that --help is fast."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from megatron_infer import __version__
from megatron_infer.cli.parser import USAGE_ERROR, Parser
from megatron_infer.config.inference import ConfigWarning
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.utils.gc_pause import end_without_collection
from megatron_infer.utils.openmp import limit_spinning

PROGRAM = "megatron-infer"
COMMANDS = {
    "generate": "answer prompts, many at once",
    "chat": "talk to a model in the terminal",
    "speak": "speak a text with a model of speech tokens",
    "bench": "throughput and latency, beside the machine's limits",
    "serve": "OpenAI-compatible HTTP server",
    "tinker": "train and sample adapters of one live model by the Tinker API",
    "bench-serve": "commands that load a server; replay of recorded calls",
    "coordinator": "distribute requests over replicas",
    "replica": "serve a model behind a coordinator",
    "demo": "three prompts answered by a 135M model",
    "replay": "replay a recording and compare every token",
    "convert": "write a checkpoint as safetensors with a Hugging Face config",
    "plan": "sizes of an engine, from the model, the options and the memory",
    "env": "versions, CPU features, and the chosen kernels with reasons",
}
"""Subcommand -> its line in --help. Its module is megatron_infer.cli.NAME, with _ for -."""
FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141
"""Exit codes; that of a usage error is the parser's."""


def build_parser(command: str | None) -> tuple[Parser, dict[str, Parser]]:
    """The parser with the flags of `command` only, and the subparsers by command."""
    parser = Parser(prog=PROGRAM, description="Dynamic LLM inference that lives inside a Megatron training job.")
    parser.add_argument("--version", action="version", version=version_line())
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        if name == command:
            importlib.import_module(f"megatron_infer.cli.{name.replace('-', '_')}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=line)
    return parser, subparsers.choices


def version_line() -> str:
    """The versions of the package and of what it runs on, without importing them."""
    parts = [f"{PROGRAM} {__version__}"]
    for package in ("torch", "megatron-core"):
        try:
            parts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            parts.append(f"{package} not installed")
    return ", ".join([*parts, f"Python {sys.version.split()[0]}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line -> exit code: 0 done, 1 failed, 2 usage error, 130 interrupted."""
    limit_spinning()
    if argv is None:
        end_without_collection()
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((text for text in arguments if not text.startswith("-")), None)
    parser, commands = build_parser(command)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands[args.command].refuse_unknown(unknown)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        return int(args.run(args))
    except ConfigError as error:
        return _fail(args, error, USAGE_ERROR)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (head, less) has ended: redirect stdout, as Python flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (InferenceError, NotImplementedError, OSError) as error:  # OSError: a full disk, a folder without rights
        return _fail(args, error, FAILED)


def _fail(args: argparse.Namespace, error: Exception, code: int) -> int:
    print(f"{PROGRAM} {args.command}: error: {error}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **_: Any) -> None:
    """A ConfigWarning as one line; other warnings as Python shows them."""
    if issubclass(category, ConfigWarning):
        print(f"warning: {message}", file=sys.stderr)
    else:
        print(warnings.formatwarning(message, category, place[0], place[1]), file=sys.stderr, end="")


if __name__ == "__main__":
    sys.exit(main())

"""`megatron-infer replica MODEL`: serves one engine behind a coordinator."""

from __future__ import annotations

import argparse
import signal
from typing import Any

from megatron_infer.cli.coordinator import DEFAULT_BIND, add_key_option, key_from
from megatron_infer.cli.loading import add_model_options, load_llm, note
from megatron_infer.utils.stderr_log import log_to_stderr


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replica",
        help="serve a model behind a coordinator",
        description="Load a model and serve the requests that a coordinator (megatron-infer coordinator) sends. "
        "SIGTERM drains: running requests finish, and no others are taken. Ctrl-C ends at once, and other replicas "
        "continue the requests.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--coordinator",
        default=DEFAULT_BIND,
        metavar="ADDRESS",
        help=f"the coordinator's address (default {DEFAULT_BIND})",
    )
    parser.add_argument("--name", default="", help="name of this replica (default: the host's name)")
    add_key_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C -> 0. Raises an error of the engine, or AccessRefused."""
    from megatron_infer.coordinator.protocol import checked_address
    from megatron_infer.coordinator.replica import Replica  # fails for missing packages before a model is loaded

    checked_address(args.coordinator)
    key = key_from(args)
    log_to_stderr("megatron_infer.coordinator")
    llm = load_llm(args)
    from megatron_infer.rl.remote_weights import RemoteWeights

    commands = RemoteWeights(llm.engine).commands()
    replica = Replica(llm.engine, args.coordinator, name=args.name, key=key, commands=commands)
    signal.signal(signal.SIGTERM, lambda *_: replica.drain())
    note(f"serving for {args.coordinator}")
    with replica:
        replica.run()
    return 0

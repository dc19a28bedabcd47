"""`megatron-infer replica MODEL`: one engine behind a coordinator."""

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
        description="Load a model and compute the requests that a coordinator (megatron-infer coordinator) sends. "
        "SIGTERM drains: what is under way ends here, nothing new comes. Ctrl-C leaves at once: others go on with it.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--coordinator", default=DEFAULT_BIND, metavar="ADDRESS", help=f"where it is (default {DEFAULT_BIND})"
    )
    parser.add_argument("--name", default="", help="how the coordinator calls this replica (default: the host's name)")
    add_key_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until told to end; 0. An error of the engine or a refusal by the coordinator is raised."""
    from megatron_infer.coordinator.protocol import checked_address
    from megatron_infer.coordinator.replica import Replica  # says what is missing before a model is loaded

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

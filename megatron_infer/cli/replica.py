"""`megatron-infer replica MODEL`: serves one engine behind a coordinator."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

from megatron_infer.cli.coordinator import DEFAULT_BIND, add_key_option, key_from
from megatron_infer.cli.loading import add_model_options, load_llm, note
from megatron_infer.config.coordinator_options import ReplicaRole
from megatron_infer.errors import ConfigError
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
    parser.add_argument(
        "--role",
        choices=[role.value for role in ReplicaRole],
        default=ReplicaRole.BOTH.value,
        help="prefill_only: prompts and first tokens; decode_only: what follows them (default: both)",
    )
    parser.add_argument("--name", default="", help="name of this replica (default: the host's name)")
    add_key_option(parser)
    parser.add_argument(
        "--control",
        action="store_true",
        help="take commands (pause, suspend, new weights) of every client that holds the coordinator's key",
    )
    parser.add_argument(
        "--weights-root", metavar="DIR", help="with --control: new weights may be read from files below this directory"
    )
    parser.add_argument(
        "--lora-root", metavar="DIR", help="LoRA adapters may be loaded from directories below this one, by clients"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C -> 0. Raises an error of the engine, or AccessRefused."""
    from megatron_infer.coordinator.protocol import checked_address
    from megatron_infer.coordinator.replica import Replica  # fails for missing packages before a model is loaded

    checked_address(args.coordinator)
    if args.weights_root is not None and not args.control:
        raise ConfigError("--weights-root without --control: nothing would read from it; give both")
    if args.weights_root is not None and not Path(args.weights_root).is_dir():
        raise ConfigError(f"--weights-root is {args.weights_root!r}, which is no directory")
    if args.lora_root is not None and not Path(args.lora_root).is_dir():
        raise ConfigError(f"--lora-root is {args.lora_root!r}, which is no directory")
    key = key_from(args)
    log_to_stderr("megatron_infer.coordinator")
    llm = load_llm(args)
    from megatron_infer.server.engine_replica import engine_replica

    replica: Replica = engine_replica(
        llm.engine,
        args.coordinator,
        name=args.name,
        key=key,
        role=args.role,
        control=args.control,
        weights_root=args.weights_root,
        lora_root=args.lora_root,
    )
    signal.signal(signal.SIGTERM, lambda *_: replica.drain())
    note(f"serving for {args.coordinator}")
    with replica:
        replica.run()
    return 0

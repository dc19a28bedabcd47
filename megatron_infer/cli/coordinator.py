"""`megatron-infer coordinator`: distributes the requests of clients over replicas."""

from __future__ import annotations

import argparse
import signal
from typing import Any

from megatron_infer.cli.config_flags import add_flags, given_flags
from megatron_infer.config.coordinator_options import CoordinatorOptions
from megatron_infer.utils.process_memory import full_collections_by_hand
from megatron_infer.utils.stderr_log import log_to_stderr

DEFAULT_BIND = "tcp://127.0.0.1:5757"
PREFIX = "coordinator_"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "coordinator",
        help="distribute requests over replicas",
        description="Distribute the requests of InferenceClient over the replicas that have registered "
        "(megatron-infer replica). Needs no model and no torch. Ctrl-C ends it.",
    )
    parser.add_argument(
        "--bind",
        default=DEFAULT_BIND,
        metavar="ADDRESS",
        help=f"tcp://HOST:PORT or ipc://PATH (default {DEFAULT_BIND})",
    )
    add_flags(parser, parser, CoordinatorOptions, PREFIX)
    add_key_option(parser)
    parser.set_defaults(run=run)


def add_key_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="shared key of coordinator, replicas and clients: the bytes of this file (default: this user's own key, "
        "made by the first coordinator; an ipc:// socket in a folder of mode 0700 asks for none)",
    )


def key_from(args: argparse.Namespace) -> bytes | None:
    """The key in --key-file; None without one. Raises ConfigError."""
    from megatron_infer.coordinator.access import read_key  # needs zmq

    return None if args.key_file is None else read_key(args.key_file)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM -> 0."""
    from megatron_infer.coordinator.access import user_key_file
    from megatron_infer.coordinator.coordinator import Coordinator

    options = CoordinatorOptions(key=key_from(args), **given_flags(args, CoordinatorOptions, PREFIX))
    log_to_stderr("megatron_infer.coordinator")
    with full_collections_by_hand(), Coordinator(args.bind, options) as coordinator:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: coordinator.stop())
        print(f"coordinator at {coordinator.address}", flush=True)
        if coordinator.key is None:
            print("no key: only this user's processes enter the folder of the socket", flush=True)
        else:
            print(f"its key is in {args.key_file or user_key_file()}", flush=True)
        coordinator.run()
    return 0

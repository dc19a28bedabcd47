"""`megatron-infer coordinator`: distributes the requests of clients over replicas."""

from __future__ import annotations

import argparse
import signal
from typing import Any

from megatron_infer.cli.config_flags import flag_of
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.options import docs_of, options_of
from megatron_infer.utils.stderr_log import log_to_stderr

DEFAULT_BIND = "tcp://127.0.0.1:5757"
POLICY, ALPHA = "prefix_caching_coordinator_policy", "prefix_caching_routing_alpha"


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
    docs, options = docs_of(InferenceConfig), options_of(InferenceConfig)
    parser.add_argument(
        flag_of(options[POLICY]),
        dest="policy",
        default=None,
        choices=options[POLICY].words,
        help=f"{docs[POLICY]} (default: the first replica's)",
    )
    parser.add_argument(
        flag_of(options[ALPHA]),
        dest="alpha",
        type=float,
        default=None,
        metavar="X",
        help=f"{docs[ALPHA]} (default: the first replica's, or 1.0 with a policy given here)",
    )
    parser.add_argument(
        "--max-queue", type=int, default=4096, metavar="N", help="most requests that wait (default 4096)"
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=5.0,
        metavar="S",
        help="silence after which a replica counts as dead (default 5)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="for the seeds of requests without one (default 0)"
    )
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
    from megatron_infer.coordinator.coordinator import Coordinator, CoordinatorOptions

    options = CoordinatorOptions(
        policy=args.policy,
        alpha=args.alpha,
        key=key_from(args),
        max_queue=args.max_queue,
        heartbeat_s=min(0.5, args.timeout_s / 4),
        timeout_s=args.timeout_s,
        seed=args.seed,
    )
    log_to_stderr("megatron_infer.coordinator")
    with Coordinator(args.bind, options) as coordinator:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: coordinator.stop())
        print(f"coordinator at {coordinator.address}", flush=True)
        if coordinator.key is None:
            print("no key: only this user's processes enter the folder of the socket", flush=True)
        else:
            print(f"its key is in {args.key_file or user_key_file()}", flush=True)
        coordinator.run()
    return 0

"""`megatron-infer replay`: give a recorded run to a model again and compare every token."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_infer.cli.loading import add_model_options, load_llm, note


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="run a recording again and compare every token",
        description="Run a recording (generate --record) again and compare every token. Engine options may differ: "
        "they must not change an answer.",
    )
    parser.add_argument("recording", metavar="FILE", help="what generate --record wrote")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when every token is the same, 1 with the first difference when not."""
    from megatron_infer.debug.record import read, verify

    num_requests = sum(event["kind"] == "add" for event in read(args.recording))
    difference = verify(args.recording, load_llm(args).engine)
    if difference is not None:
        note(f"differs: {difference}")
        return 1
    print(f"{num_requests} requests replayed: every token is the same")
    return 0

"""`megatron-infer replay`: replay a recorded run on a model and compare every token."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_infer.cli.loading import add_model_options, load_llm, note


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="replay a recording and compare every token",
        description="Replay a recording (generate --record) and compare every token. Engine options may differ, as "
        "they must not change any token.",
    )
    parser.add_argument("recording", metavar="FILE", help="recording of generate --record")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """-> 0 if every token is the same, else 1, with the first difference."""
    from megatron_infer.engine.record import read, verify

    num_requests = sum(event["kind"] == "add" for event in read(args.recording))
    difference = verify(args.recording, load_llm(args).engine)
    if difference is not None:
        note(f"differs: {difference}")
        return 1
    print(f"{num_requests} requests replayed: every token is the same")
    return 0

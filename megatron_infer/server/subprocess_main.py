"""Processes that end with the one that started them: `python -m megatron_infer.server.subprocess_main ROLE`.

What a child is told comes as JSON through a pipe, not by arguments that every user of the machine can read; what it
tells comes as lines of JSON on its standard output: {"ready": {...}} once it serves, {"error": "..."} when it cannot.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from megatron_infer.errors import InferenceError
from megatron_infer.utils.stderr_log import log_to_stderr

PARENT_DEATH = 1
"""PR_SET_PDEATHSIG of <linux/prctl.h>."""


def die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends; where there is no such thing, nothing happens."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(1)


def tell(**message: Any) -> None:
    """A line for the parent."""
    print(json.dumps(message), flush=True)


def main() -> int:
    """0: it has done what it was told; 1: it could not, and has told why."""
    told = json.loads(sys.stdin.readline())
    die_with(told.pop("parent"))
    try:
        _roles()[sys.argv[1]](**told)
    except (InferenceError, NotImplementedError) as error:
        tell(error=str(error))
        return 1
    return 0


def _roles() -> dict[str, Callable[..., None]]:
    return {"coordinator": coordinator, "card": card, "worker": worker, "front": front}


def coordinator(*, bind: str, max_queue: int, key: str | None = None) -> None:
    """Spread requests until SIGTERM."""
    from megatron_infer.coordinator.coordinator import Coordinator, CoordinatorOptions

    log_to_stderr("megatron_infer.coordinator")
    options = CoordinatorOptions(max_queue=max_queue, key=None if key is None else key.encode())
    with Coordinator(bind, options) as one:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: one.stop())
        tell(ready={"address": one.address})
        one.run()


def card(*, model: str, folder: str) -> None:
    """Put a model's tokenizer into a folder: whoever reads it there needs no torch."""
    from megatron_infer.server.model_card import write_card

    tell(ready=write_card(model, folder))


def worker(**told: Any) -> None:
    """Serve a model behind the coordinator until SIGTERM."""
    from megatron_infer.server.engine_process import serve

    serve(**told)


def front(**told: Any) -> None:
    """Serve HTTP until SIGTERM."""
    from megatron_infer.server.http_process import serve_beside

    serve_beside(**told)


if __name__ == "__main__":
    sys.exit(main())

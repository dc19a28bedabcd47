"""Runs checks in processes of their own, so that a crash or a poisoned device loses one check and not the rest.

parent                                      worker: gpu_check.py --worker
  names of checks  ----- argv ----->          for each: {"start": name}, then {"done": name, "result": ...}
  a worker ends with the first check that fails; one that dies or is silent fails the check that it began;
  the next checks get a new worker
"""

from __future__ import annotations

import faulthandler
import importlib.abc
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gpu_checks.registry import FAILED, SKIPPED, Check, Result, Unavailable
from megatron_infer.utils.child_process import ChildProcess

ABSENT = (
    "pydantic",
    "pydantic_settings",
    "zmq",
    "llguidance",
    "psutil",
    "gguf",
    "tokenizers",
    "fastapi",
    "starlette",
    "uvicorn",
    "safetensors",
    "transformers",
    "wandb",
    "prometheus_client",
)
"""What a GPU machine may lack: a rehearsal refuses to import it."""
PATIENCE = 4
"""Times its budget a check may take before it is stopped."""
START_S = 120.0
"""A process may take so long to import and find its device."""
TAIL, TRACEBACK = 500, 12_000
"""Characters of what went wrong that the line of a check has, and that the JSON report has."""
NO_TIME = "no time left"
NO_ROOM = "no room"
"""How the reason of a check begins that ran out of memory on a device that is small, or that others use too."""
OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
"""torch's, and what the engine raises where not one request fits."""


class Absent(importlib.abc.MetaPathFinder):
    """Refuses imports of `ABSENT`, as a machine without those packages does."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r} (absent in a rehearsal)", name=name)


def end_of(text: str) -> list[str]:
    """The last lines, as a report may have them: of a file's path its name and folder, not where its owner keeps it."""
    return re.sub(r'(?<=File ")/[^"]*/(?=[^/"]+/[^/"]+")', "", text).strip()[-TRACEBACK:].splitlines()


def run_one(check: Check, ctx: Any) -> Result:
    """The check's result; whatever it raises is its own failure."""
    start = time.perf_counter()
    try:
        result = check(ctx)
        ctx.wait()
    except Unavailable as reason:
        result = Result(SKIPPED, reason=str(reason))
    except Exception as error:
        if type(error).__name__ in OUT_OF_MEMORY and (why := ctx.lacks_room()) is not None:
            return Result(SKIPPED, reason=f"{NO_ROOM}: {why}", seconds=time.perf_counter() - start)
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
        traceback.print_exc()
        told = end_of(traceback.format_exc())
        result = Result(FAILED, reason=" ".join(text.split())[:TAIL], details={"traceback": told})
    result.seconds = time.perf_counter() - start
    return result


def refuse_absent() -> None:
    """From here on this process cannot import what a GPU machine may lack."""
    sys.meta_path.insert(0, Absent())


def work(checks: Sequence[Check], make_context: Callable[[], Any]) -> NoReturn:
    """The worker's whole life, until a check fails: what has happened to the device then stays with this process.

    Standard output carries the protocol; what checks print goes to standard error.
    """
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)  # one that is stopped says where it was

    def tell(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")

    ctx = make_context()
    for check in checks:
        tell(start=check.name)
        result = run_one(check, ctx)
        tell(done=check.name, result=result.to_dict())
        if result.status == FAILED:
            break
    channel.flush()
    os._exit(0)  # nothing that a check left behind may turn a good run into a bad one


RUNNING: set[ChildProcess] = set()
"""Every worker's process that may still run."""


def stop_all() -> None:
    """Kill them, waiting for nothing."""
    for process in list(RUNNING):
        process.kill()


class Worker:
    """One process and the messages it sends."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with this object
        self._process = ChildProcess(command, stdout=subprocess.PIPE, stderr=self._log, env=environment)
        self._unread = b""
        RUNNING.add(self._process)

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message; None when the process has ended. Raises TimeoutError."""
        assert self._process.stdout is not None
        until = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            piece = os.read(self._process.stdout.fileno(), 65536)
            if not piece:
                return None
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def end(self) -> str:
        """Stop it if it runs -> how it ended, with the last of what it printed."""
        status = self._process.end(signal.SIGTERM, timeout_s=5)
        RUNNING.discard(self._process)
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        printed = "\n".join(self.printed)
        return f"{how}: {' '.join(printed[-TAIL:].split())}" if printed else how

    @property
    def printed(self) -> list[str]:
        """The last of what it printed so far, a line each."""
        self._log.seek(0)
        return end_of(self._log.read().decode(errors="replace"))


def run_group(
    checks: Sequence[Check],
    command: Callable[[Sequence[str]], Sequence[str]],
    environment: dict[str, str],
    tell: Callable[[Check, Result], None],
    *,
    deadline: float,
    patience: float = PATIENCE,
) -> None:
    """Run `checks` in order, in as few processes as they survive; `tell` hears every outcome.

    command(names) is the command line of a worker. deadline is on time.monotonic's clock: what has not ended by then is
    stopped, and it and the rest are skipped.
    """
    left = list(checks)
    while left:
        if time.monotonic() >= deadline:
            for one in left:
                tell(one, Result(SKIPPED, reason=NO_TIME))
            return
        left = _run_some(left, Worker(command([one.name for one in left]), environment), tell, deadline, patience)


def _run_some(
    left: list[Check], worker: Worker, tell: Callable[[Check, Result], None], deadline: float, patience: float
) -> list[Check]:
    """Hear one worker out -> the checks that are still to be run."""
    limit, begun, heard = START_S, False, False
    while left:
        remaining = max(0.0, deadline - time.monotonic())
        try:
            message = worker.next(min(limit, remaining))
        except TimeoutError:
            message = {}
        if message:
            heard, begun = True, "start" in message
            limit = left[0].budget_s * patience if begun else START_S
            if not begun:
                tell(left[0], Result.from_dict(message["result"]))
                left = left[1:]
            continue
        ended, details, died = worker.end(), {"printed": worker.printed}, message is None
        if died and heard and not begun:
            return left  # with the check that failed
        if died:
            result = Result(FAILED, reason=f"its process died, {ended}", details=details)
        elif remaining < limit:
            result = Result(SKIPPED, reason=NO_TIME + f": stopped after {remaining:.0f} s" * begun, details=details)
        else:
            waited = "took longer than" if begun else "did not begin within"
            result = Result(FAILED, reason=f"{waited} {limit:.0f} s; {ended}", details=details)
        lost = left if died and not heard else left[:1]  # what dies before the first check dies of what all have
        for one in lost:
            tell(one, result)
        return left[len(lost) :]
    worker.end()
    return left

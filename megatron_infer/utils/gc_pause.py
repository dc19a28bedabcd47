"""Pauses of Python's cyclic garbage collector, where it must not run or has nothing to find."""

from __future__ import annotations

import atexit
import contextlib
import gc
import threading
from collections.abc import Iterator

_LOCK = threading.Lock()
_PROGRAM = threading.Event()
_WERE_ON: list[bool] = []
"""For each `no_collection` that is active now, in any thread, whether the collector was on before it: only the first
can be True."""


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Turn the collector off. When the last of several overlapping calls ends, the collector is as it was before.

    torch and megatron-core create a million objects that all stay: scanning them again and again during import is a
    quarter of the import time.
    """
    with _LOCK:
        _WERE_ON.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _LOCK:
            if _WERE_ON.pop():
                gc.enable()


def end_without_collection() -> None:
    """For programs: skip the last collection when this process ends, which takes a second with torch loaded.

    Exit handlers and `weakref.finalize` still run; cycles that were not collected are left to the system.
    """
    _PROGRAM.set()
    atexit.register(gc.freeze)


def is_program() -> bool:
    """Whether `end_without_collection` was called: the process is this package's own, and ends with its work."""
    return _PROGRAM.is_set()

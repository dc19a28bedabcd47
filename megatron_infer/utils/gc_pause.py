"""Python's cyclic garbage collector, where it must not run or has nothing to find."""

from __future__ import annotations

import atexit
import contextlib
import gc
import threading
from collections.abc import Iterator

_LOCK = threading.Lock()
_WERE_ON: list[bool] = []
"""What those found who are in `no_collection` now, in any thread: all but the first, that it was off."""


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Garbage stays for a while; when the last of those who ask for it at once is done, the collector is as it was.

    torch and megatron-core bring a million objects that all stay: looking through them again and again while they come
    is a quarter of the time their import takes.
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
    """For programs: when this process ends, what is left is not looked through once more, a second with torch loaded.

    Exit handlers and `weakref.finalize` run as ever; cycles that nothing has collected are left to the system.
    """
    atexit.register(gc.freeze)

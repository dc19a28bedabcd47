"""Memory of a process that answers calls: no long pauses for garbage while it is busy, and freed pages go back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

from megatron_infer.utils.gc_pause import no_collection

_YOUNG, _MIDDLE = 10_000, 10
"""Thresholds of the collector's first two generations: pauses of a few milliseconds."""
_NEVER = 1 << 30


@contextlib.contextmanager
def full_collections_by_hand() -> Iterator[None]:
    """Within it the collector looks at young objects only; `give_back` collects all.

    A full collection stops all threads: for over a second where streams that are not read hold a million objects.
    What the caller had frozen stays frozen afterwards.
    """
    before, is_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()  # garbage that is frozen is never collected
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not is_frozen:
            gc.unfreeze()


def give_back() -> None:
    """Collect all garbage and return freed memory to the system; takes milliseconds when little is held."""
    gc.collect()
    return_freed()


def return_freed() -> None:
    """Return memory that was freed to the system: the allocator keeps what lies between objects that are in use."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def loading_for_good() -> Iterator[None]:
    """For programs: what is created within it stays until the process ends, and is never searched for garbage.

    Imports and models are a million objects without garbage; the first full collections of them take a second.
    """
    with no_collection():
        yield
        gc.freeze()
    return_freed()

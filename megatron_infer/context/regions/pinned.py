"""Page-locked host memory that is kept between uses: pinning it takes longer than filling it, and stops the device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

KEEP_SHARE = 1 / 4
"""Of the machine's memory: what the pools of all its devices keep idle at most, for the trainer lives there too."""
MIN_BYTES = 1 << 16


def pin(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 that devices copy from and to without waiting. Raises MemoryError."""
    try:
        with torch.inference_mode(False):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise MemoryError(f"the system pins no {num_bytes:,} bytes: {error}") from error


def unpin_idle() -> None:
    """torch keeps dropped pinned memory for itself; ask it to let go of it, where it can be asked."""
    for home, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        empty: Callable[[], None] | None = getattr(home, name, None)
        if empty is not None:
            empty()
            return


class PinnedChunk:
    """A tensor in page-locked memory; `release` gives the memory back to its pool, for whoever comes next.

    Copies under way may still use it then: all of a pool's users copy on one stream, in order.
    """

    def __init__(self, pool: PinnedPool, memory_X: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._pool, self._memory_X = pool, memory_X
        self.tensor = memory_X[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def resident_bytes(self) -> int:
        return self._memory_X.nbytes

    def release(self) -> None:
        self._pool.give(self._memory_X)


class PinnedPool:
    """Chunks in sizes of powers of two, as torch pins them; idle ones wait up to `keep_bytes`."""

    def __init__(
        self, keep_bytes: int, *, pin: Callable[[int], Tensor] = pin, unpin: Callable[[], None] = unpin_idle
    ) -> None:
        self.keep_bytes = keep_bytes
        self._pin, self._unpin = pin, unpin
        self._idle: dict[int, list[Tensor]] = {}

    def idle_bytes(self) -> int:
        """Pinned, and in nobody's use."""
        return sum(size * len(chunks) for size, chunks in self._idle.items())

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> PinnedChunk:
        """Content undefined. Raises MemoryError when it has to be pinned and cannot."""
        size = max(MIN_BYTES, 1 << (math.prod(shape) * dtype.itemsize - 1).bit_length())
        idle = self._idle.get(size)
        return PinnedChunk(self, idle.pop() if idle else self._pin(size), shape, dtype)

    def give(self, memory_X: Tensor) -> None:
        """Called by chunks. What would be too much to keep goes when `trim` is called."""
        self._idle.setdefault(memory_X.nbytes, []).append(memory_X)

    def trim(self, keep_bytes: int | None = None) -> int:
        """Unpin idle chunks, the largest first, until `keep_bytes` (None: the pool's own) are left -> bytes unpinned.

        Waits for copies under way; not for the middle of a step.
        """
        keep, before = self.keep_bytes if keep_bytes is None else keep_bytes, self.idle_bytes()
        left = before
        for size in sorted(self._idle, reverse=True):
            while self._idle[size] and left > keep:
                self._idle[size].pop()
                left -= size
        if left < before:
            self._unpin()
        return before - left


def machine_share() -> int:
    """One device's part of KEEP_SHARE of the machine's memory."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(whole * KEEP_SHARE / max(1, torch.cuda.device_count()))

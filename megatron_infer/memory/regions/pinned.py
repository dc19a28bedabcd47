"""Page-locked host memory, kept between uses: pinning it takes longer than filling it, and stops the device.

upload:     take -> fill -> copy, record event -> retire ............ event done -> free again
read:       take -> copy, record event -> ........ wait for the event -> give_back -> free again
host copy:  take -> copies to the host ..... copies back, all of them done -> give_back -> free again
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

KEEP_SHARE = 1 / 4
"""Share of the machine's memory that the pools of all its devices keep idle at most: the trainer needs memory, too."""
SMALLEST_BYTES = 4096
MAX_RETIRED_BYTES = 256 << 20
"""Bytes of uploads that the device has not finished. Beyond that the host, which is far ahead then, waits for the
oldest."""


class CopyEvent(Protocol):
    """Marks a point in the device's work."""

    def record(self) -> None: ...

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


@dataclass(slots=True)
class PinnedBuffer:
    """One buffer and the event of the copy that uses it."""

    bytes_B: Tensor
    """uint8, at least as long as asked for."""
    event: CopyEvent


def pin(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 that devices copy from and to without waiting. Raises MemoryError."""
    try:
        with torch.inference_mode(False):  # it outlives the step that may be running
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise MemoryError(f"the system pins no {num_bytes:,} bytes: {error}") from error


def unpin_idle() -> None:
    """Make torch unpin the memory it caches, where this version of torch can."""
    for home, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        empty: Callable[[], None] | None = getattr(home, name, None)
        if empty is not None:
            empty()
            return


class PinnedPool:
    """Buffers in sizes of powers of two, as torch pins them. Any thread may call it."""

    def __init__(
        self,
        make_event: Callable[[], CopyEvent],
        *,
        keep_bytes: int | None = None,
        pin: Callable[[int], Tensor] = pin,
        unpin: Callable[[], None] = unpin_idle,
    ) -> None:
        """keep_bytes: what `trim` leaves idle; None: one device's part of KEEP_SHARE. pin(num_bytes) -> uint8."""
        self._make_event, self._keep_bytes, self._pin, self._unpin = make_event, keep_bytes, pin, unpin
        self._idle: dict[int, list[PinnedBuffer]] = {}
        self._retired: deque[PinnedBuffer] = deque()
        self._retired_bytes = 0
        self._lock = threading.Lock()

    def idle_bytes(self) -> int:
        """Bytes pinned and not in use."""
        with self._lock:
            return sum(size * len(buffers) for size, buffers in self._idle.items())

    def take(self, num_bytes: int) -> PinnedBuffer:
        """A buffer that no copy reads or writes, content undefined. Raises MemoryError when one has to be pinned and
        cannot be."""
        size = max(SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        with self._lock:
            self._reclaim()
            idle = self._idle.get(size)
            if idle:
                return idle.pop()
        return PinnedBuffer(self._pin(size), self._make_event())

    def retire(self, buffer: PinnedBuffer) -> None:
        """Return a buffer whose copy to the device is enqueued and its event recorded: it is free once that is done.

        Call in the order of the device's work; in another order buffers only become free later than they could.
        """
        with self._lock:
            self._retired.append(buffer)
            self._retired_bytes += buffer.bytes_B.numel()
            while self._retired_bytes > MAX_RETIRED_BYTES and len(self._retired) > 1:
                self._retired[0].event.wait()
                self._reclaim()

    def give_back(self, buffer: PinnedBuffer) -> None:
        """Return a buffer whose copies are done; it stays pinned until `trim`."""
        with self._lock:
            self._put(buffer)

    def trim(self, keep_bytes: int | None = None) -> int:
        """Unpin idle buffers, the largest first, until `keep_bytes` (None: the pool's own) are left -> bytes unpinned.

        Waits for running copies.
        """
        before = left = self.idle_bytes()
        keep = self._keep_bytes if keep_bytes is None else keep_bytes
        keep = machine_share() if keep is None else keep
        with self._lock:
            for size in sorted(self._idle, reverse=True):
                while self._idle[size] and left > keep:
                    self._idle[size].pop()
                    left -= size
        if left < before:
            self._unpin()
        return before - left

    def _reclaim(self) -> None:
        while self._retired and self._retired[0].event.is_done():
            buffer = self._retired.popleft()
            self._retired_bytes -= buffer.bytes_B.numel()
            self._put(buffer)

    def _put(self, buffer: PinnedBuffer) -> None:
        self._idle.setdefault(buffer.bytes_B.numel(), []).append(buffer)


class PinnedRegion:
    """Bytes of a buffer of the pool, from construction until `release`."""

    def __init__(self, pool: PinnedPool, num_bytes: int) -> None:
        self._pool, self._buffer = pool, pool.take(num_bytes)
        self.tensor = self._buffer.bytes_B[:num_bytes]
        """uint8."""

    def resident_bytes(self) -> int:
        return self._buffer.bytes_B.nbytes

    def release(self) -> None:
        """Return the buffer; no copy may be using it."""
        self._pool.give_back(self._buffer)


def machine_share() -> int:
    """One device's part of KEEP_SHARE of the machine's memory, also where a launcher shows each process one device."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    num_devices = max(1, torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return int(whole * KEEP_SHARE / num_devices)

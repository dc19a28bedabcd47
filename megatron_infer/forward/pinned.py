"""Page-locked host buffers for copies between host and device: lent for one copy each, never written while one runs.

upload:  take -> fill -> copy, record -> retire ............ event passed -> free again
read:    take -> copy, record -> ........ event waited for -> give_back -> free again
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

SMALLEST_BYTES = 4096
MAX_RETIRED_BYTES = 256 << 20
"""Of uploads that the device has not done yet. Beyond it the oldest is waited for: the host is far ahead then."""


class CopyEvent(Protocol):
    """Marks a place in the device's work."""

    def record(self) -> None: ...

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


@dataclass(slots=True)
class Lent:
    """One buffer and the event of the copy it is lent for."""

    bytes_B: Tensor
    """uint8, at least as long as was asked for."""
    event: CopyEvent


class PinnedPool:
    """Buffers by size, powers of two. Any thread may call it."""

    def __init__(self, make_buffer: Callable[[int], Tensor], make_event: Callable[[], CopyEvent]) -> None:
        """make_buffer(num_bytes) -> uint8 tensor of page-locked memory."""
        self._make_buffer, self._make_event = make_buffer, make_event
        self._free: dict[int, list[Lent]] = {}
        self._retired: deque[Lent] = deque()
        self._retired_bytes = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Lent:
        """A buffer that no copy reads or writes."""
        size = max(SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        with self._lock:
            self._reclaim()
            free = self._free.get(size)
            if free:
                return free.pop()
        return Lent(self._make_buffer(size), self._make_event())

    def retire(self, lent: Lent) -> None:
        """The copy out of it is under way and its event recorded: it is free once that has passed.

        Copies are retired in the order of the device's work; else one is only free later than it could be.
        """
        with self._lock:
            self._retired.append(lent)
            self._retired_bytes += lent.bytes_B.numel()
            while self._retired_bytes > MAX_RETIRED_BYTES and len(self._retired) > 1:
                self._retired[0].event.wait()
                self._reclaim()

    def give_back(self, lent: Lent) -> None:
        """Nobody looks at it any more, its copy is done."""
        with self._lock:
            self._put(lent)

    def _reclaim(self) -> None:
        while self._retired and self._retired[0].event.is_done():
            lent = self._retired.popleft()
            self._retired_bytes -= lent.bytes_B.numel()
            self._put(lent)

    def _put(self, lent: Lent) -> None:
        self._free.setdefault(lent.bytes_B.numel(), []).append(lent)

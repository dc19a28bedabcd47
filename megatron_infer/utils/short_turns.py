"""Short turns of the interpreter, where threads that compute stand next to one that others wait for."""

from __future__ import annotations

import sys
import threading

_TURN_S = 2e-4
"""Seconds that one thread has the interpreter while another one waits for it."""


class ShortTurns:
    """Inside, a thread that waits for the interpreter soon has it back. Steps give it away with each kernel, an event
    loop with each call of the system.

    The length of a turn is the process's: the first who enters shortens it, and the last one puts it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._before = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _TURN_S))
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                sys.setswitchinterval(self._before)


short_turns = ShortTurns()

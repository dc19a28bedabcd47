"""Threads that take their jobs in turns by caller, next to work that others wait for."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

NICE = 12
"""Of the threads, where each thread has such a value (Linux): jobs take what other work leaves of the processor."""


class TurnPool:
    """Runs jobs in threads: callers take turns, a caller's jobs begin in their order.

    A job that waits ends when its future is cancelled. From any thread.
    """

    def __init__(self, num_threads: int, name: str, *, most_each: int) -> None:
        """most_each: most threads of one caller; fewer than all where jobs take longer than others may wait."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=_give_way)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[Hashable, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._most_each = most_each
        self._running: Counter[Hashable] = Counter()
        """Jobs that run, by caller."""

    def submit(self, caller: Hashable, job: Callable[[], Any], future: Future[Any] | None = None) -> Future[Any]:
        """Queue a job -> its future. future: of a job that waits in another caller's turn: it runs in the first of
        both."""
        future = Future() if future is None else future
        with self._lock:
            self._waiting.setdefault(caller, deque()).append((future, job))
        self._threads.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        """Run the next caller's job, if there is one whose caller may have a thread."""
        with self._lock:
            caller = next((one for one in self._waiting if self._running[one] < self._most_each), None)
            if caller is None:
                return
            future, job = self._waiting[caller].popleft()
            if self._waiting[caller]:
                self._waiting.move_to_end(caller)
            else:
                del self._waiting[caller]
            self._running[caller] += 1
            is_due = not (future.done() or future.running()) and future.set_running_or_notify_cancel()
        try:
            if is_due:
                _run(future, job)
        finally:
            with self._lock:
                self._running[caller] -= 1
                if not self._running[caller]:
                    del self._running[caller]
                waits = bool(self._waiting)
            if waits:  # for this thread, or for this caller's turn
                self._threads.submit(self._run_next)


def _run(future: Future[Any], job: Callable[[], Any]) -> None:
    try:
        result = job()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _give_way() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

"""Threads that take their jobs in turns by caller, next to work that others wait for."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

NICE = 19
"""Of the threads, where each thread has such a value (Linux): jobs take what other work leaves of the processor."""
QUICK_S, FORGET_S = 0.05, 1.0
"""A caller whose jobs have taken less than QUICK_S of a processor lately does not give way with its next one. What it
took weighs 1/e after FORGET_S."""
NUM_QUICK = 2
POLL_S = 0.01

_Given = list[tuple[Future[Any], Callable[[], Any]]]
"""One job and its future, or none. Who runs the job takes them out: frames hold neither, else the future would hold an
error whose traceback holds the future, and what the job was given would stay until a collection."""


class TurnPool:
    """Runs jobs in threads: callers take turns, a caller's jobs begin in their order.

    A job that waits ends when its future is cancelled. From any thread.
    """

    def __init__(self, num_threads: int, name: str, *, most_each: int, gives_way: bool = True) -> None:
        """most_each: most threads of one caller; fewer than all where jobs take longer than others may wait. gives_way:
        to all other work, but for the jobs of callers that have had few."""
        give_way = _give_way if gives_way else None
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=give_way)
        self._quick = ThreadPoolExecutor(NUM_QUICK, thread_name_prefix=f"{name}-quick") if gives_way else None
        self._num_quick = 0
        """Quick jobs that run."""
        self._lock = threading.Lock()
        self._waiting: OrderedDict[Hashable, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._most_each = most_each
        self._running: Counter[Hashable] = Counter()
        """Jobs that run, by caller."""
        self._used: dict[Hashable, tuple[float, float]] = {}
        """Caller -> (when its latest job ended, seconds of a processor until then)."""

    def submit(self, caller: Hashable, job: Callable[[], Any], future: Future[Any] | None = None) -> Future[Any]:
        """Queue a job -> its future. future: of a job that waits in another caller's turn: it runs in the first of
        both."""
        future = Future() if future is None else future
        with self._lock:
            is_quick = self._is_quick(caller)
            if is_quick:
                self._running[caller] += 1
                self._num_quick += 1
            else:
                self._waiting.setdefault(caller, deque()).append((future, job))
        if is_quick:
            assert self._quick is not None
            self._quick.submit(self._run_quick, caller, [(future, job)])
        else:
            self._threads.submit(self._run_next)
        return future

    def close(self) -> None:
        """Wait until all jobs have ended; none may come any more."""
        while self._waiting or self._running:
            time.sleep(POLL_S)
        self._threads.shutdown()
        if self._quick is not None:
            self._quick.shutdown()

    def _is_quick(self, caller: Hashable) -> bool:
        if self._quick is None or self._num_quick == NUM_QUICK or caller in self._waiting or self._running[caller]:
            return False
        return self._used_lately(caller) < QUICK_S

    def _used_lately(self, caller: Hashable) -> float:
        ended, seconds = self._used.get(caller, (0.0, 0.0))
        return seconds * math.exp((ended - time.monotonic()) / FORGET_S)

    def _run_quick(self, caller: Hashable, given: _Given) -> None:
        with self._lock:
            _drop_ended(given)
        self._run(caller, given, is_quick=True)

    def _run_next(self) -> None:
        """Run the next caller's job, if there is one whose caller may have a thread."""
        with self._lock:
            caller = next((one for one in self._waiting if self._running[one] < self._most_each), None)
            if caller is None:
                return
            given: _Given = [self._waiting[caller].popleft()]
            if self._waiting[caller]:
                self._waiting.move_to_end(caller)
            else:
                del self._waiting[caller]
            self._running[caller] += 1
            _drop_ended(given)
        self._run(caller, given, is_quick=False)

    def _run(self, caller: Hashable, given: _Given, *, is_quick: bool) -> None:
        began = time.thread_time()
        try:
            if given:
                _fulfil(given)
        finally:
            with self._lock:
                self._num_quick -= is_quick
                self._running[caller] -= 1
                if not self._running[caller]:
                    del self._running[caller]
                if self._quick is not None:
                    self._count(caller, time.thread_time() - began)
                waits = bool(self._waiting)
            if waits:  # for this thread, or for this caller's turn
                self._threads.submit(self._run_next)

    def _count(self, caller: Hashable, seconds: float) -> None:
        now = time.monotonic()
        self._used[caller] = now, self._used_lately(caller) + seconds
        if len(self._used) > 1000:
            self._used = {one: used for one, used in self._used.items() if now - used[0] < 10 * FORGET_S}


def _drop_ended(given: _Given) -> None:
    """Drop the job whose future is cancelled, or which another turn has begun."""
    (future, _) = given[0]
    if future.done() or future.running() or not future.set_running_or_notify_cancel():
        given.clear()


def _fulfil(given: _Given) -> None:
    future, job = given.pop()
    try:
        result = job()
    except BaseException as error:
        future.set_exception(error)
        del future, job
    else:
        future.set_result(result)


def _give_way() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

"""Who of an engine's ranks is still there: a thread that gives signs of life and notices who gives none."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from megatron_infer.comm.rank_links import LinkClosed, RankLink
from megatron_infer.errors import RankFailure

log = logging.getLogger("megatron_infer")

PULSES_PER_DEADLINE = 8
MAX_INTERVAL_S = 1.0


class Heartbeat:
    """Pulses between the leader and each other rank; what is noticed once holds for good.

    Death is an end of file and shows at once. A stall (SIGSTOP, a host that is gone) shows after `timeout_s` without
    a pulse. The leader tells the others whom it misses, so that all name the same rank.
    """

    def __init__(
        self,
        links: dict[int, RankLink],
        *,
        timeout_s: float,
        phase: Callable[[], str],
        give_up: Callable[[], bool] = lambda: True,
    ) -> None:
        """give_up: called from the watch's thread once a rank is missed that did not say goodbye, to end what waits for
        it; again with the next pulse until there was something to end.
        """
        self._links, self._timeout_s = links, timeout_s
        self._phase, self._give_up = phase, give_up
        self._interval_s = min(MAX_INTERVAL_S, timeout_s / PULSES_PER_DEADLINE)
        now = time.monotonic()
        self._seen = dict.fromkeys(links, now)
        self._phases = dict.fromkeys(links, "start")
        self._lost: tuple[int, str, bool] | None = None
        """Rank, reason, and whether it said goodbye."""
        self._has_given_up = False
        self._gone: set[int] = set()
        """Ranks that have said goodbye: their silence afterwards is no news."""
        self._closing, self._awake, self._told = threading.Event(), threading.Event(), threading.Event()
        self._beaten = threading.Event()
        # The thread must not keep an engine alive that everyone else has forgotten.
        events = self._closing, self._awake
        self._thread = threading.Thread(target=_run, args=(weakref.ref(self), *events), daemon=True)
        self._thread.name = "megatron_infer watch"
        self._thread.start()

    @property
    def lost(self) -> tuple[int, str] | None:
        """(rank, reason) of the first rank that was missed, one that said no goodbye before one that did."""
        return None if self._lost is None else self._lost[:2]

    @property
    def patience_s(self) -> float:
        """After so long a stall has been noticed; who is late without one lives."""
        return self._timeout_s + 2 * self._interval_s

    def phase_of(self, rank: int) -> str:
        """What it was doing when it was last heard of."""
        return self._phases.get(rank, "an unknown phase")

    def check(self, *, goodbyes: bool = True) -> None:
        """Raise RankFailure if a rank was missed. goodbyes: also one that said so, having done its part until then."""
        lost = self._lost  # another thread may replace it
        if lost is not None and (goodbyes or not lost[2]):
            raise RankFailure(lost[0], self._phase(), lost[1])

    def spread(self, rank: int, reason: str) -> None:
        """Have the others know what this rank has found, before it ends: one that waits for its own device hears of
        nothing else."""
        self._miss(rank, reason)
        self._told.clear()
        self._awake.set()
        self._told.wait(self._interval_s)

    def catch_up(self) -> None:
        """Take in what a rank that has just gone may have said before."""
        self._beaten.clear()
        self._awake.set()
        self._beaten.wait(self._interval_s)

    def close(self) -> None:
        """Say goodbye and end the thread; the links are closed by whoever made them."""
        self._closing.set()
        self._awake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        for link in self._links.values():
            try:
                link.send({"bye": True}, wait_s=0.2)
            except LinkClosed:
                continue

    def beat(self, gap_s: float) -> float:
        """One round of the thread: read, judge, send -> seconds to the next. gap_s: since the last one."""
        self._read()
        # Whoever was stopped itself, or starved, has heard nobody: the others get another interval.
        if gap_s < 2 * self._interval_s:
            self._judge()
        message: dict[str, Any] = {"phase": self._phase()}
        if self._lost is not None:
            message["lost"] = self._lost
        for rank, link in self._links.items():
            try:
                link.send(message, wait_s=self._interval_s)
            except LinkClosed:
                self._hear(rank, link)  # its goodbye may be there to read
                self._miss(rank, "its process has ended, or cannot be reached any more")
        self._beaten.set()
        if "lost" in message:
            self._told.set()
            self._end_waits()
        return self._interval_s

    def _end_waits(self) -> None:
        """Behind what the others are told: it may take a while."""
        if self._has_given_up or self._lost is None or self._lost[2]:
            return
        try:
            self._has_given_up = self._give_up()
        except Exception:  # the waits end at their own limit then, and the pulses go on
            self._has_given_up = True
            log.exception("what waits for a rank that is gone could not be ended")

    def _read(self) -> None:
        for rank, link in self._links.items():
            self._hear(rank, link)

    def _hear(self, rank: int, link: RankLink) -> None:
        try:
            while (message := link.receive(0.0)) is not None:
                self._seen[rank] = time.monotonic()
                if message.get("bye"):
                    self._miss(rank, "it has closed its engine", goodbye=True)
                if "phase" in message:
                    self._phases[rank] = message["phase"]
                if message.get("lost") is not None:
                    lost, reason, goodbye = message["lost"]
                    self._miss(lost, reason, goodbye=goodbye)
        except LinkClosed:
            self._miss(rank, "its process has ended")

    def _judge(self) -> None:
        now = time.monotonic()
        for rank, seen in self._seen.items():
            if now - seen > self._timeout_s:
                self._miss(rank, f"no sign of life for {now - seen:.1f} s")

    def _miss(self, rank: int, reason: str, *, goodbye: bool = False) -> None:
        if goodbye:
            self._gone.add(rank)
        elif rank in self._gone:
            return
        if self._lost is None or (self._lost[2] and not goodbye):
            self._lost = rank, reason, goodbye


def _run(watch_ref: weakref.ref[Heartbeat], closing: threading.Event, awake: threading.Event) -> None:
    wait_s, last = 0.0, time.monotonic()
    while True:
        awake.wait(wait_s)
        awake.clear()
        watch = watch_ref()
        if watch is None or closing.is_set():
            return
        now = time.monotonic()
        wait_s, last = watch.beat(now - last), now
        del watch

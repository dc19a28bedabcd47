"""Heartbeats between the ranks of an engine: a thread sends them, and detects ranks that are lost."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from megatron_infer.distributed.rank_links import RankLink
from megatron_infer.distributed.wire import LinkClosed, Silence
from megatron_infer.errors import RankFailure

log = logging.getLogger("megatron_infer")

BEATS_PER_TIMEOUT = 8
MAX_INTERVAL_S = 1.0


class Heartbeat:
    """Heartbeats between the leader and every other rank; a rank that is lost stays lost.

    Death is an end of file and is detected at once. A stall (SIGSTOP, a host that is gone) is detected after
    `timeout_s` without a heartbeat. The leader sends the others which rank is lost, so that all name the same one.
    """

    def __init__(
        self,
        links: dict[int, RankLink],
        *,
        timeout_s: float,
        give_up: Callable[[], bool] = lambda: True,
    ) -> None:
        """give_up: called on the heartbeat's thread once a rank is lost without a goodbye, to end what waits for it;
        called again with every heartbeat until it returns True."""
        self._links = links
        self._timeout_s = timeout_s
        self._give_up = give_up
        self.phase = "start"
        """What this rank is doing, for errors here and on the other ranks."""
        self.trouble = ""
        """See `Lockstep.trouble`."""
        self.leads = False
        """Whether this rank is in a call, and waits for the others there."""
        self._interval_s = min(MAX_INTERVAL_S, timeout_s / BEATS_PER_TIMEOUT)
        self._silences = {rank: Silence(2 * self._interval_s) for rank in links}
        self._phases = dict.fromkeys(links, "start")
        self._troubles = dict.fromkeys(links, "")
        self._leads = dict.fromkeys(links, False)
        self._lost: tuple[int, str, bool] | None = None
        """Rank, reason, and whether it said goodbye."""
        self._has_given_up = False
        self._gone: set[int] = set()
        """Ranks that have said goodbye, whose later silence is expected."""
        self._closing, self._wake = threading.Event(), threading.Event()
        self._has_beaten, self._has_sent_loss = threading.Event(), threading.Event()
        # With a weak reference the thread does not keep an unused engine alive.
        events = self._closing, self._wake
        self._thread = threading.Thread(target=_run, args=(weakref.ref(self), *events), daemon=True)
        self._thread.name = "megatron_infer heartbeat"
        self._thread.start()

    @property
    def lost(self) -> tuple[int, str] | None:
        """(rank, reason) of the first lost rank; one without a goodbye goes before one with."""
        return None if self._lost is None else self._lost[:2]

    @property
    def patience_s(self) -> float:
        """Seconds after which a stall has been detected; a rank that is late without one is alive."""
        return self._timeout_s + 2 * self._interval_s

    def phase_of(self, rank: int) -> str:
        """What a rank was doing at its last heartbeat."""
        return self._phases.get(rank, "an unknown phase") + self._after(rank)

    def is_in_trouble(self, rank: int) -> bool:
        """Whether a rank has sent a `trouble` with its last heartbeat, and leads no call."""
        return bool(self._troubles.get(rank)) and not self._leads[rank]

    def _after(self, rank: int) -> str:
        return f" ({self._troubles[rank]})" if self._troubles.get(rank) else ""

    def reason_of(self, rank: int) -> str:
        """Why a rank is lost whose connection has ended."""
        return f"its process has ended{self._after(rank)}"

    def check(self, *, goodbyes: bool = True) -> None:
        """Raise RankFailure if a rank is lost. goodbyes: also for a rank that left with a goodbye."""
        lost = self._lost  # another thread may replace it
        if lost is not None and (goodbyes or not lost[2]):
            raise RankFailure(lost[0], self.phase, lost[1])

    def spread(self, rank: int, reason: str) -> None:
        """Send the other ranks a loss that this rank has found, before it ends: a rank that waits for its own device
        learns of it in no other way."""
        self._lose(rank, reason)
        self._has_sent_loss.clear()
        self._wake.set()
        self._has_sent_loss.wait(self._interval_s)

    def catch_up(self) -> None:
        """Read what a rank that has just gone may have sent before."""
        self._has_beaten.clear()
        self._wake.set()
        self._has_beaten.wait(self._interval_s)

    def close(self) -> None:
        """Say goodbye and end the thread; the owner of the links closes them."""
        self._closing.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        for link in self._links.values():
            try:
                link.send({"bye": True}, wait_s=0.2)
            except LinkClosed:
                continue

    def beat(self) -> float:
        """Read, check, send once -> seconds to the next call."""
        for rank, link in self._links.items():
            self._read(rank, link)
        for rank, silence in self._silences.items():
            if (silent := silence.seconds()) > self._timeout_s:
                self._lose(rank, f"no sign of life for {silent:.1f} s")
        message: dict[str, Any] = {"phase": self.phase, "trouble": self.trouble, "leads": self.leads}
        if self._lost is not None:
            message["lost"] = self._lost
        for rank, link in self._links.items():
            try:
                link.send(message, wait_s=self._interval_s)
            except LinkClosed:
                self._read(rank, link)  # it may have sent a goodbye
                self._lose(rank, "its process has ended, or cannot be reached any more")
        self._has_beaten.set()
        if "lost" in message:
            self._has_sent_loss.set()
            self._end_waits()
        return self._interval_s

    def _end_waits(self) -> None:
        """After the heartbeats are sent, as it may take a while."""
        if self._has_given_up or self._lost is None or self._lost[2]:
            return
        try:
            self._has_given_up = self._give_up()
        except Exception:  # the waits then end at their own timeouts, and heartbeats go on
            self._has_given_up = True
            log.exception("what waits for a lost rank could not be ended")

    def _read(self, rank: int, link: RankLink) -> None:
        try:
            while (message := link.receive(0.0)) is not None:
                self._silences[rank].heard()
                if message.get("bye"):
                    self._lose(rank, f"it has closed its engine{self._after(rank)}", goodbye=True)
                if "phase" in message:
                    self._phases[rank], self._troubles[rank] = message["phase"], message["trouble"]
                    self._leads[rank] = message["leads"]
                if message.get("lost") is not None:
                    lost, reason, goodbye = message["lost"]
                    self._lose(lost, reason, goodbye=goodbye)
        except LinkClosed:
            self._lose(rank, self.reason_of(rank))

    def _lose(self, rank: int, reason: str, *, goodbye: bool = False) -> None:
        if goodbye:
            self._gone.add(rank)
        elif rank in self._gone:
            return
        if self._lost is None or (self._lost[2] and not goodbye):
            self._lost = rank, reason, goodbye


def _run(heartbeat_ref: weakref.ref[Heartbeat], closing: threading.Event, wake: threading.Event) -> None:
    wait_s = 0.0
    while True:
        wake.wait(wait_s)
        wake.clear()
        heartbeat = heartbeat_ref()
        if heartbeat is None or closing.is_set():
            return
        wait_s = heartbeat.beat()
        del heartbeat

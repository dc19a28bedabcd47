"""Requests that hold a lease, and what happens among them when blocks run out: pause, resume, evict."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from megatron_infer.context.context import DynamicInferenceContext, Lease
from megatron_infer.schedule import policy
from megatron_infer.schedule.queue import WaitingQueue, arrival_of, remove_by_arrival
from megatron_infer.schedule.request import Request, Status

EventHook = Callable[[Request, str, dict[str, Any]], None]
"""(request, "admit" | "pause" | "resume" | "evict" | "finish", what is worth knowing about it)."""


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was made."""

    steps: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    admitted: int = 0
    """Admissions, readmissions after an eviction and forks included."""
    forked: int = 0
    paused: int = 0
    resumed: int = 0
    evicted: int = 0
    prefix_queries: int = 0
    """Admissions that looked for a published prefix; forks count neither here nor below."""
    prefix_hits: int = 0
    """Those that found one, be it only while their prompt was being computed."""
    prefix_hit_tokens: int = 0
    """Known tokens of those admissions that were found."""
    prefix_miss_tokens: int = 0
    """Known tokens of those admissions that are left to compute."""
    finished: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class Roster:
    """Who decodes, who prefills, who is paused: each list oldest first.

    A decoding request that finds no block pauses and keeps what it has, up to `paused_block_limit` blocks of all the
    paused. Past that the youngest of all gives its memory back. As a request with a step in flight must keep its
    lease, such a one is paused first and evicted after its commit.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        queue: WaitingQueue,
        stats: SchedulerStats,
        *,
        paused_block_limit: int,
        version: int,
        on_event: EventHook | None,
    ) -> None:
        self.version = version
        """Of the weights that steps planned from now on compute with."""
        self.decoding: list[Request] = []
        self.prefilling: list[Request] = []
        self.paused: list[Request] = []
        self.paused_block_limit = paused_block_limit
        self._context = context
        self._queue = queue
        self._stats = stats
        self._on_event = on_event

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def live(self) -> list[Request]:
        return [*self.decoding, *self.prefilling, *self.paused]

    def emit(self, request: Request, kind: str, **payload: Any) -> None:
        if self._on_event is not None:
            self._on_event(request, kind, payload)

    # ------------------------------------------------------------------ coming and going

    def enter(self, request: Request, lease: Lease, *, forked_from: Request | None = None) -> None:
        """Take in a request with a fresh lease; it prefills what is not cached."""
        request.lease, request.scheduled, request.history.cached_tokens = lease, lease.cached, lease.cached
        request.status = Status.RUNNING
        if forked_from is None:
            request.history.computed_anew(self.version, first_token=request.num_output, cached=lease.cached)
        else:
            request.history.forked(forked_from.history, first_token=request.num_output, computed=lease.cached)
        insort(self.prefilling, request, key=arrival_of)
        stats = self._stats
        stats.admitted += 1
        if forked_from is not None:
            stats.forked += 1
        elif self._context.prefix_caching and request.may_hit:
            stats.prefix_queries += 1
            stats.prefix_hits += lease.cached > 0
            stats.prefix_hit_tokens += lease.cached
            stats.prefix_miss_tokens += len(request.tokens) - lease.cached
        self.emit(request, "admit", cached_tokens=lease.cached, forked=forked_from is not None)

    def skip(self, request: Request, num_tokens: int) -> None:
        """The next known tokens of `request` need no computation: it holds blocks with them since now."""
        history, stats = request.history, self._stats
        stats.prefix_hits += not history.cached_tokens
        stats.prefix_hit_tokens += num_tokens
        stats.prefix_miss_tokens -= num_tokens
        history.cached_tokens += num_tokens
        request.scheduled += num_tokens

    def begin_decoding(self, request: Request) -> None:
        """Its last known token is planned: from here on it takes one token a step."""
        remove_by_arrival(self.prefilling, request)
        insort(self.decoding, request, key=arrival_of)

    def take_off(self, request: Request) -> None:
        """Remove from whichever list holds it."""
        lists = (self.paused,) if request.status is Status.PAUSED else (self.decoding, self.prefilling)
        found = any(remove_by_arrival(requests, request) for requests in lists)
        assert found, f"{request.id!r} is {request.status.value} but in no list"

    def let_go(self, request: Request) -> None:
        """Give back the lease of a request that has left the lists, once nothing of it is in flight."""
        if request.lease is not None and not request.in_flight:
            self._context.release(request.lease)
            request.lease = None

    def start_over(self, request: Request) -> None:
        """Take off an idle request without its memory: it waits again, all of its tokens to be computed anew."""
        assert not request.in_flight, f"{request.id!r} has {request.in_flight} steps in flight"
        self.take_off(request)
        self.let_go(request)
        request.status, request.scheduled = Status.WAITING, 0

    # ------------------------------------------------------------------ when blocks run out

    def youngest(self) -> Request:
        return policy.youngest(requests[-1] for requests in (self.decoding, self.prefilling, self.paused) if requests)

    def pause(self, request: Request) -> None:
        assert request.lease is not None
        self.take_off(request)
        request.status = Status.PAUSED
        request.history.num_pauses += 1
        insort(self.paused, request, key=arrival_of)
        self._stats.paused += 1
        self.emit(request, "pause", num_blocks=len(request.lease.blocks), num_tokens=request.scheduled)

    def evict(self, request: Request) -> None:
        assert request.lease is not None
        num_blocks, num_tokens = len(request.lease.blocks), request.scheduled
        self.start_over(request)
        request.history.num_evictions += 1
        self._queue.put_back(request)
        self._stats.evicted += 1
        self.emit(request, "evict", num_blocks=num_blocks, num_tokens=num_tokens)

    def relieve(self) -> None:
        """At the start of a step: resume whom there is room for, oldest first, and hold the limit for the others."""
        self._resume()
        while self.paused and self._num_paused_blocks() > self.paused_block_limit:
            if not self._evict_youngest():
                return
            self._resume()

    def make_room(self, request: Request) -> bool:
        """Find decoding `request` its next block if it may not pause for one; False: it has to.

        Takes off only requests that are younger than this one.
        """
        assert request.lease is not None
        while self._num_paused_blocks() + len(request.lease.blocks) > self.paused_block_limit:
            if self.youngest() is request or not self._evict_youngest():
                return False
            if self._context.extend(request.lease, request.scheduled + 1):
                return True
        return False

    def _evict_youngest(self) -> bool:
        """Evict the youngest; False while it has a step in flight, after which it will be idle."""
        victim = self.youngest()
        if victim.in_flight:
            if victim.status is Status.RUNNING:
                self.pause(victim)
            return False
        self.evict(victim)
        return True

    def _resume(self) -> None:
        """Let the paused go on, oldest first, as far as there are blocks: nobody passes one who still needs some."""
        while self.paused:
            request = self.paused[0]
            assert request.lease is not None
            if not self._context.extend(
                request.lease, min(request.scheduled + 1, policy.stored_tokens(request.max_total))
            ):
                return
            del self.paused[0]
            request.status = Status.RUNNING
            prefills = policy.is_prefill(request, leads=self._queue.leads(request))
            insort(self.prefilling if prefills else self.decoding, request, key=arrival_of)
            self._stats.resumed += 1
            self.emit(request, "resume")

    def _num_paused_blocks(self) -> int:
        return sum(request.lease.capacity for request in self.paused if request.lease) // self._context.block_size

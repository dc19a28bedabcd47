"""Requests that hold a lease: how they come, pause, resume and go."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from megatron_infer.context.dynamic_context import DynamicInferenceContext, Lease
from megatron_infer.scheduler import policy
from megatron_infer.scheduler.request import FinishReason, Request, Status
from megatron_infer.scheduler.waiting_queue import remove_by_rank, sort_key_of

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
    recomputed_tokens: int = 0
    """Tokens that had been computed and were dropped by an eviction."""
    swapped_out: int = 0
    """Evictions to the host, and how many came back from there (the others ended or were computed anew)."""
    swapped_in: int = 0
    swap_blocks_out: int = 0
    """Blocks copied to the host, and back; content that is on the other side already is not copied."""
    swap_blocks_in: int = 0
    prefix_queries: int = 0
    """Admissions that looked for a published prefix; forks count neither here nor below."""
    prefix_hits: int = 0
    """Those that found one, be it only while their prompt was being computed."""
    prefix_hit_tokens: int = 0
    """Known tokens of those admissions that were found."""
    prefix_miss_tokens: int = 0
    """Known tokens of those admissions that are left to compute."""
    states_kept: int = 0
    """Recurrent states kept for the prefix cache while prompts were computed."""
    states_loaded: int = 0
    """Times a prompt went on from one of the states kept."""
    finished: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class RunningSet:
    """Who decodes, who prefills, who is paused: each list by rank. `Pressure` decides on the last."""

    def __init__(
        self,
        context: DynamicInferenceContext,
        stats: SchedulerStats,
        *,
        version: int,
        on_event: EventHook | None,
    ) -> None:
        self.version = version
        """Of the weights that steps planned from now on compute with."""
        self.decoding: list[Request] = []
        self.prefilling: list[Request] = []
        self.paused: list[Request] = []
        self.stats = stats
        self._context = context
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
        self._book(request, lease)
        request.history.cached_tokens = lease.cached
        if forked_from is None:
            request.history.computed_anew(self.version, first_token=request.num_output, cached=lease.cached)
        else:
            request.history.forked(forked_from.history, first_token=request.num_output, computed=lease.cached)
        stats = self.stats
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
        history, stats = request.history, self.stats
        stats.prefix_hits += not history.cached_tokens
        stats.prefix_hit_tokens += num_tokens
        stats.prefix_miss_tokens -= num_tokens
        history.cached_tokens += num_tokens
        request.scheduled += num_tokens

    def enter_again(self, request: Request, lease: Lease) -> None:
        """Take in a request whose keys and values came back from the host; it goes on with them."""
        self._book(request, lease)
        request.history.goes_on_with(self.version, first_token=request.num_output, computed=lease.cached)
        request.history.num_swaps += 1
        self.stats.swapped_in += 1
        self.emit(request, "admit", cached_tokens=0, forked=False, swapped_tokens=lease.cached)

    def _book(self, request: Request, lease: Lease) -> None:
        request.lease, request.scheduled = lease, lease.cached
        request.status = Status.RUNNING
        insort(self.prefilling, request, key=sort_key_of)
        self.stats.admitted += 1

    def begin_decoding(self, request: Request) -> None:
        """Its last known token is planned: from here on it takes one token a step."""
        remove_by_rank(self.prefilling, request)
        insort(self.decoding, request, key=sort_key_of)

    def take_off(self, request: Request) -> None:
        """Remove from whichever list holds it."""
        lists = (self.paused,) if request.status is Status.PAUSED else (self.decoding, self.prefilling)
        found = any(remove_by_rank(requests, request) for requests in lists)
        assert found, f"{request.id!r} is {request.status.value} but in no list"

    def let_go(self, request: Request) -> None:
        """Give back the lease of a request that has left the lists, once nothing of it is in flight."""
        if request.lease is not None and not request.in_flight:
            self._context.release(request.lease)
            request.lease = None

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End a request that was removed, from here or from the queue."""
        request.finish(reason, stop_reason)
        self.stats.finished += 1
        self.emit(request, "finish", reason=reason.value, stop_reason=stop_reason)
        self.let_go(request)

    def finish_ended(self, ended: list[Request]) -> list[Request]:
        """Release the leases of `ended`, and finish those that ended by their last token -> the latter."""
        newly = []
        for request in ended:
            if request.status is Status.FINISHED:
                self.let_go(request)
                continue
            newly.append(request)
            self.take_off(request)
            token = request.tokens[-1]
            if token in request.stop_ids:
                asked_for = token in request.params.stop_token_ids
                self.finish(request, FinishReason.STOP, token if asked_for else None)
            else:
                self.finish(request, FinishReason.LENGTH, None)
        return newly

    def start_over(self, request: Request) -> None:
        """Take off an idle request without its memory: it waits again, all of its tokens to be computed anew."""
        assert not request.in_flight, f"{request.id!r} has {request.in_flight} steps in flight"
        self.take_off(request)
        self.let_go(request)
        request.status, request.scheduled = Status.WAITING, 0

    def pause(self, request: Request) -> None:
        """It keeps its memory and waits for a block."""
        assert request.lease is not None
        self.take_off(request)
        request.status = Status.PAUSED
        request.history.num_pauses += 1
        insort(self.paused, request, key=sort_key_of)
        self.stats.paused += 1
        self.emit(request, "pause", num_blocks=len(request.lease.blocks), num_tokens=request.scheduled)

    def resume(self, request: Request, *, leads: bool) -> None:
        """A paused request has room again; leads: siblings wait for its prefill."""
        self.take_off(request)
        request.status = Status.RUNNING
        prefills = policy.is_prefill(request, leads=leads)
        insort(self.prefilling if prefills else self.decoding, request, key=sort_key_of)
        self.stats.resumed += 1
        self.emit(request, "resume")

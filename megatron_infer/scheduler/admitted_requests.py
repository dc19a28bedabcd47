"""Requests that hold a lease: how they are admitted, pause, resume and leave."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from megatron_infer.scheduler import policy
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.context.leases import Lease
from megatron_infer.scheduler.request import FinishReason, Request, Status, sort_key_of

EventHook = Callable[[Request, str, dict[str, Any]], None]
"""(request, "admit" | "pause" | "resume" | "evict" | "finish", details as keyword -> value)."""


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
    """Evictions to the host, and how many of them came back from there (the others ended or were recomputed)."""
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
    """Times a prompt continued from one of the states kept."""
    finished: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class AdmittedRequests:
    """The requests that decode, that prefill, and that are paused: each list by priority and arrival.

    `PreemptionPolicy` decides which of them pause.
    """

    def __init__(
        self, context: DynamicInferenceContext, stats: SchedulerStats, *, version: int, on_event: EventHook | None
    ) -> None:
        self.version = version
        """Version of the weights that steps planned from now on compute with."""
        self.decoding: list[Request] = []
        self.prefilling: list[Request] = []
        self.paused: list[Request] = []
        self.stats, self._context, self._on_event = stats, context, on_event

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def num_live(self) -> int:
        return self.num_running + len(self.paused)

    def live(self) -> list[Request]:
        return [*self.decoding, *self.prefilling, *self.paused]

    def emit(self, request: Request, kind: str, **payload: Any) -> None:
        if self._on_event is not None:
            self._on_event(request, kind, payload)

    def has_adapter_slot(self, request: Request) -> bool:
        """Whether the device has the request's adapter, or room for it beside those of running requests."""
        name = request.params.adapter
        if name is None:
            return True
        assert self._context.adapters is not None, f"{request.id!r} names an adapter, the engine has none"
        return self._context.adapters.has_room(name, self._used_adapters)

    def _used_adapters(self) -> set[str]:
        return {request.params.adapter for request in self.live() if request.params.adapter is not None}

    def _take_adapter(self, request: Request, lease: Lease) -> None:
        name, adapters = request.params.adapter, self._context.adapters
        if name is not None and adapters is not None:
            lease.adapter_slot = adapters.take(name, self._used_adapters)
            request.history.adapter = adapters.versions[name]

    # ------------------------------------------------------------------ coming and going

    def admit(self, request: Request, lease: Lease) -> None:
        """Insert a request with a fresh lease; it prefills what is not cached."""
        self._take_adapter(request, lease)
        request.history.restart(self.version, first_token=request.num_output, cached=lease.cached)
        if self._context.prefix_caching and request.may_hit:
            stats = self.stats
            stats.prefix_queries += 1
            stats.prefix_hits += lease.cached > 0
            stats.prefix_hit_tokens += lease.cached
            stats.prefix_miss_tokens += len(request.tokens) - lease.cached
        request.history.cached_tokens = lease.cached
        self._insert(request, lease, cached_tokens=lease.cached, forked=False)

    def fork(self, leader: Request, child: Request, lease: Lease) -> None:
        """Insert a sibling whose lease was forked from its leader's."""
        child.history.fork_from(leader.history, first_token=child.num_output, computed=lease.cached)
        child.history.cached_tokens = lease.cached
        self.stats.forked += 1
        self._insert(child, lease, cached_tokens=lease.cached, forked=True)

    def swap_in(self, request: Request, lease: Lease) -> None:
        """Insert a request whose keys and values come back from the host; it continues with them."""
        self._take_adapter(request, lease)
        request.history.continue_with(self.version, first_token=request.num_output, computed=lease.cached)
        request.history.num_swaps += 1
        self.stats.swapped_in += 1
        self._insert(request, lease, cached_tokens=0, forked=False, swapped_tokens=lease.cached)

    def lease_computed(
        self, request: Request, computed: int, *, root: bytes | None, like: Request | None, num_shared: int, least: int
    ) -> int | None:
        """Give `request` a row and blocks for what was computed of it elsewhere, and for the rest of its prompt; all or
        nothing -> how many leading tokens the blocks hold already. None: no room, or fewer than `least`.

        root: the lease takes and publishes blocks under it; None: the lease publishes nothing.
        Its first `num_shared` tokens, a whole number of blocks, are those of `like`, whose blocks it then shares.
        """
        context, found = self._context, num_shared
        if not self.has_adapter_slot(request):
            return None
        if like is None:
            lease = context.admit(request.tokens, root=root or b"", use_cache=False)
            if lease is not None and root is not None:
                found = context.take_published(lease, request.tokens[: computed + 1])
        else:
            assert like.lease is not None and num_shared % context.block_size == 0, f"{num_shared} tokens shared"
            forked = context.fork(like.lease, num_shared)
            lease = None if forked is None else forked[0]  # the caller writes its recurrent state
        if lease is None:
            return None
        lease.publishes = root is not None
        request.scheduled = computed
        prefills = policy.is_prefill(request, is_leader=bool(request.siblings))
        if found < least or not context.extend(lease, len(request.tokens) if prefills else computed):
            context.release(lease)
            request.scheduled = 0
            return None
        request.lease = lease
        return found

    def readmit(self, request: Request, *, is_leader: bool) -> None:
        """Insert a request after `lease_computed`."""
        assert request.lease is not None
        self._take_adapter(request, request.lease)
        request.history.continue_with(self.version, first_token=request.num_output, computed=request.scheduled)
        self._run(request, is_leader=is_leader)

    def skip(self, request: Request, num_tokens: int) -> None:
        """The next known tokens of `request` need no computation: its lease has moved to blocks with them."""
        history, stats = request.history, self.stats
        stats.prefix_hits += not history.cached_tokens
        stats.prefix_hit_tokens += num_tokens
        stats.prefix_miss_tokens -= num_tokens
        history.cached_tokens += num_tokens
        request.scheduled += num_tokens

    def begin_decoding(self, request: Request) -> None:
        """Its last known token is planned: from here on it takes one token a step."""
        _remove_from(self.prefilling, request)
        insort(self.decoding, request, key=sort_key_of)

    def remove(self, request: Request) -> None:
        """Remove from the list that holds it."""
        lists = (self.paused,) if request.status is Status.PAUSED else (self.decoding, self.prefilling)
        found = any(_remove_from(requests, request) for requests in lists)
        assert found, f"{request.id!r} is {request.status.value} but in no list"

    def release(self, request: Request) -> None:
        """Release the lease of a request that was removed, once nothing of it is in flight."""
        if request.lease is not None and not request.in_flight:
            self._context.release(request.lease)
            request.lease = None

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End a request that was removed, from here or from the queue."""
        request.finish(reason, stop_reason)
        self.stats.finished += 1
        self.emit(request, "finish", reason=reason.value, stop_reason=stop_reason)
        self.release(request)

    def finish_ended(self, ended: list[Request]) -> list[Request]:
        """Release the leases of `ended`, and finish those that ended by their last token -> the latter."""
        newly = []
        for request in ended:
            if request.status is Status.FINISHED:
                self.release(request)
                continue
            newly.append(request)
            self.remove(request)
            token = request.tokens[-1]
            if token in request.stop_ids:
                asked_for = token in request.params.stop_token_ids
                self.finish(request, FinishReason.STOP, token if asked_for else None)
            else:
                self.finish(request, FinishReason.LENGTH, None)
        return newly

    def start_over(self, request: Request) -> None:
        """Remove an idle request and its memory: it waits, all of its tokens to be recomputed."""
        assert not request.in_flight, f"{request.id!r} has {request.in_flight} steps in flight"
        self.remove(request)
        self.release(request)
        request.status, request.scheduled = Status.WAITING, 0

    def pause(self, request: Request) -> None:
        """It keeps its memory and waits for a block."""
        assert request.lease is not None
        self.remove(request)
        request.status = Status.PAUSED
        request.history.num_pauses += 1
        insort(self.paused, request, key=sort_key_of)
        self.stats.paused += 1
        self.emit(request, "pause", num_blocks=len(request.lease.blocks), num_tokens=request.scheduled)

    def resume(self, request: Request, *, is_leader: bool) -> None:
        """A paused request has room again."""
        self.remove(request)
        self._run(request, is_leader=is_leader)
        self.stats.resumed += 1
        self.emit(request, "resume")

    def _insert(self, request: Request, lease: Lease, **payload: Any) -> None:
        request.lease, request.scheduled = lease, lease.cached
        request.status = Status.RUNNING
        insort(self.prefilling, request, key=sort_key_of)
        self.stats.admitted += 1
        self.emit(request, "admit", **payload)

    def _run(self, request: Request, *, is_leader: bool) -> None:
        request.status = Status.RUNNING
        prefills = policy.is_prefill(request, is_leader=is_leader)
        insort(self.prefilling if prefills else self.decoding, request, key=sort_key_of)


def _remove_from(requests: list[Request], request: Request) -> bool:
    """Remove `request` from a list sorted by `sort_key`; False when it is not in it."""
    index = bisect_left(requests, request.sort_key, key=sort_key_of)
    if index == len(requests) or requests[index] is not request:
        return False
    del requests[index]
    return True

"""What happens when KV blocks run out: which requests pause, which are evicted, and how they get their memory back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from megatron_infer.config.inference import PreemptionMode
from megatron_infer.scheduler import policy
from megatron_infer.scheduler.admitted_requests import AdmittedRequests
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.request import Request, Status, sort_key_of
from megatron_infer.scheduler.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from megatron_infer.scheduler.context.swap import SwappedSequence


def needs_block(request: Request) -> bool:
    """Whether a decoding request lacks room for its next token; one whose last token is in flight takes no more."""
    assert request.lease is not None
    return request.lease.capacity <= request.scheduled < request.max_total - 1


def may_need_block(request: Request) -> bool:
    """Whether a decoding request lacks room for the most tokens that it may get."""
    assert request.lease is not None
    return request.lease.capacity < policy.stored_tokens(request.max_total)


def is_ending(request: Request) -> bool:
    """Whether its last token is in flight: its blocks come free at the next commit."""
    return request.in_flight > 0 and request.scheduled >= request.max_total - 1


class PreemptionPolicy:
    """Decides once per step, before decode requests are planned, which of them do without a block.

    Free blocks go to requests that need one, oldest first. A request that gets none pauses and keeps what it has, as
    long as all paused ones keep no more than `paused_block_limit` blocks. Past that, live requests are evicted,
    cheapest first by `policy.eviction_price`, until the stuck ones have a block or are within the limit. A victim with
    a step in flight pauses now and is evicted after its commit, if that is still needed. An evicted request waits
    again: its tokens are recomputed, or its keys and values come back from the host, and it continues where it was.

    Older means a smaller `sort_key`: the smaller priority number, or the earlier arrival within a priority. Among the
    requests that may be evicted those of the largest priority number go first, and then by price.

    No request starves, except behind smaller priorities. The oldest live one is never evicted, keeps its blocks and
    gets the first free one; alone it fits the pool, and when all are stuck another is evicted: so it finishes, and the
    next is the oldest. Take the oldest unfinished request R. While it is live it is the oldest of the live, and
    finishes. While it waits, it is queued before all that were never evicted; at most MAX_OVERTAKEN are admitted past
    it, then none is, the live ones finish one after the other, and R fits at the latest when the pool is empty. Once R
    is done the same holds for the next, so every request finishes.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        queue: WaitingQueue,
        admitted_requests: AdmittedRequests,
        *,
        paused_block_limit: int,
        preemption: PreemptionMode,
        costs: policy.CostModel,
    ) -> None:
        self.costs = costs
        self.swapped: dict[Request, SwappedSequence] = {}
        """Waiting requests whose keys and values are on the host."""
        self.paused_block_limit = paused_block_limit
        self._preemption = preemption
        self._context = context
        self._queue = queue
        self._admitted_requests = admitted_requests
        self._evict_next: list[Request] = []
        """Victims that were paused because a step of theirs was in flight."""
        self._paused_since: dict[Request, int] = {}

    # ------------------------------------------------------------------ once per step

    def make_room(self) -> None:
        """Ensure that each decoding request has room for its next token, or that the pool has a free block for it.

        No request stays paused while a block is free, so that an admission takes no block that a paused one needs.
        """
        context, admitted_requests = self._context, self._admitted_requests
        needy = [request for request in admitted_requests.decoding if needs_block(request)]
        if not admitted_requests.paused and len(needy) <= context.num_free_blocks:
            return
        # A pause that something else ended (a requeue, a failed step) is over: the next one counts from its own start.
        self._paused_since = {r: since for r, since in self._paused_since.items() if r.status is Status.PAUSED}
        chosen, self._evict_next = {request for request in self._evict_next if request.status is Status.PAUSED}, []
        stuck = self._grow([*needy, *(request for request in admitted_requests.paused if request not in chosen)])
        if self._num_blocks(stuck) > self.paused_block_limit:
            stuck = self._evict_for(stuck, chosen)
        for request in stuck:
            if request.status is Status.RUNNING:
                admitted_requests.pause(request)
        # Blocks that are still free go to the paused. Without one only victims of the step before may resume as they
        # are: those of this step must stay paused until they are idle.
        former = [request for request in chosen if request.status is Status.PAUSED]
        self._grow(admitted_requests.paused if context.num_free_blocks else former)
        now = admitted_requests.stats.steps
        self._paused_since = {request: self._paused_since.get(request, now) for request in admitted_requests.paused}

    @property
    def is_short(self) -> bool:
        """Whether the free blocks do not last for another block of each request that decodes and may need one."""
        admitted_requests, num_free = self._admitted_requests, self._context.num_free_blocks
        if admitted_requests.paused or num_free >= len(admitted_requests.decoding):
            return bool(admitted_requests.paused)
        return num_free < sum(map(may_need_block, admitted_requests.decoding))

    def next_victims(self) -> tuple[list[Request], float]:
        """The requests that can be evicted, the next one first, and how many seconds the next eviction costs."""
        victims = self._victims((), num_needed=self._admitted_requests.num_live)
        return victims, self._seconds(victims[0]) if victims else 0.0

    def make_way(self, among: Collection[Request] | None) -> bool:
        """Evict one request, as none of `among` (None: all) can run and nothing is in flight; False: it would not help.

        Requests that are not in `among` go first, the youngest of them. Else a paused one goes, as all paused requests
        wait for each other's blocks: one that frees blocks, if there is any.
        """
        live, paused = self._admitted_requests.live(), self._admitted_requests.paused
        if others := [] if among is None else [request for request in live if request not in among]:
            wants = len(others) < len(live) or bool(self._queue.candidates(0, among))
            if wants:
                self.evict(max(others, key=sort_key_of))
            return wants
        if paused:
            victims = self._victims((), num_needed=1) or sorted(paused, key=sort_key_of)[:0:-1]
            assert victims, f"alone, {paused[0].id!r} does not fit the pool"
            self.evict(victims[0])
            return True
        return False

    def _grow(self, needy: Iterable[Request]) -> list[Request]:
        """Give each request room for its next token, oldest first, and resume the paused -> those left without."""
        stuck = []
        for request in sorted(needy, key=sort_key_of):
            assert request.lease is not None
            end = min(request.scheduled + 1, policy.stored_tokens(request.max_total))
            if not self._context.extend(request.lease, end):
                stuck.append(request)
            elif request.status is Status.PAUSED:
                self._admitted_requests.resume(request, is_leader=self._queue.is_leader(request))
        return stuck

    def _evict_for(self, stuck: list[Request], chosen: Collection[Request]) -> list[Request]:
        """Evict the cheapest until `stuck` have room or may stay paused -> those of them that still lack a block."""
        live, count = self._admitted_requests.live(), self._context.pool.num_exclusive
        coming = sum(count(request.lease.blocks) for request in live if request.lease and is_ending(request))
        for victim in self._victims(chosen, num_needed=len(stuck)):
            if len(stuck) <= coming or self._num_blocks(stuck) <= self.paused_block_limit:
                break
            if victim in stuck:
                stuck.remove(victim)
            if not victim.in_flight:
                self.evict(victim)
                stuck = self._grow(stuck)
                continue
            assert victim.lease is not None
            coming += count(victim.lease.blocks)
            if victim.status is Status.RUNNING:
                self._admitted_requests.pause(victim)
            self._evict_next.append(victim)
        return stuck

    def _victims(self, chosen: Collection[Request], *, num_needed: int) -> list[Request]:
        """Requests whose eviction would free blocks: the largest priority first, then by price, then the younger first.

        Those in `chosen` come before the others. Blocks freed beyond those needed would go to new requests: they do not
        make a victim cheaper.
        """
        live = self._admitted_requests.live()
        oldest = min(live, key=sort_key_of, default=None)
        priced = []
        for request in live:
            if request is oldest or is_ending(request):
                continue
            assert request.lease is not None
            num_freed = self._context.pool.num_exclusive(request.lease.blocks)
            if num_freed:
                price = self._price(request, min(num_freed, num_needed))
                priority, arrival = request.sort_key
                priced.append((request not in chosen, -priority, price, -arrival, request))
        return [request for *_, request in sorted(priced)]

    def _price(self, request: Request, num_gained: int) -> float:
        now = self._admitted_requests.stats.steps
        return policy.eviction_price(
            self._seconds(request),
            num_gained=num_gained,
            num_evictions=request.history.num_evictions,
            steps_paused=now - self._paused_since.get(request, now),
        )

    def _seconds(self, request: Request) -> float:
        """What it costs until an evicted request has its memory again."""
        if self._prefers_swap(request):
            return self.costs.swap_s(self._num_stored(request))
        return self.costs.recompute_s(request.scheduled)

    # ------------------------------------------------------------------ out and back in

    def evict(self, request: Request) -> None:
        """Take an idle request's memory, to the host if that is cheaper and has room; it waits again."""
        assert request.lease is not None and not request.in_flight, f"{request.id!r} has steps in flight"
        num_blocks, num_tokens = len(request.lease.blocks), request.scheduled
        stats = self._admitted_requests.stats
        swapped = self._context.swap_out(request.lease, num_tokens) if self._prefers_swap(request) else None
        if swapped is None:
            stats.recomputed_tokens += num_tokens
        else:
            request.lease = None
            self.swapped[request] = swapped
            stats.swapped_out += 1
            assert self._context.swap is not None
            stats.swap_blocks_out = self._context.swap.blocks_out
        self._admitted_requests.start_over(request)
        request.history.num_evictions += 1
        self._queue.insert_evicted(request)
        stats.evicted += 1
        how = "recompute" if swapped is None else "swap"
        self._admitted_requests.emit(request, "evict", num_blocks=num_blocks, num_tokens=num_tokens, how=how)

    def swap_in(self, request: Request, *, headroom: int) -> bool:
        """Give a swapped request a lease on what it held, with room for all its tokens; False: nothing changed."""
        lease = self._context.swap_in(self.swapped[request], capacity=len(request.tokens), headroom=headroom)
        if lease is None:
            return False
        del self.swapped[request]
        self._admitted_requests.swap_in(request, lease)
        assert self._context.swap is not None
        self._admitted_requests.stats.swap_blocks_in = self._context.swap.blocks_in
        return True

    def drop(self, request: Request) -> None:
        """Release what the host holds of `request`, if it does."""
        swapped = self.swapped.pop(request, None)
        if swapped is not None:
            assert self._context.swap is not None
            self._context.swap.drop(swapped)

    def drop_all(self) -> None:
        """Release what the host holds: all requests are recomputed."""
        for request in list(self.swapped):
            self.drop(request)

    def _prefers_swap(self, request: Request) -> bool:
        """Whether the host is the cheaper way for `request` and has room for it."""
        swap, mode = self._context.swap, self._preemption
        if swap is None or mode is PreemptionMode.RECOMPUTE:
            return False
        assert request.lease is not None
        num_blocks = self._num_stored(request)
        if mode is PreemptionMode.AUTO and self.costs.swap_s(num_blocks) >= self.costs.recompute_s(request.scheduled):
            return False
        return swap.has_room(request.lease, request.scheduled)

    def _num_stored(self, request: Request) -> int:
        return policy.blocks_needed(request.scheduled, self._context.block_size)

    @staticmethod
    def _num_blocks(requests: Sequence[Request]) -> int:
        return sum(len(request.lease.blocks) for request in requests if request.lease is not None)

"""What happens when KV blocks run out: who gets the next one, who pauses, who gives its memory back and how."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from megatron_infer.config.inference import PreemptionMode
from megatron_infer.context.dynamic_context import DynamicInferenceContext
from megatron_infer.context.swap_slots import SwappedSequence
from megatron_infer.scheduler import policy
from megatron_infer.scheduler.request import Request, Status
from megatron_infer.scheduler.running_set import RunningSet
from megatron_infer.scheduler.waiting_queue import WaitingQueue, sort_key_of


def needs_block(request: Request) -> bool:
    """Whether a decoding request lacks room for its next token; one whose last token is in flight takes no more."""
    assert request.lease is not None
    return request.lease.capacity <= request.scheduled < request.max_total - 1


def is_ending(request: Request) -> bool:
    """Whether its last token is in flight: its blocks come free at the next commit."""
    return request.in_flight > 0 and request.scheduled >= request.max_total - 1


class PreemptionPolicy:
    """Decides once per step, before decode requests are planned, who has to do without a block.

    Free blocks go to those who need one, oldest first. Who gets none pauses and keeps what it has, as long as all of
    them keep no more than `paused_block_limit` blocks. Past that, live requests are evicted, cheapest first by
    `policy.eviction_price`, until the stuck are served or within the limit. A victim with a step in flight pauses now
    and is evicted after its commit, if that is still needed. An evicted request waits again: its tokens are computed
    anew, or its keys and values come back from the host, and it goes on where it was.

    Older is whose rank is smaller: of two priorities the smaller number, of the same priority who came first. Of those
    who may be evicted the ones of the largest priority go first, and then by price.

    Nobody starves but behind smaller priorities. The oldest live request is never evicted, keeps its blocks and gets
    the first free one; alone it fits the pool, and when all are stuck another is evicted: so it finishes, and the next
    is the oldest. Take the oldest unfinished request R. While it is live it is the oldest of the live, and finishes.
    While it waits, it stands in the line before all that were never evicted; at most MAX_OVERTAKEN are admitted past
    it, then nobody is, the live ones finish one after the other, and R fits at the latest when the pool is empty. Once
    R is done the same holds for the next, so every request finishes.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        queue: WaitingQueue,
        running_set: RunningSet,
        *,
        paused_block_limit: int,
        preemption: PreemptionMode,
    ) -> None:
        self.costs = policy.CostModel()
        self.swapped: dict[Request, SwappedSequence] = {}
        """Waiting requests whose keys and values are on the host."""
        self.paused_block_limit = paused_block_limit
        self._preemption = preemption
        self._context = context
        self._queue = queue
        self._running_set = running_set
        self._doomed: list[Request] = []
        """Victims that were paused because a step of theirs was in flight."""
        self._paused_since: dict[Request, int] = {}

    # ------------------------------------------------------------------ once per step

    def settle(self) -> None:
        """Afterwards every decoding request has room for its next token, or the pool a block for each that has not.

        Nobody stays paused beside a free block, so that an admission takes nothing from the paused.
        """
        context, running_set = self._context, self._running_set
        needy = [request for request in running_set.decoding if needs_block(request)]
        if not running_set.paused and len(needy) <= context.num_free_blocks:
            return
        # A pause that something else ended (a requeue, a failed step) is over: the next one counts from its own start.
        self._paused_since = {r: since for r, since in self._paused_since.items() if r.status is Status.PAUSED}
        doomed, self._doomed = {request for request in self._doomed if request.status is Status.PAUSED}, []
        stuck = self._serve([*needy, *(request for request in running_set.paused if request not in doomed)])
        if self._num_blocks(stuck) > self.paused_block_limit:
            stuck = self._relieve(stuck, doomed)
        for request in stuck:
            if request.status is Status.RUNNING:
                running_set.pause(request)
        # A block that is still free is nobody's but theirs who pause; without one only former victims may go on as they
        # are: this step's must stay paused until they are idle.
        self._serve(running_set.paused if context.num_free_blocks else [r for r in doomed if r.status is Status.PAUSED])
        now = running_set.stats.steps
        self._paused_since = {request: self._paused_since.get(request, now) for request in running_set.paused}

    def break_deadlock(self) -> None:
        """Evict one of the paused, who all wait for blocks of each other; one that frees nothing if all are such."""
        victims = self._victims((), num_needed=1) or sorted(self._running_set.paused, key=sort_key_of)[:0:-1]
        assert victims, f"alone, {self._running_set.paused[0].id!r} does not fit the pool"
        self.evict(victims[0])

    def _serve(self, needy: Iterable[Request]) -> list[Request]:
        """Give everyone room for the next token, oldest first, and let the paused go on with it -> those without."""
        stuck = []
        for request in sorted(needy, key=sort_key_of):
            assert request.lease is not None
            end = min(request.scheduled + 1, policy.stored_tokens(request.max_total))
            if not self._context.extend(request.lease, end):
                stuck.append(request)
            elif request.status is Status.PAUSED:
                self._running_set.resume(request, leads=self._queue.leads(request))
        return stuck

    def _relieve(self, stuck: list[Request], doomed: Collection[Request]) -> list[Request]:
        """Take memory from the cheapest until `stuck` are served or may stay paused -> those of them who are stuck."""
        live, count = self._running_set.live(), self._context.num_exclusive_blocks
        coming = sum(count(request.lease) for request in live if request.lease and is_ending(request))
        for victim in self._victims(doomed, num_needed=len(stuck)):
            if len(stuck) <= coming or self._num_blocks(stuck) <= self.paused_block_limit:
                break
            if victim in stuck:
                stuck.remove(victim)
            if not victim.in_flight:
                self.evict(victim)
                stuck = self._serve(stuck)
                continue
            assert victim.lease is not None
            coming += count(victim.lease)
            if victim.status is Status.RUNNING:
                self._running_set.pause(victim)
            self._doomed.append(victim)
        return stuck

    def _victims(self, doomed: Collection[Request], *, num_needed: int) -> list[Request]:
        """Whose eviction would free blocks: the largest priority first, then by price, then the younger first.

        Those in `doomed` come before the others. Blocks freed beyond those needed would go to newcomers: they do not
        make a victim cheaper.
        """
        live = self._running_set.live()
        oldest = min(live, key=sort_key_of)
        priced = []
        for request in live:
            if request is oldest or is_ending(request):
                continue
            assert request.lease is not None
            num_freed = self._context.num_exclusive_blocks(request.lease)
            if num_freed:
                price = self._price(request, min(num_freed, num_needed))
                priority, arrival = request.rank
                priced.append((request not in doomed, -priority, price, -arrival, request))
        return [request for *_, request in sorted(priced)]

    def _price(self, request: Request, num_gained: int) -> float:
        now = self._running_set.stats.steps
        return policy.eviction_price(
            self.costs.swap_s(self._num_stored(request))
            if self._prefers_swap(request)
            else self.costs.recompute_s(request.scheduled),
            num_gained=num_gained,
            num_evictions=request.history.num_evictions,
            steps_paused=now - self._paused_since.get(request, now),
        )

    # ------------------------------------------------------------------ out and back in

    def evict(self, request: Request) -> None:
        """Take an idle request's memory; it waits again, to the host if that is the better way and has room."""
        assert request.lease is not None and not request.in_flight, f"{request.id!r} has steps in flight"
        num_blocks, num_tokens = len(request.lease.blocks), request.scheduled
        stats = self._running_set.stats
        swapped = self._context.swap_out(request.lease, num_tokens) if self._prefers_swap(request) else None
        if swapped is None:
            stats.recomputed_tokens += num_tokens
        else:
            request.lease = None
            self.swapped[request] = swapped
            stats.swapped_out += 1
            self._count_moves()
        self._running_set.start_over(request)
        request.history.num_evictions += 1
        self._queue.put_back(request)
        stats.evicted += 1
        how = "recompute" if swapped is None else "swap"
        self._running_set.emit(request, "evict", num_blocks=num_blocks, num_tokens=num_tokens, how=how)

    def swap_in(self, request: Request, *, headroom: int) -> bool:
        """Lease a swapped request what it held, with room for all of its tokens; False: nothing changed."""
        lease = self._context.swap_in(self.swapped[request], capacity=len(request.tokens), headroom=headroom)
        if lease is None:
            return False
        del self.swapped[request]
        self._running_set.enter_again(request, lease)
        self._count_moves()
        return True

    def drop(self, request: Request) -> None:
        """Forget what the host holds of `request`, if it does."""
        swapped = self.swapped.pop(request, None)
        if swapped is not None:
            self._context.drop_swapped(swapped)

    def drop_all(self) -> None:
        """Let everyone start over by computing."""
        for request in list(self.swapped):
            self.drop(request)

    def weights_changed(self) -> None:
        """What is on the host stays usable, and publishes no more (see `Scheduler.set_root`); nor is a state found."""
        self._context.forget_states()
        if self._context.host is not None:
            self._context.host.forget_contents()

    def _prefers_swap(self, request: Request) -> bool:
        """Whether the host is the way for `request` and has room for it."""
        host, mode = self._context.host, self._preemption
        if host is None or mode is PreemptionMode.RECOMPUTE:
            return False
        assert request.lease is not None
        num_blocks = self._num_stored(request)
        if mode is PreemptionMode.AUTO and self.costs.swap_s(num_blocks) >= self.costs.recompute_s(request.scheduled):
            return False
        return self._context.host_has_room(request.lease, request.scheduled)

    def _num_stored(self, request: Request) -> int:
        return policy.blocks_needed(request.scheduled, self._context.block_size)

    def _count_moves(self) -> None:
        host, stats = self._context.host, self._running_set.stats
        assert host is not None
        stats.swap_blocks_out, stats.swap_blocks_in = host.blocks_out, host.blocks_in

    @staticmethod
    def _num_blocks(requests: Sequence[Request]) -> int:
        return sum(len(request.lease.blocks) for request in requests if request.lease is not None)

"""Decides each step: which requests decode or prefill, which are admitted, paused, resumed or evicted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from megatron_infer.config.batching import BatchingLimits
from megatron_infer.config.inference import PreemptionMode
from megatron_infer.errors import RequestError
from megatron_infer.scheduler import policy
from megatron_infer.scheduler.admitted_requests import AdmittedRequests, EventHook, SchedulerStats
from megatron_infer.scheduler.caller_shares import CallerShares
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.context.leases import Lease
from megatron_infer.scheduler.decode import DecodePlanner
from megatron_infer.scheduler.preemption import PreemptionPolicy
from megatron_infer.scheduler.prefill import NOTHING, PrefillPlanner, PrefillRoom
from megatron_infer.scheduler.recompute_progress import RecomputeProgress
from megatron_infer.scheduler.request import FinishReason, Request, Status
from megatron_infer.scheduler.step_budget import StepBudget
from megatron_infer.scheduler.step_costs import StepCosts
from megatron_infer.scheduler.step_plan import Committed, PrefillChunk, StepPlan, StepResult
from megatron_infer.scheduler.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from megatron_infer.scheduler.drafts import DraftPlanner
    from megatron_infer.scheduler.phases import Phase, Phases

BOTH: tuple[Phase, ...] = ((True, True, None),)  # type: ignore[assignment]
"""Decode, and prompts in what it leaves of the budget: each step without `Phases`."""


class Scheduler:
    """Queues and policy; deterministic in the calls it gets, so that every rank decides alike.

        add --> queue --admit--> prefilling --last chunk of the prompt--> decoding --stop, length, abort--> finished
                  ^                  |                                    |    ^
                  |                  +------- no block: pause ------------+    |
                  +---- evict ---------------------- paused ------ resume -----+

    A step may be scheduled before the last one is committed (overlap): a request then counts on a token that only the
    device knows. A request that ends with such a step in flight keeps its lease until the commit.

    With `num_micro_batches` in flight the first pipeline stage does not know a token that is being drawn: its request
    is not planned until the commit. Chunks of a prompt need no drawn token and follow each other closely.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        *,
        max_tokens: int,
        chunked_prefill: bool,
        paused_block_limit: int,
        root: bytes,
        version: int = 0,
        preemption: PreemptionMode = PreemptionMode.AUTO,
        costs: policy.CostModel | None = None,
        num_micro_batches: int = 1,
        prefill_room: PrefillRoom | None = None,
        limits: BatchingLimits | None = None,
        phases: Phases | None = None,
        drafts: DraftPlanner | None = None,
        on_event: EventHook | None = None,
    ) -> None:
        """root, version: of the weights (see `set_root`). costs: see `set_costs`; None: the defaults.

        num_micro_batches: micro-batches that share the requests, for pipeline stages to work on at once.
        prefill_room: what the shapes of captured steps leave for prompts; None: max_tokens is the only bound.
        limits: further bounds; None: none. phases: the order of decode and prompts; None: each step
        decodes, and prompts fill the rest of its budget. drafts: None: nothing is drafted.
        """
        assert max_tokens >= 1 <= num_micro_batches, f"max_tokens {max_tokens}, micro-batches {num_micro_batches}"
        self.context, self.root = context, root
        self.budget, self.num_micro_batches = StepBudget(max_tokens), num_micro_batches
        self.stats = SchedulerStats()
        self.queue = WaitingQueue()
        self.admitted_requests = AdmittedRequests(context, self.stats, version=version, on_event=on_event)
        self.preemption = PreemptionPolicy(
            context,
            self.queue,
            self.admitted_requests,
            paused_block_limit=paused_block_limit,
            preemption=preemption,
            costs=costs or policy.CostModel(),
        )
        self.shares = CallerShares(context, self.queue, self.admitted_requests, self.preemption)
        self._prefills = PrefillPlanner(
            context,
            self.queue,
            self.admitted_requests,
            self.preemption,
            chunked_prefill=chunked_prefill,
            num_micro_batches=num_micro_batches,
            room=prefill_room,
            limits=limits or BatchingLimits(),
            shares=self.shares,
        )
        self._decodes = DecodePlanner(context, self.admitted_requests, num_micro_batches=num_micro_batches)
        self._phases = phases
        self._drafts = drafts
        self.recompute_progress = RecomputeProgress()
        self._num_uncommitted = self._prompt_tokens_in_flight = 0
        self._readmitted: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue `request`, with its siblings behind it when it leads a group.

        Raises RequestError (and queues nothing) when it could never finish: the pool, a row or max_total is too small.
        """
        stored, limit = policy.stored_tokens(request.max_total), self.context.max_stored_tokens
        if stored > limit:
            raise RequestError(
                f"request {request.id!r} may grow to {stored:,} stored tokens, the cache holds {limit:,} for one "
                f"sequence (blocks of {self.context.block_size}); lower max_tokens or give the cache more memory"
            )
        if request.max_total <= len(request.tokens) or not request.tokens:
            raise RequestError(
                f"request {request.id!r} has {len(request.tokens):,} tokens and a limit of {request.max_total:,}; "
                "it needs one token at least and room to draw another"
            )
        self.shares.see(request.caller)
        self.queue.assign_arrivals(request)
        self.queue.append(request)

    def readmit(
        self,
        request: Request,
        computed: int,
        *,
        like: Request | None = None,
        num_shared: int = 0,
        least: int = 0,
        publishes: bool = False,
    ) -> int | None:
        """Let `request` continue after `computed` tokens -> how many of these its blocks hold; the caller writes the KV
        of the others now. None: no room, or fewer than `least`: `add` it.

        publishes: the weights in force computed them. See `AdmittedRequests.lease_computed`.
        """
        found = self.admitted_requests.lease_computed(
            request,
            computed,
            root=self.root_of(request) if publishes else None,
            like=like,
            num_shared=num_shared,
            least=least,
        )
        if found is None:
            return None
        self.shares.see(request.caller)
        self.queue.assign_arrivals(request)
        self.queue.hold_siblings(request)
        self.admitted_requests.readmit(request, is_leader=self.queue.is_leader(request))
        self._readmitted.append(request)
        return found

    def num_published(self, tokens: Sequence[int], *, adapter: str | None, salt: str) -> int:
        """How many leading tokens the prefix cache holds now."""
        return self.context.num_published(tokens, root=self.context.root_of(self.root, adapter=adapter, salt=salt))

    def root_of(self, request: Request) -> bytes:
        """The first link of the chain of a request's blocks."""
        return self.context.root_of(self.root, adapter=request.params.adapter, salt=request.cache.salt)

    def abort(self, request: Request) -> None:
        """End `request` in whatever state it is, keeping the tokens it has; does nothing if it has finished."""
        self.finish(request, FinishReason.ABORT)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End `request` from outside. The commit of a step it has in flight drops the token and releases its lease."""
        if request.status is Status.FINISHED:
            return
        assert request.arrival >= 0, f"request {request.id!r} was never added"
        if request.status is Status.WAITING:
            self.queue.remove(request)
            self.preemption.drop(request)
        else:
            self.admitted_requests.remove(request)
            self.queue.insert_group(self.queue.pop_siblings(request))
        self.admitted_requests.finish(request, reason, stop_reason)

    def finish_by_text(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """The text or the grammar of its last token ends `request`; if that token has ended it, this reason counts."""
        if request.status is Status.FINISHED:
            request.finish(reason, stop_reason)
        else:
            self.finish(request, reason, stop_reason)

    def set_root(self, root: bytes, *, version: int) -> None:
        """Publish and match under `root` from now on: the weights changed, to `version`. Nothing may be in flight.

        A request that holds a lease or is swapped out keeps its KV and publishes no more: its blocks mix weights,
        whatever root comes later.
        """
        assert not self._num_uncommitted, f"{self._num_uncommitted} steps are in flight"
        self.admitted_requests.version = version
        for request in self.admitted_requests.live():
            request.history.continue_with(version, first_token=request.num_output, computed=request.scheduled)
        if root == self.root:
            return
        self.root = root
        self.context.stop_publishing()

    def set_costs(self, costs: policy.CostModel) -> None:
        """The next step decides on evictions with these prices; they must be the same on every rank."""
        self.preemption.costs = costs

    def set_step_costs(self, costs: StepCosts) -> None:
        """The next step decides on drafts and on the shares of callers with these; the same on every rank."""
        self.shares.costs = costs
        if self._drafts is not None:
            self._drafts.set_costs(costs)

    def requeue_all(self) -> None:
        """Queue all requests again, by arrival, without row, blocks or host slots; nothing may be in flight."""
        assert not self._num_uncommitted, f"{self._num_uncommitted} steps are in flight"
        self.preemption.drop_all()
        live = self.admitted_requests.live()
        self.recompute_progress.requeue(live)
        for request in live:
            self.admitted_requests.start_over(request)
        self.queue.insert_sorted(live)

    def cancel(self, *plans: StepPlan) -> None:
        """Undo plans whose steps failed, all earlier ones being committed: their requests start over from the queue.

        Plans made after a failed one are undone with it: they build on what it should have computed.
        The blocks of its chunks were published when it was planned and are not computed: as this is rare, all content
        of the prefix cache is forgotten. Those blocks are held by requests of the plan, which found them in it, and by
        requests that the commit of the step before has moved to them: these start over too. No others can hold one.
        """
        plans = tuple(plan for plan in plans if plan.num_tokens)
        if not plans:
            return
        self._num_uncommitted -= len(plans)
        self._prompt_tokens_in_flight = 0
        assert not self._num_uncommitted, f"{self._num_uncommitted} earlier steps are in flight"
        self.context.forget_all()  # first: blocks given back below must not be kept as cached
        chunks = [chunk for plan in plans for chunk in plan.prefill]
        lost = {block for chunk in chunks for block in _written_blocks(chunk, self.context.block_size)}
        back = []
        for request in [r for plan in plans for r in plan.sampled] + [c.request for c in chunks if not c.samples]:
            request.in_flight -= 1
            if request.in_flight:
                continue  # a later one of the plans has it too
            if request.status is Status.FINISHED:
                self.admitted_requests.release(request)
            else:
                self.admitted_requests.start_over(request)
                back.append(request)
        # The state behind a verified draft may be in a copy that the failed step took: it is not known whose.
        unsure = self.context.states is not None and self.context.states.num_draft_states > 0
        for request in self.admitted_requests.live():
            if request.lease is not None and (unsure or not lost.isdisjoint(request.lease.blocks)):
                self.admitted_requests.start_over(request)
                back.append(request)
        self.queue.insert_sorted(back)
        self._readmitted += [request for plan in plans for request in plan.readmitted if request.lease is not None]
        # The failed step may not have executed the table writes and copies it took: requests swapped in start over with
        # it, those swapped out may not have arrived. Copies that no plan took are for places given up by now.
        self.context.repeat_table_writes()
        self.preemption.drop_all()
        self.context.take_copies()
        if self.context.adapters is not None:
            self.context.adapters.repeat_loads()

    def retract(self, plan: StepPlan, *later: StepPlan) -> bool:
        """Undo a step that ran out of memory and later ones, and halve the budget. False: it had one token only."""
        if plan.num_tokens <= 1:
            return False
        self.cancel(plan, *later)
        self.budget.halve(plan.num_tokens)
        return True

    def reset_prefix_cache(self) -> int:
        """Nothing computed before is ever matched again -> free cached blocks dropped. Steps may be in flight.

        Running requests keep the blocks they have and publish no more.
        """
        return self.context.forget_all()

    @property
    def waiting(self) -> list[Request]:
        """The queue before admission, in order; siblings behind their leader are not in it."""
        return list(self.queue.requests)

    @property
    def running(self) -> list[Request]:
        return [*self.admitted_requests.decoding, *self.admitted_requests.prefilling]

    @property
    def paused(self) -> list[Request]:
        return self.admitted_requests.paused

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def num_running(self) -> int:
        return self.admitted_requests.num_running

    @property
    def num_paused(self) -> int:
        return len(self.admitted_requests.paused)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.queue.requests or self.admitted_requests.num_running or self.admitted_requests.paused)

    def _plan_step(self, among: Collection[Request] | None) -> StepPlan:
        """A step of requests in `among` (None: of all); the next one is planned from what this one has changed."""
        context, admitted_requests, phases = self.context, self.admitted_requests, self._phases
        budget, num_in_flight = self.budget.tokens, self._num_uncommitted
        if context.states is not None:
            context.states.begin_step()
        self.shares.begin_step(among)
        if admitted_requests.paused or context.num_free_blocks < len(admitted_requests.decoding):
            self.preemption.make_room()
        share = self.shares.share(budget, among)
        decode: list[Request] = []
        starts: list[int] = []
        draft = NOTHING
        for decodes, prefills, only in BOTH if phases is None else phases.attempts(admitted_requests):
            if decodes:
                chosen = among if only is None else [one for one in only if among is None or one in among]
                if share is not None:
                    chosen = share.decode if only is None else [one for one in only if one in share.decode]
                if self._drafts is not None:
                    chosen = self._drafts.ready(admitted_requests, chosen, num_in_flight=num_in_flight)
                decode, starts = self._decodes.plan(budget, num_in_flight=num_in_flight, among=chosen)
            if prefills:
                draft = self._prefills.plan(budget, starts, self._prompt_tokens_in_flight, self.root, among, share)
            if decode or draft.chunks:
                break
        if phases is not None:
            phases.planned(draft)
        verified: list[PrefillChunk] = []
        sampled = [*decode, *draft.sampled] if draft.sampled else decode
        num_tokens = len(decode) + draft.num_tokens
        if self._drafts is not None and decode:
            most = budget if share is None else min(budget, share.num_tokens)
            verified = self._drafts.plan(admitted_requests, decode, starts, room=max(0, most - num_tokens))
            sampled = [*decode, *(one.request for one in verified for _ in range(one.n)), *draft.sampled]
            num_tokens = len(decode) + sum(one.n for one in verified) + draft.num_tokens
        adapters = context.adapters
        return StepPlan(
            step=admitted_requests.stats.steps,
            decode=decode,
            decode_starts=starts,
            prefill=(*verified, *draft.chunks),
            copies_before=context.take_copies() if num_tokens else (),
            copies_after=tuple(sorted(draft.copies, key=lambda copy: copy.kind.value)),
            readmitted=tuple([request for request in self._readmitted if request.lease is not None]),
            adapter_loads=() if adapters is None or not num_tokens else adapters.take_loads(),
            num_tokens=num_tokens,
            sampled=sampled,
            num_prompt_tokens=draft.num_tokens,
        )

    def schedule(self, among: Collection[Request] | None = None) -> StepPlan:
        """The next step, of requests in `among` only (None: of all); others keep their memory unless these lack it.
        num_tokens is 0 when nothing can run: all is finished, or waits for a step in flight."""
        plan = self._plan_step(among)
        while not plan.num_tokens and not self._num_uncommitted and self.preemption.make_way(among):
            plan = self._plan_step(among)
        if plan.num_tokens:
            self._num_uncommitted += 1
            self._prompt_tokens_in_flight += plan.num_prompt_tokens
            self._readmitted = []
            self.stats.steps += 1
            self.stats.decode_tokens += plan.num_tokens - plan.num_prompt_tokens
            self.stats.prefill_tokens += plan.num_prompt_tokens
        return plan

    def commit(self, plan: StepPlan, result: StepResult, *, is_last: bool = True) -> Committed:
        """Append what the step drew and finish the requests that end by it. In the order of the plans.

        A token of a request that has finished meanwhile is dropped. A step that verified drafts is committed as several
        plans of one token for each request, see `runner.speculative.verify`; is_last: the last one of them.
        """
        if not plan.num_tokens:
            return Committed((), [])
        self._prompt_tokens_in_flight -= plan.num_prompt_tokens
        if is_last:
            self._num_uncommitted -= 1
            self.budget.step_committed()
        finished = Status.FINISHED
        ended: list[Request] = []
        dropped: list[Request] = []
        for request, token in zip(plan.sampled, result.tokens, strict=True):
            request.in_flight -= 1
            if request.status is finished:
                dropped.append(request)
                ended.append(request)
                continue
            tokens = request.tokens
            tokens.append(token)
            if token in request.stop_ids or len(tokens) >= request.max_total:
                ended.append(request)
        for chunk in plan.prefill:
            if not chunk.samples:
                chunk.request.in_flight -= 1
                if chunk.request.status is finished:
                    ended.append(chunk.request)
        if self.context.prefix_caching:
            _publish(plan, self.context)
        taken: Sequence[int] = range(len(plan.sampled))
        if dropped:
            taken = [index for index, request in enumerate(plan.sampled) if request not in dropped]
        return Committed(taken, self.admitted_requests.finish_ended(ended) if ended else ended)


def _publish(plan: StepPlan, context: DynamicInferenceContext) -> None:
    """Publish the full blocks that a step completed."""
    size = context.block_size
    last = size - 1
    computed = [(plan.decode[i], start + 1) for i, start in enumerate(plan.decode_starts) if start % size == last]
    for chunk in plan.prefill:  # forks move as their leader did, before its lease ends
        computed += [(request, chunk.start + chunk.n) for request in (chunk.request, *chunk.forks)]
    for request, num_tokens in computed:
        lease: Lease = request.lease  # type: ignore[assignment]
        context.publish_computed(lease, request.tokens, min(num_tokens, len(request.tokens)))


def _written_blocks(chunk: PrefillChunk, block_size: int) -> list[int]:
    """Blocks that the step of a chunk writes to."""
    assert chunk.request.lease is not None
    return chunk.request.lease.blocks[chunk.start // block_size : -(-(chunk.start + chunk.n) // block_size)]

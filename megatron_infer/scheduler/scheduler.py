"""Decides each step: who decodes, whose prompt is computed, who is admitted, paused, resumed or evicted."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_infer.config.inference import PreemptionMode
from megatron_infer.context.dynamic_context import DynamicInferenceContext
from megatron_infer.errors import RequestError
from megatron_infer.scheduler import policy, readmit
from megatron_infer.scheduler.decode import DecodePlanner
from megatron_infer.scheduler.preemption import PreemptionPolicy
from megatron_infer.scheduler.prefill import PrefillPlanner, PrefillRoom
from megatron_infer.scheduler.request import FinishReason, Request, Status
from megatron_infer.scheduler.running_set import EventHook, RunningSet, SchedulerStats
from megatron_infer.scheduler.step_plan import Committed, PrefillChunk, StepPlan, StepResult
from megatron_infer.scheduler.waiting_queue import WaitingQueue, number


class Scheduler:
    """Queues and policy; deterministic in the calls it gets, so that every rank decides alike.

        add --> queue --admit--> prefilling --last prompt slice--> decoding --stop, length, abort--> finished
                  ^                  |                              |    ^
                  |                  +---- no block: pause ---------+    |
                  +---- evict ------------------- paused ---- resume ----+

    A step may be scheduled before the last one is committed (overlap): a request then counts on a token that only the
    device knows. Whoever has such a step in flight keeps its lease until the commit.

    With `num_groups` micro-batches in flight the first stage does not know a token that is being drawn: its request
    sits out until the commit. Chunks of a prompt need no drawn token and follow each other closely.
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
        on_event: EventHook | None = None,
    ) -> None:
        """num_groups: micro-batches that share the requests, for pipeline stages to work on at once."""
        assert max_tokens >= 1 <= num_micro_batches, f"max_tokens {max_tokens}, num_groups {num_micro_batches}"
        self.num_micro_batches = num_micro_batches
        self.context = context
        self.max_tokens = max_tokens
        self.root = root
        self.stats = SchedulerStats()
        self.queue = WaitingQueue()
        self.running_set = RunningSet(context, self.stats, version=version, on_event=on_event)
        self.preemption = PreemptionPolicy(
            context, self.queue, self.running_set, paused_block_limit=paused_block_limit, preemption=preemption
        )
        self.set_costs(costs if costs is not None else policy.CostModel())
        self.prompts = PrefillPlanner(
            context,
            self.queue,
            self.running_set,
            self.preemption,
            max_tokens=max_tokens,
            chunked_prefill=chunked_prefill,
            num_micro_batches=num_micro_batches,
            room=prefill_room,
        )
        self._decodes = DecodePlanner(context, self.running_set, num_micro_batches=num_micro_batches)
        self._num_arrivals = self._num_uncommitted = self._prompt_tokens_in_flight = 0
        self._returned: list[Request] = []

    # ------------------------------------------------------------------ commands, between steps

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
        self._num_arrivals = number(request, self._num_arrivals)
        self.queue.append(request)

    def readmit(self, request: Request, computed: int, *, like: Request | None = None, num_shared: int = 0) -> bool:
        """Let `request` go on after `computed` tokens; the caller writes their KV now. False: no room, `add` it."""
        if not readmit.lease_for(self.context, request, computed, like=like, num_shared=num_shared):
            return False
        self._num_arrivals = number(request, self._num_arrivals)
        readmit.rejoin(self.queue, self.running_set, request)
        self._returned.append(request)
        return True

    def abort(self, request: Request) -> None:
        """End `request` wherever it stands, keeping the tokens it has; does nothing if it has finished."""
        self.finish(request, FinishReason.ABORT)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End `request` from outside; a step it has in flight is dropped at its commit, where its lease goes back."""
        if request.status is Status.FINISHED:
            return
        assert request.arrival >= 0, f"request {request.id!r} was never added"
        if request.status is Status.WAITING:
            self.queue.remove(request)
            self.preemption.drop(request)
        else:
            self.running_set.take_off(request)
            self.queue.stand_in_line(self.queue.take_siblings(request))
        self.running_set.finish(request, reason, stop_reason)

    def finish_by_text(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """The text or the grammar of its last token ends `request`; if that token has ended it, this reason counts."""
        if request.status is Status.FINISHED:
            request.finish(reason, stop_reason)
        else:
            self.finish(request, reason, stop_reason)

    def set_costs(self, costs: policy.CostModel) -> None:
        """The next step decides on evictions with these prices."""
        self.preemption.costs = costs

    def set_root(self, root: bytes, *, version: int) -> None:
        """Publish and match under `root` from now on: the weights changed, to `version`. Nothing may be in flight.

        Who holds a lease or is swapped out keeps its KV, and publishes no more: its blocks mix weights, whatever root
        comes later.
        """
        assert not self._num_uncommitted, f"{self._num_uncommitted} steps are in flight"
        self.running_set.version = version
        for request in self.running_set.live():
            request.history.goes_on_with(version, first_token=request.num_output, computed=request.scheduled)
        if root == self.root:
            return
        self.root = root
        self.preemption.weights_changed()
        for request in self.running_set.live():
            assert request.lease is not None
            request.lease.root = b""

    def requeue_all(self) -> None:
        """Send everyone back to the queue, by arrival, without row, blocks or host slots; nothing may be in flight."""
        assert not self._num_uncommitted, f"{self._num_uncommitted} steps are in flight"
        self.preemption.drop_all()
        live = self.running_set.live()
        for request in live:
            self.running_set.start_over(request)
        self.queue.restart(live)

    def cancel(self, *plans: StepPlan) -> None:
        """Undo plans whose steps failed, all earlier ones being committed: their requests start over from the queue.

        Plans made after a failed one go with it: they build on what it should have computed.
        Its slices' blocks were published when it was planned and are not computed. The whole prefix index goes with
        them, as this is rare. They are held by members of the plan, who found them in it, and by requests that the
        commit of the step before has moved to them: these start over too. Nobody else can: no plan was made since.
        """
        plans = tuple(plan for plan in plans if plan.num_tokens)
        if not plans:
            return
        self._num_uncommitted -= len(plans)
        self._prompt_tokens_in_flight = 0
        assert not self._num_uncommitted, f"{self._num_uncommitted} earlier steps are in flight"
        self.context.forget_all()  # first: blocks given back below must not be kept as cached
        pieces = [chunk for plan in plans for chunk in plan.prefill]
        lost = {block for chunk in pieces for block in _written_blocks(chunk, self.context.block_size)}
        back = []
        sampled = [request for plan in plans for request in plan.sampled]
        for request in [*sampled, *(chunk.request for chunk in pieces if not chunk.samples)]:
            request.in_flight -= 1
            if request.in_flight:
                continue  # a later one of the plans has it, too
            if request.status is Status.FINISHED:
                self.running_set.let_go(request)
            else:
                self.running_set.start_over(request)
                back.append(request)
        for request in self.running_set.live():
            if request.lease is not None and not lost.isdisjoint(request.lease.blocks):
                self.running_set.start_over(request)
                back.append(request)
        self.queue.restart(back)
        self._returned += [request for plan in plans for request in plan.returned if request.lease is not None]
        # The failed step may have taken table writes and moves without executing them. Who was swapped in starts over
        # with it; what was swapped out may never have arrived. Moves that nobody took are for places given up by now.
        self.context.repeat_table_writes()
        self.preemption.drop_all()
        self.context.take_moves()

    def reset_prefix_cache(self) -> int:
        """Nothing computed before is ever matched again -> free cached blocks dropped. Steps may be in flight.

        Whoever is running goes on with the blocks it has and publishes no more.
        """
        return self.context.forget_all()

    # ------------------------------------------------------------------ reading

    @property
    def waiting(self) -> list[Request]:
        """The line before admission, in order; siblings behind their leader are not in it."""
        return list(self.queue.line)

    @property
    def running(self) -> list[Request]:
        return [*self.running_set.decoding, *self.running_set.prefilling]

    @property
    def paused(self) -> list[Request]:
        return self.running_set.paused

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def num_running(self) -> int:
        return self.running_set.num_running

    @property
    def num_paused(self) -> int:
        return len(self.running_set.paused)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.queue.line or self.running_set.num_running or self.running_set.paused)

    # ------------------------------------------------------------------ a step

    def schedule(self) -> StepPlan:
        """The next step. num_tokens is 0 when nothing can run: all is finished, or waits for a step in flight."""
        plan = self._plan_step()
        while not plan.num_tokens and self.running_set.paused and not self._num_uncommitted:
            self.preemption.break_deadlock()
            plan = self._plan_step()
        if plan.num_tokens:
            self._num_uncommitted += 1
            self._prompt_tokens_in_flight += plan.num_tokens - len(plan.decode)
            self._returned = []
            self.stats.steps += 1
            self.stats.decode_tokens += len(plan.decode)
            self.stats.prefill_tokens += plan.num_tokens - len(plan.decode)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> Committed:
        """Append what the step drew and finish the requests that end by it. In the order of the plans.

        A token of a request that has finished meanwhile is dropped.
        """
        if not plan.num_tokens:
            return Committed((), [])
        self._num_uncommitted -= 1
        self._prompt_tokens_in_flight -= plan.num_tokens - len(plan.decode)
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
        return Committed(taken, self.running_set.finish_ended(ended) if ended else ended)

    # ------------------------------------------------------------------ planning

    def _plan_step(self) -> StepPlan:
        running_set, context = self.running_set, self.context
        context.begin_step()
        if running_set.paused or context.num_free_blocks < len(running_set.decoding):
            self.preemption.settle()
        decode, starts = self._decodes.plan(self.max_tokens, num_in_flight=self._num_uncommitted)
        draft = self.prompts.begin(self.max_tokens - len(decode), len(decode), in_flight=self._prompt_tokens_in_flight)
        if draft.left and running_set.prefilling:
            self.prompts.go_on(draft)
        # An admission takes a block at least, and one that a late hit has just freed is for those who are paused.
        if draft.left and self.queue.line and context.num_free_blocks and not running_set.paused:
            self.prompts.admit(draft, root=self.root)
        return StepPlan(
            step=self.stats.steps,
            decode=decode,
            decode_starts=starts,
            prefill=tuple(draft.slices),
            copies=tuple(draft.copies),
            state_copies=tuple(draft.state_copies),
            returned=tuple(request for request in self._returned if request.lease is not None),
            num_tokens=len(decode) + draft.num_tokens,
            sampled=[*decode, *draft.sampled] if draft.sampled else decode,
        )


def _publish(plan: StepPlan, context: DynamicInferenceContext) -> None:
    """Offer the full blocks that a step completed to later prompts."""
    size = context.block_size
    last = size - 1
    crossing = [i for i, start in enumerate(plan.decode_starts) if start % size == last]
    for i in crossing:
        _publish_request(plan.decode[i], plan.decode_starts[i] + 1, context)
    for chunk in plan.prefill:
        for request in (chunk.request, *chunk.forks):  # forks move as their leader did, before it can let go
            _publish_request(request, chunk.start + chunk.n, context)


def _publish_request(request: Request, computed: int, context: DynamicInferenceContext) -> None:
    assert request.lease is not None
    context.commit(request.lease, request.tokens, min(computed, len(request.tokens)))


def _written_blocks(chunk: PrefillChunk, block_size: int) -> list[int]:
    """Blocks that a slice's step writes to."""
    assert chunk.request.lease is not None
    return chunk.request.lease.blocks[chunk.start // block_size : -(-(chunk.start + chunk.n) // block_size)]

"""The prompt part of a step: chunks of prompts begun before, admissions, and the forks of a group's siblings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_infer.context.dynamic_context import DynamicInferenceContext, Lease
from megatron_infer.context.prefix_hash import salted
from megatron_infer.scheduler import policy
from megatron_infer.scheduler.preemption import PreemptionPolicy
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.running_set import RunningSet
from megatron_infer.scheduler.step_plan import PrefillChunk
from megatron_infer.scheduler.waiting_queue import WaitingQueue

PrefillRoom = Callable[[int], tuple[int, int]]
"""Decode rows of a step -> tokens and slices that may prefill beside them."""


@dataclass(slots=True)
class PrefillDraft:
    """The prefill part of a plan while it is put together."""

    left: int
    """Tokens the step may still take."""
    num_tokens: int = 0
    """Taken."""
    most_slices: int | None = None
    """None: any number."""
    stop_at: int = 0
    """Prompts are left to other micro-batches once no more than this is left."""
    slices: list[PrefillChunk] = field(default_factory=list)
    sampled: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return self.left <= self.stop_at or len(self.slices) == self.most_slices


class PrefillPlanner:
    """Plans slices of known tokens within what a step has left of its budget.

    A slice's full blocks are published as it is planned, so that whoever is planned after it shares them, in the same
    step already: a prompt that many requests bring at once is computed once. Within a step only slices planned before
    can be found, and they are never taken back: a failed step goes through `Scheduler.cancel`.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        queue: WaitingQueue,
        running_set: RunningSet,
        preemption: PreemptionPolicy,
        *,
        max_tokens: int,
        chunked_prefill: bool,
        num_micro_batches: int = 1,
        room: PrefillRoom | None = None,
    ) -> None:
        """num_groups: micro-batches that divide the prompts that wait. room: None: max_tokens is the bound."""
        self._context = context
        self._queue = queue
        self._running_set = running_set
        self._preemption = preemption
        self._max_tokens = max_tokens
        self._chunked_prefill = chunked_prefill
        self._num_groups = num_micro_batches
        self._room = room
        self._waited: dict[Request, int] = {}
        """Who waits for a state that is being computed, and the tokens it had to compute when it began to."""

    def begin(self, left: int, num_decode: int, *, in_flight: int) -> PrefillDraft:
        """The prompt part of a step that may take `left` tokens beside so many decode rows.

        Of several micro-batches it takes its share of what waits and of the `in_flight` tokens that others have taken.
        """
        most_slices = None
        if self._room is not None:
            room, most_slices = self._room(num_decode)
            left = min(left, room)
        if self._num_groups == 1:
            return PrefillDraft(left=left, most_slices=most_slices)
        total = in_flight + self._num_waiting_tokens(policy.SHARES_PER_GROUP * self._num_groups * left)
        return PrefillDraft(
            left=left, most_slices=most_slices, stop_at=max(0, left - policy.prompt_share(total, self._num_groups))
        )

    def go_on(self, draft: PrefillDraft) -> None:
        """The next chunk of each prompt begun before, oldest first. Its blocks were reserved at admission."""
        for request in list(self._running_set.prefilling):
            if draft.is_full:
                return
            self._catch_up(request)
            remaining = len(request.tokens) - request.scheduled
            self._take_slice(draft, request, min(remaining, draft.left - draft.stop_at), first=False)

    def _num_waiting_tokens(self, limit: int) -> int:
        """Known tokens to compute of prompts begun and of those next in line; counted up to `limit` or a little more.

        Tokens that will be found in the prefix cache count too.
        """
        total = sum(len(request.tokens) - request.scheduled for request in self._running_set.prefilling)
        for request in self._queue.candidates(self._context.num_free_rows):
            if total >= limit:
                break
            total += len(request.tokens)
        return total

    def admit(self, draft: PrefillDraft, *, root: bytes) -> None:
        """Admit from the queue in order, looking past those that do not fit as far as `policy` allows."""
        admitted: set[Request] = set()
        skipped: list[Request] = []
        overtaken = self._queue.overtaken
        for request in self._queue.candidates(self._context.num_free_rows):
            if draft.is_full or not self._context.num_free_rows:
                break
            if self._try_admit(draft, request, root):
                admitted.add(request)
                for older in skipped:
                    overtaken[older] = overtaken.get(older, 0) + 1
            else:
                skipped.append(request)
            if len(skipped) > policy.LOOKAHEAD or any(
                overtaken.get(older, 0) >= policy.MAX_OVERTAKEN for older in skipped
            ):
                break
        self._waited = {request: self._waited[request] for request in skipped if request in self._waited}
        self._queue.take_out(admitted)

    def _try_admit(self, draft: PrefillDraft, request: Request, root: bytes) -> bool:
        """Lease all that the known tokens of `request` need and plan its first slice; False: nothing changed."""
        if request in self._preemption.swapped:
            return self._bring_back(draft, request)
        context, total = self._context, len(request.tokens)
        need = policy.blocks_needed(total, context.block_size)
        headroom = self._headroom()
        # Before anything is hashed: the last token is never found, so that one block is needed at least.
        if (1 if context.prefix_caching else need) > context.num_free_blocks - headroom:
            return False
        lease = context.admit(request.tokens, root=salted(root, request.cache.salt), use_cache=request.may_hit)
        if lease is None:
            return False
        if lease.waits and self._is_worth_waiting(request, lease):
            context.release(lease)
            return False
        n = self._chunk_size(draft, total - lease.cached)
        fits = need - len(lease.blocks) <= context.num_free_blocks - headroom
        if not n or not fits or not context.extend(lease, total):
            context.release(lease)
            return False
        self._running_set.enter(request, lease)
        self._load_state(request)
        self._take_slice(draft, request, n, first=True)
        return True

    def _is_worth_waiting(self, request: Request, lease: Lease) -> bool:
        """In the next step it can skip what this one computes for another, unless that state gives way before.

        It waits again only if its last wait has halved what it has to compute: a few times at most, however many
        others there are whose prompt is a little longer each, and not at all for one whose state is never there.
        """
        left = len(request.tokens) - lease.cached
        if request in self._waited and 2 * left > self._waited[request]:
            return False
        self._waited[request] = left
        return True

    def _load_state(self, request: Request) -> None:
        assert request.lease is not None
        if request.lease.begins_behind is not None:
            self._running_set.stats.states_loaded += 1
            self._context.load_state(request.lease)

    def _catch_up(self, request: Request) -> None:
        """Skip what others have published of this prompt since its last slice was planned."""
        assert request.lease is not None
        if not self._context.prefix_caching or not request.may_hit:
            return
        planned = self._context.catch_up(request.lease, request.tokens, request.scheduled)
        if planned > request.scheduled:
            self._running_set.skip(request, planned - request.scheduled)
            self._load_state(request)

    def _bring_back(self, draft: PrefillDraft, request: Request) -> bool:
        """Lease a swapped request what it held and plan its next slice; False: nothing changed."""
        remaining = len(request.tokens) - self._preemption.swapped[request].num_tokens
        n = self._chunk_size(draft, remaining)
        if not n or not self._preemption.swap_in(request, headroom=self._headroom()):
            return False
        self._take_slice(draft, request, n, first=True)
        return True

    def _chunk_size(self, draft: PrefillDraft, remaining: int) -> int:
        """Without chunking a prompt is taken whole even where it exceeds its micro-batch's share."""
        left = draft.left - (draft.stop_at if self._chunked_prefill else 0)
        return policy.chunk_size(remaining, left, max_tokens=self._max_tokens, chunked=self._chunked_prefill)

    def _headroom(self) -> int:
        return policy.admission_headroom(self._running_set.num_running, self._context.num_blocks)

    def _take_slice(self, draft: PrefillDraft, request: Request, n: int, *, first: bool) -> None:
        """Plan the next `n` known tokens of a prefilling request; the last of them draws a token and forks siblings."""
        assert request.lease is not None
        start = request.scheduled
        end = start + n
        samples = end >= len(request.tokens)
        kept = self._context.keep_states(request.lease, request.tokens, start, end)
        self._context.publish_planned(request.lease, request.tokens, end)
        self._running_set.stats.states_kept += len(kept)
        draft.state_copies += ((request.lease.row, slot) for position, slot in kept if position == end)
        forks: tuple[Request, ...] = ()
        if samples:
            if self._queue.leads(request):
                forks = self._fork_siblings(draft, request)
            self._running_set.begin_decoding(request)
            draft.sampled += (request, *forks)
        captures = tuple((position, slot) for position, slot in kept if position < end)
        draft.slices.append(
            PrefillChunk(
                request=request, start=start, n=n, samples=samples, forks=forks, first=first, captures=captures
            )
        )
        draft.left -= n
        draft.num_tokens += n
        request.scheduled = start + n
        request.in_flight += 1

    def _fork_siblings(self, draft: PrefillDraft, leader: Request) -> tuple[Request, ...]:
        """Lease the leader's prompt to its siblings, who draw from the same position; the rest wait in line."""
        assert leader.lease is not None
        siblings = self._queue.take_siblings(leader)
        for index, child in enumerate(siblings):
            forked = self._context.fork(leader.lease, len(leader.tokens))
            if forked is None:
                self._queue.stand_in_line(siblings[index:])
                return tuple(siblings[:index])
            lease, copy = forked
            if copy is not None:
                draft.copies.append(copy)
            if self._context.recurrent:
                draft.state_copies.append((leader.lease.row, lease.row))
            self._running_set.enter(child, lease, forked_from=leader)
            self._running_set.begin_decoding(child)
            child.in_flight += 1
        return tuple(siblings)

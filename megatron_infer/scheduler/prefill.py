"""The prompt part of a step: chunks of prompts begun before, admissions, and the forks of a group's siblings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from megatron_infer.config.batching import BatchingLimits
from megatron_infer.scheduler import policy
from megatron_infer.scheduler.admitted_requests import AdmittedRequests
from megatron_infer.scheduler.caller_shares import CallerShares, StepShare
from megatron_infer.scheduler.context.copies import Copy, CopyKind
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.context.leases import Lease
from megatron_infer.scheduler.preemption import PreemptionPolicy
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_plan import PrefillChunk
from megatron_infer.scheduler.waiting_queue import WaitingQueue

PrefillRoom = Callable[[int], tuple[int, int]]
"""Decode rows of a step -> tokens and chunks that may prefill beside them."""


@dataclass(slots=True)
class PrefillDraft:
    """The prefill part of a plan while it is put together."""

    left: int
    """Tokens the step may still take."""
    budget: int = 0
    """Tokens it may take in all."""
    context_left: int | None = None
    """Tokens that the contexts of further chunks may have; None: any number."""
    num_tokens: int = 0
    """Tokens taken."""
    max_chunks: int | None = None
    """None: any number."""
    among: Collection[Request] | None = None
    """Only these may take part; None: all."""
    share: StepShare | None = None
    """None: no caller is limited."""
    stop_at: int = 0
    """Prompts are left to other micro-batches once no more than this is left."""
    chunks: list[PrefillChunk] = field(default_factory=list)
    sampled: list[Request] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return self.left <= self.stop_at or len(self.chunks) == self.max_chunks

    def left_for(self, request: Request) -> int:
        """Tokens that a request's caller may still take."""
        return self.left if self.share is None else min(self.left, self.share.prompt_tokens.get(request.caller, 1))


NOTHING = PrefillDraft(left=0)


class PrefillPlanner:
    """Plans chunks of known tokens within what a step has left of its budget.

    A chunk's full blocks are published as it is planned, so that a request that is planned after it shares them, in the
    same step already: a prompt that many requests bring at once is computed once. Within a step only chunks planned
    before can be found, and they are never taken back: a failed step goes through `Scheduler.cancel`.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        queue: WaitingQueue,
        admitted_requests: AdmittedRequests,
        preemption: PreemptionPolicy,
        *,
        chunked_prefill: bool,
        num_micro_batches: int,
        room: PrefillRoom | None,
        limits: BatchingLimits,
        shares: CallerShares,
    ) -> None:
        """num_micro_batches: they divide the prompts that wait. room: None where the budget is the only bound."""
        self._context = context
        self._queue = queue
        self._admitted_requests = admitted_requests
        self._preemption = preemption
        self._chunked_prefill = chunked_prefill
        self._num_micro_batches = num_micro_batches
        self._room, self._limits, self._shares = room, limits, shares
        self._waited: dict[Request, int] = {}
        """Requests that wait for a state that is being computed -> tokens they had to compute when they began to."""

    def plan(
        self,
        budget: int,
        decode_starts: Sequence[int],
        in_flight: int,
        root: bytes,
        among: Collection[Request] | None = None,
        share: StepShare | None = None,
    ) -> PrefillDraft:
        """The prompt part of a step of at most `budget` tokens, of which decode rows take the positions given.
        among: the requests that may take part; None: all. share: of callers, where prompts are chunked.

        One of several micro-batches takes its share of what waits and of the `in_flight` tokens that others have taken.
        """
        admitted_requests, queue, count = self._admitted_requests, self._queue, self._num_micro_batches
        if not admitted_requests.prefilling and not queue.requests:
            return NOTHING
        num_decode = len(decode_starts)
        draft = PrefillDraft(left=budget - num_decode, budget=budget, among=among)
        draft.share = share if self._chunked_prefill else None
        if self._limits.max_total_tokens is not None:
            draft.context_left = self._limits.max_total_tokens - sum(decode_starts) - num_decode
        if self._room is not None:
            room, draft.max_chunks = self._room(num_decode)
            draft.left = min(draft.left, room)
        if count > 1:
            total = in_flight + self._num_waiting_tokens(policy.SHARES_PER_MICRO_BATCH * count * draft.left, among)
            draft.stop_at = max(0, draft.left - policy.prompt_share(total, count))
        if draft.left and admitted_requests.prefilling:
            self._continue_prompts(draft)
        # An admission takes at least one block, and one that a late hit has just freed is for the paused.
        if draft.left and queue.requests and self._context.num_free_blocks and not admitted_requests.paused:
            self._admit(draft, root)
        return draft

    def _num_waiting_tokens(self, limit: int, among: Collection[Request] | None) -> int:
        """Known tokens to compute of prompts begun and of those next in the queue; counted to `limit` or a little more.

        Tokens that will be found in the prefix cache count too.
        """
        begun = [one for one in self._admitted_requests.prefilling if among is None or one in among]
        total = sum(len(request.tokens) - request.scheduled for request in begun)
        for request in self._queue.candidates(self._num_free_rows(), among):
            if total >= limit:
                break
            total += len(request.tokens)
        return total

    def _continue_prompts(self, draft: PrefillDraft) -> None:
        """The next chunk of each prompt begun before, oldest first. Its blocks were reserved at admission."""
        for request in list(self._admitted_requests.prefilling):
            if draft.is_full:
                return
            if draft.among is not None and request not in draft.among:
                continue
            self._catch_up(request)
            n = min(len(request.tokens) - request.scheduled, draft.left_for(request), draft.left - draft.stop_at)
            if not n:
                continue
            if draft.context_left is not None and request.scheduled + n > draft.context_left:
                draft.left = 0  # an admission would overtake it
                return
            self._take_chunk(draft, request, n, first=False)

    def _catch_up(self, request: Request) -> None:
        """Skip what others have published of this prompt since its last chunk was planned."""
        assert request.lease is not None
        if not self._context.prefix_caching or not request.may_hit:
            return
        planned = self._context.catch_up(request.lease, request.tokens, request.scheduled)
        if planned > request.scheduled:
            self._admitted_requests.skip(request, planned - request.scheduled)
            self._load_state(request.lease)

    # ------------------------------------------------------------------ admission

    def _admit(self, draft: PrefillDraft, root: bytes) -> None:
        """Admit from the queue in order, looking past those that do not fit as far as `policy` allows."""
        admitted: set[Request] = set()
        skipped: list[Request] = []
        overtaken = self._queue.overtaken
        for request in self._queue.candidates(self._num_free_rows(), draft.among):
            if draft.is_full or not self._num_free_rows():
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
        self._queue.remove_admitted(admitted)

    def _try_admit(self, draft: PrefillDraft, request: Request, root: bytes) -> bool:
        """Lease all that the known tokens of `request` need and plan its first chunk; False: nothing changed."""
        if not self._admitted_requests.has_adapter_slot(request):
            return False
        if request in self._preemption.swapped:
            return self._swap_in(draft, request)
        context, total = self._context, len(request.tokens)
        need = policy.blocks_needed(total, context.block_size)
        headroom = self._headroom()
        # Before anything is hashed: the last token is never found, so that at least one block is needed.
        if (1 if context.prefix_caching else need) > context.num_free_blocks - headroom:
            return False
        root = context.root_of(root, adapter=request.params.adapter, salt=request.cache.salt)
        lease = context.admit(request.tokens, root=root, use_cache=request.may_hit)
        if lease is None:
            return False
        if context.states is not None and context.states.gains_by_waiting(lease) and self._may_wait(request, lease):
            context.release(lease)
            return False
        n = self._chunk_size(draft, request, total - lease.cached)
        fits = need - len(lease.blocks) <= context.num_free_blocks - headroom
        if draft.context_left is not None and lease.cached + n > draft.context_left:
            fits = False
        if not n or not fits or not context.extend(lease, total):
            context.release(lease)
            return False
        self._admitted_requests.admit(request, lease)
        self._load_state(lease)
        self._take_chunk(draft, request, n, first=True)
        return True

    def _may_wait(self, request: Request, lease: Lease) -> bool:
        """Whether it waits a step: in the next one it can skip what this one computes for another, if the state stays.

        It waits again only if its last wait has halved what it has to compute. So it waits a few times at most, however
        many others have a slightly longer prompt each, and does not wait again for a state that was evicted.
        """
        left = len(request.tokens) - lease.cached
        if request in self._waited and 2 * left > self._waited[request]:
            return False
        self._waited[request] = left
        return True

    def _load_state(self, lease: Lease) -> None:
        if self._context.states is not None and self._context.states.load(lease):
            self._admitted_requests.stats.states_loaded += 1

    def _swap_in(self, draft: PrefillDraft, request: Request) -> bool:
        """Lease a swapped request what it held and plan its next chunk; False: nothing changed."""
        stored = self._preemption.swapped[request].num_tokens
        n = self._chunk_size(draft, request, len(request.tokens) - stored)
        if draft.context_left is not None and stored + n > draft.context_left:
            return False
        if not n or not self._preemption.swap_in(request, headroom=self._headroom()):
            return False
        self._take_chunk(draft, request, n, first=True)
        return True

    def _chunk_size(self, draft: PrefillDraft, request: Request, remaining: int) -> int:
        """Without chunking a prompt is taken whole even where it exceeds its micro-batch's share."""
        left = min(draft.left_for(request), draft.left - (draft.stop_at if self._chunked_prefill else 0))
        return policy.chunk_size(remaining, left, max_tokens=draft.budget, chunked=self._chunked_prefill)

    def _num_free_rows(self) -> int:
        """Sequences that may still be admitted or forked."""
        free, most = self._context.num_free_rows - self._shares.num_reserved, self._limits.max_live
        return free if most is None else max(0, min(free, most - self._admitted_requests.num_live))

    def _headroom(self) -> int:
        if (most := self._limits.max_used_blocks) is not None:
            return self._context.num_blocks - most if self._admitted_requests.num_live else 0
        return policy.admission_headroom(self._admitted_requests.num_running, self._context.num_blocks)

    # ------------------------------------------------------------------ chunks

    def _take_chunk(self, draft: PrefillDraft, request: Request, n: int, *, first: bool) -> None:
        """Plan the next `n` known tokens of a prefilling request; the last of them draws a token and forks siblings."""
        lease, start, states = request.lease, request.scheduled, self._context.states
        assert lease is not None
        end = start + n
        samples = end >= len(request.tokens)
        captures: tuple[tuple[int, int], ...] = ()
        if states is not None:
            kept = states.keep(lease, request.tokens, start, end)
            self._admitted_requests.stats.states_kept += len(kept)
            captures = tuple((position, slot) for position, slot in kept if position < end)
            draft.copies += (Copy(CopyKind.STATE, lease.row, slot) for position, slot in kept if position == end)
        self._context.publish_planned(lease, request.tokens, end)
        forks: tuple[Request, ...] = ()
        if samples:
            if self._queue.is_leader(request):
                forks = self._fork_siblings(draft, request)
            self._admitted_requests.begin_decoding(request)
            draft.sampled += (request, *forks)
        draft.chunks.append(
            PrefillChunk(
                request=request, start=start, n=n, samples=samples, forks=forks, first=first, captures=captures
            )
        )
        if draft.share is not None:
            draft.share.prompt_tokens[request.caller] = draft.left_for(request) - n
        draft.left -= n
        if draft.context_left is not None:
            draft.context_left -= end
        draft.num_tokens += n
        request.scheduled = end
        request.in_flight += 1

    def _fork_siblings(self, draft: PrefillDraft, leader: Request) -> tuple[Request, ...]:
        """Fork the leader's lease for its siblings, which draw from the same position; without room they are queued."""
        assert leader.lease is not None
        siblings = self._queue.pop_siblings(leader)
        for index, child in enumerate(siblings):
            forked = self._context.fork(leader.lease, len(leader.tokens)) if self._num_free_rows() else None
            if forked is None:
                self._queue.insert_group(siblings[index:])
                return tuple(siblings[:index])
            lease, copies = forked
            draft.copies += copies
            self._admitted_requests.fork(leader, child, lease)
            self._admitted_requests.begin_decoding(child)
            child.in_flight += 1
        return tuple(siblings)

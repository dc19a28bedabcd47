"""Drafts of a step: which decoding requests verify several tokens at once, and how many."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_infer.scheduler.admitted_requests import AdmittedRequests
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.draft_depth import NO_PROPOSAL, DraftDepth, Proposal
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_costs import StepCosts
from megatron_infer.scheduler.step_plan import ON_DEVICE, PrefillChunk


class Proposer(Protocol):
    """Guesses tokens; deterministic in the requests' tokens, as the scheduler is."""

    def propose(self, request: Request, most: int) -> Proposal:
        """Tokens that may follow those of `request`, all of which are known. More than `most`, and those behind one
        that does not exist, are cut off."""
        ...


class DeviceProposer:
    """Leaves the tokens to a draft model, which draws them on the device in the step that verifies them. For structured
    output it has none: the host knows no such token, so that it has no masks for what follows."""

    def propose(self, request: Request, most: int) -> Proposal:
        if request.params.structured is not None:
            return NO_PROPOSAL
        return Proposal((ON_DEVICE,) * most, "draft")


@dataclass(slots=True)
class SpecDecodeMetrics:
    """What was drafted and kept since the engine was built."""

    num_drafted: int = 0
    num_accepted: int = 0
    """Drafts that became tokens of their request."""
    drafted_per_position: list[int] = field(default_factory=list)
    """This and the next: by a draft's place among the drafts of its request in the step."""
    accepted_per_position: list[int] = field(default_factory=list)
    proposals_per_depth: list[int] = field(default_factory=list)
    """Proposals by how many of their tokens a step verified, from 0: the depths that were chosen."""
    num_verifications: int = 0
    """Requests that verified drafts, once for each step."""
    seconds_drafting: float = 0.0
    """Host time: proposals, and how many of them pay; the steps of a draft model, enqueued (on a CPU: run)."""

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that were kept; 0 before the first."""
        return self.num_accepted / max(1, self.num_drafted)

    @property
    def mean_tokens_per_step(self) -> float:
        """Tokens that a request drew in a step in which it verified drafts; 1 before the first."""
        return 1.0 + self.num_accepted / max(1, self.num_verifications)


class DraftPlanner:
    """Turns decode rows into chunks that verify drafts.

    Drafts take tokens that the step has left and blocks that are free: no request pauses, is evicted or waits for a
    guess. A request whose drafts are being verified sits out until the commit, as its next position is not known.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        proposer: Proposer,
        *,
        max_drafts: int,
        vocab_size: int,
        depth: DraftDepth | None = None,
        num_allowed: Callable[[Request, Sequence[int]], int] | None = None,
        has_draft_model: bool = False,
    ) -> None:
        """depth: decides how many drafts pay; None: all of them. num_allowed: see `Grammars`; None: nothing is drafted
        for requests with structured output. has_draft_model: drafts may be `ON_DEVICE`."""
        assert 1 <= max_drafts < context.block_size, f"{max_drafts} drafts, blocks of {context.block_size} tokens"
        places = [0] * max_drafts
        self.stats = SpecDecodeMetrics(
            drafted_per_position=places, accepted_per_position=[*places], proposals_per_depth=[0, *places]
        )
        self.proposer, self.depth, self._context = proposer, depth, context
        self._max_drafts, self._vocab_size, self._num_allowed = max_drafts, vocab_size, num_allowed
        self._has_draft_model = has_draft_model
        self._verifying: set[Request] = set()
        self._proposals: dict[Request, Proposal] = {}
        """What `ready` has asked for already, for the step that is being planned."""

    def ready(
        self, admitted_requests: AdmittedRequests, among: Collection[Request] | None, *, num_in_flight: int
    ) -> Collection[Request] | None:
        """Those of the decoding requests in `among` (None: all) that may be planned now; None: all.

        With steps in flight a request waits for its last token if drafts can be expected to follow it: requests that
        draft take turns with each other, and the others decode in every step.
        """
        self._proposals = {}
        if not num_in_flight:
            self._verifying.clear()  # a step that failed was undone, and is not committed
            return among
        begun, decoding = time.perf_counter(), admitted_requests.decoding
        adaptive = self.depth
        self._proposals = {
            request: NO_PROPOSAL if adaptive is not None and adaptive.rests(request) else self._proposal(request)
            for request in decoding
        }
        depths = self._depths_of(decoding, list(self._proposals.values()))
        self.stats.seconds_drafting += time.perf_counter() - begun
        waiting = {
            request
            for request, depth in zip(decoding, depths, strict=True)
            if request.in_flight and (depth or request in self._verifying)
        }
        if not waiting:
            return among
        return {one for one in admitted_requests.decoding if one not in waiting and (among is None or one in among)}

    def plan(
        self, admitted_requests: AdmittedRequests, decode: list[Request], starts: list[int], *, room: int
    ) -> list[PrefillChunk]:
        """Move requests with drafts from the decode rows to chunks of their own; room: tokens left of the step."""
        begun, stats = time.perf_counter(), self.stats
        chunks: list[PrefillChunk] = []
        rows: list[tuple[Request, int]] = []
        looking = range(len(decode)) if self.depth is None else self.depth.looking(decode)
        proposals = [NO_PROPOSAL] * len(decode)
        for place in looking:
            request = decode[place]
            if len(request.tokens) == starts[place] + 1:
                proposals[place] = self._proposals.get(request) or self._proposal(request)
        depths = self._depths_of(decode, proposals, looking) if looking else [0] * len(decode)
        if not any(depths):
            stats.proposals_per_depth[0] += sum(bool(proposal.tokens) for proposal in proposals)
            stats.seconds_drafting += time.perf_counter() - begun
            return chunks
        for request, start, proposal, depth in zip(decode, starts, proposals, depths, strict=True):
            most = min(depth, room)
            drafts: tuple[int, ...] = ()
            if most > 0:
                drafts = self._with_room(admitted_requests, request, start, tuple(proposal.tokens[:most]))
            stats.proposals_per_depth[len(drafts)] += bool(proposal.tokens)
            if not drafts:
                rows.append((request, start))
                continue
            room -= len(drafts)
            request.in_flight += len(drafts)
            self._verifying.add(request)
            stats.num_drafted += len(drafts)
            for place in range(len(drafts)):
                stats.drafted_per_position[place] += 1
            chunks.append(
                PrefillChunk(
                    request=request,
                    start=start,
                    n=1 + len(drafts),
                    samples=True,
                    drafts=drafts,
                    captures=self._captures(request, start, len(drafts)),
                )
            )
        if chunks:
            decode[:], starts[:] = [request for request, _ in rows], [start for _, start in rows]
        stats.seconds_drafting += time.perf_counter() - begun
        return chunks

    def set_costs(self, costs: StepCosts) -> None:
        """The next step decides with these costs; they must be the same on every rank."""
        if self.depth is not None:
            self.depth.costs = costs

    def _depths_of(
        self, requests: Sequence[Request], proposals: Sequence[Proposal], looking: Sequence[int] | None = None
    ) -> list[int]:
        """Tokens of each proposal to verify. looking: a step is planned with them, of the requests at these places."""
        depth = self.depth
        if depth is None:
            return [len(proposal.tokens) for proposal in proposals]
        return depth.expected(requests, proposals) if looking is None else depth.of(requests, proposals, looking)

    def settle(self, chunk: PrefillChunk, num_kept: int) -> None:
        """Keep the first `num_kept` tokens that a chunk drew, at least one, and undo the others."""
        request, lease = chunk.request, chunk.request.lease
        assert lease is not None and 1 <= num_kept <= chunk.n, f"{request.id}: {num_kept} of {chunk.n} kept"
        if self.depth is not None:
            self.depth.verified(request, len(chunk.drafts), num_kept - 1)
        request.in_flight -= chunk.n - num_kept
        request.scheduled += num_kept - 1
        self._verifying.discard(request)
        self._context.shrink(lease, request.scheduled)
        if self._context.states is not None and num_kept < chunk.n:
            self._context.states.keep_draft(lease, num_kept - 1)

    def count(self, request: Request, num_accepted: int) -> None:
        """A request has taken this many drafts as its tokens."""
        stats = self.stats
        stats.num_verifications += 1
        stats.num_accepted += num_accepted
        request.history.num_accepted_drafts += num_accepted
        for place in range(num_accepted):
            stats.accepted_per_position[place] += 1

    def _captures(self, request: Request, start: int, num_drafts: int) -> tuple[tuple[int, int], ...]:
        """The recurrent states to keep: behind all tokens but the last, behind which is the row's own."""
        states, lease = self._context.states, request.lease
        if states is None:
            return ()
        assert lease is not None
        return tuple((start + 1 + place, slot) for place, slot in enumerate(states.draft_slots(lease)[:num_drafts]))

    def _proposal(self, request: Request) -> Proposal:
        """What may follow the known tokens of `request`, as far as it can be drawn."""
        most = min(self._max_drafts, request.max_total - 1 - len(request.tokens))
        structured = request.params.structured is not None
        if most < 1 or request.params.speculate is False or (structured and self._num_allowed is None):
            return NO_PROPOSAL
        found = self.proposer.propose(request, most)
        tokens = found.tokens[:most]
        if not self._has_draft_model or ON_DEVICE not in tokens:
            wrong = next((place for place, one in enumerate(tokens) if not 0 <= one < self._vocab_size), len(tokens))
            if wrong and structured and self._num_allowed is not None:
                wrong = self._num_allowed(request, tokens[:wrong])
            tokens = tokens[:wrong]
        found = found._replace(tokens=tokens)
        if self.depth is not None:
            self.depth.proposed(request, found)
        return found

    def _with_room(
        self, admitted_requests: AdmittedRequests, request: Request, start: int, drafts: tuple[int, ...]
    ) -> tuple[int, ...]:
        """`drafts`, cut to the blocks that the request has where no other is free."""
        context, lease = self._context, request.lease
        assert lease is not None
        end = start + 1 + len(drafts)
        if end > lease.capacity:
            spare = context.num_free_blocks > len(admitted_requests.decoding) and not admitted_requests.paused
            if not spare or not context.extend(lease, end):
                return drafts[: lease.capacity - start - 1]
        return drafts

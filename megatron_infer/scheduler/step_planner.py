"""Puts a step together from its decode and its prompt part, in the order that `Phases` asks for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from megatron_infer.scheduler.admitted_requests import AdmittedRequests
from megatron_infer.scheduler.caller_shares import CallerShares
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.decode import DecodePlanner
from megatron_infer.scheduler.preemption import PreemptionPolicy
from megatron_infer.scheduler.prefill import NOTHING, PrefillPlanner
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_plan import PrefillChunk, StepPlan

if TYPE_CHECKING:
    from megatron_infer.scheduler.drafts import DraftPlanner
    from megatron_infer.scheduler.phases import Phase, Phases

BOTH: tuple[Phase, ...] = ((True, True, None),)  # type: ignore[assignment]
"""Decode, and prompts in what it leaves of the budget."""


class StepPlanner:
    """Plans one step; the next one is planned from what this one has changed in the running set and the context."""

    def __init__(
        self,
        context: DynamicInferenceContext,
        admitted_requests: AdmittedRequests,
        preemption: PreemptionPolicy,
        decodes: DecodePlanner,
        prefills: PrefillPlanner,
        phases: Phases | None,
        drafts: DraftPlanner | None,
        shares: CallerShares,
    ) -> None:
        """phases: None: each step plans `BOTH`. drafts: None: one token a step is drawn for each request."""
        self._shares = shares
        self._context = context
        self._admitted_requests = admitted_requests
        self._preemption = preemption
        self._decodes = decodes
        self._prefills = prefills
        self._phases = phases
        self._drafts = drafts

    def plan(
        self,
        budget: int,
        root: bytes,
        among: Collection[Request] | None,
        *,
        num_in_flight: int,
        prompt_tokens: int,
        readmitted: Sequence[Request],
    ) -> StepPlan:
        """A step of at most `budget` tokens, of requests in `among` (None: of all). num_in_flight, prompt_tokens: steps
        in flight, and their prompt tokens."""
        context, admitted_requests, phases = self._context, self._admitted_requests, self._phases
        if context.states is not None:
            context.states.begin_step()
        self._shares.begin_step(among)
        if admitted_requests.paused or context.num_free_blocks < len(admitted_requests.decoding):
            self._preemption.make_room()
        share = self._shares.share(budget, among)
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
                draft = self._prefills.plan(budget, starts, prompt_tokens, root, among, share)
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
            readmitted=tuple([request for request in readmitted if request.lease is not None]),
            adapter_loads=() if adapters is None or not num_tokens else adapters.take_loads(),
            num_tokens=num_tokens,
            sampled=sampled,
            num_prompt_tokens=draft.num_tokens,
        )

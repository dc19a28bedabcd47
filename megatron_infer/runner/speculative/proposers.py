"""Proposals of what structured output forces, and of the first of several methods that has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_infer.scheduler.draft_depth import NO_PROPOSAL, Proposal
from megatron_infer.scheduler.drafts import Proposer
from megatron_infer.scheduler.request import Request


class GrammarProposer:
    """Tokens that the grammar of a request forces: they are verified as all others, since the model may split the
    forced text in another way."""

    def __init__(self, forced: Callable[[Request], Sequence[int]]) -> None:
        """forced: see `Grammars.forced`."""
        self._forced = forced

    def propose(self, request: Request, most: int) -> Proposal:
        if request.params.structured is None:
            return NO_PROPOSAL
        return Proposal(self._forced(request)[:most], "grammar")


class FirstProposer:
    """The proposal of the first proposer that has one."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = proposers

    def propose(self, request: Request, most: int) -> Proposal:
        found = (one.propose(request, most) for one in self._proposers)
        return next((proposal for proposal in found if proposal.tokens), NO_PROPOSAL)

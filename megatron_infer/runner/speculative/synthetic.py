"""Drafts that are kept at a given rate, whatever is drawn: what a step with so many kept drafts costs and gives.

Tokens mean nothing then. The rate is that of one draft if all before it were kept, so of k drafts at rate a
a + a^2 + ... + a^k are kept on average.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_infer.runner.sampling.rng import uniform
from megatron_infer.scheduler.draft_depth import NO_PROPOSAL, Proposal
from megatron_infer.scheduler.request import Request

_KEEP = 0x2545F4914F6CDD1D
"""Changes a request's seed to that of the choice which drafts are kept."""
_MASK = 2**64 - 1


class SyntheticProposer:
    """Drafts the last token again: it ends no request. For structured output it drafts nothing, since a grammar could
    not follow."""

    def propose(self, request: Request, most: int) -> Proposal:
        if request.params.structured is not None:
            return NO_PROPOSAL
        return Proposal(request.tokens[-1:] * most, "synthetic")


class SyntheticAcceptance:
    """Chooses which drafts are kept, the same on every rank."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def num_kept(self, request: Request, start: int, drafts: Sequence[int]) -> int:
        """How many of a request's drafts behind position `start` are kept."""
        seeds = np.full(len(drafts), (request.seed ^ _KEEP) & _MASK, dtype=np.uint64)
        fails = uniform(seeds, start + np.arange(len(drafts))) >= self._rate
        request.history.is_synthetic = True
        return int(fails.argmax()) if fails.any() else len(drafts)

"""Drafts for tests: what requests will draw is known, and some of it is proposed wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.scheduler.draft_depth import Proposal
from megatron_infer.scheduler.request import Request
from megatron_infer.testing.inspect import inspect

DRAFTS = {"speculative": {"num_speculative_tokens": 5, "adaptive": False}}


class Rehearsal:
    """Proposes the answers that were heard before, up to a place that depends on the position, and wrong ids there."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        """sequences: prompts with their answers; no prompt with its first answer token begins another one."""
        self._sequences = [list(sequence) for sequence in sequences]

    def propose(self, request: Request, most: int) -> Proposal:
        tokens, length = request.tokens, len(request.tokens)
        heard = next((one for one in self._sequences if one[:length] == tokens), tokens)[length : length + most]
        num_right = length % (most + 2)
        return Proposal(heard[:num_right] + [(token + 1) % 7 for token in heard[num_right:]])


def rehearse(engine: DynamicInferenceEngine, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
    """Draft from these answers, where the engine drafts at all."""
    drafts = inspect(engine).drafts
    if drafts is not None:
        drafts.proposer = Rehearsal(a + b for a, b in zip(prompts, answers, strict=True))


def check_drafted(engine: DynamicInferenceEngine) -> None:
    """Drafts were kept, and others were not."""
    drafts = inspect(engine).drafts
    if drafts is not None:
        assert 0 < drafts.stats.num_accepted < drafts.stats.num_drafted, drafts.stats

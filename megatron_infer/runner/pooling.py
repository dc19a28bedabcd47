"""Final hidden states of prompts, pooled to one vector each or kept for each position, for embeddings.

Legend: T tokens of the step, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_plan import PrefillChunk, StepPlan


@dataclass(slots=True)
class Pooled:
    """One chunk: the sum over its positions start .. end - 1 ("mean"), the prompt's last position ("last"), or each of
    its positions ("all")."""

    request: Request
    start: int
    end: int
    values_D: Tensor
    """fp32; [N, D] of "all"."""


def pooled_chunks(plan: StepPlan) -> Iterator[tuple[PrefillChunk, int]]:
    """(a chunk that is pooled, the place of its first token in the step), in order: the same on every rank."""
    offset = len(plan.decode)
    for chunk in plan.prefill:
        request = chunk.request
        ends = chunk.start + chunk.n >= request.prompt_len
        if request.params.pooling in ("mean", "all") or (request.params.pooling == "last" and ends):
            yield chunk, offset
        offset += chunk.n


def pool(plan: StepPlan, hidden_TD: Tensor) -> list[Pooled]:
    """hidden_TD: the final norm's output."""
    pooled = []
    for chunk, offset in pooled_chunks(plan):
        hidden_ND = hidden_TD[offset : offset + chunk.n].float()
        pooling = chunk.request.params.pooling
        values_D = hidden_ND.sum(0) if pooling == "mean" else hidden_ND if pooling == "all" else hidden_ND[-1]
        pooled.append(pooled_as(chunk, values_D))
    return pooled


def pooled_as(chunk: PrefillChunk, values_D: Tensor) -> Pooled:
    return Pooled(chunk.request, chunk.start, chunk.start + chunk.n, values_D)

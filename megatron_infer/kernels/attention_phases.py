"""Paged attention whose decode rows and slices run on a backend each.

    tokens of a step:   | decode rows |  slices, padding  |
                             decode          prefill

A step of one kind goes to its backend as it is. Of a mixed one each backend gets its rows as a step of their own, and
rotates, appends and attends by itself: no slice reads a block that a decode row of the step writes, nor the reverse.
Legend: kernels/base.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, AttentionBackend, GraphSupport, StateCaptures, StepMetadata


class PhasedAttention:
    """An attention backend for decode rows and one for slices, behind the seam of one."""

    def __init__(self, *, decode: AttentionBackend, prefill: AttentionBackend) -> None:
        self.name = f"{decode.name} (decode), {prefill.name} (prefill)"
        self._decode, self._prefill = decode, prefill
        self.graphs = decode.graphs
        if self.graphs is not GraphSupport.NONE:
            self.graphs = GraphSupport.ALL if prefill.graphs is GraphSupport.ALL else GraphSupport.DECODE
        self._only: AttentionBackend | None = None
        """What runs the whole step; None: the first `_num_decode` tokens run on one, the others on the other."""
        self._num_decode = 0
        has_plan = decode.plan_on_host is not None or prefill.plan_on_host is not None
        self.plan_on_host = self._plan_on_host if has_plan else None

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        asked = {"dtype": dtype, "block_size": block_size, "kv_dtype": kv_dtype}
        return self._decode.supports(spec, **asked) or self._prefill.supports(spec, **asked)

    def plan(self, step: StepMetadata) -> None:
        self._only = self._alone(step)
        if self._only is not None:
            self._only.plan(step)
            return
        self._num_decode = step.num_decode
        self._decode.plan(_decode_rows(step))
        self._prefill.plan(_slices(step))

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        if self._only is not None:
            return self._only.run(q_TKGH, k_TKH, v_TKH, kv_cache, layer=layer, spec=spec)
        count = self._num_decode
        return torch.cat(
            [
                backend.run(q_TKGH[part], k_TKH[part], v_TKH[part], kv_cache, layer=layer, spec=spec)
                for backend, part in ((self._decode, slice(0, count)), (self._prefill, slice(count, None)))
            ]
        )

    def _alone(self, step: StepMetadata) -> AttentionBackend | None:
        """The backend of a step whose rows are all of one kind."""
        if step.num_rows == step.num_decode:
            return self._decode
        return None if step.num_decode else self._prefill

    def _plan_on_host(self, step: StepMetadata, is_padded: bool) -> None:
        alone = self._alone(step)
        parts = (
            [(alone, step)]
            if alone is not None
            else [(self._decode, _decode_rows(step)), (self._prefill, _slices(step))]
        )
        for backend, part in parts:
            if backend.plan_on_host is not None:
                backend.plan_on_host(part, is_padded)


def _decode_rows(step: StepMetadata) -> StepMetadata:
    count = step.num_decode
    return _part(step, rows=slice(0, count), tokens=slice(0, count), num_decode=count)


def _slices(step: StepMetadata) -> StepMetadata:
    first = step.num_decode
    return _part(step, rows=slice(first, step.num_rows), tokens=slice(first, step.num_tokens), num_decode=0)


def _part(step: StepMetadata, *, rows: slice, tokens: slice, num_decode: int) -> StepMetadata:
    """Some rows of a step and their tokens as a step of their own, on the same memory."""
    bounds = slice(rows.start, rows.stop + 1)

    def of_tokens(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[tokens]

    return replace(
        step,
        num_tokens=tokens.stop - tokens.start,
        num_rows=rows.stop - rows.start,
        num_decode=num_decode,
        q_len=step.q_len[rows],
        kv_len=step.kv_len[rows],
        cu_q=step.cu_q[bounds] - tokens.start,
        table_row=step.table_row[rows],
        num_prompt_queries=step.num_prompt_queries[rows],
        q_len_R=step.q_len_R[rows],
        kv_len_R=step.kv_len_R[rows],
        cu_q_R1=step.cu_q_R1[bounds] - tokens.start,
        table_row_R=step.table_row_R[rows],
        positions_T=of_tokens(step.positions_T),
        kv_pos_T=of_tokens(step.kv_pos_T),
        cos_TR=of_tokens(step.cos_TR),
        sin_TR=of_tokens(step.sin_TR),
        captures=StateCaptures(),
        max_q_len=1 if num_decode else step.max_q_len,
    )

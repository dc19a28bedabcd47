"""Sparse attention over latents on a GPU: scores by an indexer, the choice of keys, attention to what is chosen.

    1  index_scores   of every key that a query sees: one number that orders keys by score, then by position
    2  torch.topk     the top_k largest of them, whose lower half is the position, counted from the last there can be
    3  decode_kernel  every query as a row of its own, whose block table has a block of one key for each key chosen

A step whose shape has no row of more than top_k keys attends to all of them, as dense latent attention. In other steps
queries that see no more choose all. Nothing waits, nothing reads the host's arrays, and all shapes follow from that of
the step: a step can be captured. Not yet run on a GPU. Legend: kernels/base.py; I index heads, C chosen keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, IndexQueries, IndexSpec, StepMetadata
from megatron_infer.kernels.torch.sparse_attention import dense_spec, refusal, turn_index, turn_index_keys
from megatron_infer.kernels.triton import attention
from megatron_infer.kernels.triton.attention import TritonPagedAttention
from megatron_infer.kernels.triton.attention_tiles import (
    blocks_of,
    key_places,
    load_tile,
    padded,
)
from megatron_infer.kernels.triton.conv import rows_of_tokens
from megatron_infer.kernels.triton.launch import cdiv, kernels_unavailable, launch, precision
from megatron_infer.kernels.triton_scratch import index_queries

KEYS = {2: 64, 4: 16}
"""Bytes of an element -> keys of one program of the indexer; more in fp32 do not fit its registers."""
UNSEEN = tl.constexpr(-(1 << 63))
LOWER_HALF = (1 << 32) - 1


@triton.jit(
    do_not_specialize=["first_token", "max_keys"], do_not_specialize_on_alignment=["row", "positions", "table_row"]
)
def index_scores(
    q, weights, k_cache, out, row, positions, table_row, block_table,
    q_stride, weight_stride, table_stride, first_token, max_keys,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    KEY_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, RELU: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, tiles of keys): out [tokens, max_keys] int64, which orders by score, then by earlier position.

    The upper half of a number orders as the score in fp32 does, the lower half falls with the position. UNSEEN where
    the query does not see the key, and in rows of padding tokens.
    """
    token = tl.program_id(0).to(tl.int64) + first_token
    start = tl.program_id(1) * BLOCK_N
    key = start + tl.arange(0, BLOCK_N)
    target = out + tl.program_id(0).to(tl.int64) * max_keys + key
    of_row = tl.load(row + token)
    num_keys = tl.where(of_row < 0, 0, tl.load(positions + token).to(tl.int32) + 1)
    if start >= num_keys:
        tl.store(target, tl.full([BLOCK_N], UNSEEN, tl.int64), mask=key < max_keys)
        return
    head = tl.arange(0, HEADS)
    q_tile = load_tile(q, token * q_stride + head * HEAD_DIM, head < NUM_HEADS, HEAD_DIM, HEAD_PAD, True)
    weight = tl.load(weights + token * weight_stride + head, mask=head < NUM_HEADS, other=0.0).to(tl.float32)
    table = block_table + tl.load(table_row + of_row).to(tl.int64) * table_stride
    block = blocks_of(table, start, num_keys, BLOCK_SIZE, BLOCK_N)
    at = key_places(block, start, BLOCK_SIZE, BLOCK_N) * KEY_WIDTH
    k = load_tile(k_cache + KEY_WIDTH - HEAD_DIM, at, key < num_keys, HEAD_DIM, HEAD_PAD, True).to(q_tile.dtype)
    score = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION)
    if RELU:
        score = tl.maximum(score, 0.0, propagate_nan=tl.PropagateNan.ALL)
    score = tl.sum(score * weight[:, None], 0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0 is 0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(score != score, 0x7FC00000, bits).to(tl.int64)  # a NaN is highest, as in torch's order
    number = (bits << 32) | (0xFFFFFFFF - key.to(tl.int64))
    tl.store(target, tl.where(key < num_keys, number, UNSEEN), mask=key < max_keys)


unavailable = kernels_unavailable


def make(device: torch.device, dtype: torch.dtype) -> TritonSparseAttention:
    return TritonSparseAttention(attention.make(device, dtype))


class TritonSparseAttention:
    """kernels.base.SparseAttentionBackend in Triton."""

    name = "triton, sparse"
    graph_safe = True

    def __init__(self, dense: TritonPagedAttention) -> None:
        self._dense = dense
        self._step: StepMetadata | None = None
        self._row_T: Tensor | None = None
        """The row of each token, -1 for padding tokens; None: no layer of the step has asked yet."""
        self._rows: tuple[StepMetadata, ...] = ()
        """Every query as a row of the keys chosen, by the last layer with an indexer: decode rows, other tokens."""
        self._top_k = 0
        self._chosen_TC: Tensor | None = None
        """int32 positions of these keys, ascending, then others; None: every query attends to all keys."""

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        if (reason := refusal(spec)) is not None or spec.index is None:
            return reason
        if spec.index.dim > attention.MAX_HEAD_DIM:
            return f"needs index keys of up to {attention.MAX_HEAD_DIM} dims, got {spec.index.dim}"
        return self._dense.supports(dense_spec(spec), dtype=dtype, block_size=block_size, kv_dtype=kv_dtype)

    def plan(self, step: StepMetadata) -> None:
        self._step, self._row_T, self._rows, self._chosen_TC = step, None, (), None
        self._dense.plan(step)

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        raise AssertionError("a layer without an indexer: supports() refuses it")

    def run_sparse(
        self,
        q_TKGH: Tensor,
        k_TKH: Tensor,
        kv_cache: Tensor,
        *,
        layer: int,
        spec: AttendSpec,
        index: IndexQueries | None,
    ) -> Tensor:
        step, indexer = self._step, spec.index
        assert step is not None and indexer is not None, "run() before plan()"
        if index is not None:
            turn_index_keys(k_TKH, step, spec)
        self._top_k = indexer.top_k
        if step.max_kv_len <= indexer.top_k:
            return self._dense.run(q_TKGH, k_TKH, k_TKH, kv_cache, layer=layer, spec=spec)
        q_TKGH, keys, _ = self._dense.append(q_TKGH, k_TKH, k_TKH, kv_cache, layer=layer, spec=spec)
        if index is not None:
            q_TIH = turn_index(index.q_TIH, step, spec)
            self._rows = self._choose(step, q_TIH, index.weights_TI, keys, indexer)
        assert self._rows, "a layer attends to an earlier layer's choice, and none has chosen"
        out_TX = q_TKGH.new_empty(q_TKGH.shape[0], spec.group_size * spec.value_dim)
        first = 0
        for rows, is_split in zip(self._rows, (True, False), strict=True):
            some = slice(first, first + rows.num_decode)
            if rows.num_decode:
                self._dense.attend_chosen(q_TKGH[some], keys, out_TX[some], rows, spec, is_split=is_split)
            first = some.stop
        return out_TX

    def choice_of_step(self, most: int) -> Tensor:
        step = self._step
        assert step is not None and self._top_k, "choice_of_step() before run_sparse()"
        column_C = torch.arange(min(self._top_k, most), dtype=torch.int32, device=step.positions_T.device)
        chosen_TC = column_C if self._chosen_TC is None else self._chosen_TC[:, : len(column_C)]
        return chosen_TC.where(column_C <= step.positions_T[:, None], -1)

    def _choose(
        self, step: StepMetadata, q_TIH: Tensor, weights_TI: Tensor, keys: Tensor, indexer: IndexSpec
    ) -> tuple[StepMetadata, ...]:
        """The step's queries as rows of their chosen keys."""
        num_tokens, max_keys, size = q_TIH.shape[0], step.max_kv_len, keys.shape[1]
        if self._row_T is None:
            self._row_T = rows_of_tokens(step.cu_q_R1, num_tokens)
        row_T = self._row_T
        line_T = step.table_row_R.index_select(0, row_T.clamp(min=0)).long() * step.block_table.shape[1]
        places_TC, self._chosen_TC = (row_T.new_empty(num_tokens, indexer.top_k) for _ in range(2))
        given = q_TIH.contiguous(), weights_TI.contiguous(), keys
        constexprs = _constexprs(indexer, width=keys.shape[-1], block_size=size, element_bytes=q_TIH.element_size())
        at_once = index_queries(max_keys)
        for first in range(0, num_tokens, at_once):
            some = slice(first, min(num_tokens, first + at_once))
            number_tP = step.positions_T.new_empty(some.stop - first, max_keys)
            launch(
                index_scores, (some.stop - first, cdiv(max_keys, constexprs["BLOCK_N"])),
                *given, number_tP, row_T, step.positions_T, step.table_row_R, step.block_table,
                given[0].stride(0), given[1].stride(0), step.block_table.stride(0), first, max_keys,
                **constexprs, num_warps=4, num_stages=1,
            )  # fmt: skip
            top_tC = number_tP.topk(indexer.top_k, sorted=False).values
            at_tC = (LOWER_HALF - (top_tC & LOWER_HALF)).sort().values.clamp_(max=max_keys - 1)  # unseen ones are last
            self._chosen_TC[some] = at_tC
            block_tC = torch.take(step.block_table, line_T[some, None] + at_tC // size)
            places_TC[some] = block_tC * size + at_tC % size
        kv_len_T = (step.positions_T + 1).clamp_(max=indexer.top_k).masked_fill_(row_T < 0, 0).to(torch.int32)
        line_T = torch.arange(num_tokens, dtype=torch.int32, device=row_T.device)
        parts = slice(0, step.num_decode), slice(step.num_decode, num_tokens)
        return tuple(
            replace(
                step,
                num_decode=part.stop - part.start,
                kv_len_R=kv_len_T[part],
                table_row_R=line_T[: part.stop - part.start],
                block_table=places_TC[part],
                max_kv_len=indexer.top_k,
            )
            for part in parts
        )


def _constexprs(indexer: IndexSpec, *, width: int, block_size: int, element_bytes: int) -> dict[str, Any]:
    return {
        "NUM_HEADS": indexer.num_heads,
        "HEADS": padded(indexer.num_heads),
        "HEAD_DIM": indexer.dim,
        "HEAD_PAD": padded(indexer.dim),
        "KEY_WIDTH": width,
        "BLOCK_SIZE": block_size,
        "BLOCK_N": KEYS[element_bytes],
        "RELU": indexer.relu,
        "PRECISION": precision(element_bytes),
    }

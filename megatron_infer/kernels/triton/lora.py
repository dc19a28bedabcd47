"""Products of LoRA adapters in Triton: every adapter of a step in two launches a linear, without the host.

    x, A of each slot --shrink--> A x, in parts over the inputs --expand--> y + scale * B (the parts' sum)

A program has BLOCK_M neighbouring tokens and one slot, and returns where none of them has that slot: nothing is sorted,
and grids follow from the number of tokens and slots alone, so that a graph may capture both. The tile's height, the
parts and the order of all sums depend on the linear alone: a token's bits do not depend on other tokens. The matrices
behind a slot's rank are not read. Not yet run on a GPU.

Legend: T tokens, X and W widths of a linear, S adapter slots, R rank, P parts of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.lora import LoRAWeights, PackedPair, PairBlock
from megatron_infer.kernels.triton.launch import cdiv, kernels_unavailable, launch, precision
from megatron_infer.kernels.triton_scratch import lora_parts

BLOCK_M = 16
"""Tokens of a tile, the least of a product on tensor cores."""
BLOCK_X, BLOCK_W = 64, 64
NUM_WARPS = 4


def rank_tile(max_rank: int) -> int:
    """Rows of A in a tile."""
    return 16 if max_rank <= 16 else 32


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink(
    x_ptr, slot_ptr, a_ptr, rank_ptr, h_ptr, num_tokens, x_stride, width, part_width, max_rank,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """h[p, t] = A x over the inputs of part p, for the tokens of one slot; h is [P, T, max_rank]."""
    tiles = tl.cdiv(max_rank, BLOCK_R)
    slot = tl.program_id(1) // tiles
    first = tl.program_id(1) % tiles * BLOCK_R
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    own_M = tl.load(slot_ptr + token, mask=token < num_tokens, other=-1) == slot
    rank = tl.load(rank_ptr + slot)
    if (tl.max(own_M.to(tl.int32), axis=0) == 0) | (first >= rank):
        return
    row = first + tl.arange(0, BLOCK_R)
    entry = tl.arange(0, BLOCK_X)
    x_at = x_ptr + token.to(tl.int64)[:, None] * x_stride + entry[None, :]
    a_at = a_ptr + (slot.to(tl.int64) * max_rank + row)[:, None] * width + entry[None, :]
    start = tl.program_id(2) * part_width
    acc_MR = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for at in range(start, tl.minimum(start + part_width, width), BLOCK_X):
        inside_X = at + entry < width
        x = tl.load(x_at + at, mask=own_M[:, None] & inside_X[None, :], other=0.0)
        a = tl.load(a_at + at, mask=(row < rank)[:, None] & inside_X[None, :], other=0.0)
        acc_MR = tl.dot(x, tl.trans(a), acc=acc_MR, input_precision=PRECISION)
    line = tl.program_id(2).to(tl.int64) * num_tokens + token
    tl.store(h_ptr + line[:, None] * max_rank + row[None, :], acc_MR, mask=own_M[:, None] & (row < rank)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand(
    y_ptr, h_ptr, slot_ptr, b_ptr, rank_ptr, scale_ptr, num_tokens, y_stride, width, max_rank,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """y += scale * B h, with h summed over its parts; fp32 until y is rounded."""
    slot = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    own_M = tl.load(slot_ptr + token, mask=token < num_tokens, other=-1) == slot
    rank = tl.load(rank_ptr + slot)
    if (tl.max(own_M.to(tl.int32), axis=0) == 0) | (rank == 0):
        return
    column = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside_W = column < width
    acc_MW = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    for first in range(0, rank, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        inside_MR = own_M[:, None] & (row < rank)[None, :]
        h_MR = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for part in tl.static_range(PARTS):
            line = token.to(tl.int64) + part * num_tokens
            h_MR += tl.load(h_ptr + line[:, None] * max_rank + row[None, :], mask=inside_MR, other=0.0)
        b_at = b_ptr + (slot.to(tl.int64) * max_rank + row)[:, None] * width + column[None, :]
        b_RW = tl.load(b_at, mask=(row < rank)[:, None] & inside_W[None, :], other=0.0).to(tl.float32)
        acc_MW = tl.dot(h_MR, b_RW, acc=acc_MW, input_precision="ieee")
    y_at = y_ptr + token.to(tl.int64)[:, None] * y_stride + column[None, :]
    inside_MW = own_M[:, None] & inside_W[None, :]
    y_MW = tl.load(y_at, mask=inside_MW, other=0.0).to(tl.float32) + tl.load(scale_ptr + slot) * acc_MW
    tl.store(y_at, y_MW.to(y_ptr.dtype.element_ty), mask=inside_MW)


class TritonLoRA:
    """fp32, bf16 or fp16; nothing waits."""

    name = "triton"
    graph_safe = True

    def __init__(self) -> None:
        self._slot_T: Tensor | None = None

    def pairs(
        self, num_slots: int, max_rank: int, width_in: int, width_out: int, *, dtype: torch.dtype, device: torch.device
    ) -> LoRAWeights:
        return LoRAWeights.empty(num_slots, max_rank, width_in, width_out, dtype=dtype, device=device)

    def pack(self, given: Sequence[tuple[LoRAWeights, Sequence[PairBlock]]]) -> list[PackedPair | None]:
        return [weights.pack(blocks) for weights, blocks in given]

    def plan(self, slot_T: Tensor) -> None:
        self._slot_T = slot_T

    def run(self, y_TW: Tensor, x_TX: Tensor, weights: LoRAWeights) -> Tensor:
        slot_T = self._slot_T
        assert slot_T is not None and len(slot_T) == len(x_TX) == len(y_TW), "plan comes first"
        assert y_TW.stride(1) == 1 == x_TX.stride(1), "columns are contiguous"
        num_slots, max_rank, width_in = weights.a_SRX.shape
        num_tokens, width_out = y_TW.shape
        parts, part_width = lora_parts(width_in)
        block_r, tiles = rank_tile(max_rank), cdiv(num_tokens, BLOCK_M)
        h_PTR = torch.empty(parts, num_tokens, max_rank, dtype=torch.float32, device=y_TW.device)
        launch(
            _shrink, (tiles, num_slots * cdiv(max_rank, block_r), parts),
            x_TX, slot_T, weights.a_SRX, weights.rank_S, h_PTR,
            num_tokens, x_TX.stride(0), width_in, part_width, max_rank,
            PRECISION=precision(x_TX.element_size()), BLOCK_M=BLOCK_M, BLOCK_R=block_r, BLOCK_X=BLOCK_X,
            num_warps=NUM_WARPS,
        )  # fmt: skip
        launch(
            _expand, (tiles, num_slots, cdiv(width_out, BLOCK_W)),
            y_TW, h_PTR, slot_T, weights.b_SRW, weights.rank_S, weights.scale_S,
            num_tokens, y_TW.stride(0), width_out, max_rank,
            PARTS=parts, BLOCK_M=BLOCK_M, BLOCK_R=block_r, BLOCK_W=BLOCK_W, num_warps=NUM_WARPS,
        )  # fmt: skip
        return y_TW


unavailable = kernels_unavailable


def make(device: torch.device, dtype: torch.dtype) -> TritonLoRA:
    return TritonLoRA()

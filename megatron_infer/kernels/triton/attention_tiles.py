"""What decode and prefill attention share: the places of keys in the cache, and one step of the online softmax.

Scores are in base 2: with c = scale * log2(e), exp(scale*qk - max) = exp2(c*qk - m), where m = c*max. `qk` is masked
before the product with c, so that the product and the difference are the same instruction with a mask and without; a
tile that a query does not see at all leaves its sums unchanged, to the bit. So a query's bits do not depend on the
other queries of its tile. Source: FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec
from megatron_infer.kernels.triton.launch import precision
from megatron_infer.kernels.triton_scratch import MIN_DOT as MIN_DOT
from megatron_infer.kernels.triton_scratch import cdiv as cdiv
from megatron_infer.kernels.triton_scratch import padded as padded
from megatron_infer.kernels.triton_scratch import power_of_2 as power_of_2

LOG2E = 1.4426950408889634
FP8_ARCH = 89
"""Least compute capability, in tenths, for which the compiler converts FP8."""
LOOSE = ["sinks", "kv_len", "table_row", "block_table"]
"""Arguments read one element at a time: another alignment must not compile another kernel."""


@triton.jit
def blocks_of(table, start, num_keys, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cache blocks of keys start .. start + BLOCK_N - 1: one where a tile lies in one block, else that of each key.

    start is a multiple of BLOCK_N. Entries of the table behind key num_keys - 1 are not read; their keys get block 0.
    Loops load the next tile's blocks while they compute this one: if they were needed at once, the compiler could load
    keys and values only half as far ahead.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < num_keys, other=0)
    else:
        key = start + tl.arange(0, BLOCK_N)
        block = tl.load(table + key // BLOCK_SIZE, mask=key < num_keys, other=0)
    return block


@triton.jit
def key_places(block, start, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Places in the flat cache of keys start .. start + BLOCK_N - 1, int64; `block` as blocks_of gives it."""
    at = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        places = block.to(tl.int64) * BLOCK_SIZE + (start % BLOCK_SIZE + at)
    else:
        places = block.to(tl.int64) * BLOCK_SIZE + (start + at) % BLOCK_SIZE
    return places


@triton.jit
def load_tile(base, rows, rows_mask, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, MASKED: tl.constexpr):
    """[rows, HEAD_PAD] elements at base + rows + dim; zeros behind HEAD_DIM and, if MASKED, outside rows_mask."""
    dim = tl.arange(0, HEAD_PAD)[None, :]
    where = base + rows[:, None] + dim
    if MASKED and HEAD_DIM == HEAD_PAD:
        tile = tl.load(where, mask=rows_mask[:, None], other=0.0)
    elif MASKED:
        tile = tl.load(where, mask=rows_mask[:, None] & (dim < HEAD_DIM), other=0.0)
    elif HEAD_DIM == HEAD_PAD:
        tile = tl.load(where)
    else:
        tile = tl.load(where, mask=dim < HEAD_DIM, other=0.0)
    return tile


@triton.jit
def mean_of(acc, total):
    """Weighted mean of values [M, HEAD_PAD]; zeros without visible keys."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def tanh_of(x):
    """tanh x to 1e-7, absolute; Triton's own needs a library that its interpreter does not have."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    size = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -size, size)


# fmt: off
@triton.jit
def attend_tile(
    q, lead, acc, top, total, k_cache, v_cache, block, start, num_keys, last_key, scale2,
    KEY_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, LEAD: tl.constexpr,
    LEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Add keys start .. start + BLOCK_N - 1 for queries q [M, HEAD_PAD] -> (acc [M, HEAD_PAD], top [M], total [M]).

    acc: values weighted by exp2(score - top), total: the sum of these weights, top: the greatest score, in base 2.
    Query m sees keys last_key[m] - WINDOW + 1 (WINDOW 0: 0) .. last_key[m]; without MASKED it sees the whole tile.
    Keys from num_keys on are not loaded: their memory may hold anything, NaN too. Keys and values of 8 bits are
    converted to q's dtype, which represents each of them exactly. SOFTCAP 0: scores are not capped.
    LEAD > 0 (latents): a key is LEAD dims, which meet `lead` [M, LEAD_PAD], and then its value, which meets q.
    """
    at = key_places(block, start, BLOCK_SIZE, BLOCK_N) * KEY_STRIDE
    key = start + tl.arange(0, BLOCK_N)
    exists = key < num_keys
    v = load_tile(v_cache, at, exists, HEAD_DIM, HEAD_PAD, MASKED)
    if LEAD > 0:
        v = v.to(q.dtype)
        k = load_tile(k_cache, at, exists, LEAD, LEAD_PAD, MASKED)
        qk = tl.dot(q, tl.trans(v), input_precision=PRECISION)
        qk = tl.dot(lead, tl.trans(k.to(q.dtype)), acc=qk, input_precision=PRECISION)
    else:
        k = load_tile(k_cache, at, exists, HEAD_DIM, HEAD_PAD, MASKED)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP > 0:
        qk = tanh_of(qk * (scale2 / (SOFTCAP * 1.4426950408889634)))
        scale2 = SOFTCAP * 1.4426950408889634
    if MASKED:
        seen = key[None, :] <= last_key[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > last_key[:, None] - WINDOW)
        qk = tl.where(seen, qk, float("-inf"))
    new_top = tl.maximum(top, tl.max(qk, 1) * scale2)
    # a query without a visible key so far: its weights are exp2(-inf - 0) = 0
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(qk * scale2 - shift[:, None])
    shrink = tl.exp2(top - shift)
    total = total * shrink + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_top, total


def partials(like: Tensor, num_parts: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(weighted values, greatest scores, sums of weights) of `num_parts` lines; `partial_bytes` bytes together."""
    memory = like.new_empty(num_parts * (head_dim + 2), dtype=torch.float32)
    acc, top, total = memory.split_with_sizes((num_parts * head_dim, num_parts, num_parts))
    return acc, top, total


@dataclass(frozen=True, slots=True)
class Layer:
    """The properties of a layer and its cache that a kernel is compiled for."""

    num_kv: int
    group: int
    head_dim: int
    block_size: int
    element_bytes: int
    window: int = 0
    has_sinks: bool = False
    fp8: bool = False
    """The cache is FP8."""
    softcap: float = 0.0
    """0: none."""
    lead: int = 0
    """Dims of a key before its value, which is a part of it; 0: keys and values are apart, of head_dim each."""
    unread: int = 0
    """Dims after it that queries do not have: an index key."""

    @property
    def key_width(self) -> int:
        """What the cache keeps of a token and head in one plane."""
        return self.lead + self.head_dim + self.unread

    def constexprs(self) -> dict[str, Any]:
        """Constants of decode_kernel and of prefill_kernel."""
        return {
            "NUM_KV": self.num_kv,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "HEAD_PAD": padded(self.head_dim),
            "LEAD": self.lead,
            "LEAD_PAD": padded(self.lead),
            "KEY_WIDTH": self.key_width,
            "BLOCK_SIZE": self.block_size,
            "WINDOW": self.window,
            "SOFTCAP": self.softcap,
            "HAS_SINKS": self.has_sinks,
            "PRECISION": precision(self.element_bytes),
        }

    @classmethod
    def of(cls, spec: AttendSpec, *, block_size: int, element_bytes: int, fp8: bool) -> Layer:
        """From a spec, without its tensors."""
        sinks, window = spec.sinks_N is not None, spec.window or 0
        sizes, softcap = (spec.num_kv_heads, spec.group_size, spec.value_dim), spec.softcap or 0.0
        lead, unread = spec.value_start or 0, spec.head_dim - spec.query_dim
        return cls(*sizes, block_size, element_bytes, window, sinks, fp8, softcap, lead, unread)

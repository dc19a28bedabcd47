"""Attention of slices over the paged cache: prompts, chunks of prompts, drafts, mixed steps.

A program computes one tile of queries of one row with the query heads of one kv head: BLOCK_M lines, line m being query
m // GROUP_TILE and head m % GROUP_TILE of the group, so that keys and values are loaded once for the whole group.
Key tiles that every query of the tile sees completely need no masks; those on the diagonal and all with a window do.

The grid is an upper bound from the step's shape. Row r has the tiles from (cu_q[r] - cu_q[0]) // Q + r on (Q queries
per tile): at least as many as its queries need, and found by bisection without a table. After the last row there is
one more row, that of the padding tokens, whose outputs are zeros. So R rows and T tokens need T // Q + R + 1 tiles per
kv head. Tiles run from the last to the first, so that the longest start earliest.

Work: 4*H FLOP for each query head and visible key; a key tile of N rows is 4*N*H bytes (16 bit) for 4*N*H*BLOCK_M
FLOP, BLOCK_M FLOP a byte, from L2 for all tiles of a row but one. Source: FlashAttention-2, arXiv:2307.08691; the
search after vLLM's unified attention. Legend: `kernels/base.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, StepMetadata
from megatron_infer.kernels.triton.attention_tiles import (
    LOG2E,
    LOOSE,
    Layer,
    attend_tile,
    blocks_of,
    cdiv,
    load_tile,
    mean_of,
    padded,
)
from megatron_infer.kernels.triton.launch import Launcher
from megatron_infer.kernels.triton.ragged import find_row
from megatron_infer.kernels.triton_scratch import LARGE_SHARED_KIB


# fmt: off
@triton.jit
def _attend_keys(
    q, lead, acc, top, total, k_cache, v_cache, table, begin, end, num_keys, last_key, scale2,
    KEY_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, LEAD: tl.constexpr,
    LEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):
    """Key tiles from begin, a multiple of BLOCK_N, to the one that holds end - 1; see attend_tile."""
    block = blocks_of(table, begin, num_keys, BLOCK_SIZE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        next_block = blocks_of(table, start + BLOCK_N, num_keys, BLOCK_SIZE, BLOCK_N)
        acc, top, total = attend_tile(
            q, lead, acc, top, total, k_cache, v_cache, block, start, num_keys, last_key, scale2,
            KEY_STRIDE, HEAD_DIM, HEAD_PAD, LEAD, LEAD_PAD, BLOCK_SIZE, BLOCK_N, MASKED, WINDOW, SOFTCAP, PRECISION,
        )
        block = next_block
    return acc, top, total


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_decode"], do_not_specialize_on_alignment=[*LOOSE, "cu_q"]
)
def prefill_kernel(
    q, k_cache, v_cache, out, sinks, cu_q, kv_len, table_row, block_table,
    q_stride_t, q_stride_k, q_stride_g, table_stride, scale2, num_tokens, num_rows, num_decode,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    LEAD: tl.constexpr, LEAD_PAD: tl.constexpr, KEY_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Grid (tiles, NUM_KV * group tiles); num_rows rows from row num_decode on."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP_TILE
    GROUP_TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    KEY_STRIDE: tl.constexpr = NUM_KV * KEY_WIDTH
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // GROUP_TILES
    k_cache += kv_head * KEY_WIDTH
    v_cache += kv_head * KEY_WIDTH + LEAD
    cu_q += num_decode
    row, first_tile = find_row(cu_q, tile, num_rows, QUERIES)
    first_token = tl.load(cu_q + row)
    stop_token = num_tokens
    if row < num_rows:
        stop_token = tl.load(cu_q + row + 1)
    num_queries = stop_token - first_token
    first_query = (tile - first_tile) * QUERIES
    if first_query >= num_queries:
        return

    line = tl.arange(0, BLOCK_M)
    query = first_query + line // GROUP_TILE
    group = (tl.program_id(1) % GROUP_TILES) * GROUP_TILE + line % GROUP_TILE
    real = (line // GROUP_TILE < QUERIES) & (query < num_queries) & (group < GROUP)
    head = kv_head * GROUP + group
    token = (first_token + query).to(tl.int64)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if row < num_rows:
        if HAS_SINKS:
            top = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
        at = token * q_stride_t + kv_head * q_stride_k + group * q_stride_g
        q_tile = load_tile(q + LEAD, at, real, HEAD_DIM, HEAD_PAD, True)
        lead = q_tile
        if LEAD > 0:
            lead = load_tile(q, at, real, LEAD, LEAD_PAD, True)
        table = block_table + tl.load(table_row + num_decode + row).to(tl.int64) * table_stride
        num_keys = tl.load(kv_len + num_decode + row)
        position = num_keys - num_queries + first_query
        last_key = num_keys - num_queries + query
        # The tile's first query sees all key tiles before `whole`, its last query none from `end` on.
        end = tl.minimum(position + QUERIES, num_keys)
        if WINDOW > 0:
            whole = tl.maximum(position + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        else:
            whole = (position + 1) // BLOCK_N * BLOCK_N
            acc, top, total = _attend_keys(
                q_tile, lead, acc, top, total, k_cache, v_cache, table, 0, whole, num_keys, last_key, scale2,
                KEY_STRIDE, HEAD_DIM, HEAD_PAD, LEAD, LEAD_PAD, BLOCK_SIZE, BLOCK_N, False, 0, SOFTCAP, PRECISION,
            )
        acc, top, total = _attend_keys(
            q_tile, lead, acc, top, total, k_cache, v_cache, table, whole, end, num_keys, last_key, scale2,
            KEY_STRIDE, HEAD_DIM, HEAD_PAD, LEAD, LEAD_PAD, BLOCK_SIZE, BLOCK_N, True, WINDOW, SOFTCAP, PRECISION,
        )
    dim = tl.arange(0, HEAD_PAD)[None, :]
    where = out + (token * (NUM_KV * GROUP) + head)[:, None] * HEAD_DIM + dim
    tl.store(where, mean_of(acc, total).to(out.dtype.element_ty), mask=real[:, None] & (dim < HEAD_DIM))
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiles:
    """The sizes of prefill's work for one kind of layer, dtype and GPU, the same for every step."""

    lines: int
    """BLOCK_M: queries times heads of a group."""
    keys: int
    """BLOCK_N."""
    num_warps: int
    num_stages: int


@functools.cache
def prefill_tiles(layer: Layer, shared_kib: int) -> PrefillTiles:
    """Tiles whose queries and staged keys and values fit `shared_kib` KiB of shared memory per block.

    Bytes: lines*H for the queries and num_stages * 2*keys*H for what is loaded ahead, times the element size.
    16 bit, H=128: 128*128*2 = 32 KiB and 3 * 2*64*128*2 = 96 KiB. The shapes are those of torch's flex attention, which
    are good on H100 and A100; H=64 and H=256 have twice the warps, since 4 spill registers, and H=128 in fp32 has 16
    keys, since 32 do. A latent is key and value: 32 lines and 32 keys of 576 dims are 72 KiB, and 64 lines spill.
    """
    large, head_pad = shared_kib >= LARGE_SHARED_KIB, padded(layer.head_dim)
    if layer.lead and head_pad > 128:
        if layer.element_bytes > 2:
            return PrefillTiles(lines=16, keys=16, num_warps=8, num_stages=1)
        return PrefillTiles(lines=32 if large else 16, keys=32, num_warps=8, num_stages=2)
    if layer.element_bytes > 2:
        return PrefillTiles(lines=32, keys=32 if head_pad <= 64 else 16, num_warps=8, num_stages=1)
    if head_pad <= 64:
        return PrefillTiles(lines=128, keys=64, num_warps=8 if head_pad > 32 else 4, num_stages=3)
    stages = 3 if large else 2
    if head_pad <= 128:
        return PrefillTiles(lines=128 if large else 64, keys=64, num_warps=8 if large else 4, num_stages=stages)
    return PrefillTiles(lines=64, keys=32, num_warps=8, num_stages=stages)


@functools.cache
def _kernel(layer: Layer, tiles: PrefillTiles) -> Launcher:
    own = {"GROUP_TILE": min(layer.group, tiles.lines), "BLOCK_M": tiles.lines, "BLOCK_N": tiles.keys}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return Launcher(prefill_kernel, **layer.constexprs(), **own, **options)


def attend_prefill(
    q_TKGH: Tensor,
    keys: Tensor,
    values: Tensor,
    out_TX: Tensor,
    step: StepMetadata,
    spec: AttendSpec,
    layer: Layer,
    tiles: PrefillTiles,
) -> None:
    """Outputs of rows num_decode .. num_rows - 1; zeros for padding tokens."""
    num_decode, num_rows = step.num_decode, step.num_rows - step.num_decode
    num_tokens = q_TKGH.shape[0]
    kernel, group = _kernel(layer, tiles), min(layer.group, tiles.lines)
    num_tiles = (num_tokens - num_decode) // (tiles.lines // group) + num_rows + 1
    kernel(
        (num_tiles, spec.num_kv_heads * cdiv(spec.group_size, group)),
        q_TKGH,
        keys,
        values,
        out_TX,
        out_TX if spec.sinks_N is None else spec.sinks_N,
        step.cu_q_R1,
        step.kv_len_R,
        step.table_row_R,
        step.block_table,
        *q_TKGH.stride()[:3],
        step.block_table.stride(0),
        spec.scale * LOG2E,
        num_tokens,
        num_rows,
        num_decode,
    )

"""Attention of slices with few queries over many keys: the last chunk of a prompt, a prompt behind a cached prefix,
drafts.

Such a row has too few tiles of queries to occupy a GPU (32 queries, 4 heads per kv head: one tile for each kv head). So
its keys are split like those of decode rows, and each split of each tile is an item of work, which programs share on
the device. A row may have SLICE_PROGRAMS items over all heads, so a row of many tiles is not split, nor is one of few
keys: both, and every bit, depend on the row's own queries and keys. Other slices are left to `attention_prefill`.

    queries  |--tile 0--|--tile 1--|              keys  0       512      1024  ...     2048
    items    tile 0: splits 0 1 2 3, tile 1: splits 0 1 2 3
    merge    sum over splits, first to last, of exp2(top_s - top) * acc_s, over the same of total_s (+ the sink's)

Partial sums are BLOCK_M * (H + 2) fp32 for each item and tile of heads, SLICE_PROGRAMS of them for a row of any length
(8 MiB at H=128 in 16 bit); a step with more rows than fit SLICES_BYTES has several pairs of launches over the same
memory. Source: Flash-Decoding (Dao et al., 2023). Not yet run on a GPU. Legend: `kernels/base.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, StepMetadata
from megatron_infer.kernels.triton.attention_prefill import (
    PrefillTiles,
    attend_range,
    constexprs_of,
    for_gpus_of,
    prefill_tiles,
)
from megatron_infer.kernels.triton.attention_splits import share_of_program, slice_splits
from megatron_infer.kernels.triton.attention_tiles import (
    LOG2E,
    LOOSE,
    Layer,
    cdiv,
    finish,
    load_tile,
    padded,
    partials,
    power_of_2,
    variant,
)
from megatron_infer.kernels.triton.launch import AotVariant, launch
from megatron_infer.kernels.triton_scratch import head_tiles, slice_parts, slices_at_once

MERGE_LINES = 16
"""Lines of a tile (queries times heads of a group) that one program merges."""
MERGE_OPTIONS = {"num_warps": 4, "num_stages": 1}
AHEAD = 4
"""Splits whose partial sums are read at once."""


# fmt: off
@triton.jit(
    do_not_specialize=["first_row", "num_rows"], do_not_specialize_on_alignment=[*LOOSE, "cu_q"]
)
def slices_kernel(
    q, k_cache, v_cache, acc_part, top_part, total_part, cu_q, kv_len, table_row, block_table,
    q_stride_t, q_stride_k, q_stride_g, table_stride, scale2, first_row, num_rows,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, ITEMS: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):
    """Grid (NUM_KV * group tiles, programs that share the items of rows first_row .. first_row + num_rows - 1).

    acc_part [rows, NUM_KV * group tiles, ITEMS, BLOCK_M, HEAD_DIM], top_part and total_part the same without HEAD_DIM.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP_TILE
    GROUP_TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    kv_head = tl.program_id(0) // GROUP_TILES
    cu_q += first_row
    kv_len += first_row
    table_row += first_row
    line = tl.arange(0, BLOCK_M)
    group = (tl.program_id(0) % GROUP_TILES) * GROUP_TILE + line % GROUP_TILE
    dim = tl.arange(0, HEAD_PAD)[None, :]
    left, row, item = share_of_program(cu_q, kv_len, num_rows, QUERIES, CHUNK, CHUNK, ITEMS, WINDOW)
    while left > 0:
        first_token = tl.load(cu_q + row)
        num_queries = tl.load(cu_q + row + 1) - first_token
        num_keys = tl.load(kv_len + row)
        tiles, origin, split_keys, splits = slice_splits(num_queries, num_keys, QUERIES, CHUNK, ITEMS, WINDOW)
        stop = tl.minimum(item + left, tl.where(splits > 1, tiles * splits, 0))
        table = block_table + tl.load(table_row + row).to(tl.int64) * table_stride
        for one in range(item, stop):
            first_query = one // splits * QUERIES
            begin = origin + one % splits * split_keys
            query = first_query + line // GROUP_TILE
            real = (line // GROUP_TILE < QUERIES) & (query < num_queries) & (group < GROUP)
            at = (first_token + query).to(tl.int64) * q_stride_t + kv_head * q_stride_k + group * q_stride_g
            q_tile = load_tile(q, at, real, HEAD_DIM, HEAD_PAD, True)
            acc = tl.zeros([BLOCK_M, HEAD_PAD], dtype=tl.float32)
            top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            total = tl.zeros([BLOCK_M], dtype=tl.float32)
            acc, top, total = attend_range(
                q_tile, acc, top, total, k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM, table, begin,
                begin + split_keys, num_keys - num_queries + first_query, num_keys, num_keys - num_queries + query,
                scale2, QUERIES, NUM_KV * HEAD_DIM, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_N, WINDOW, PRECISION,
            )
            place = (row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * ITEMS + one
            part = place * BLOCK_M + line
            tl.store(acc_part + part[:, None] * HEAD_DIM + dim, acc, mask=real[:, None] & (dim < HEAD_DIM))
            tl.store(top_part + part, top, mask=real)
            tl.store(total_part + part, total, mask=real)
        left -= tl.maximum(stop - item, 0)
        item = left * 0
        row += 1


@triton.jit(
    do_not_specialize=["first_row", "max_tiles"], do_not_specialize_on_alignment=["lse", "sinks", "kv_len", "cu_q"]
)
def merge_slices_kernel(
    out, lse, sinks, acc_part, top_part, total_part, cu_q, kv_len, first_row, max_tiles,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, ITEMS: tl.constexpr, ITEMS_PAD: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, LINES: tl.constexpr, AHEAD: tl.constexpr,
):
    """Grid (rows * max_tiles, NUM_KV * group tiles * (BLOCK_M / LINES)): partial sums of LINES lines -> outputs."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP_TILE
    GROUP_TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    LINE_TILES: tl.constexpr = BLOCK_M // LINES
    row = tl.program_id(0) // max_tiles
    tile = tl.program_id(0) % max_tiles
    head_tile = tl.program_id(1) // LINE_TILES
    first_line = tl.program_id(1) % LINE_TILES * LINES
    first_token = tl.load(cu_q + first_row + row)
    num_queries = tl.load(cu_q + first_row + row + 1) - first_token
    num_keys = tl.load(kv_len + first_row + row)
    _, _, _, splits = slice_splits(num_queries, num_keys, QUERIES, CHUNK, ITEMS, WINDOW)
    if (splits == 1) | (tile * QUERIES + first_line // GROUP_TILE >= num_queries):
        return

    line = first_line + tl.arange(0, LINES)
    query = tile * QUERIES + line // GROUP_TILE
    group = head_tile % GROUP_TILES * GROUP_TILE + line % GROUP_TILE
    real = (line // GROUP_TILE < QUERIES) & (query < num_queries) & (group < GROUP)
    head = head_tile // GROUP_TILES * GROUP + group
    place = (row.to(tl.int64) * (NUM_KV * GROUP_TILES) + head_tile) * ITEMS + tile * splits
    part = place * BLOCK_M + line
    split = tl.arange(0, ITEMS_PAD)[:, None]
    there = (split < splits) & real[None, :]
    tops = tl.load(top_part + part[None, :] + split * BLOCK_M, mask=there, other=float("-inf"))
    top = tl.max(tops, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    top = tl.where(real, top, 0.0)
    totals = tl.load(total_part + part[None, :] + split * BLOCK_M, mask=there, other=0.0)
    total = tl.sum(totals * tl.exp2(tops - top[None, :]), 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    dim = tl.arange(0, HEAD_PAD)[None, :]
    whole = real[:, None] & (dim < HEAD_DIM)
    acc = tl.zeros([LINES, HEAD_PAD], dtype=tl.float32)
    for first in range(0, splits, AHEAD):
        for more in tl.static_range(AHEAD):
            one = first + more
            at = part + one * BLOCK_M
            weight = tl.exp2(tl.load(top_part + at, mask=real & (one < splits), other=float("-inf")) - top)
            sums = tl.load(acc_part + at[:, None] * HEAD_DIM + dim, mask=whole & (one < splits), other=0.0)
            acc += sums * weight[:, None]
    mean, sums = finish(acc, top, total)
    token = (first_token + query).to(tl.int64)
    where = out + (token * (NUM_KV * GROUP) + head)[:, None] * HEAD_DIM + dim
    tl.store(where, mean.to(out.dtype.element_ty), mask=whole)
    if HAS_LSE:
        tl.store(lse + token * (NUM_KV * GROUP) + head, sums, mask=real)
# fmt: on


@functools.cache
def _constexprs(layer: Layer, tiles: PrefillTiles) -> tuple[dict[str, Any], dict[str, Any]]:
    """(constexprs of slices_kernel, constexprs of merge_slices_kernel)."""
    of_prefill = constexprs_of(layer, tiles)
    slices = {name: value for name, value in of_prefill.items() if name in slices_kernel.arg_names}
    merge = {name: value for name, value in of_prefill.items() if name in merge_slices_kernel.arg_names}
    return slices, merge | {
        "ITEMS_PAD": power_of_2(of_prefill["ITEMS"]),
        "LINES": min(MERGE_LINES, tiles.lines),
        "AHEAD": AHEAD,
    }


def attend_slices(
    q_TKGH: Tensor,
    keys: Tensor,
    values: Tensor,
    out_TX: Tensor,
    step: StepMetadata,
    spec: AttendSpec,
    layer: Layer,
    tiles: PrefillTiles,
    lse_TN: Tensor | None,
    *,
    programs: int,
) -> None:
    """Outputs of the slices whose keys are split. programs: see attend_decode."""
    slices, merge = _constexprs(layer, tiles)
    items, queries = slices["ITEMS"], tiles.lines // slices["GROUP_TILE"]
    lines = head_tiles(layer.num_kv, layer.group, tiles.lines)
    max_tiles = min(items // 2, cdiv(step.max_q_len, queries))
    visible = step.max_kv_len
    if spec.window is not None:
        visible = min(visible, spec.window + max_tiles * queries - 1)
    if not max_tiles or visible < 2 * tiles.chunk or step.num_rows == step.num_decode:
        return  # no row of such a step is split
    num_parts = slice_parts(layer.num_kv, layer.group, tiles.lines, tiles.max_programs)
    num_rows = slices_at_once(step.num_rows - step.num_decode, num_parts, layer.head_dim)
    parts, lengths = partials(out_TX, num_rows * num_parts, layer.head_dim), (step.cu_q_R1, step.kv_len_R)
    for first_row in range(step.num_decode, step.num_rows, num_rows):
        here = min(num_rows, step.num_rows - first_row)
        launch(
            slices_kernel,
            (lines, max(1, min(here * items, programs // lines))),
            q_TKGH,
            keys,
            values,
            *parts,
            *lengths,
            step.table_row_R,
            step.block_table,
            *q_TKGH.stride()[:3],
            step.block_table.stride(0),
            spec.scale * LOG2E,
            first_row,
            here,
            **slices,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        launch(
            merge_slices_kernel,
            (here * max_tiles, lines * (tiles.lines // merge["LINES"])),
            out_TX,
            out_TX if lse_TN is None else lse_TN,
            out_TX if spec.sinks_N is None else spec.sinks_N,
            *parts,
            *lengths,
            first_row,
            max_tiles,
            **merge,
            **MERGE_OPTIONS,
        )


def layer_variants(layer: Layer, name: str, dtype: str, shared_kib: int) -> list[AotVariant]:
    """Both kernels for one kind of layer."""
    tiles = prefill_tiles(padded(layer.head_dim), layer.element_bytes, shared_kib)
    slices, merge = _constexprs(layer, tiles)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    cut = variant(f"slices_{name}", slices_kernel, slices, options, dtype, fp8=layer.fp8)
    return [
        for_gpus_of(tiles, layer, cut),
        variant(f"merge_slices_{name}", merge_slices_kernel, merge, MERGE_OPTIONS, dtype),
    ]

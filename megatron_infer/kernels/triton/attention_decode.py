"""Attention of decode rows over the paged cache, with the keys of a row split over programs and merged.

A row's keys are split every CHUNK keys, counted from position 0; a row with more chunks than it may have splits uses
the least multiple of CHUNK that gives no more than that. A row that sees no more keys than CHUNK is not split and is
written without a merge; one that sees up to 8 CHUNK is split every SHORT keys.

    keys    0       64       128      192       CHUNK 256, SHORT 64: 900 keys are 15 splits, 4096 keys 16 of 256
    splits  |---0---|---1----|---2----|--- ...  with a row of 1 split and 2 programs: {0 .. 7} and {8 .. 14, 0'}
    merge   sum over splits of exp2(top_s - top) * acc_s, over the same of total_s (+ the sink's)

The splits of all rows, end to end, are divided evenly in runs over as many programs as the device holds at once. Each
program finds its run from the rows' lengths at the time it starts: a long row among short ones is spread too, and an
upper bound of lengths costs no programs. Each split starts from zeros and stores its own partial sums, so that every
bit depends on the row's length and the layer alone: not on the other rows, the padding, the capacity, or the number of
multiprocessors. The query heads of a kv head are lines of one tile (padded to 16, the least that a dot takes), so each
key and value is read once.

Bytes per key: 2*K*H elements. A multiprocessor must keep about 30 KB in flight to reach 4.8 TB/s (132 of them, 0.8 us
of latency); a program stages two or three tiles of 2*BLOCK_N*H elements, 32 KiB each at H=128 in 16 bit. Partial sums
are 4*(H + 2) bytes for each query head and split, against CHUNK*2*H elements read for each kv head: 1.6 % with 4 query
heads per kv head in 16 bit, 6 % with SHORT, and they mostly stay in L2.
Source: Flash-Decoding (Dao et al., 2023). Legend: `kernels/base.py`; C splits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, StepMetadata
from megatron_infer.kernels.triton.attention_tiles import (
    LOG2E,
    LOOSE,
    MIN_DOT,
    Layer,
    attend_tile,
    blocks_of,
    cdiv,
    load_tile,
    mean_of,
    padded,
    power_of_2,
)
from megatron_infer.kernels.triton.launch import Launcher, precision
from megatron_infer.kernels.triton_scratch import (
    DECODE_CHUNK,
    DECODE_SHORT,
    DECODE_SHORT_PARTS,
    LARGE_SHARED_KIB,
    decode_splits,
    max_decode_splits,
)

MERGE_WARPS = 4
MAX_LINES = {2: 64, 4: 16}
"""Bytes of an element -> query heads of one tile; a larger group has several. fp32 dots are in registers."""
MAX_LATENT_LINES = 16
"""The same of latents: more sums of 512 dims do not fit the registers next to a tile of keys."""
ROWS = tl.constexpr(256)
"""Rows whose lengths are read at once."""
_SHORT_CHUNKS = tl.constexpr(DECODE_SHORT)


@triton.jit
def _cut_keys(first_key, num_keys, max_splits, CHUNK: tl.constexpr):
    """(origin: the first key of the first split, keys per split, splits; 1 for a row without keys)."""
    first_chunk = first_key // CHUNK
    chunks = tl.cdiv(num_keys, CHUNK) - first_chunk
    share = tl.maximum(tl.cdiv(chunks, max_splits), 1)
    return first_chunk * CHUNK, share * CHUNK, tl.maximum(tl.cdiv(chunks, share), 1)


@triton.jit
def row_splits(num_keys, CHUNK: tl.constexpr, SHORT: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr):
    """(first visible key, origin, keys per split, splits) of a decode row."""
    first_key = num_keys * 0
    if WINDOW > 0:
        first_key = tl.maximum(num_keys - WINDOW, 0)
    origin, split_keys, splits = _cut_keys(first_key, num_keys, MAX_SPLITS, CHUNK)
    if SHORT < CHUNK:  # both, as division by a number that is compiled in is a shift
        short_origin, short_keys, short_splits = _cut_keys(first_key, num_keys, MAX_SPLITS, SHORT)
        is_short = num_keys - first_key <= _SHORT_CHUNKS * CHUNK
        origin = tl.where(is_short, short_origin, origin)
        split_keys = tl.where(is_short, short_keys, split_keys)
        splits = tl.where(is_short, short_splits, splits)
    is_whole = num_keys - first_key <= CHUNK
    split_keys = tl.where(is_whole, 2 * CHUNK, split_keys)  # from an origin before the first key
    splits = tl.where(is_whole, 1, splits)
    return first_key, origin, split_keys, splits


@triton.jit
def _splits_of_rows(
    kv_len, first, num_rows, CHUNK: tl.constexpr, SHORT: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr
):
    """The number of splits of rows first .. first + ROWS - 1; 0 after the last row."""
    row = first + tl.arange(0, ROWS)
    inside = row < num_rows
    num_keys = tl.load(kv_len + row, mask=inside, other=0)
    _, _, _, splits = row_splits(num_keys, CHUNK, SHORT, MAX_SPLITS, WINDOW)
    return tl.where(inside, splits, 0)


@triton.jit
def share_of_program(
    kv_len, num_rows, CHUNK: tl.constexpr, SHORT: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr
):
    """This program's share of all rows' splits end to end: (number, row of the first, its index in that row)."""
    total = num_rows * 0
    for first in range(0, num_rows, ROWS):
        total += tl.sum(_splits_of_rows(kv_len, first, num_rows, CHUNK, SHORT, MAX_SPLITS, WINDOW), 0)
    share = tl.cdiv(total, tl.num_programs(1))
    begin = tl.program_id(1) * share
    row = num_rows * 0
    before = num_rows * 0
    passed = num_rows * 0
    for first in range(0, num_rows, ROWS):
        splits = _splits_of_rows(kv_len, first, num_rows, CHUNK, SHORT, MAX_SPLITS, WINDOW)
        ends = passed + tl.cumsum(splits, 0)
        earlier = (ends <= begin) & (first + tl.arange(0, ROWS) < num_rows)
        row += tl.sum(earlier.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(earlier, ends, 0), 0))
        passed += tl.sum(splits, 0)
    return tl.minimum(share, total - begin), row, begin - before


# fmt: off
@triton.jit
def _attend_splits(
    q_tile, lead, k_cache, v_cache, out, sinks, acc_part, top_part, total_part, table, num_keys, line, group,
    first_split, stop_split, part_splits, scale2,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, LEAD: tl.constexpr,
    LEAD_PAD: tl.constexpr, KEY_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, SHORT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Splits first_split .. stop_split - 1 of one row; line: index of each query head in the parts and the outputs."""
    first_key, origin, split_keys, num_splits = row_splits(num_keys, CHUNK, SHORT, MAX_SPLITS, WINDOW)
    real = group < GROUP
    dim = tl.arange(0, HEAD_PAD)[None, :]
    whole = real[:, None] & (dim < HEAD_DIM)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    last_key = tl.zeros([BLOCK_M], dtype=tl.int32) + (num_keys - 1)
    begin = tl.maximum(origin + first_split * split_keys, first_key // BLOCK_N * BLOCK_N)
    end = tl.minimum(origin + stop_split * split_keys, num_keys)
    block = blocks_of(table, begin, num_keys, BLOCK_SIZE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        next_block = blocks_of(table, start + BLOCK_N, num_keys, BLOCK_SIZE, BLOCK_N)
        acc, top, total = attend_tile(
            q_tile, lead, acc, top, total, k_cache, v_cache, block, start, num_keys, last_key, scale2,
            NUM_KV * KEY_WIDTH, HEAD_DIM, HEAD_PAD, LEAD, LEAD_PAD, BLOCK_SIZE, BLOCK_N, True, WINDOW, SOFTCAP,
            PRECISION,
        )
        block = next_block
        stop = start + BLOCK_N
        if (num_splits > 1) & (((stop - origin) % split_keys == 0) | (stop >= end)):
            part = line * part_splits + (start - origin) // split_keys
            tl.store(acc_part + part[:, None] * HEAD_DIM + dim, acc, mask=whole)
            tl.store(top_part + part, top, mask=real)
            tl.store(total_part + part, total, mask=real)
            acc = tl.zeros([BLOCK_M, HEAD_PAD], dtype=tl.float32)
            top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if num_splits == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + line % (NUM_KV * GROUP), mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            new_top = tl.maximum(top, sink)
            shrink = tl.exp2(top - new_top)
            acc = acc * shrink[:, None]
            total = total * shrink + tl.exp2(sink - new_top)
        tl.store(out + line[:, None] * HEAD_DIM + dim, mean_of(acc, total).to(out.dtype.element_ty), mask=whole)


@triton.jit(
    do_not_specialize=["part_splits", "num_rows"], do_not_specialize_on_alignment=[*LOOSE, "total_part"]
)
def decode_kernel(
    q, k_cache, v_cache, out, sinks, acc_part, top_part, total_part, kv_len, table_row, block_table,
    q_stride_t, q_stride_k, q_stride_g, table_stride, part_splits, num_rows, scale2,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, LEAD: tl.constexpr,
    LEAD_PAD: tl.constexpr, KEY_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, SHORT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):
    """Grid (NUM_KV * group tiles, programs that share the splits of all rows).

    acc_part [rows, N, part_splits, HEAD_DIM], top_part and total_part [rows, N, part_splits], all fp32.
    """
    GROUP_TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(0) // GROUP_TILES
    group = (tl.program_id(0) % GROUP_TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    if PDL:
        tl.extra.cuda.gdc_wait()
    left, row, split = share_of_program(kv_len, num_rows, CHUNK, SHORT, MAX_SPLITS, WINDOW)
    while left > 0:
        num_keys = tl.load(kv_len + row)
        _, _, _, num_splits = row_splits(num_keys, CHUNK, SHORT, MAX_SPLITS, WINDOW)
        stop = tl.minimum(split + left, num_splits)
        row64 = row.to(tl.int64)
        at = row64 * q_stride_t + kv_head * q_stride_k + group.to(tl.int64) * q_stride_g
        q_tile = load_tile(q + LEAD, at, group < GROUP, HEAD_DIM, HEAD_PAD, True)
        lead = q_tile
        if LEAD > 0:
            lead = load_tile(q, at, group < GROUP, LEAD, LEAD_PAD, True)
        table = block_table + tl.load(table_row + row).to(tl.int64) * table_stride
        line = row64 * (NUM_KV * GROUP) + kv_head * GROUP + group
        _attend_splits(
            q_tile, lead, k_cache + kv_head * KEY_WIDTH, v_cache + kv_head * KEY_WIDTH + LEAD, out, sinks, acc_part,
            top_part, total_part, table, num_keys, line, group, split, stop, part_splits, scale2, NUM_KV, GROUP,
            HEAD_DIM, HEAD_PAD, LEAD, LEAD_PAD, KEY_WIDTH, BLOCK_SIZE, BLOCK_M, BLOCK_N, CHUNK, SHORT, MAX_SPLITS,
            WINDOW, SOFTCAP, HAS_SINKS, PRECISION,
        )
        left -= stop - split
        split = left * 0
        row += 1
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(
    do_not_specialize=["part_splits"], do_not_specialize_on_alignment=["sinks", "kv_len", "total_part"]
)
def merge_kernel(
    out, sinks, acc_part, top_part, total_part, kv_len, part_splits,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, HEAD_PAD: tl.constexpr,
    CHUNK: tl.constexpr, SHORT: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):
    """Grid (rows, NUM_HEADS): the partial sums of one query head of a row of several splits -> its output."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    _, _, _, num_splits = row_splits(tl.load(kv_len + row), CHUNK, SHORT, MAX_SPLITS, WINDOW)
    if num_splits == 1:
        return
    line = row * NUM_HEADS + head
    split = tl.arange(0, MAX_SPLITS)
    there = split < num_splits
    part = line * part_splits + split
    tops = tl.load(top_part + part, mask=there, other=float("-inf"))
    top = tl.max(tops, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    weight = tl.exp2(tops - top)
    total = tl.sum(tl.load(total_part + part, mask=there, other=0.0) * weight, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    for first_dim in tl.static_range(0, HEAD_PAD, DIMS):
        dim = first_dim + tl.arange(0, DIMS)
        where = acc_part + part[:, None] * HEAD_DIM + dim[None, :]
        parts = tl.load(where, mask=there[:, None] & (dim[None, :] < HEAD_DIM), other=0.0)
        mean = tl.sum(parts * weight[:, None], 0) / total
        tl.store(out + line * HEAD_DIM + dim, mean.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
# fmt: on


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """The sizes of decode's work for one kind of layer and dtype, the same for every step."""

    chunk: int
    short: int
    """Keys per split of a row that sees few."""
    keys: int
    """BLOCK_N; divides both."""
    max_splits: int
    num_stages: int


@functools.cache
def decode_tiles(layer: Layer, chunk: int = DECODE_CHUNK, *, shared_kib: int = 0) -> DecodeTiles:
    """32 KiB of keys and values a tile in 16 bit (H=128: 64 keys), half as many keys in fp32.

    FP8: for queries in 16 bit as many keys in half of the bytes, and more tiles loaded ahead, so that as many bytes are
    in flight. For queries in fp32 half as many keys, since the widened keys are in registers.
    Latents: 36 KiB (512 + 64 dims, 32 keys), of which a second tile is loaded ahead where the shared memory of a block
    is large. Rows are not cut at SHORT: partial sums of one key head's 16 to 128 query heads would be half of the keys'
    bytes.
    """
    head_pad, fp8, is_latent = padded(layer.head_dim), layer.fp8, layer.lead > 0
    if layer.element_bytes == 2:
        keys = min(128, (16384 if is_latent else 8192) // head_pad)
        stages = 5 if fp8 else 3
    else:
        keys, stages = min(64, (2048 if fp8 else 4096) // head_pad), 2
    if is_latent:
        stages = 3 if shared_kib >= LARGE_SHARED_KIB and layer.element_bytes == 2 else 2
    keys = max(MIN_DOT, min(keys, chunk))
    return DecodeTiles(
        chunk=chunk,
        short=chunk if is_latent else max(keys, chunk // DECODE_SHORT_PARTS),
        keys=keys,
        max_splits=max_decode_splits(layer.num_kv),
        num_stages=stages,
    )


@functools.cache
def _constexprs(layer: Layer, tiles: DecodeTiles) -> tuple[dict[str, Any], dict[str, Any]]:
    """(constexprs of decode_kernel, constexprs of merge_kernel)."""
    cut = {"CHUNK": tiles.chunk, "SHORT": tiles.short, "MAX_SPLITS": tiles.max_splits}
    decode = layer.constexprs() | cut
    most = MAX_LATENT_LINES if layer.lead else MAX_LINES[layer.element_bytes]
    decode |= {"BLOCK_M": max(MIN_DOT, min(most, power_of_2(layer.group))), "BLOCK_N": tiles.keys}
    merge = {name: decode[name] for name in ("HEAD_DIM", "HEAD_PAD", "WINDOW", "HAS_SINKS")} | cut
    return decode, merge | {"NUM_HEADS": layer.num_kv * layer.group, "DIMS": min(32, padded(layer.head_dim))}


def _options(constexprs: Mapping[str, Any], tiles: DecodeTiles) -> dict[str, int]:
    """Of decode_kernel: 8 warps where the sums of a tile, 64 lines of 128 dims or more, are half of 4 warps' registers
    with the scores beside them; and in fp32, whose widened keys spill from 4."""
    sums, fp32 = constexprs["BLOCK_M"] * constexprs["HEAD_PAD"], constexprs["PRECISION"] == precision(4)
    return {"num_warps": 8 if fp32 or sums >= 64 * 128 else 4, "num_stages": tiles.num_stages}


class DecodeKernels(NamedTuple):
    """Both kernels of a layer."""

    tiles: DecodeTiles
    lines: int
    """Tiles of the query heads of a token."""
    decode: Launcher
    merge: Launcher


def decode_kernels(layer: Layer, tiles: DecodeTiles, overlap: Mapping[str, bool]) -> DecodeKernels:
    """overlap: see `launch.overlapping`."""
    return _kernels(layer, tiles, tuple(overlap.items()))


@functools.cache
def _kernels(layer: Layer, tiles: DecodeTiles, overlap: tuple[tuple[str, bool], ...]) -> DecodeKernels:
    """Made once: a launcher that is new searches for its compiled kernel again."""
    decode, merge = _constexprs(layer, tiles)
    options = _options(decode, tiles)
    return DecodeKernels(
        tiles,
        layer.num_kv * cdiv(layer.group, decode["BLOCK_M"]),
        Launcher(decode_kernel, **decode, **dict(overlap), **options),
        Launcher(merge_kernel, **merge, **dict(overlap), num_warps=MERGE_WARPS, num_stages=1),
    )


def row_parts(step: StepMetadata, spec: AttendSpec, tiles: DecodeTiles) -> int:
    """Splits that a decode row of the step may have; 1: there is nothing to merge."""
    return decode_splits(step.max_kv_len, tiles.max_splits, tiles.chunk, spec.window, short=tiles.short)


def attend_decode(
    q_TKGH: Tensor,
    keys: Tensor,
    values: Tensor,
    out_TX: Tensor,
    step: StepMetadata,
    spec: AttendSpec,
    kernels: DecodeKernels,
    parts: tuple[Tensor, Tensor, Tensor],
    *,
    splits: int,
    programs: int,
) -> None:
    """Outputs of tokens 0 .. num_decode - 1.

    splits: `row_parts`. parts: `partials` of so many for each row and query head; of one line if splits is 1. programs:
    how many run at once on the device; changes no bit.
    """
    _, lines, decode, merge = kernels
    num_rows, block_table = step.num_decode, step.block_table
    sinks = out_TX if spec.sinks_N is None else spec.sinks_N
    decode(
        (lines, max(1, min(splits * num_rows, programs // lines))),
        q_TKGH,
        keys,
        values,
        out_TX,
        sinks,
        *parts,
        step.kv_len_R,
        step.table_row_R,
        block_table,
        *q_TKGH.stride()[:3],
        block_table.stride(0),
        splits,
        num_rows,
        spec.scale * LOG2E,
    )
    if splits > 1:
        num_heads = spec.num_kv_heads * spec.group_size
        merge((num_rows, num_heads), out_TX, sinks, *parts, step.kv_len_R, splits)

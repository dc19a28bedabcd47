"""How attention splits the keys of decode rows, and how programs share the splits of all rows on the device.

A row's keys are split every CHUNK keys, counted from position 0; a row with more chunks than it may have splits uses
the least multiple of CHUNK that gives no more than that. A row that sees no more keys than CHUNK is not split, and one
that sees up to 8 CHUNK is split every SHORT keys.

The splits of all rows, end to end, are divided evenly in runs over as many programs as the device holds at once. Each
program finds its run from the rows' lengths at the time it starts: a long row among short ones is spread too, and an
upper bound of lengths costs no programs. Which program computes a split changes no bit: each split starts from zeros
and stores its own partial sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_infer.kernels.triton_scratch import DECODE_SHORT

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

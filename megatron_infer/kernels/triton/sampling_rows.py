"""Kernels around a captured draw for what only some rows ask for: edits of logits before it, ranks after it.

    token pool, lists --mark--> a mark of each id [S, V] --edit--> logits [S, V] fp32, in the same memory
    model's logits -----------------------------------^

A mark says whether an id is allowed, banned or in the prompt, and counts how often it was drawn. It is built by sums
and disjunctions of integers, so that the order of programs does not matter. A program of a row without requests returns
after it has read the row's parameters.
Legend: S rows drawn, V vocab, G groups of neighbouring ids, C chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_infer.kernels.draw_columns import Asks, Column, Mark

# fmt: off

STREAM = tl.constexpr(int(Column.STREAM))
_ASKS = tl.constexpr(int(Column.ASKS))
_TEMPERATURE = tl.constexpr(int(Column.TEMPERATURE))
_REPETITION = tl.constexpr(int(Column.REPETITION))
_PRESENCE = tl.constexpr(int(Column.PRESENCE))
_FREQUENCY = tl.constexpr(int(Column.FREQUENCY))
_PROMPT_LEN = tl.constexpr(int(Column.PROMPT_LEN))
_MIN_TOTAL = tl.constexpr(int(Column.MIN_TOTAL))
_BIASED_END = tl.constexpr(int(Column.BIASED))
_ALLOWED_END = tl.constexpr(int(Column.ALLOWED))
_BAD_END = tl.constexpr(int(Column.BAD))
_STOP_END = tl.constexpr(int(Column.STOP))
ASK_RAW = tl.constexpr(int(Asks.RAW))
ASK_OWN = tl.constexpr(int(Asks.OWN))
_ASK_PENALTY = tl.constexpr(int(Asks.PENALTY))
_ASK_EDIT = tl.constexpr(int(Asks.EDIT))
_ASK_MIN_TOKENS = tl.constexpr(int(Asks.MIN_TOKENS))
_ASK_ALLOWED = tl.constexpr(int(Asks.ALLOWED))
_ASK_RANK = tl.constexpr(int(Asks.RANK))
_ASK_OWN_RANK = tl.constexpr(int(Asks.OWN_RANK))
_SEEN = tl.constexpr(int(Mark.SEEN))
_ALLOWED = tl.constexpr(int(Mark.ALLOWED))
_BANNED = tl.constexpr(int(Mark.BANNED))
_DRAWN = tl.constexpr(int(Mark.DRAWN))


@triton.jit
def number_of(numbers_ptr, stride, at, COLUMN: tl.constexpr):
    """An integer of a request row, int32."""
    return tl.load(numbers_ptr + COLUMN * stride + at).to(tl.int32)


@triton.jit
def asks_of(numbers_ptr, stride, at):
    """`Asks` of a request row."""
    return number_of(numbers_ptr, stride, at, _ASKS)


@triton.jit
def masks_stops(numbers_ptr, stride, at, position):
    """Whether stop ids must not be drawn yet."""
    asks = asks_of(numbers_ptr, stride, at)
    return ((asks & _ASK_MIN_TOKENS) != 0) & (position < number_of(numbers_ptr, stride, at, _MIN_TOTAL))


@triton.jit
def is_edited(numbers_ptr, stride, at, position):
    """Whether the row's logits are edited before a token is chosen."""
    asks = asks_of(numbers_ptr, stride, at)
    return ((asks & (_ASK_PENALTY | _ASK_EDIT)) != 0) | masks_stops(numbers_ptr, stride, at, position)


@triton.jit(do_not_specialize=["columns_stride"])
def mark_kernel(
    work_ptr, numbers_ptr, columns_stride, lists_ptr, row_ptr, position_ptr, pool_ptr, pool_stride, vocab, num_parts,
    LISTED: tl.constexpr, TILE: tl.constexpr,
):
    """Marks of the ids that a row allows or bans, and of its prompt's and drawn tokens; num_parts programs a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.load(row_ptr + row).to(tl.int64)
    position = tl.load(position_ptr + row)
    if is_edited(numbers_ptr, columns_stride, at, position):
        asks = asks_of(numbers_ptr, columns_stride, at)
        work_ptr += row * vocab
        if (asks & _ASK_PENALTY) != 0:
            prompt_len = number_of(numbers_ptr, columns_stride, at, _PROMPT_LEN)
            for start in range(part * TILE, position, num_parts * TILE):
                place = start + tl.arange(0, TILE)
                token = tl.load(pool_ptr + at * pool_stride + place, mask=place < position, other=-1)
                inside = (token >= 0) & (token < vocab)
                drawn = inside & (place >= prompt_len)
                given = inside & (place < prompt_len)
                tl.atomic_add(work_ptr + token, tl.full((TILE,), _DRAWN, tl.int32), mask=drawn, sem="relaxed")
                known = tl.load(work_ptr + token, mask=given, other=_SEEN)
                given = (known & _SEEN) == 0  # a frequent token is marked a few times at most
                tl.atomic_or(work_ptr + token, tl.full((TILE,), _SEEN, tl.int32), mask=given, sem="relaxed")
        biased = number_of(numbers_ptr, columns_stride, at, _BIASED_END)
        allowed = number_of(numbers_ptr, columns_stride, at, _ALLOWED_END)
        bad = number_of(numbers_ptr, columns_stride, at, _BAD_END)
        end = bad
        if masks_stops(numbers_ptr, columns_stride, at, position):
            end = number_of(numbers_ptr, columns_stride, at, _STOP_END)
        for start in range(biased + part * TILE, end, num_parts * TILE):
            place = start + tl.arange(0, TILE)
            id = (tl.load(lists_ptr + at * LISTED + place, mask=place < end, other=0) & 0x7FFFFFFF).to(tl.int32)
            mark = tl.where(place < allowed, _ALLOWED, _BANNED)
            tl.atomic_or(work_ptr + id, mark, mask=place < end, sem="relaxed")


@triton.jit
def with_bias(x, ids, first, end, lists_ptr, num_biased):
    """Logits of neighbouring ids first .. end - 1 plus their biases, found by bisection in the row's ascending list."""
    low, high = num_biased * 0, num_biased
    while low < high:
        middle = (low + high) // 2
        before = (tl.load(lists_ptr + middle) & 0x7FFFFFFF) < first
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    entry = tl.load(lists_ptr + low, mask=low < num_biased, other=0x7FFFFFFF)
    while (entry & 0x7FFFFFFF) < end:
        bias = (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        x = tl.where(ids == (entry & 0x7FFFFFFF).to(tl.int32), x + bias, x)
        low += 1
        entry = tl.load(lists_ptr + low, mask=low < num_biased, other=0x7FFFFFFF)
    return x


@triton.jit(do_not_specialize=["columns_stride"])
def edit_kernel(
    x_ptr, x_stride, work_ptr, maxima_ptr, best_ptr, best_id_ptr, columns_ptr, numbers_ptr, columns_stride, lists_ptr,
    row_ptr, position_ptr, vocab, num_chunks, LISTED: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):
    """Replace marks by edited logits: bias, allowed and banned ids, repetition, frequency, presence, each rounded to
    fp32 (compile without fusing products into sums); and maxima by those of the edited logits."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.load(row_ptr + row).to(tl.int64)
    if is_edited(numbers_ptr, columns_stride, at, tl.load(position_ptr + row)):
        asks = asks_of(numbers_ptr, columns_stride, at)
        group_G = tl.arange(0, CHUNK // GROUP)
        ids = chunk * CHUNK + group_G[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        here = ids < vocab
        x = tl.load(x_ptr + row * x_stride + ids, mask=here, other=-float("inf")).to(tl.float32)
        mark = tl.load(work_ptr + row * vocab + ids, mask=here, other=0)
        num_biased = number_of(numbers_ptr, columns_stride, at, _BIASED_END)
        x = with_bias(x, ids, chunk * CHUNK, (chunk + 1) * CHUNK, lists_ptr + at * LISTED, num_biased)
        banned = (mark & _BANNED) != 0
        banned = banned | (((asks & _ASK_ALLOWED) != 0) & ((mark & _ALLOWED) == 0))
        x = tl.where(banned & here, -float("inf"), x)
        if (asks & _ASK_PENALTY) != 0:
            repetition = tl.load(columns_ptr + _REPETITION * columns_stride + at).to(tl.float32)
            presence = tl.load(columns_ptr + _PRESENCE * columns_stride + at).to(tl.float32)
            frequency = tl.load(columns_ptr + _FREQUENCY * columns_stride + at).to(tl.float32)
            count = mark // _DRAWN
            penalised = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
            x = tl.where((count > 0) | ((mark & _SEEN) != 0), penalised, x)
            x = tl.where(count > 0, x - frequency * count.to(tl.float32) - presence, x)
        tl.store(work_ptr + row * vocab + ids, x.to(tl.int32, bitcast=True), mask=here)
        put_maxima(x, ids, maxima_ptr, best_ptr, best_id_ptr, row * num_chunks + chunk, group_G, CHUNK, GROUP)


@triton.jit
def put_maxima(x, ids, maxima_ptr, best_ptr, best_id_ptr, at, group_G, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Store the maxima of a chunk's groups [G, GROUP] and its largest logit (NaN if one is NaN) with its lowest id."""
    broken = tl.max(tl.max((x != x).to(tl.int32), 1), 0)
    x = tl.where(x == x, x, -float("inf"))
    maxima = tl.max(x, 1)
    best = tl.max(maxima, 0)
    best_id = tl.min(tl.min(tl.where(x == best, ids, 0x7FFFFFFF), 1), 0)
    best = tl.where(broken > 0, float("nan"), best)
    tl.store(maxima_ptr + at * (CHUNK // GROUP) + group_G, maxima)
    tl.store(best_ptr + at, best)
    tl.store(best_id_ptr + at, best_id)
    return best


@triton.jit(do_not_specialize=["columns_stride"])
def drawn_rank_kernel(
    x_ptr, x_stride, work_ptr, columns_ptr, numbers_ptr, columns_stride, row_ptr, position_ptr, token_ptr,
    cut_logit_ptr, cut_id_ptr, rank_ptr, vocab, CHUNK: tl.constexpr,
):
    """Add to a row's rank the number of ids in a chunk before its token, in the model's order or the processed one."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.load(row_ptr + row).to(tl.int64)
    asks = asks_of(numbers_ptr, columns_stride, at)
    if (asks & (_ASK_RANK | _ASK_OWN_RANK)) != 0:
        token = tl.load(token_ptr + row).to(tl.int32)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        here = ids < vocab
        of_own = (asks & _ASK_OWN_RANK) != 0
        if of_own & is_edited(numbers_ptr, columns_stride, at, tl.load(position_ptr + row)):
            x = tl.load(work_ptr + row * vocab + ids, mask=here, other=-float("inf"))
            own = tl.load(work_ptr + row * vocab + token)
        else:
            x = tl.load(x_ptr + row * x_stride + ids, mask=here, other=-float("inf")).to(tl.float32)
            own = tl.load(x_ptr + row * x_stride + token).to(tl.float32)
        if of_own:
            cut, cut_id = tl.load(cut_logit_ptr + row), tl.load(cut_id_ptr + row).to(tl.int32)
            here = here & ((x > cut) | ((x == cut) & (ids <= cut_id)))
            temperature = tl.load(columns_ptr + _TEMPERATURE * columns_stride + at).to(tl.float32)
            x, own = tl.div_rn(x, temperature), tl.div_rn(own, temperature)
        before = ((x > own) | ((x == own) & (ids < token))) & here
        tl.atomic_add(rank_ptr + row, tl.sum(before.to(tl.int32), 0).to(tl.int64), sem="relaxed")

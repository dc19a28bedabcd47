"""The kernels of `triton.sampling`, which describes them.

Legend: C chunks, G groups of neighbouring ids, H candidates held in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_infer.kernels.draw_columns import Asks, Column
from megatron_infer.kernels.triton.sampling_device import (
    SCALE,
    draw_from,
    gather_candidates,
    level_of,
    logit_of,
    weight_of,
)

# fmt: off

_STREAM = tl.constexpr(int(Column.STREAM))
_ASKS = tl.constexpr(int(Column.ASKS))
_RAW = tl.constexpr(int(Asks.RAW))
_OWN = tl.constexpr(int(Asks.OWN))


@triton.jit
def chunk_maxima_kernel(
    x_ptr, x_stride, maxima_ptr, best_ptr, best_id_ptr, vocab, num_chunks, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):
    """Maxima of groups, and the largest logit of each chunk (NaN if one is NaN) with its lowest id."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group_G = tl.arange(0, CHUNK // GROUP)
    ids = chunk * CHUNK + group_G[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * x_stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    broken = tl.max(tl.max((x != x).to(tl.int32), 1), 0)
    x = tl.where(x == x, x, -float("inf"))
    maxima = tl.max(x, 1)
    best = tl.max(maxima, 0)
    best_id = tl.min(tl.min(tl.where(x == best, ids, 0x7FFFFFFF), 1), 0)
    at = row * num_chunks + chunk
    tl.store(maxima_ptr + at * (CHUNK // GROUP) + group_G, maxima)
    tl.store(best_ptr + at, tl.where(broken > 0, float("nan"), best))
    tl.store(best_id_ptr + at, best_id)


@triton.jit
def largest(best_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    """(largest logit of the row, whether the row can be drawn from, largest logits of its chunks)."""
    at = tl.arange(0, CHUNKS)
    best_C = tl.load(best_ptr + row * num_chunks + at, mask=at < num_chunks, other=-float("inf"))
    broken = tl.max((best_C != best_C).to(tl.int32), 0) > 0
    top = tl.max(tl.where(best_C == best_C, best_C, -float("inf")), 0)
    fit = (broken == 0) & (top < float("inf")) & (top > -float("inf"))
    return tl.where(broken, float("nan"), top), fit, best_C


@triton.jit
def wishes(columns_ptr, stride, at):
    """(1 / temperature, top_k, top_p, min_p)."""
    columns_ptr += at
    top_k = tl.load(columns_ptr + stride).to(tl.int32)
    return tl.load(columns_ptr), top_k, tl.load(columns_ptr + 2 * stride), tl.load(columns_ptr + 3 * stride)


@triton.jit
def needs_mass(top_k, top_p, min_p, vocab):
    """Whether the draw needs the sum of all weights: without filters, or for a nucleus without a top_k."""
    return (top_k >= vocab) & ((top_p < 1.0) | (min_p <= 0.0))


@triton.jit
def asks_of(numbers_ptr, stride, at):
    """`Asks` of a request row, int32."""
    return tl.load(numbers_ptr + _ASKS * stride + at).to(tl.int32)


@triton.jit(do_not_specialize=["columns_stride"])
def chunk_masses_kernel(
    x_ptr, x_stride, best_ptr, mass_ptr, columns_ptr, columns_stride, row_ptr, numbers_ptr, model_mass_ptr, vocab,
    num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STATIC: tl.constexpr,
):
    """Sums of weights of the chunks, for rows whose draw needs them. STATIC: also those at temperature 1, for rows that
    ask for the model's log probability."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, asks = row, tl.zeros((), tl.int32)
    if STATIC:
        at = tl.load(row_ptr + row).to(tl.int64)
        asks = asks_of(numbers_ptr, columns_stride, at)
    inverse, top_k, top_p, min_p = wishes(columns_ptr, columns_stride, at)
    top, fit, _ = largest(best_ptr, row, num_chunks, CHUNKS)
    is_drawn = inverse > 0.0
    wanted = tl.where(is_drawn, needs_mass(top_k, top_p, min_p, vocab), (asks & _OWN) != 0)
    of_model = (asks & _RAW) != 0
    if fit & (wanted | of_model):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + row * x_stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        one = tl.full((), 1.0, tl.float64)
        inverse = tl.where(is_drawn, inverse, one)
        place = row * num_chunks + chunk
        mass = tl.zeros((), tl.int64)
        if wanted:
            mass = tl.sum(weight_of(x, top, inverse), 0)
            tl.store(mass_ptr + place, mass)
        if STATIC:
            if of_model & ((wanted == 0) | (inverse != 1.0)):
                mass = tl.sum(weight_of(x, top, one), 0)
            tl.store(model_mass_ptr + place, mass, mask=of_model)


@triton.jit
def logprob_of(x, top, inverse, mass):
    """fp32 log probability of a fp32 logit in a distribution with largest logit `top` and sum of weights `mass`."""
    return ((x.to(tl.float64) - top.to(tl.float64)) * inverse - tl.log(mass.to(tl.float64) / SCALE)).to(tl.float32)


@triton.jit
def mix(x):
    """`rng.mix`: SplitMix64's finaliser, uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform_of(stream, position):
    """`rng.uniform` of a row's stream (int64 bits of mix(seed)) and position -> float64, the same bits."""
    counter = (position.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    drawn = mix(stream.to(tl.uint64, bitcast=True) + counter) >> 11
    return drawn.to(tl.int64, bitcast=True).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def draw_free(x_ptr, mass_C, uniform, vocab, top, inverse, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Draw without a filter, by sums in order of ids: first the chunk that holds the target, then the entry in it."""
    at_C = tl.arange(0, CHUNKS)
    total = tl.sum(mass_C, 0)
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    chunk = tl.sum((tl.cumsum(mass_C, 0) <= target).to(tl.int32), 0)  # chunks of padding are above it
    before = tl.sum(tl.where(at_C < chunk, mass_C, 0), 0)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    upto = before + tl.cumsum(weight_of(x, top, inverse), 0)
    return chunk * CHUNK + tl.sum((upto <= target).to(tl.int32), 0), total


@triton.jit
def draw_held(
    x_ptr, maxima_ptr, listed_ptr, held_ptr, total, wanted, top_k, top_p, min_p, uniform, vocab, num_groups, top,
    inverse, GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Draw among the first candidates, if they can be held -> (whether they were enough, *results of `draw_from`)."""
    token, cut_id = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    cut_logit = tl.full((), -float("inf"), tl.float32)
    kept_mass = tl.zeros((), tl.int64)
    enough = wanted < 0
    if wanted <= HELD // 2:
        num_held, lowest = gather_candidates(
            x_ptr, maxima_ptr, listed_ptr, held_ptr, wanted, vocab, num_groups, GROUPS, GROUP, TILE, HELD, SHIFT
        )
        if num_held <= HELD:
            place = tl.arange(0, HELD)
            level_H = tl.load(held_ptr + place, mask=place < num_held, other=-0x7FFFFFFF)
            id_H = tl.load(held_ptr + HELD + place, mask=place < num_held, other=0)
            weight_H = tl.where(place < num_held, weight_of(logit_of(level_H, SHIFT), top, inverse), 0)
            held_mass = tl.sum(weight_H, 0).to(tl.float64)
            last = weight_of(logit_of(lowest, SHIFT), top, inverse).to(tl.float64)
            enough = (top_k < vocab) | (num_held == vocab) | (last < min_p * SCALE)
            enough = enough | ((top_p < 1.0) & (held_mass >= top_p * total.to(tl.float64)))
            if enough:
                token, cut_logit, cut_id, kept_mass = draw_from(
                    level_H, id_H, weight_H, lowest, level_of(top, SHIFT), total, top_k, top_p, min_p, uniform,
                    x_ptr, vocab, top, inverse, False, SHIFT, BLOCK,
                )
        tl.debug_barrier()  # held_ptr may be filled again
    return enough, token, cut_logit, cut_id, kept_mass


@triton.jit
def draw_filtered(
    x_ptr, maxima_ptr, listed_ptr, held_ptr, total, top_k, top_p, min_p, uniform, vocab, num_groups, top, inverse,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr, MANY: tl.constexpr,
    BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):
    """Draw among few candidates, else among more, else among all -> results of `draw_from`."""
    wanted = tl.where(top_k < vocab, top_k, MANY)
    enough, token, cut_logit, cut_id, kept_mass = draw_held(
        x_ptr, maxima_ptr, listed_ptr, held_ptr, total, wanted, top_k, top_p, min_p, uniform, vocab, num_groups, top,
        inverse, GROUP, GROUPS, TILE, HELD, BLOCK, SHIFT,
    )
    if enough == 0:
        wanted = tl.where(top_k < vocab, top_k, 4 * MANY)
        enough, token, cut_logit, cut_id, kept_mass = draw_held(
            x_ptr, maxima_ptr, listed_ptr, held_ptr, total, wanted, top_k, top_p, min_p, uniform, vocab, num_groups,
            top, inverse, GROUP, GROUPS, TILE, 2 * HELD, BLOCK, SHIFT,
        )
    if enough == 0:
        lowest = level_of(tl.full((), -float("inf"), tl.float32), SHIFT)
        none = tl.arange(0, 1)
        token, cut_logit, cut_id, kept_mass = draw_from(
            none, none, none, lowest, level_of(top, SHIFT), total, top_k, top_p, min_p, uniform,
            x_ptr, vocab, top, inverse, True, SHIFT, BLOCK,
        )
    return token, cut_logit, cut_id, kept_mass


@triton.jit(do_not_specialize=["columns_stride"])
def draw_kernel(
    x_ptr, x_stride, maxima_ptr, best_ptr, best_id_ptr, mass_ptr, listed_ptr, held_ptr,
    columns_ptr, columns_stride, numbers_ptr, row_ptr, position_ptr, pool_ptr, pool_stride, model_mass_ptr, token_ptr,
    top_ptr, bad_ptr, cut_logit_ptr, cut_id_ptr, row_mass_ptr, own_ptr, raw_ptr, vocab, num_chunks,
    STATIC: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    TILE: tl.constexpr, HELD: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):
    """One row's token. STATIC: parameters are read by request row, the uniform is computed here, and the token is
    written to the pool."""
    row = tl.program_id(0).to(tl.int64)
    at, asks = row, tl.zeros((), tl.int32)
    if STATIC:
        at = tl.load(row_ptr + row).to(tl.int64)
        position = tl.load(position_ptr + row)
        asks = asks_of(numbers_ptr, columns_stride, at)
    inverse, top_k, top_p, min_p = wishes(columns_ptr, columns_stride, at)
    x_ptr += row * x_stride
    top, fit, best_C = largest(best_ptr, row, num_chunks, CHUNKS)
    at_C = tl.arange(0, CHUNKS)
    here_C = at_C < num_chunks
    token = tl.zeros((), tl.int32)
    cut_logit = tl.full((), -float("inf"), tl.float32)
    cut_id = token + vocab
    row_mass, kept_mass = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    if fit & (inverse <= 0.0):
        id_C = tl.load(best_id_ptr + row * num_chunks + at_C, mask=here_C, other=0x7FFFFFFF)
        token = tl.min(tl.where(best_C == top, id_C, 0x7FFFFFFF), 0)
        if (asks & _OWN) != 0:
            kept_mass = tl.sum(tl.load(mass_ptr + row * num_chunks + at_C, mask=here_C, other=0), 0)
    if fit & (inverse > 0.0):
        if STATIC:
            uniform = uniform_of(tl.load(numbers_ptr + _STREAM * columns_stride + at), position)
        else:
            uniform = tl.load(columns_ptr + 4 * columns_stride + at)
        mass_C = tl.zeros((CHUNKS,), tl.int64)
        if needs_mass(top_k, top_p, min_p, vocab):
            mass_C = tl.load(mass_ptr + row * num_chunks + at_C, mask=here_C, other=0)
        total = tl.sum(mass_C, 0)
        row_mass = tl.where(inverse == 1.0, total, 0)
        if (top_k >= vocab) & (top_p >= 1.0) & (min_p <= 0.0):
            token, kept_mass = draw_free(x_ptr, mass_C, uniform, vocab, top, inverse, CHUNK, CHUNKS)
        else:
            num_groups = num_chunks * (CHUNK // GROUP)
            token, cut_logit, cut_id, kept_mass = draw_filtered(
                x_ptr, maxima_ptr + row * num_groups, listed_ptr + row * GROUPS, held_ptr + row * 4 * HELD, total,
                top_k, top_p, min_p, uniform, vocab, num_groups, top, inverse,
                GROUP, GROUPS, TILE, HELD, MANY, BLOCK, SHIFT,
            )
    token = tl.minimum(token, vocab - 1)
    tl.store(token_ptr + row, token.to(tl.int64))
    own = logprob_of(tl.load(x_ptr + token).to(tl.float32), top, tl.where(inverse > 0.0, inverse, 1.0), kept_mass)
    known = fit
    if STATIC == 0:
        known = fit & (inverse > 0.0)
    tl.store(own_ptr + row, tl.where(known, own, float("nan")))
    tl.store(top_ptr + row, top)
    tl.store(cut_logit_ptr + row, cut_logit)
    tl.store(cut_id_ptr + row, cut_id.to(tl.int64))
    if STATIC:
        tl.store(bad_ptr + row, (fit == 0).to(tl.int8))
        tl.store(pool_ptr + at * pool_stride + position, token)
        if (asks & _RAW) != 0:
            row_mass = tl.sum(tl.load(model_mass_ptr + row * num_chunks + at_C, mask=here_C & fit, other=0), 0)
            raw = logprob_of(tl.load(x_ptr + token).to(tl.float32), top, tl.full((), 1.0, tl.float64), row_mass)
            tl.store(raw_ptr + row, tl.where(fit, raw, float("nan")))
    tl.store(row_mass_ptr + row, row_mass)


@triton.jit
def best_kernel(best_ptr, best_id_ptr, token_ptr, num_chunks, CHUNKS: tl.constexpr):
    """The lowest id of a row's largest logit."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    here = at < num_chunks
    best_C = tl.load(best_ptr + row * num_chunks + at, mask=here, other=-float("inf"))
    id_C = tl.load(best_id_ptr + row * num_chunks + at, mask=here, other=0x7FFFFFFF)
    top = tl.max(tl.where(best_C == best_C, best_C, -float("inf")), 0)
    tl.store(token_ptr + row, tl.min(tl.where(best_C == top, id_C, 0x7FFFFFFF), 0).to(tl.int64))


@triton.jit
def chunk_ranks_kernel(
    x_ptr, x_stride, best_ptr, mass_ptr, before_ptr, token_ptr, known_ptr, vocab, num_chunks, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """For each chunk: the number of ids before the row's token, and the sum of weights at temperature 1 if unknown."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x_ptr += row * x_stride
    at = row * num_chunks + chunk
    token = tl.load(token_ptr + row)
    own = tl.load(x_ptr + token).to(tl.float32)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    before = ((x > own) | ((x == own) & (ids < token))) & (ids < vocab)
    tl.store(before_ptr + at, tl.sum(before.to(tl.int32), 0))
    top, fit, _ = largest(best_ptr, row, num_chunks, CHUNKS)
    known = tl.zeros((), tl.int64)
    if known_ptr is not None:
        known = tl.load(known_ptr + row)
    if fit & (known <= 0):
        one = tl.full((), 1.0, tl.float64)
        tl.store(mass_ptr + at, tl.sum(weight_of(x, top, one), 0))


@triton.jit(do_not_specialize=["num_top"])
def score_kernel(
    x_ptr, x_stride, maxima_ptr, best_ptr, mass_ptr, before_ptr, listed_ptr, held_ptr, token_ptr, known_ptr,
    logprob_ptr, rank_ptr, top_ids_ptr, top_logprobs_ptr, num_top, vocab, num_chunks, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr,
    BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):
    """Log probability and rank of a row's token, and the best candidates in order."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    at_C = tl.arange(0, CHUNKS)
    here_C = at_C < num_chunks
    top, fit, _ = largest(best_ptr, row, num_chunks, CHUNKS)
    mass = tl.zeros((), tl.int64)
    if known_ptr is not None:
        mass = tl.load(known_ptr + row)
    if mass <= 0:
        mass = tl.sum(tl.load(mass_ptr + row * num_chunks + at_C, mask=here_C & fit, other=0), 0)
    own = logprob_of(tl.load(x_ptr + tl.load(token_ptr + row)).to(tl.float32), top, tl.full((), 1.0, tl.float64), mass)
    rank = 1 + tl.sum(tl.load(before_ptr + row * num_chunks + at_C, mask=here_C, other=0), 0)
    tl.store(logprob_ptr + row, tl.where(fit, own, float("nan")))
    tl.store(rank_ptr + row, rank.to(tl.int64))
    top_ids_ptr += row * num_top
    top_logprobs_ptr += row * num_top
    if fit == 0:
        for i in range(num_top):
            tl.store(top_ids_ptr + i, i + tl.zeros((), tl.int64))
            tl.store(top_logprobs_ptr + i, float("nan"))
    if fit & (num_top > 0):
        num_groups = num_chunks * (CHUNK // GROUP)
        num_held = tl.zeros((), tl.int32) + (HELD + 1)
        held_ptr += row * 4 * HELD
        if num_top <= HELD // 2:
            num_held, _lowest = gather_candidates(
                x_ptr, maxima_ptr + row * num_groups, listed_ptr + row * GROUPS, held_ptr, num_top, vocab, num_groups,
                GROUPS, GROUP, TILE, HELD, SHIFT,
            )
        if num_held <= HELD:
            place = tl.arange(0, HELD)
            level_H = tl.load(held_ptr + place, mask=place < num_held, other=-0x7FFFFFFF)
            id_H = tl.load(held_ptr + HELD + place, mask=place < num_held, other=0x7FFFFFFF)
            key_H = order_of(level_H, id_H)
            for i in range(num_top):
                key = tl.max(key_H, 0)
                put_alternative(top_ids_ptr + i, top_logprobs_ptr + i, key, top, mass, SHIFT)
                key_H = tl.where(key_H == key, -0x7FFFFFFFFFFFFFFF, key_H)
        else:
            last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
            for i in range(num_top):
                last = next_candidate(x_ptr, last, vocab, SHIFT, BLOCK)
                put_alternative(top_ids_ptr + i, top_logprobs_ptr + i, last, top, mass, SHIFT)


@triton.jit
def order_of(level, id):
    """int64 keys that sort as the candidates, the first one largest."""
    return (level.to(tl.int64) << 32) | (0x7FFFFFFF - id).to(tl.int64)


@triton.jit
def put_alternative(id_ptr, logprob_ptr, key, top, mass, SHIFT: tl.constexpr):
    """Store the candidate of a key and its log probability."""
    tl.store(id_ptr, 0x7FFFFFFF - (key & 0x7FFFFFFF))
    logit = logit_of((key >> 32).to(tl.int32), SHIFT)
    tl.store(logprob_ptr, logprob_of(logit, top, tl.full((), 1.0, tl.float64), mass))


@triton.jit
def next_candidate(x_ptr, last, vocab, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The key of a row's first candidate behind the one with key `last`."""
    key = tl.full((), -0x7FFFFFFFFFFFFFFF, tl.int64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        key_B = order_of(level_of(x, SHIFT), ids)
        key = tl.maximum(key, tl.max(tl.where((key_B < last) & (ids < vocab), key_B, -0x7FFFFFFFFFFFFFFF), 0))
    return key


@triton.jit
def forbid_kernel(work_ptr, work_stride, bits_ptr, num_words, rows_ptr, vocab, BLOCK: tl.constexpr):
    """Write -inf where a row's bit is not set."""
    mask = tl.program_id(0).to(tl.int64)
    row = mask
    if rows_ptr is not None:
        row = tl.load(rows_ptr + mask)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits_ptr + mask * num_words + ids // 32, mask=ids < vocab, other=-1)
    forbidden = ((word >> (ids % 32)) & 1) == 0
    none = tl.full((BLOCK,), -float("inf"), tl.float32)
    tl.store(work_ptr + row * work_stride + ids, none, mask=forbidden & (ids < vocab))

"""Device functions behind `triton.sampling`: integer weights, sort keys, and the search for a place in candidate order.

The definition is that of runner/sampling/filters.py: weights floor(2**40 * exp((logit - max) / temperature)), exact
int64 sums, candidates by (logit descending, id ascending). A *level* is an integer that sorts as the logit: the bits of
the fp32 value made monotone, without the low bits that are always 0 in the logits' dtype. What is kept or drawn is "all
candidates above a level, and the first few at it": a level is found by bisection on sums over what lies above.

Legend: C candidates held in registers, V vocab, one row a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off

SCALE = tl.constexpr(1099511627776.0)  # 2**40
ANY_MASS = tl.constexpr(0x7FFFFFFFFFFFFFFF)
ANY_BOUND = tl.constexpr(1.0e300)


@triton.jit
def weight_of(x, top, inverse):
    """floor(2**40 * e**s) of fp32 logits, s = (x - top) * inverse <= 0 in float64 -> int64.

    e**s is a degree-13 Taylor polynomial after range reduction, as in native/sampling.cpp: within 1 ulp, 2**40 exactly
    at s = 0, and with the same bits on every GPU and for every version of Triton, whose own exp is not used.
    """
    s = tl.maximum((x.to(tl.float64) - top.to(tl.float64)) * inverse, -40.0)  # 2**40 e**-40 is below 1
    shifted = s * 1.4426950408889634 + 6755399441055744.0  # adding 1.5 * 2**52 rounds to an integer
    n = shifted - 6755399441055744.0
    r = s - n * 0.693147180369123816490
    r = r - n * 1.90821492927058770002e-10
    p = r * 1.6059043836821613e-10 + 2.08767569878681e-09
    p = p * r + 2.505210838544172e-08
    p = p * r + 2.755731922398589e-07
    p = p * r + 2.7557319223985893e-06
    p = p * r + 2.48015873015873e-05
    p = p * r + 0.0001984126984126984
    p = p * r + 0.001388888888888889
    p = p * r + 0.008333333333333333
    p = p * r + 0.041666666666666664
    p = p * r + 0.16666666666666666
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    bits = p.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
    return (bits.to(tl.float64, bitcast=True) * SCALE).to(tl.int64)


@triton.jit
def level_of(x, SHIFT: tl.constexpr):
    """int32 that sorts as the logits; 0.0 and -0.0 have the same level."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def logit_of(level, SHIFT: tl.constexpr):
    """The logit at a level, fp32."""
    low = tl.where(level < 0, (1 << SHIFT) - 1, 0)
    key = (level << SHIFT) | low
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def between(
    level_C, weight_C, above, upto, x_ptr, vocab, top, inverse, ROW: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(count, mass) of candidates with above < level <= upto, of the held ones or of the whole ROW."""
    if ROW:
        count = tl.zeros((), tl.int32)
        mass = tl.zeros((), tl.int64)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
            level = level_of(x, SHIFT)
            inside = (level > above) & (level <= upto) & (ids < vocab)
            num = tl.sum(inside.to(tl.int32), 0)
            if num > 0:
                mass += tl.sum(tl.where(inside, weight_of(x, top, inverse), 0), 0)
            count += num
    else:
        inside = (level_C > above) & (level_C <= upto)
        count = tl.sum(inside.to(tl.int32), 0)
        mass = tl.sum(tl.where(inside, weight_C, 0), 0)
    return count, mass


@triton.jit
def lowest_level(
    level_C, weight_C, lowest, highest, most, bound, limit, least, x_ptr, vocab, top, inverse, ROW: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):
    """The lowest level from which a candidate may still be taken -> (level, count above it, mass above it).

    A level qualifies while fewer than `most` candidates, and less mass than `bound` (as float64) and `limit`, lie above
    it, and a weight at it is at least `least`. The highest level always qualifies, one below `lowest` never does.
    """
    low, high = lowest - 1, highest
    count, mass = tl.zeros((), tl.int32), tl.zeros((), tl.int64)
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)  # rounds down, without overflow
        more, heavier = between(level_C, weight_C, middle, high, x_ptr, vocab, top, inverse, ROW, SHIFT, BLOCK)
        weight = weight_of(logit_of(middle, SHIFT), top, inverse)
        may = (count + more < most) & ((mass + heavier).to(tl.float64) < bound) & (mass + heavier < limit)
        may = may & (weight.to(tl.float64) >= least)
        low = tl.where(may, low, middle)
        high = tl.where(may, middle, high)
        count += tl.where(may, more, 0)
        mass += tl.where(may, heavier, 0)
    return high, count, mass


@triton.jit
def nth_at(level_C, id_C, level, index, x_ptr, vocab, ROW: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Id of the index-th candidate at a level, by id; held candidates are in that order."""
    if ROW:
        seen = tl.zeros((), tl.int32)
        found = tl.zeros((), tl.int32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
            at = ((level_of(x, SHIFT) == level) & (ids < vocab)).to(tl.int32)
            num = tl.sum(at, 0)
            if (seen <= index) & (index < seen + num):
                found = tl.max(tl.where((at == 1) & (seen + tl.cumsum(at, 0) == index + 1), ids, 0), 0)
            seen += num
    else:
        at = (level_C == level).to(tl.int32)
        found = tl.max(tl.where((at == 1) & (tl.cumsum(at, 0) == index + 1), id_C, 0), 0)
    return found


@triton.jit
def lowest_present(
    level_C, from_level, highest, x_ptr, vocab, ROW: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """The lowest level >= from_level of a candidate."""
    if ROW:
        found = highest
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + ids, mask=ids < vocab, other=float("inf")).to(tl.float32)
            level = level_of(x, SHIFT)
            found = tl.minimum(found, tl.min(tl.where(level >= from_level, level, highest), 0))
    else:
        found = tl.min(tl.where(level_C >= from_level, level_C, highest), 0)
    return found


@triton.jit
def draw_from(
    level_C, id_C, weight_C, lowest, highest, mass_V, top_k, top_p, min_p, uniform, x_ptr, vocab, top, inverse,
    ROW: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):
    """top_k, top_p on the rest, min_p, then the draw -> (token, logit and id of the last candidate kept, the sum of the
    weights of all candidates kept)."""
    has_top_k = top_k < vocab
    bound = tl.full((), ANY_BOUND, tl.float64)
    if top_p < 1.0:
        mass = mass_V
        if has_top_k:
            level, count, above = lowest_level(
                level_C, weight_C, lowest, highest, top_k, ANY_BOUND, ANY_MASS, -1.0, x_ptr, vocab, top, inverse,
                ROW, SHIFT, BLOCK,
            )
            mass = above + (top_k - count).to(tl.int64) * weight_of(logit_of(level, SHIFT), top, inverse)
        bound = top_p * mass.to(tl.float64)
    least = min_p * SCALE
    level, count, above = lowest_level(
        level_C, weight_C, lowest, highest, top_k, bound, ANY_MASS, least, x_ptr, vocab, top, inverse, ROW, SHIFT,
        BLOCK,
    )
    num, _ = between(level_C, weight_C, level - 1, level, x_ptr, vocab, top, inverse, ROW, SHIFT, BLOCK)
    weight = weight_of(logit_of(level, SHIFT), top, inverse)
    low, kept = num * 0, num  # candidates at the level that are kept: at least `low`, at most `kept`
    while low < kept:
        middle = (low + kept + 1) // 2
        may = (count + middle <= top_k) & ((above + (middle - 1).to(tl.int64) * weight).to(tl.float64) < bound)
        low = tl.where(may, middle, low)
        kept = tl.where(may, kept, middle - 1)
    kept = tl.where((count == 0) & (num > 0), tl.maximum(kept, 1), kept)
    total = above + kept.to(tl.int64) * weight
    cut = lowest_present(level_C, level, highest, x_ptr, vocab, ROW, SHIFT, BLOCK)
    if num == 0:  # no candidate is at the level itself: all at the level before are kept
        kept, _ = between(level_C, weight_C, cut - 1, cut, x_ptr, vocab, top, inverse, ROW, SHIFT, BLOCK)
    cut_id = nth_at(level_C, id_C, cut, kept - 1, x_ptr, vocab, ROW, SHIFT, BLOCK)
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    drawn, _, above = lowest_level(
        level_C, weight_C, level, highest, vocab + 1, ANY_BOUND, target + 1, -1.0, x_ptr, vocab, top, inverse, ROW,
        SHIFT, BLOCK,
    )
    index = (target - above) // tl.maximum(weight_of(logit_of(drawn, SHIFT), top, inverse), 1)
    token = nth_at(level_C, id_C, drawn, index.to(tl.int32), x_ptr, vocab, ROW, SHIFT, BLOCK)
    return token, logit_of(cut, SHIFT), cut_id, total


@triton.jit
def gather_candidates(
    x_ptr, maxima_ptr, listed_ptr, held_ptr, wanted, vocab, num_groups, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, HELD: tl.constexpr, SHIFT: tl.constexpr,
):
    """Collect the first candidates: at least `wanted`, and all that equal the last -> (count, the last one's level).

    `wanted` groups of neighbouring ids have a largest logit of at least the bound, so at least as many candidates reach
    it, and groups below it have none. held_ptr: [2, HELD] levels and ids, by id; beyond HELD they are only counted.
    """
    group_G = tl.arange(0, GROUPS)
    here_G = group_G < num_groups
    level_G = level_of(tl.load(maxima_ptr + group_G, mask=here_G, other=-float("inf")), SHIFT)
    low = level_of(tl.full((), -float("inf"), tl.float32), SHIFT)
    high = tl.max(level_G, 0) + 1
    while low + 1 < high:  # the highest level that `wanted` groups reach
        middle = (low & high) + ((low ^ high) >> 1)
        reach = tl.sum(((level_G >= middle) & here_G).to(tl.int32), 0) >= wanted
        low = tl.where(reach, middle, low)
        high = tl.where(reach, high, middle)
    chosen = ((level_G >= low) & here_G).to(tl.int32)
    tl.store(listed_ptr + tl.cumsum(chosen, 0) - 1, group_G, mask=chosen == 1)
    num_listed = tl.sum(chosen, 0)
    tl.debug_barrier()  # every thread may load what another stored
    num_held = tl.zeros((), tl.int32)
    at = tl.arange(0, TILE * GROUP)
    for start in range(0, num_listed, TILE):
        place = start + at // GROUP
        group = tl.load(listed_ptr + place, mask=place < num_listed, other=0)
        ids = group * GROUP + at % GROUP
        inside = (place < num_listed) & (ids < vocab)
        x = tl.load(x_ptr + ids, mask=inside, other=-float("inf")).to(tl.float32)
        level = level_of(x, SHIFT)
        hit = ((level >= low) & inside).to(tl.int32)
        to = num_held + tl.cumsum(hit, 0) - 1
        tl.store(held_ptr + to, level, mask=(hit == 1) & (to < HELD))
        tl.store(held_ptr + HELD + to, ids, mask=(hit == 1) & (to < HELD))
        num_held += tl.sum(hit, 0)
    tl.debug_barrier()
    return num_held, low

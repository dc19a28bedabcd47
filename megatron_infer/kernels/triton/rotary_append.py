"""Rotate a step's queries and keys, and write its keys and values into the paged cache, in one launch.

A program handles some heads of one token: it rotates query heads in place, writes rotated key heads into the cache, and
copies value heads there. Everything is read once and written once; for T tokens of N + 2K heads of H elements that is
2*T*(N + 2K)*H elements, plus the cos and sin of each token, which stay in L1.

A cache of 8 bits gets the bits of `kernels.kv_rounding`, computed here in integers: the same on every GPU and in the
interpreter, whose own conversion rounds some numbers wrongly.

One thread loads and writes both members of a pair, so rotating in place is safe. The arithmetic is fp32 and rounded
once, like the reference's. Source of the rotation: RoFormer, arXiv:2104.09864. Legend: `kernels/base.py`.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.triton.attention_tiles import cdiv, power_of_2
from megatron_infer.kernels.triton.launch import Launcher

TILE = 2048
"""Most elements of one program's tile."""
NUM_WARPS = 4


@triton.jit
def _load_head(base, at, mask, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two members of each pair, fp32; `at` is an index of pairs."""
    if INTERLEAVED:
        first = 2 * at
        second = first + 1
    else:
        first = at
        second = first + ROTARY_DIM // 2
    return tl.load(base + first, mask=mask).to(tl.float32), tl.load(base + second, mask=mask).to(tl.float32)


@triton.jit
def to_e4m3(x):
    """The e4m3 code (uint8) nearest to x (fp32), ties to even; above 448 that of 448; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal: keep 3 bits of the mantissa, a carry goes to the exponent; its bias is 7 instead of 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2**-6: adding 2**14 leaves multiples of 2**-9, which are the codes.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _as_kept(x, source, target):
    """x, rounded to what `source` points to and then to what `target` points to: bytes are e4m3."""
    x = x.to(source.dtype.element_ty)
    if target.dtype.element_ty == tl.uint8:
        kept = to_e4m3(x.to(tl.float32))
    else:
        kept = x.to(target.dtype.element_ty)
    return kept


@triton.jit
def _turn(
    source, target, heads_mask, cos, sin, ROTARY_DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Rotate the leading dims of heads at `source` [HEADS, 1] and write them at `target` [HEADS, 1].

    A pair (a, b) with its own cos and sin for each member becomes (a*cos_a - b*sin_a, b*cos_b + a*sin_b).
    """
    at = tl.arange(0, PAIRS)
    inside = at < ROTARY_DIM // 2
    mask = heads_mask & inside[None, :]
    cos_a, cos_b = _load_head(cos, at, inside, ROTARY_DIM, INTERLEAVED)
    sin_a, sin_b = _load_head(sin, at, inside, ROTARY_DIM, INTERLEAVED)
    a, b = _load_head(source, at[None, :], mask, ROTARY_DIM, INTERLEAVED)
    turned_a = a * cos_a[None, :] - b * sin_a[None, :]
    turned_b = b * cos_b[None, :] + a * sin_b[None, :]
    turned_a = _as_kept(turned_a, source, target)
    turned_b = _as_kept(turned_b, source, target)
    if INTERLEAVED:
        tl.store(target + 2 * at[None, :], turned_a, mask=mask)
        tl.store(target + 2 * at[None, :] + 1, turned_b, mask=mask)
    else:
        tl.store(target + at[None, :], turned_a, mask=mask)
        tl.store(target + ROTARY_DIM // 2 + at[None, :], turned_b, mask=mask)


@triton.jit
def _copy(source, target, heads_mask, BEGIN: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Dims BEGIN .. HEAD_DIM - 1 of heads at `source` [HEADS, 1], rounded as in the cache, to `target` [HEADS, 1]."""
    at = BEGIN + tl.arange(0, HEAD_PAD)[None, :]
    mask = heads_mask & (at < HEAD_DIM)
    tl.store(target + at, _as_kept(tl.load(source + at, mask=mask), source, target), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["kv_pos"])
def rotary_append_kernel(
    q,
    k,
    v,
    k_cache,
    v_cache,
    kv_pos,
    cos,
    sin,
    q_stride_t,
    q_stride_k,
    q_stride_g,
    k_stride_t,
    k_stride_k,
    v_stride_t,
    v_stride_k,
    cos_stride,
    sin_stride,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    REST_PAD: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_TILES: tl.constexpr,
):
    """Grid (T, KV_TILES + tiles of query heads); without rotation there are no tiles of query heads."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cos += token * cos_stride
    sin += token * sin_stride
    if tile < KV_TILES:
        head = (tile * HEADS + tl.arange(0, HEADS))[:, None]
        here = head < NUM_KV
        at = (tl.load(kv_pos + token) * NUM_KV + head) * HEAD_DIM
        source = k + token * k_stride_t + head * k_stride_k
        if ROTARY_DIM > 0:
            _turn(source, k_cache + at, here, cos, sin, ROTARY_DIM, PAIRS, INTERLEAVED)
        if ROTARY_DIM < HEAD_DIM:
            _copy(source, k_cache + at, here, ROTARY_DIM, HEAD_DIM, REST_PAD)
        if HAS_VALUES:
            _copy(v + token * v_stride_t + head * v_stride_k, v_cache + at, here, 0, HEAD_DIM, HEAD_PAD)
    else:
        head = ((tile - KV_TILES) * HEADS + tl.arange(0, HEADS))[:, None]
        here = head < NUM_KV * GROUP
        where = q + token * q_stride_t + (head // GROUP) * q_stride_k + (head % GROUP) * q_stride_g
        if ROTARY_DIM > 0:
            _turn(where, where, here, cos, sin, ROTARY_DIM, PAIRS, INTERLEAVED)


def rotary_append(
    q_TKGH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    keys: Tensor,
    values: Tensor | None,
    kv_pos_T: Tensor,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    *,
    rotary_dim: int,
    interleaved: bool,
) -> None:
    """Rotate q in place; write rotated k, and v, to places kv_pos of `keys` and `values` [blocks, B, K, H], `movable`.

    q, k, v may be strided views with a contiguous last dim. Without cos and sin, or with rotary_dim 0, nothing is
    rotated and q is not accessed. If tokens share a place (in the dummy block), the value of one of them stays.
    values: None where they are a part of the keys, and v is not accessed; a key may then be wider than a query.
    """
    num_tokens, num_kv, group, _ = q_TKGH.shape
    head_dim, has_values = k_TKH.shape[-1], values is not None
    if num_tokens == 0:
        return
    if cos_TR is None or sin_TR is None:
        rotary_dim = 0
    cos, sin = (cos_TR, sin_TR) if rotary_dim else (kv_pos_T, kv_pos_T)  # not read without rotation
    tiles, kernel = _kernel(num_kv, group, head_dim, rotary_dim, interleaved, has_values)
    kernel(
        (num_tokens, tiles),
        q_TKGH,
        k_TKH,
        v_TKH,
        keys,
        keys if values is None else values,
        kv_pos_T,
        cos,
        sin,
        *q_TKGH.stride()[:3],
        *k_TKH.stride()[:2],
        *v_TKH.stride()[:2],
        cos.stride(0),
        sin.stride(0),
    )


@functools.cache
def _kernel(
    num_kv: int, group: int, head_dim: int, rotary_dim: int, interleaved: bool, has_values: bool
) -> tuple[int, Launcher]:
    """(programs of a token, the kernel)."""
    head_pad = power_of_2(head_dim)
    heads = max(1, min(power_of_2(num_kv * group), TILE // head_pad))
    constexprs = {
        "NUM_KV": num_kv,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": head_pad,
        "ROTARY_DIM": rotary_dim,
        "PAIRS": power_of_2(max(1, rotary_dim // 2)),
        "REST_PAD": power_of_2(max(1, head_dim - rotary_dim)),
        "HAS_VALUES": has_values,
        "INTERLEAVED": interleaved,
        "HEADS": heads,
        "KV_TILES": cdiv(num_kv, heads),
    }
    q_tiles = cdiv(num_kv * group, heads) if rotary_dim else 0
    kernel = Launcher(rotary_append_kernel, **constexprs, num_warps=NUM_WARPS, num_stages=1)
    return cdiv(num_kv, heads) + q_tiles, kernel

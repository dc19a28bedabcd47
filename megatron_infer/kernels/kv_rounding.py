"""Keys and values in the cache's dtype: that of the activations, or rounded to eight bits.

FP8 is e4m3 (4 exponent bits, 3 of mantissa; no infinity): normal from 2**-6 = 0.0156 to 448, where rounding changes a
number by at most 2**-4 of itself; below in steps of 2**-9, where it changes it by at most 2**-10; everything above 448
becomes 448. Keys are rounded after rotation, from the activations' dtype. There is no scale: a scale derived from
content would make a position's bits depend on others, and a power of two would only shift the range. SmolLM2's keys and
values reach 20, and 2.4 % of them lie below 2**-6; a model with values above 448 cannot use this cache.

Every query, also in the step that appends them, sees the rounded keys and values: an answer does not depend on how its
prompt was chunked. Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def as_kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the cache's dtype, rounded to nearest (ties to even), saturating; NaN stays NaN. x itself in its own dtype.

    Example in FP8: 1.0625 -> 1.0, 1.1875 -> 1.25, -1e9 -> -448, 2**-11 -> 0.
    """
    if x.dtype is dtype:
        return x
    return x.clamp(-FP8_MAX, FP8_MAX).to(dtype)


def movable(x: Tensor) -> Tensor:
    """The same memory in a dtype that every device can index and compare; for FP8 torch cannot everywhere."""
    return x.view(torch.uint8) if x.dtype is FP8 else x


def append(pages: Tensor, kv_pos_T: Tensor, x_TKH: Tensor) -> Tensor:
    """Write x to places kv_pos of keys or values [blocks, B, K, H] -> x as readers of the cache see it, in x's dtype.

    x itself where the cache has x's dtype.
    """
    kept = as_kept(x_TKH, pages.dtype)
    movable(pages).view(-1, *pages.shape[2:]).index_copy_(0, kv_pos_T, movable(kept))
    return kept.to(x_TKH.dtype)


def select(pages: Tensor, blocks: Tensor) -> Tensor:
    """A copy of some blocks, in the cache's dtype."""
    return movable(pages).index_select(0, blocks).view(pages.dtype)


def only_own_dtype(dtype: object, kv_dtype: object | None) -> str | None:
    """Why a backend that reads the cache in the activations' dtype only cannot run; None: it can."""
    if kv_dtype is None or kv_dtype is dtype:
        return None
    return f"reads keys and values in {dtype} only, the cache keeps them in {kv_dtype}"

"""Keys and values as the cache keeps them: in the activations' dtype, or rounded to eight bits.

FP8 is e4m3 (4 exponent bits, 3 of mantissa; no infinity): normal from 2**-6 = 0.0156 to 448, where a number moves by at
most 2**-4 of itself; in steps of 2**-9 below, where it moves by at most 2**-10; everything above 448 becomes 448. Keys
are rounded after they were turned, from the activations' dtype. There is no scale: a scale derived from content would
tie a position's bits to others', and a power of two would only shift the range. SmolLM2's keys and values reach 20 and
2.4 % of them lie below 2**-6; a model with some beyond 448 is not for this cache.

Every query, those of the step that appends them too, sees keys and values as they are kept: an answer does not depend
on how its prompt was cut. Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def as_kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the cache's dtype, to the nearest (ties to even), saturating; NaN stays NaN. x itself where it has that.

    Example in FP8: 1.0625 -> 1.0, 1.1875 -> 1.25, -1e9 -> -448, 2**-11 -> 0.
    """
    if x.dtype is dtype:
        return x
    return x.clamp(-FP8_MAX, FP8_MAX).to(dtype)


def movable(x: Tensor) -> Tensor:
    """The same memory in a dtype that every device can index and compare: torch lacks some of it for FP8."""
    return x.view(torch.uint8) if x.dtype is FP8 else x


def append(pages: Tensor, kv_pos_T: Tensor, x_TKH: Tensor) -> Tensor:
    """Write x to places kv_pos of keys or values [blocks, B, K, H] -> x as its readers see it, in its dtype.

    x itself where the cache keeps it as it is.
    """
    kept = as_kept(x_TKH, pages.dtype)
    movable(pages).view(-1, *pages.shape[2:]).index_copy_(0, kv_pos_T, movable(kept))
    return kept.to(x_TKH.dtype)


def select(pages: Tensor, blocks: Tensor) -> Tensor:
    """A copy of these blocks, in the cache's dtype."""
    return movable(pages).index_select(0, blocks).view(pages.dtype)


def only_own_dtype(dtype: object, kv_dtype: object | None) -> str | None:
    """Why a backend that reads the cache in the activations' dtype cannot run; None: it can."""
    if kv_dtype is None or kv_dtype is dtype:
        return None
    return f"reads keys and values in {dtype} only, the cache keeps them in {kv_dtype}"

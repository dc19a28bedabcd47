"""Conversions to and from eight bits, by a kernel of their own."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_infer.kernels.triton.rotary_append import to_e4m3


@triton.jit
def to_e4m3_kernel(x, out, num, SIZE: tl.constexpr):
    """Grid (ceil(num / SIZE),): codes of fp32 numbers."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, to_e4m3(tl.load(x + at, mask=at < num)), mask=at < num)


@triton.jit
def widen_kernel(x, out, num, SIZE: tl.constexpr):
    """The same grid: numbers of codes, as the attention kernels widen a tile."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at, mask=at < num, other=0.0).to(out.dtype.element_ty), mask=at < num)

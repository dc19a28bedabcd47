"""Kernels that show what device functions give; imported where kernels can run."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_infer.kernels.triton.attention_decode import share_of_program
from megatron_infer.kernels.triton.rotary_append import to_e4m3
from megatron_infer.kernels.triton.sampling_device import weight_of
from megatron_infer.kernels.triton.sampling_kernels import uniform_of


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


@triton.jit
def share_kernel(kv_len, num_rows, out, CHUNK: tl.constexpr, SHORT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """What attention's programs would do."""
    count, row, split = share_of_program(kv_len, num_rows, CHUNK, SHORT, MAX_SPLITS, 0)
    at = out + 3 * tl.program_id(1)
    tl.store(at, count)
    tl.store(at + 1, row)
    tl.store(at + 2, split)


@triton.jit
def draw_kernel(x, weight, stream, position, uniform, N: tl.constexpr):
    """Weights at an inverse temperature of 0.7 below a largest logit of 0, and uniforms, of N entries each."""
    at = tl.arange(0, N)
    top, inverse = tl.full((), 0.0, tl.float32), tl.full((), 0.7, tl.float64)
    tl.store(weight + at, weight_of(tl.load(x + at), top, inverse))
    tl.store(uniform + at, uniform_of(tl.load(stream + at), tl.load(position + at)))

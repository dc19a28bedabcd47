"""A kernel that shows what device functions of sampling give; imported where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_infer.kernels.triton.sampling_device import weight_of
from megatron_infer.kernels.triton.sampling_kernels import uniform_of


@triton.jit
def probe_kernel(x, weight, stream, position, uniform, N: tl.constexpr):
    """Weights at an inverse temperature of 0.7 below a largest logit of 0, and uniforms, of N entries each."""
    at = tl.arange(0, N)
    top, inverse = tl.full((), 0.0, tl.float32), tl.full((), 0.7, tl.float64)
    tl.store(weight + at, weight_of(tl.load(x + at), top, inverse))
    tl.store(uniform + at, uniform_of(tl.load(stream + at), tl.load(position + at)))

"""Activations between fc1 and fc2 in one launch, gated or not. Not yet run on a GPU.

Computed in fp32 and rounded once, at the store; torch in 16 bit rounds after each call. tanh(z) is 2 sigmoid(2 z) - 1
here, so that the approximate GELU is x * sigmoid(2 z). Shape legend: kernels/base.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.activations import (
    GELU,
    QUICK_GELU,
    RELU,
    SQUARED_RELU,
    TANH_GELU,
    Form,
)
from megatron_infer.kernels.triton.launch import APART, Launcher, cdiv, power_of_2

TILE = 1024
"""Entries of one program."""
_GELU, _TANH_GELU = tl.constexpr(GELU), tl.constexpr(TANH_GELU)
_QUICK_GELU, _RELU, _SQUARED_RELU = tl.constexpr(QUICK_GELU), tl.constexpr(RELU), tl.constexpr(SQUARED_RELU)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """The activation KIND of x. exp overflows to inf for large negative arguments, which gives the right 0."""
    if KIND == _GELU:
        out = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == _RELU:
        out = tl.where(x < 0.0, 0.0, x)
    elif KIND == _SQUARED_RELU:
        out = tl.where(x < 0.0, 0.0, x * x)
    else:
        z = x
        if KIND == _TANH_GELU:
            z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        elif KIND == _QUICK_GELU:
            z = 1.702 * x
        out = x / (1.0 + tl.exp(-z))
    return out


@triton.jit
def _activate(
    x_ptr, out_ptr, scale_ptr, x_stride, width, clamp, offset,
    KIND: tl.constexpr, GATED: tl.constexpr, HAS_CLAMP: tl.constexpr, SCALE_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """f(x), or for rows [gate, up] f(min(gate, clamp)) * (clip(up) + offset); with a SCALE_STRIDE times a factor."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_CLAMP:  # comparisons that keep NaN, as torch's clamp does
            x = tl.where(x > clamp, clamp, x)
            up = tl.where(up > clamp, clamp, tl.where(up < -clamp, -clamp, up))
        out = _activated(x, KIND) * (up + offset)
    else:
        out = _activated(x, KIND)
    out = out.to(out_ptr.dtype.element_ty)
    if SCALE_STRIDE > 0:
        scale = tl.load(scale_ptr + row * SCALE_STRIDE).to(tl.float32, bitcast=True)
        out = (out.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + row * width + column, out, mask=inside)


class Activations:
    """Activations of known forms, each in one launch."""

    def __init__(self, overlap: Mapping[str, bool] = APART) -> None:
        """overlap: see `launch.overlapping`."""
        self._overlap = overlap
        self._launchers: dict[tuple[Form, int, int], tuple[int, int, Launcher, float, float]] = {}

    def run(self, form: Form, x_TX: Tensor, scale_TS: Tensor | None = None) -> Tensor:
        """[T, X], or [T, 2 X] for a gated activation -> [T, X] contiguous, rounded to x's dtype.

        scale_TS: int32, contiguous; its first column holds the bits of an fp32 factor of each row, by which what was
        rounded is multiplied before it is rounded again.
        """
        row_stride, stride = x_TX.stride()
        if stride != 1:
            x_TX = x_TX.contiguous()
            row_stride = x_TX.stride(0)
        num_tokens, width = x_TX.shape
        scale_stride = 0 if scale_TS is None else scale_TS.shape[1]
        if (found := self._launchers.get((form, width, scale_stride))) is None:
            found = self._launchers[form, width, scale_stride] = self.made(form, width, scale_stride)
        width, programs, kernel, clamp, offset = found
        out_TX = x_TX.new_empty((num_tokens, width))
        if num_tokens:
            scale = x_TX if scale_TS is None else scale_TS
            kernel((num_tokens, programs), x_TX, out_TX, scale, row_stride, width, clamp, offset)
        return out_TX

    def made(self, form: Form, width: int, scale_stride: int) -> tuple[int, int, Launcher, float, float]:
        """(entries of a row of the output, programs of a row, the kernel, clamp, offset)."""
        width //= 2 if form.gated else 1
        block = min(TILE, max(16, power_of_2(width)))
        constexprs = {"KIND": form.kind, "GATED": form.gated, "HAS_CLAMP": form.clamp is not None}
        constexprs |= {"SCALE_STRIDE": scale_stride, "BLOCK": block}
        kernel = Launcher(_activate, **constexprs, num_warps=4, **self._overlap)
        return width, cdiv(width, block), kernel, float(form.clamp or 0.0), float(form.offset)

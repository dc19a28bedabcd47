"""Activations between fc1 and fc2 in one launch, gated or not. Not yet run on a GPU.

Computed in fp32 and rounded once, at the store; torch in 16 bit rounds after each call. tanh(z) is 2 sigmoid(2 z) - 1
here, so that the approximate GELU is x * sigmoid(2 z). Shape legend: kernels/base.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.activations import GELU, KINDS, QUICK_GELU, RELU, SQUARED_RELU, TANH_GELU, Form
from megatron_infer.kernels.triton.launch import APART, DTYPES, AotVariant, cdiv, launch, power_of_2

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
    x_ptr, out_ptr, x_stride, width, clamp, offset,
    KIND: tl.constexpr, GATED: tl.constexpr, HAS_CLAMP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """f(x), or for rows [gate, up] f(min(gate, clamp)) * (clip(up) + offset)."""
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
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def activate(form: Form, x_TX: Tensor, overlap: Mapping[str, bool] = APART) -> Tensor:
    """[T, X], or [T, 2 X] for a gated activation -> [T, X] contiguous. overlap: see `launch.overlapping`."""
    if x_TX.stride(-1) != 1:
        x_TX = x_TX.contiguous()
    num_tokens, width = x_TX.shape[0], x_TX.shape[1] // (2 if form.gated else 1)
    out_TX = x_TX.new_empty(num_tokens, width)
    if num_tokens:
        block = min(TILE, max(16, power_of_2(width)))
        clamp = 0.0 if form.clamp is None else float(form.clamp)
        launch(
            _activate, (num_tokens, cdiv(width, block)), x_TX, out_TX, x_TX.stride(0), width, clamp,
            float(form.offset), KIND=form.kind, GATED=form.gated, HAS_CLAMP=form.clamp is not None, BLOCK=block,
            num_warps=4, **overlap,
        )  # fmt: skip
    return out_TX


def aot_variants() -> list[AotVariant]:
    """Each function alone and gated, in each dtype."""
    variants = []
    for dtype in DTYPES.values():
        for kind in KINDS.values():
            for gated, clamped in ((False, False), (True, False), (True, True)):
                constexprs = {"KIND": kind, "GATED": gated, "HAS_CLAMP": clamped, "BLOCK": TILE, "PDL": False}
                numbers = {"x_stride": "i32", "width": "i32", "clamp": "fp32", "offset": "fp32"}
                signature = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"} | numbers
                one = AotVariant(
                    name=f"activate-{kind}-{'gated' if gated else 'plain'}{'-clamped' if clamped else ''}-{dtype}",
                    kernel=_activate,
                    signature=signature | dict.fromkeys(constexprs, "constexpr"),
                    constexprs=constexprs,
                    options={"num_warps": 4},
                )
                variants.extend((one, one.overlapping()) if (dtype, kind, gated) == ("bf16", GELU, False) else (one,))
    return variants

"""Every kind of norm in one launch: layer and RMS norms, with zero-centered weights or none, also of heads in place.

A row of a strided view is found by its indices along up to three axes, so that heads can be normed inside the fused
projection; a matrix has one axis. A row wider than HELD_WIDTH does not fit a program's registers: each pass over it
reads it again, out of a cache. The rest is as in `elementwise`. Not yet run on a GPU. Legend: kernels/base.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.triton.launch import APART, Launcher, cdiv, power_of_2

TILE = 1024
"""Entries of one program of narrow rows."""
HELD_WIDTH = 16384
"""Most entries of a row that a program holds in registers: 16 for each thread of the largest program."""
WIDE_TILE = 8192
"""Entries of a wider row that a program holds at a time."""


@triton.jit(do_not_specialize=["num_rows"])
def _norm(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_1, num_2, stride_0, stride_1, stride_2, width,
    eps,
    CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row r is x[r // (num_1 * num_2), r // num_2 % num_1, r % num_2]; rows of out and residual are contiguous."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    begin = row // (num_1 * num_2) * stride_0 + row // num_2 % num_1 * stride_1 + row % num_2 * stride_2
    x = tl.load(x_ptr + begin[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = x + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if CENTERED:
        mean = tl.sum(x, axis=1) / width
        x = tl.where(inside, x - mean[:, None], 0.0)
    out = x * tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column[None, :], mask=column[None, :] < width, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            weight += 1.0
        out = out * weight
    if HAS_BIAS:
        out += tl.load(bias_ptr + column[None, :], mask=column[None, :] < width, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_wide(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_1, num_2, stride_0, stride_1, stride_2, width,
    eps,
    CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_norm` of one row, BLOCK entries at a time; ROWS is 1."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row // (num_1 * num_2) * stride_0 + row // num_2 % num_1 * stride_1 + row % num_2 * stride_2
    residual_ptr += row * width
    out_ptr += row * width
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            total = x + tl.load(residual_ptr + column, mask=inside, other=0.0).to(tl.float32)
            rounded = total.to(residual_ptr.dtype.element_ty)
            tl.store(residual_ptr + column, rounded, mask=inside)
            x = rounded.to(tl.float32)
        sums += x if CENTERED else x * x
    if ADD:
        tl.debug_barrier()  # what one thread stored is read by another
    source_ptr = residual_ptr if ADD else x_ptr
    mean = 0.0
    if CENTERED:
        mean = tl.sum(sums, axis=0) / width
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < width
            x = tl.where(inside, tl.load(source_ptr + column, mask=inside, other=0.0).to(tl.float32) - mean, 0.0)
            sums += x * x
    scale = tl.rsqrt(tl.sum(sums, axis=0) / width + eps)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < width
        out = (tl.load(source_ptr + column, mask=inside, other=0.0).to(tl.float32) - mean) * scale
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
            if ZERO_CENTERED:
                weight += 1.0
            out = out * weight
        if HAS_BIAS:
            out += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + column, out.to(out_ptr.dtype.element_ty), mask=inside)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def row_tile(width: int) -> tuple[int, int, int]:
    """(ROWS, BLOCK, num_warps) of a program over rows of `width` entries."""
    if width > HELD_WIDTH:
        return 1, WIDE_TILE, 16
    block = max(16, power_of_2(width))
    return max(1, TILE // block), block, min(32, max(4, block // 512))


class TritonNorms:
    """kernels.base.Norms. overlap: see `launch.overlapping`."""

    def __init__(self, overlap: Mapping[str, bool] = APART) -> None:
        self._overlap = overlap
        self._launchers: dict[tuple[int, bool, bool, bool, bool, bool], tuple[int, Launcher]] = {}

    def norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        *,
        centered: bool,
        zero_centered: bool,
        residual: Tensor | None = None,
    ) -> Tensor:
        strides = x.stride()
        if strides[-1] != 1:
            x = x.contiguous()
            strides = x.stride()
        shape = x.shape
        width, num_rows, num_1, num_2, stride_1, stride_2 = shape[-1], shape[0], 1, 1, 0, 0
        if len(shape) > 2:
            assert len(shape) <= 4
            num_1, num_2 = (*shape[1:-1], 1)[:2]
            stride_1, stride_2 = (*strides[1:-1], 0)[:2]
            num_rows *= num_1 * num_2
        out = torch.empty_like(x) if len(shape) == 2 else x.new_empty(shape)  # new_empty takes longer on the host
        if not num_rows or not width:
            return out
        assert residual is None or residual.is_contiguous()
        key = width, centered, zero_centered, weight is not None, bias is not None, residual is not None
        if (found := self._launchers.get(key)) is None:
            found = self._launchers[key] = self.made(*key)
        rows, kernel = found
        kernel(
            (cdiv(num_rows, rows),),
            x,
            x if residual is None else residual,
            x if weight is None else weight,
            x if bias is None else bias,
            out,
            num_rows,
            num_1,
            num_2,
            strides[0],
            stride_1,
            stride_2,
            width,
            eps,
        )
        return out

    def made(
        self, width: int, centered: bool, zero_centered: bool, has_weight: bool, has_bias: bool, adds: bool
    ) -> tuple[int, Launcher]:
        """(rows of a program, the kernel)."""
        rows, block, warps = row_tile(width)
        options = {"CENTERED": centered, "ZERO_CENTERED": zero_centered, "HAS_WEIGHT": has_weight}
        options |= {"HAS_BIAS": has_bias, "ADD": adds, "ROWS": rows, "BLOCK": block}
        kernel = _norm if width <= HELD_WIDTH else _norm_wide
        return rows, Launcher(kernel, **options, **self._overlap, num_warps=warps)

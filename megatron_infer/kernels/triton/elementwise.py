"""Gated norms and activations in Triton, one launch each; linears are cuBLAS's.

A program computes ROWS whole rows: one wide row, or several narrow ones (heads with a norm of their own). For rows that
its registers do not hold see `norms`. ROWS depends
on the width alone, so that a row's bits do not depend on the number of rows. Everything is computed in fp32 and rounded
once, at the store. Kernels are not specialised by numbers of rows: a step of another size compiles nothing. Other norms
are in `norms`. Not yet run on a GPU. Shape legend: kernels/base.py; a row has WIDTH entries, BLOCK is the power of two
above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.activations import SWIGLU, form_of
from megatron_infer.kernels.torch.fp32_linear import fp32_linear
from megatron_infer.kernels.torch.latent_products import into_latent, out_of_latent
from megatron_infer.kernels.triton.activations import Activations
from megatron_infer.kernels.triton.experts import TritonExperts
from megatron_infer.kernels.triton.launch import (
    APART,
    cdiv,
    kernels_unavailable,
    launch,
    overlapping,
)
from megatron_infer.kernels.triton.norms import HELD_WIDTH, TritonNorms, row_tile

unavailable = kernels_unavailable


def make(device: torch.device, dtype: torch.dtype) -> TritonOps:
    return TritonOps(overlapping(device))


@triton.jit
def _gate_of(x, SILU: tl.constexpr):
    """x * sigmoid(x), or sigmoid(x); exp overflows to inf for large negative x, which gives the right zero."""
    return (x if SILU else 1.0) / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm(
    y_ptr, gate_ptr, weight_ptr, out_ptr, gate_stride, num_rows, num_groups, width, eps,
    HAS_WEIGHT: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row is one group of channels of one token."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, group = row // num_groups, row % num_groups
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    channel = group[:, None] * width + column[None, :]
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token[:, None] * gate_stride + channel, mask=inside, other=0.0).to(tl.float32)
    y = y * _gate_of(gate, SILU)
    if HAS_WEIGHT:
        scale = tl.rsqrt(tl.sum(y * y, axis=1) / width + eps)
        y = y * scale[:, None] * tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_wide(
    y_ptr, gate_ptr, weight_ptr, out_ptr, gate_stride, num_rows, num_groups, width, eps,
    HAS_WEIGHT: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_gated_rms_norm` of one row, BLOCK entries at a time; ROWS is 1."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token, group = row // num_groups, row % num_groups
    y_ptr += row * width
    gate_ptr += token * gate_stride + group * width
    scale = 1.0
    if HAS_WEIGHT:
        squares = tl.zeros([BLOCK], tl.float32)
        for first in range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)
            y = tl.load(y_ptr + column, mask=column < width, other=0.0).to(tl.float32)
            y *= _gate_of(tl.load(gate_ptr + column, mask=column < width, other=0.0).to(tl.float32), SILU)
            squares += y * y
        scale = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < width
        y = tl.load(y_ptr + column, mask=inside, other=0.0).to(tl.float32)
        y *= _gate_of(tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32), SILU)
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + group * width + column, mask=inside, other=0.0).to(tl.float32)
            y = y * scale * weight
        tl.store(out_ptr + row * width + column, y.to(out_ptr.dtype.element_ty), mask=inside)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


class TritonOps:
    """Norms and activations as one launch each; linears by cuBLAS, with bits that may depend on the batch."""

    name = "triton"
    argmax_linear = None
    route = None
    fp32_linear = staticmethod(fp32_linear)
    embedding = staticmethod(F.embedding)
    into_latent = staticmethod(into_latent)
    out_of_latent = staticmethod(out_of_latent)

    def __init__(self, overlap: Mapping[str, bool] = APART) -> None:
        """overlap: see `launch.overlapping`."""
        self.experts, self.norms = TritonExperts(overlap), TritonNorms(overlap)
        self._activations, self._overlap = Activations(overlap), overlap

    def linear(self, x_TX: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x_TX, weight, bias)

    def rms_norm(self, x_TD: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
        return self.norms.norm(x_TD, weight.contiguous(), None, eps, centered=False, zero_centered=zero_centered)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        residual_TD, kind = residual_TD.contiguous(), {"centered": False, "zero_centered": zero_centered}
        return self.norms.norm(x_TD, weight.contiguous(), None, eps, residual=residual_TD, **kind), residual_TD

    def layer_norm(self, x_TD: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        bias = None if bias is None else bias.contiguous()
        return self.norms.norm(x_TD, weight.contiguous(), bias, eps, centered=True, zero_centered=False)

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        return self._activations.run(SWIGLU, x_T2F)

    def softcap(self, x_SV: Tensor, cap: float) -> Tensor:
        return x_SV.div_(cap).tanh_().mul_(cap)

    def gated_rms_norm(
        self, y_TM: Tensor, gate_TM: Tensor, weight: Tensor | None, eps: float, *, group_size: int
    ) -> Tensor:
        return self._gated(y_TM, gate_TM, weight, eps, group_size=group_size, silu=True)

    def sigmoid_mul(self, x_TM: Tensor, gate_TM: Tensor) -> Tensor:
        return self._gated(x_TM, gate_TM, None, 0.0, group_size=x_TM.shape[1], silu=False)

    def _gated(
        self, y_TM: Tensor, gate_TM: Tensor, weight: Tensor | None, eps: float, *, group_size: int, silu: bool
    ) -> Tensor:
        """y * silu(gate) or y * sigmoid(gate), normed where there is a weight."""
        y_TM = y_TM.contiguous()
        if gate_TM.stride(-1) != 1:
            gate_TM = gate_TM.contiguous()
        out_TM, num_rows = torch.empty_like(y_TM), y_TM.numel() // group_size
        if num_rows:
            rows, block, warps = row_tile(group_size)
            given = y_TM, gate_TM, y_TM if weight is None else weight.contiguous(), out_TM, gate_TM.stride(0)
            sizes = num_rows, y_TM.shape[1] // group_size, group_size, eps
            options = {
                "HAS_WEIGHT": weight is not None,
                "SILU": silu,
                "ROWS": rows,
                "BLOCK": block,
                "num_warps": warps,
            }
            kernel = _gated_rms_norm if group_size <= HELD_WIDTH else _gated_rms_norm_wide
            launch(kernel, (cdiv(num_rows, rows),), *given, *sizes, **options, **self._overlap)
        return out_TM

    def rowwise(self, function: Callable[[Tensor], Any], x_TX: Tensor) -> Any:
        """One launch where the function is a known activation: in fp32, rounded once."""
        form = form_of(function)
        return function(x_TX) if form is None or x_TX.ndim != 2 else self._activations.run(form, x_TX)

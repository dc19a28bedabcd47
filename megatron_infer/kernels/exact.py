"""Kernels whose results depend on a row alone: not on other rows, its place, how it was chunked, or the threads.

Most native kernels are like that already. Here, in addition, an operation uses the same kernel for any number of rows,
operations that only torch has run on parts of one shape, and attention sums prompt and output positions in one order,
so that a training forward, which does not know where the prompt ends, has the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.activations import GEGLU, form_of
from megatron_infer.kernels.base import StepMetadata
from megatron_infer.kernels.native.cpu_native import (
    MAX_NORM_GROUP,
    LinearKernels,
    NativeOps,
    NativePagedAttention,
    panel_layout,
)
from megatron_infer.kernels.native.native_call import bind_threaded
from megatron_infer.kernels.packing import PackedLinears

TORCH_ROWS = 64
"""Rows that torch computes at a time: 64 rows of any width are whole vectors, without a remainder."""
TORCH_SERIAL = 32768
"""From this many elements torch may divide work over threads, at places that depend on their number."""
_P, _I = ctypes.c_void_p, ctypes.c_int64


class ExactOps(NativeOps):
    """Norms, activations and linears of one dtype; a row has the same bits in any step and in a training forward.

    A weight that is not packed is packed for the call, which changes no bit. Inputs of another dtype than the model's
    (a router's) are multiplied in their own: fp32, bf16 or float64.
    """

    name = "native, exact"

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, packed: PackedLinears | None = None) -> None:
        self._layout = panel_layout(library, dtype, may_compact=False)  # packed for one call
        super().__init__(library, dtype, packed or PackedLinears(layout=self._layout))
        self._library = library
        self._linear_f64 = bind_threaded(library, "mi_linear_f64", [_P, _P, _P, _P, _I, _I, _I])
        self._others: dict[torch.dtype, ExactOps] = {}

    def linear(self, x_TX: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """From packed panels where the weight can be packed, else from the live weight, for any number of rows."""
        if x_TX.dtype is torch.float64:
            return self._wide_linear(x_TX, weight, bias)
        ops = self._of(x_TX.dtype)
        return ops._exact(ops._own, x_TX, weight, bias, len(weight))

    def fp32_linear(self, x_SX: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        """As `linear`, for any number of rows."""
        ops = self._of(x_SX.dtype)
        return ops._exact(ops._fp32, x_SX, weight, bias, rows)

    def _exact(self, kernels: LinearKernels, x_TX: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        """By the first rows of the weight."""
        kernel, source = kernels.panels, self._packed_of(id(weight))
        if source is None:
            source = _same(weight, self._dtype)
            if self._layout.takes(source):
                source, _ = self._layout.pack(source, None)
            else:
                kernel = kernels.live
        assert kernel is not None, "the exact kernels read panels"
        flat, added = _same(x_TX.flatten(0, -2), self._dtype), None if bias is None else _same(bias, self._dtype)
        out = kernels.run(kernel, flat, source, added, rows)
        return out.view(*x_TX.shape[:-1], rows)

    def rms_norm(self, x_TD: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
        if x_TD.dtype is self._dtype:
            weight = _same(weight, self._dtype)
            return super().rms_norm(x_TD.contiguous(), weight, eps, zero_centered=zero_centered)
        return self._of(x_TD.dtype).rms_norm(x_TD, weight, eps, zero_centered=zero_centered)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        assert residual_TD.is_contiguous() and residual_TD.dtype in (torch.float32, self._dtype)
        x_TD, weight = _same(x_TD, self._dtype), _same(weight, self._dtype)
        return super().add_rms_norm(x_TD, residual_TD, weight, eps, zero_centered=zero_centered)

    def layer_norm(self, x_TD: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x_TD.contiguous(), weight.shape, weight, bias, eps)  # by rows, each by one thread

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        return super().silu_mul(_same(x_T2F, self._dtype))

    def gated_rms_norm(
        self, y_TM: Tensor, gate_TM: Tensor, weight: Tensor | None, eps: float, *, group_size: int
    ) -> Tensor:
        assert group_size <= MAX_NORM_GROUP, f"groups of {group_size:,} channels, the limit is {MAX_NORM_GROUP:,}"
        gate_TM = gate_TM if gate_TM.stride(-1) == 1 else gate_TM.contiguous()
        weight = None if weight is None else _same(weight, self._dtype)
        return super().gated_rms_norm(
            _same(y_TM, self._dtype), gate_TM.to(self._dtype), weight, eps, group_size=group_size
        )

    def sigmoid_mul(self, x_TM: Tensor, gate_TM: Tensor) -> Tensor:
        gate_TM = gate_TM if gate_TM.stride(-1) == 1 else gate_TM.contiguous()
        return super().sigmoid_mul(_same(x_TM, self._dtype), gate_TM.to(self._dtype))

    def rowwise(self, function: Callable[[Tensor], Any], x_TX: Tensor) -> Any:
        """`function` on parts of one shape, padded with zeros; differentiable if it is.

        torch computes the remainder of a vector with other code than the vectors, so that an element's last bit depends
        on its place; parts of 64 rows have no remainder, and a wide row is a part by itself.
        """
        if form_of(function) == GEGLU and x_TX.dtype is self._dtype:
            return super().rowwise(function, x_TX.detach().contiguous())
        num_rows, width = x_TX.shape
        rows = TORCH_ROWS if TORCH_ROWS * width < TORCH_SERIAL else 1
        padded = F.pad(x_TX, (0, 0, 0, -num_rows % rows)).contiguous() if rows > 1 else x_TX
        parts = [function(part) for part in padded.split(rows)] if num_rows else [function(x_TX)]
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)[:num_rows]
        return tuple(torch.cat(column)[:num_rows] for column in zip(*parts, strict=True))

    def _wide_linear(self, x_TX: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, w = x_TX.contiguous(), _same(weight, torch.float64)
        b = None if bias is None else _same(bias, torch.float64)
        out = torch.empty(*x.shape[:-1], len(w), dtype=torch.float64)
        self._linear_f64(x, w, b, out, x.numel() // x.shape[-1], x.shape[-1], len(w))
        return out

    def _of(self, dtype: torch.dtype) -> ExactOps:
        """These operations for inputs of a dtype."""
        if dtype is self._dtype:
            return self
        if dtype not in self._others:
            self._others[dtype] = ExactOps(self._library, dtype)
        return self._others[dtype]


def _same(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype).contiguous()


class ExactAttention(NativePagedAttention):
    """Computes every position as an output position: its keys are summed in one order, in a prompt too."""

    name = "native, one order"

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        if not step.num_prompt_queries.any():
            return
        self._none = np.zeros(step.num_rows, dtype=np.int32)
        self._step_struct.num_prompt_queries = self._none.ctypes.data

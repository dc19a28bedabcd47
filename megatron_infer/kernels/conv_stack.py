"""Causal convolutions in C++ (native/conv_stack.cpp): all layers of a row in one call, exact in fixed point."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.native.native_call import bind, bind_threaded

_P, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """y[t] = round(bias + sum over k of weight[:, k] . a[t - (kernel - 1 - k) * dilation]), a: the layer before's."""

    weight: Tensor
    """float64 [outer, kernel * inner], kernel-major; whole multiples of a power of two."""
    bias: Tensor
    """float64 [outer]."""
    kernel: int = 1
    dilation: int = 1
    activates: bool = False
    """Whether a leaky ReLU is applied to the input first."""
    adds: bool = False
    """Whether the input of the layer before is added and the sum rounded again: the end of a residual unit."""


class _Layer(ctypes.Structure):
    """ConvLayer in native/conv_stack.cpp."""

    _fields_ = [
        *((name, _P) for name in ("weight", "bias")),
        *((name, _I) for name in ("inner", "outer", "padded", "kernel", "dilation", "activates", "adds")),
    ]


class _Stack(ctypes.Structure):
    """ConvStack in native/conv_stack.cpp."""

    _fields_ = [
        ("layers", _P),
        *((name, _I) for name in ("num_layers", "inner", "widest")),
        *((name, _D) for name in ("step", "limit", "slope")),
    ]


class ConvStack:
    """Layers, one after the other: the values of a step, where a layer takes fewer, are that many steps of it.

    A row is computed by one thread, so rows of a batch by as many as there are. Every sum must be a float64 without
    rounding (weights and activations of few enough digits); then its bits depend on nothing but the row.
    """

    def __init__(
        self, library: ctypes.CDLL, layers: Sequence[ConvSpec], *, step: float, limit: float, slope: float
    ) -> None:
        """Activations are multiples of `step`, a power of two, within +-`limit`. slope: of the leaky ReLU."""
        self._call = bind_threaded(library, "mi_conv_stack", [_P, _P, _P, _I, _I, _I])
        lanes = int(bind(library, "mi_conv_stack_lanes", [], ctypes.c_int)())
        self._tensors: list[Tensor] = []  # kept: the structs hold addresses
        self._layers = (_Layer * len(layers))(*(self._layer(one, lanes) for one in layers))
        self._inner = self._layers[0].inner
        per_step, widest = self._inner, self._inner
        for layer in self._layers:
            assert per_step % layer.inner == 0, f"{per_step} values a step are no whole steps of {layer.inner}"
            per_step = per_step // layer.inner * layer.outer
            widest = max(widest, per_step)
        self._per_step = per_step
        address = ctypes.addressof(self._layers)
        self._stack = _Stack(address, len(layers), self._inner, widest, step, limit, slope)

    def _layer(self, one: ConvSpec, lanes: int) -> _Layer:
        outer, inner = one.weight.shape[0], one.weight.shape[1] // one.kernel
        missing = -outer % lanes
        weight, bias = F.pad(one.weight.T, (0, missing)).contiguous(), F.pad(one.bias, (0, missing)).contiguous()
        assert weight.dtype is bias.dtype is torch.float64
        self._tensors += [weight, bias]
        sizes = (inner, outer, outer + missing, one.kernel, one.dilation, one.activates, one.adds)
        return _Layer(weight.data_ptr(), bias.data_ptr(), *sizes)

    def run(self, x_BTC: Tensor) -> Tensor:
        """float32 [B, T, inner of the first layer] -> float32 [B, all values that the last layer makes of T steps]."""
        x_BTC = x_BTC.to(torch.float32).contiguous()
        rows, steps, inner = x_BTC.shape
        assert inner == self._inner, f"rows of {inner} values, the first layer takes {self._inner}"
        out_BS = torch.empty(rows, steps * self._per_step, dtype=torch.float32)
        self._call(ctypes.addressof(self._stack), x_BTC, out_BS, rows, steps, out_BS.shape[1])
        return out_BS

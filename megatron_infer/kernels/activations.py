"""Activations of an MLP as plain torch calls, and the data from which a kernel computes the same in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class ScaledActivation:
    """outside * f(inside * x)."""

    __slots__ = ("function", "inside", "outside")

    def __init__(self, function: Activation, inside: float, outside: float) -> None:
        self.function = function
        self.inside = inside
        self.outside = outside

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x * self.inside) * self.outside


class GatedActivation:
    """f(min(gate, c)) * (clip(up, -c, c) + offset), the general form of megatron-core's gated units."""

    __slots__ = ("clamp", "function", "offset")

    def __init__(self, function: Activation, clamp: float | None, offset: float) -> None:
        self.function, self.clamp, self.offset = function, clamp, offset

    def __call__(self, x_T2F: Tensor) -> Tensor:
        gate, up = x_T2F.chunk(2, dim=-1)
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(min=-self.clamp, max=self.clamp)
        return self.function(gate) * (up + self.offset if self.offset else up)


SILU, GELU, TANH_GELU, QUICK_GELU, RELU, SQUARED_RELU = range(6)
KINDS: dict[Any, int] = {
    F.silu: SILU,
    F.gelu: GELU,
    tanh_gelu: TANH_GELU,
    quick_gelu: QUICK_GELU,
    F.relu: RELU,
    squared_relu: SQUARED_RELU,
}


class Form(NamedTuple):
    """An activation as data; see `GatedActivation` for clamp and offset."""

    kind: int
    gated: bool = False
    clamp: float | None = None
    offset: float = 0.0


SWIGLU = Form(SILU, gated=True)
GEGLU = Form(TANH_GELU, gated=True)


def form_of(function: Callable[..., Any]) -> Form | None:
    """The function as data; None: an unknown function."""
    if type(function) is GatedActivation:
        kind = KINDS.get(function.function)
        return None if kind is None else Form(kind, True, function.clamp, function.offset)
    kind = KINDS.get(function)
    return None if kind is None else Form(kind)

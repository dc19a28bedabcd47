"""Activations of an MLP exactly as `MLP.forward` applies them, as plain torch calls.

megatron-core's own functions are compiled: on a CPU the first call of each would cost seconds, and a batch of another
length seconds again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.errors import AdoptionError
from megatron_infer.models import mcore_compat as mcore

Activation = Callable[[Tensor], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


PLAIN: dict[Any, Activation] = {
    mcore.squared_relu: squared_relu,
    mcore.quick_gelu: quick_gelu,
    mcore.fast_gelu: tanh_gelu,
    mcore.openai_gelu: tanh_gelu,
}
"""megatron-core's compiled function -> the same formula."""


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


def activation_of(mlp: mcore.MLP, name: str, *, weighted: bool = False) -> Activation | None:
    """What stands between fc1 and fc2; None is plain SwiGLU, `ops.silu_mul`. weighted: an expert, scaled per token.

    `bias_activation_fusion` selects megatron-core's fused kernels, whose GELU is the tanh approximation.
    """
    config = mlp.config
    if config.use_te_activation_func:
        raise AdoptionError(name, "use_te_activation_func: Transformer Engine's activations are not supported")
    function, gated = mlp.activation_func, config.gated_linear_unit
    clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
    if config.bias_activation_fusion:
        fused = {F.silu: gated, F.gelu: not weighted, mcore.quick_gelu: gated and weighted}
        if not fused.get(function, False):
            raise AdoptionError(
                name,
                f"bias_activation_fusion with activation {function} (gated: {gated}): megatron-core has no such kernel",
            )
        if function is not mcore.quick_gelu:
            clamp, offset = None, 0.0  # the other fused kernels know neither
        if function is F.gelu:
            function = tanh_gelu
    function = PLAIN.get(function, function)
    if not gated:
        return function
    if function is F.silu and clamp is None and offset == 0.0:
        return None
    return GatedActivation(function, clamp, offset)

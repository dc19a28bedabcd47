"""The activation of a megatron-core MLP as plain torch calls, exactly as `MLP.forward` applies it.

megatron-core's own functions are compiled: on a CPU the first call of each costs seconds, and so does another batch
size.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.activations import (
    Activation,
    GatedActivation,
    ScaledActivation,
    quick_gelu,
    squared_relu,
    tanh_gelu,
)
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.bridge_modules import FALCON_H1_MLP, is_of

PLAIN: dict[Any, Activation] = {
    mcore.squared_relu: squared_relu,
    mcore.quick_gelu: quick_gelu,
    mcore.unfused_quick_gelu: quick_gelu,
    mcore.fast_gelu: tanh_gelu,
    mcore.openai_gelu: tanh_gelu,
}
"""megatron-core's compiled function -> the same formula."""


def activation_of(mlp: mcore.MLP, name: str, *, weighted: bool = False) -> Activation | None:
    """The activation between fc1 and fc2; None is plain SwiGLU, `ops.silu_mul`. weighted: an expert, scaled per token.

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
                f"bias_activation_fusion with activation {function} (gated: {gated}): megatron-core has no such "
                "kernel; build the model with bias_activation_fusion=False",
            )
        if function is not mcore.quick_gelu:
            clamp, offset = None, 0.0  # the other fused kernels know neither
        elif clamp is not None and config.add_bias_linear and isinstance(mlp, mcore.MLP):  # TEGroupedMLP's fc1 adds it
            raise AdoptionError(
                name,
                f"bias_activation_fusion with activation_func_clamp_value={clamp:g} and biases: megatron-core's kernel "
                "clamps before it adds the bias, its other path after; build the model with "
                "bias_activation_fusion=False, or with moe_grouped_gemm=True",
            )
        if function is F.gelu:
            function = tanh_gelu
    function = PLAIN.get(function, function)
    if is_of(mlp, FALCON_H1_MLP):
        function = ScaledActivation(function, *config.mlp_multipliers)
    if not gated:
        return function
    if function is F.silu and clamp is None and offset == 0.0:
        return None
    return GatedActivation(function, clamp, offset)

"""Transformer Engine's and Apex's modules as megatron-core builds them: known by name, read in place, never imported.

The paged path reads their weights at every use and runs its own kernels on them; training uses their own forward. A
linear with a norm inside counts as two modules here: a norm, and a linear behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.te_tensors import TE_PACKAGE
from megatron_infer.models.bridge_modules import NORMED_ROW_LINEAR, is_of, name_of

TE_MODULES = "megatron.core.extensions.transformer_engine"
APEX_NORM = ("megatron.core.fusions.fused_layer_norm", "FusedLayerNorm")
COLUMN, ROW, WHOLE = "column", "row", "whole"
_LINEARS = {
    "TEColumnParallelLinear": COLUMN,
    "TELayerNormColumnParallelLinear": COLUMN,
    "TERowParallelLinear": ROW,
    "TEColumnParallelGroupedLinear": COLUMN,
    "TERowParallelGroupedLinear": ROW,
    "TELinear": WHOLE,
}
NORM_INSIDE = "TELayerNormColumnParallelLinear"
GROUPED_EXPERTS = ("megatron.core.transformer.moe.experts", "TEGroupedMLP")
_NORMS = ("LayerNorm", "RMSNorm")


class LiveParameters:
    """A module's live parameters as "weight" and "bias"; a missing one is None. Holds no tensor."""

    def __init__(self, module: torch.nn.Module, *, weight: str = "weight", bias: str = "bias") -> None:
        self._parameters, self._names = module._parameters, {"weight": weight, "bias": bias}

    def __getitem__(self, name: str) -> Tensor | None:
        return self._parameters.get(self._names[name])


def qualified(module: Any) -> str:
    """The full name of a module's class, for errors."""
    return name_of(type(module))


def _is(module: Any, where: tuple[str, str]) -> bool:
    return (type(module).__module__, type(module).__qualname__) == where


def linear_role(module: Any) -> str | None:
    """COLUMN, ROW or WHOLE (each rank has all of it) of megatron-core's linears on Transformer Engine and Bridge's with
    a norm; None for other modules."""
    if is_of(module, NORMED_ROW_LINEAR):
        return ROW
    return _LINEARS.get(type(module).__qualname__) if type(module).__module__ == TE_MODULES else None


def has_norm_inside(module: Any) -> bool:
    return _is(module, (TE_MODULES, NORM_INSIDE))


def is_te_attention(module: Any) -> bool:
    return _is(module, (TE_MODULES, "TEDotProductAttention"))


def is_grouped_experts(module: Any) -> bool:
    """True for megatron-core's experts as grouped products: two modules with weight0, weight1, ..."""
    return _is(module, GROUPED_EXPERTS)


def norm_of(module: Any) -> tuple[bool, LiveParameters] | None:
    """(is an RMS norm, weight and bias) of a norm of Transformer Engine or Apex, or of the norm inside a linear."""
    if has_norm_inside(module):
        names = {"weight": "layer_norm_weight", "bias": "layer_norm_bias"}
        return module.normalization == "RMSNorm", LiveParameters(module, **names)
    if type(module).__module__.split(".")[0] == TE_PACKAGE and type(module).__qualname__ in _NORMS:
        return type(module).__qualname__ == "RMSNorm", LiveParameters(module)
    return (False, LiveParameters(module)) if _is(module, APEX_NORM) else None


def check_linear(module: Any, name: str, weight: str) -> None:
    """Raise AdoptionError for a Transformer Engine linear that does not compute a product of this weight."""
    if getattr(module, "te_quant_params", None) is not None:
        raise AdoptionError(
            name, "has a quantisation recipe of its own (quant_recipe): quantised linears are not known"
        )
    if module._parameters.get(weight) is None:
        raise AdoptionError(name, f"has no parameter {weight!r}: weights kept in several parts are not known")

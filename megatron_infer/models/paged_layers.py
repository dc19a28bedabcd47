"""Paged self attention, mixers and decoder layers: megatron-core's own classes with a second forward, for inference.

With no context, or with a context of megatron-core's own inference, these are the stock modules: same code, same
parameters, same state-dict keys. With one of our steps they run the operations of `fused_layers`. Specs name these
classes; `adopt` gives them to live modules.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_infer.errors import ModelError
from megatron_infer.kernels.base import StepInputs
from megatron_infer.models.fused_layers import FusedLayer, LayerOps
from megatron_infer.models.mcore_compat import (
    LATENT_ATTENTIONS,
    MambaLayer,
    MLPLayer,
    SelfAttention,
    TransformerLayer,
    moe_layer_classes,
)
from megatron_infer.models.parallel_layer import ParallelLayer

SEQUENCE_PARALLEL = (
    "megatron-core's own modules would split the step's tokens over ranks; turn it off around generation: "
    "megatron.core.transformer.utils.set_model_to_sequence_parallel(model, False)"
)
"""Our own operations are not affected: every rank has all tokens."""


def is_step(context: Any) -> bool:
    """True for a StepInputs, False for None and for the contexts of megatron-core's own inference."""
    return context is not None and hasattr(context, "attend")


def require_inference(module: torch.nn.Module) -> None:
    """Raise ModelError in training mode or while autograd records: dropout or gradients would be wrong silently."""
    if module.training or torch.is_grad_enabled():
        what = "the module is in training mode" if module.training else "autograd is recording"
        raise ModelError(
            f"{type(module).__name__} was given a step of inference while {what}; "
            "call model.eval() and run under torch.inference_mode()"
        )


def _require_whole_step(module: Any) -> None:
    """Raise ModelError where the caller's modules have divided the step's tokens over the ranks."""
    if module.config.sequence_parallel:
        raise ModelError(f"{type(module).__name__} was given a step with sequence_parallel=True: {SEQUENCE_PARALLEL}")


class PagedPart:
    """Mixed into self attention, mixers and delta nets: with a step, queries attend to the paged cache, and recurrent
    states are those in the step's slots.

    megatron-core's layers pass the step by keyword. Its place in the signatures differs, and a layer of the user's own
    class may pass it there.
    """

    fused: LayerOps | None = None
    """Set by `adopt`."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        step = next(filter(is_step, (*kwargs.values(), *args)), None)
        if step is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        require_inference(self)  # type: ignore[arg-type]
        _require_whole_step(self)
        out_TD, _ = bound(self.fused, self).run(step, hidden_states.squeeze(1))
        return out_TD.unsqueeze(1), None


@functools.cache
def paged_class(mixin: type, stock: type) -> type:
    """The subclass of a stock class with the second forward of `mixin`; training runs the class's own forward."""
    return type(f"Paged{stock.__name__}", (mixin, stock), {"__doc__": stock.__doc__, "__module__": mixin.__module__})


PAGED_ATTENTION = {stock: paged_class(PagedPart, stock) for stock in (SelfAttention, *LATENT_ATTENTIONS)}
"""Stock attention class -> ours."""


class PagedForward:
    """Mixed into decoder layers: with a step, the layer's operations on [T, 1, D] hidden states."""

    fused: FusedLayer | None = None
    """Set by `adopt`."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        step: StepInputs | Any = kwargs.get("inference_context")
        if not is_step(step):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        require_inference(self)  # type: ignore[arg-type]
        _require_whole_step(self)
        hidden_states = args[0] if args else kwargs["hidden_states"]
        # The operations may write into their input, which belongs to the caller.
        x_TD, residual_TD = bound(self.fused, self).run(step, hidden_states.squeeze(1).clone())
        return (x_TD + residual_TD).to(hidden_states.dtype).unsqueeze(1), kwargs.get("context")


PAGED_LAYERS = {
    stock: paged_class(PagedForward, stock)
    for stock in (TransformerLayer, MLPLayer, MambaLayer, ParallelLayer, *moe_layer_classes())
}
"""Stock layer class -> ours."""
PagedTransformerLayer = PAGED_LAYERS[TransformerLayer]
PagedMLPLayer, PagedMambaLayer = PAGED_LAYERS[MLPLayer], PAGED_LAYERS[MambaLayer]


def bound(operations: Any, module: Any) -> Any:
    """The operations that `adopt` gave to the module; raises ModelError where it gave none."""
    if operations is None:
        raise ModelError(
            f"{type(module).__name__} was given a step of inference before megatron_infer.models.adopt.adopt(model) "
            "was called; building by spec puts the classes in place, adopting binds them to the cache"
        )
    return operations

"""A low-rank pair on a live linear: parameters that train, in megatron-core's forward and in a step of ours.

    linear.lora = LinearLoRA   a child module: optimizers, DDP, the weight guard and the module guard see its parameters
    a forward hook             adds scale * b (a x) behind megatron-core's own product
    FusedLinear.run            adds it to the product of a step, before the sum over ranks: no collective is added

The base model's state dict does not have the pair. Legend: s positions or this rank's part of them, b batch, X inputs,
Y outputs, r rank; kernels/base.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_infer.kernels.base import Ops
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.module_guard import modules_of
from megatron_infer.models.tp_collectives import Reducer

CHILD = "lora"
"""Name of the pair among its linear's children."""
ATTACHED = "has an adapter that trains on it, with which every request is computed"
"""Why an engine of the model has no adapters of its own."""


class LinearLoRA(nn.Module):
    """The pair of one linear, this rank's part of it.

    A column-parallel linear has all of a and its own rows of b, a row-parallel one its own columns of a and all of b.
    """

    def __init__(self, linear: Any, *, rank: int, scale: float, dropout: float, sections: tuple[int, ...]) -> None:
        """sections: lengths of the parts of this rank's rows that are split over the ranks one by one (gate and up)."""
        super().__init__()
        weight = linear.weight
        self.is_row_parallel = isinstance(linear, mcore.RowParallelLinear)
        self.rank, self.dropout, self.sections = rank, dropout, sections
        self.scaling = scale
        self.is_off = self.is_merged = False
        """is_off: see `adapters_off`."""
        self.trains_only = False
        """Steps of an engine are computed without it, and its changes are none of the weights'."""
        self.a = nn.Parameter(torch.zeros(rank, weight.shape[1], dtype=weight.dtype, device=weight.device))
        self.b = nn.Parameter(torch.zeros(weight.shape[0], rank, dtype=weight.dtype, device=weight.device))
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(scale, device=weight.device))
        self._mark(linear)

    def _mark(self, linear: Any) -> None:
        """What megatron-core's optimizer and finalize_model_grads have to know of each parameter."""
        tp = linear.tp_group
        whole, part, dim = (self.b, self.a, 1) if self.is_row_parallel else (self.a, self.b, 0)
        if tp is not None and tp.size() > 1:
            part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, dim, 1
        # With sequence parallelism a rank's gradient of the whole one is that of its own positions.
        whole.sequence_parallel = linear.config.sequence_parallel

    def set_merged(self, merged: bool) -> None:
        """Whether the linear's weight holds the product already. The scale says it too, which the weight guard and
        captured steps read."""
        self.is_merged = merged
        self.scale.fill_(0.0 if merged else self.scaling)

    # ------------------------------------------------------------------ megatron-core's forward

    def added(self, linear: Any, x_sbX: Tensor, y_sbY: Tensor) -> Tensor:
        """What the linear gives with the pair, from its input and output. Gradients are complete on every rank."""
        x_sbX = F.dropout(x_sbX, self.dropout, self.training)
        group, is_split = linear.tp_group, linear.sequence_parallel
        h_sbr = F.linear(x_sbX, self.a)
        if self.is_row_parallel:
            spread = mcore.reduce_scatter_to_sequence_parallel_region, mcore.reduce_from_tensor_model_parallel_region
        else:
            spread = mcore.gather_from_sequence_parallel_region, mcore.copy_to_tensor_model_parallel_region
        h_sbr = spread[not is_split](h_sbr, group=group)
        return y_sbY + F.linear(h_sbr * self.scale, self.b)

    # ------------------------------------------------------------------ a step of ours

    def add_to(self, ops: Ops, x_TX: Tensor, y_TY: Tensor, *, spread: Reducer | None, reduce: Reducer | None) -> Tensor:
        """y + scale * b (a x); of a row-parallel linear this rank's part of the sum. May write into y_TY.

        spread, reduce: see `FusedLinear`; they sum the gradients of the parameter that every rank has whole.
        """
        if self.is_off:
            return y_TY
        a, b = self.a, self.b
        h_Tr = ops.linear(x_TX, a) * self.scale
        if spread is not None:
            h_Tr = spread.spread(h_Tr)
        if reduce is not None:
            b = reduce.spread(b)
        product_TY = ops.linear(h_Tr, b)
        return y_TY + product_TY if torch.is_grad_enabled() else y_TY.add_(product_TY)

    # ------------------------------------------------------------------ apart from the base model

    def _apply(self, *args: Any, **kwargs: Any) -> LinearLoRA:
        """The scale stays in fp32, and keeps its value, when the model is cast."""
        before = self.scale
        super()._apply(*args, **kwargs)
        if self.scale.dtype != before.dtype:
            self.scale = before.to(self.scale.device)
        return self

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """The base model's checkpoints are as without the pair; it has a state dict of its own (`AttachedLoRA`)."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """See `_save_to_state_dict`."""


class AddProduct:
    """The forward hook that adds the pair of a linear. An object of this package: adoption knows that it may be
    skipped."""

    def __init__(self, lora: LinearLoRA) -> None:
        self._lora = lora

    def __call__(self, linear: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        lora = self._lora
        if lora.is_off or lora.is_merged:
            return output
        y_sbY, bias = output
        return lora.added(linear, args[0] if args else kwargs["input_"], y_sbY), bias


class RecordInput:
    """The forward hook of a frozen embedding: where activations are recomputed, a layer's parameters have gradients
    only if its input has one."""

    def __call__(self, embedding: Any, args: tuple[Any, ...], output: Any) -> Any:
        recomputes = embedding.config.recompute_granularity is not None
        if recomputes and torch.is_grad_enabled() and torch.is_tensor(output) and not output.requires_grad:
            output.requires_grad_()
        return output


def lora_of(linear: nn.Module, *, trains_only: bool = False) -> LinearLoRA | None:
    """The pair on a linear that a step computes with, or the one that trains only; None: there is none."""
    found = linear._modules.get(CHILD)
    return found if isinstance(found, LinearLoRA) and found.trains_only is trains_only else None


def attached(model: nn.Module) -> Iterator[LinearLoRA]:
    """The pairs on this rank's linears of a model."""
    return (module for module in modules_of(model) if isinstance(module, LinearLoRA))


def attached_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and scales of the pairs that steps compute with, by their names in the model, which its state dict
    does not have."""
    return {
        f"{path}.{name}": tensor
        for path, module in model.named_modules()
        if isinstance(module, LinearLoRA) and not module.trains_only
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, forwards of the trainer's add no pair: they compute what the base model computes, bit for bit.

    For forwards between steps of an engine, which does not see it.
    """
    found = [lora for lora in attached(model) if not lora.is_off]
    for lora in found:
        lora.is_off = True
    try:
        yield
    finally:
        for lora in found:
            lora.is_off = False

"""megatron-core's multi-token prediction layer as operations on its live weights, as `fused_layers` has a decoder's.

    embedding of token p ──── enorm ─┐
                                     ├─ eh_proj ─ transformer layer ─ final norm ─▶ hidden state of p + 1, predicted
    hidden state of p - 1 ── hnorm ──┘

The hidden state is that behind the model's final norm. Embedding and output layer are the model's own. megatron-core
numbers the row of hidden state p - 1 and token p by the former; here it has the number of its token, so that, as in
every layer of the model, it depends on nothing behind it. Legend: kernels/base.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.base import AttendSpec, StepInputs
from megatron_infer.models.adoption_checks import check_called_by_none, check_untouched
from megatron_infer.models.fused_layers import Attend, FusedLinear, FusedNorm, LayerOps
from megatron_infer.models.layer_adoption import LayerAdoption
from megatron_infer.models.layer_programs import with_programs
from megatron_infer.models.moe import FusedExperts
from megatron_infer.models.tp_collectives import Reducer

_LAYERS = ("transformer_layer", "mtp_model_layer")
"""Name of the decoder layer in an MTP layer: of 0.16, and of later versions."""


class MTPHead:
    """The first MTP layer of a model. Raises AdoptionError for one that is not known to compute this."""

    def __init__(self, live: Any, tp: Reducer | None) -> None:
        self._tp = tp
        block = getattr(live, "mtp", None)
        if block is None or not getattr(live, "mtp_process", False):
            raise AdoptionError("mtp", "the model has no MTP layers (mtp_num_layers), or not in this pipeline stage")
        if getattr(live.config, "fp8", None):
            raise AdoptionError("mtp", "MTP layers of a model with products in FP8 are not supported")
        if live.config.no_rope_freq:
            raise AdoptionError("mtp", "no_rope_freq does not say whether an MTP layer rotates")
        layer, name = block.layers[0], "mtp.layers.0"
        check_called_by_none(block, "mtp")
        check_called_by_none(layer, name)
        parts = ("enorm", "hnorm", "eh_proj", "final_layernorm")
        for part in parts:
            check_untouched(getattr(layer, part), f"{name}.{part}")
        self._enorm, self._hnorm = (FusedNorm(getattr(layer, one), f"{name}.{one}") for one in parts[:2])
        self._eh_proj = FusedLinear(layer.eh_proj, f"{name}.eh_proj", tp=tp)
        inner = next(one for one in _LAYERS if hasattr(layer, one))
        self._layer = LayerAdoption(
            getattr(layer, inner), f"{name}.{inner}", model=live, tp=tp, num_attention=0, num_mamba=0
        )
        if self._layer.attention is None or self._layer.fused is None:
            raise AdoptionError(f"{name}.{inner}", "not a transformer layer with attention")
        if self.spec.index is not None:
            raise AdoptionError(f"{name}.{inner}", "MTP layers with sparse attention are not supported")
        operations = self._layer.fused.flat()
        last_norm = FusedNorm(layer.final_layernorm, f"{name}.final_layernorm")
        self._all = LayerOps(*with_programs([*operations, last_norm], end_model=False))
        attend = next(place for place, one in enumerate(operations) if isinstance(one, Attend))
        self._up_to_attention = LayerOps(*with_programs(operations[: attend + 1], end_model=False))

    @property
    def spec(self) -> AttendSpec:
        assert self._layer.attention is not None
        return self._layer.attention.attend.spec

    @property
    def experts(self) -> FusedExperts | None:
        """The MTP layer's experts; None: it is dense. They have no index among the model's MoE layers."""
        return self._layer.experts

    def linears(self) -> Iterator[FusedLinear]:
        yield from self._eh_proj.linears()
        yield from self._layer.linears()

    def weights(self) -> Iterator[Tensor]:
        """The weights that go through `ops.linear`."""
        yield from self._eh_proj.weights()
        yield from self._layer.weights()

    def run(self, step: StepInputs, token_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        """Embeddings of tokens and the hidden states before them -> final normed hidden states [T, D]. Writes keys and
        values into the step's cache, layer 0."""
        return self._all.run(step, self._joined(step, token_TD, hidden_TD))[0]

    def write(self, step: StepInputs, token_TD: Tensor, hidden_TD: Tensor) -> None:
        """Write the keys and values that `run` writes."""
        self._up_to_attention.run(step, self._joined(step, token_TD, hidden_TD))

    def _joined(self, step: StepInputs, token_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        parts = [self._enorm.norm(step.ops, token_TD), self._hnorm.norm(step.ops, hidden_TD)]
        x_TD, _ = self._eh_proj.run(step, torch.cat(parts, dim=-1), None)
        return x_TD if self._tp is None else self._tp.all_gather(x_TD)

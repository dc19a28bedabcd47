"""A decoder layer that attends and mixes side by side, as Falcon-H1's.

Attention and mixer take the same normed input, and their sum is added to the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_infer.models.extensions import multipliers_of
from megatron_infer.models.mcore_compat import (
    IdentityOp,
    SelfAttention,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
    build_module,
)


@dataclass
class ParallelLayerSubmodules(TransformerLayerSubmodules):
    """Those of a transformer layer, and a mixer."""

    mixer: Any = IdentityOp


class AttentionBesideMixer(SelfAttention):
    """The attention of a `ParallelLayer`, which gives the sum of both."""

    mixer: Any = None
    """The layer's, which no parameter of this module belongs to."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        given = multipliers_of(self.config)
        attended = super().forward(hidden_states * given.attention_in_multiplier, *args, **kwargs)
        mixed = self.mixer(hidden_states * given.ssm_in_multiplier, packed_seq_params=kwargs.get("packed_seq_params"))
        attended, mixed = (out if bias is None else out + bias for out, bias in (attended, mixed))
        return mixed * given.ssm_out_multiplier + attended * given.attention_out_multiplier, None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("split_qkv") is False:
            raise NotImplementedError("fused_single_qkv_rope: keys of a parallel layer have a factor of their own")
        query, key, *others = super().get_query_key_value_tensors(*args, **kwargs)
        return query, key * multipliers_of(self.config).key_multiplier, *others


class ParallelLayer(TransformerLayer):
    """A transformer layer with a mixer next to its attention."""

    def __init__(
        self, config: TransformerConfig, submodules: ParallelLayerSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        self.mixer = build_module(
            submodules.mixer,
            self.config,
            d_model=self.config.hidden_size,
            layer_number=self.layer_number,
            pg_collection=self.pg_collection,
        )
        vars(self.self_attention)["mixer"] = self.mixer  # not as a submodule: parameters are the layer's

"""A gated delta net that trains on any device of torch and, with a step, generates from state slots.

`SlottedDeltaNet` has the constructor arguments, parameters and checkpoint keys of megatron-core's GatedDeltaNet, which
can only be built with CUDA and flash-linear-attention. `paged_class` gives a live stock layer the same second
forward and changes nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_infer.kernels.ssm import DeltaSpec
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.core_attention import init_device
from megatron_infer.models.mamba_mixer import (
    build_projection,
    divided,
    draw_convolution,
    init_generator,
    sharded_in_parts,
)
from megatron_infer.models.mamba_scan import mix, over_sequences, training_weights
from megatron_infer.models.paged_layers import PagedPart

CHUNK = 64
"""Positions of a chunk in the training forward."""


def delta_spec_of(net: Any) -> DeltaSpec:
    """The sizes of this rank's part of a delta net, ours or megatron-core's."""
    ranks = net.pg_collection.tp.size()
    return DeltaSpec(
        num_heads=net.num_value_heads // ranks,
        head_dim=net.value_head_dim,
        state_dim=net.key_head_dim,
        num_groups=net.num_key_heads // ranks,
        conv_width=net.conv_kernel_dim,
    )


def projected_parts(net: Any) -> dict[str, int]:
    """Rows of this rank's in_proj, by the names that megatron-core's checkpoints have for their parts."""
    spec = delta_spec_of(net)
    keys = spec.num_groups * spec.state_dim
    values = {"value": spec.inner_width, "z": spec.inner_width}
    return {"query": keys, "key": keys} | values | {"beta": spec.num_heads, "alpha": spec.num_heads}


def convolved_parts(net: Any) -> dict[str, int]:
    """The same of the convolution's channels."""
    return {part: size for part, size in projected_parts(net).items() if part in ("query", "key", "value")}


class TorchDeltaNet(mcore.MegatronModule):
    """A gated delta net in differentiable torch: convolution, delta rule, norm, gate. [S, b, D] -> ([S, b, D], bias).

    Arguments are those of megatron-core's GatedDeltaNet; sizes come from the config (linear_key_head_dim,
    linear_num_value_heads, ...). Raises ConfigError for heads that do not divide over the ranks.
    Source: gated delta networks, arXiv:2412.06464.
    """

    def __init__(
        self,
        config: mcore.TransformerConfig,
        submodules: Any,
        layer_number: int | None = None,
        bias: bool = False,
        conv_bias: bool = False,
        conv_init: float | None = None,
        use_qk_l2norm: bool = True,
        A_init_range: tuple[float, float] = (1, 16),
        pg_collection: Any = None,
        *,
        name: str | None = None,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__(config)
        if not use_qk_l2norm:
            raise NotImplementedError("use_qk_l2norm=False: queries and keys have length 1 here")
        self.pg_collection = pg_collection
        self.layer_number = layer_number
        self.use_qk_l2norm = use_qk_l2norm
        self.conv_kernel_dim = config.linear_conv_kernel_dim
        self.key_head_dim = config.linear_key_head_dim
        self.value_head_dim = config.linear_value_head_dim
        self.num_key_heads = config.linear_num_key_heads
        self.num_value_heads = config.linear_num_value_heads
        self.act_fn = config.activation_func
        ranks = pg_collection.tp.size()
        for count, what in ((self.num_key_heads, "key heads"), (self.num_value_heads, "value heads")):
            divided(count, ranks, what, "tensor-parallel ranks")
        local = self.spec
        parts = {"config": config, "bias": bias, "tp_group": pg_collection.tp}
        sizes = config.hidden_size, ranks * sum(projected_parts(self).values())
        self.in_proj = build_projection(submodules.in_proj, sizes, is_first=True, **parts)
        drawn = ranks if config.use_cpu_initialization else 1
        place = pg_collection.tp.rank() if drawn > 1 else 0
        with init_generator(config):
            self.conv1d = draw_convolution(
                config,
                list(convolved_parts(self).values()),
                taps=self.conv_kernel_dim,
                ranks=drawn,
                rank=place,
                conv_init=conv_init,
                has_bias=conv_bias,
            )
            made = {"dtype": config.params_dtype, "device": init_device(config)}
            self.dt_bias = torch.nn.Parameter(torch.ones(local.num_heads, **made))
            decay = torch.ones(drawn * local.num_heads, **made)
            if config.perform_initialization:
                decay.uniform_(*A_init_range)
            self.A_log = torch.nn.Parameter(torch.log(decay).chunk(drawn)[place].clone())
        self.out_norm = mcore.build_module(
            submodules.out_norm, config=config, hidden_size=self.value_head_dim, eps=config.layernorm_epsilon
        )
        sizes = ranks * local.inner_width, config.hidden_size
        self.out_proj = build_projection(submodules.out_proj, sizes, is_first=False, **parts)
        for parameter in (self.dt_bias, self.A_log, *self.conv1d.parameters()):
            parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]

    @property
    def spec(self) -> DeltaSpec:
        return delta_spec_of(self)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *_: Any,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Whole sequences, each from an empty state; packed ones have one sequence axis and cu_seqlens.

        Raises NotImplementedError for a context of megatron-core's own inference, which has no delta nets.
        """
        if inference_context is not None:
            raise NotImplementedError("this layer serves steps of megatron_infer only")
        projected, _bias = self.in_proj(hidden_states)
        cp = getattr(self.pg_collection, "cp", None)
        return self.out_proj(over_sequences(self._mix, projected, packed_seq_params, cp))

    def _mix(self, projected: Tensor) -> Tensor:
        """[S, b, q k v z b a] -> [S, b, M], each sequence from an empty state."""
        spec = self.spec
        wide = torch.promote_types(projected.dtype, torch.float32)
        inputs, gate, steps = projected.split((spec.num_channels, spec.inner_width, spec.num_steps), dim=-1)
        weights = training_weights(self, wide)
        y = mix(inputs.to(wide), steps.to(wide), weights, spec, chunk=CHUNK).to(projected.dtype)
        normed = self.out_norm(y.unflatten(-1, (spec.num_heads, -1))).flatten(-2)
        return (normed * self.act_fn(gate.to(wide))).to(projected.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: dict[str, Any] | None = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        """Checkpoint keys of megatron-core's GatedDeltaNet: in_proj and conv1d in parts, each divided over ranks."""
        group = self.pg_collection.tp if tp_group is None else tp_group
        parts = {"in_proj": projected_parts(self), "conv1d": convolved_parts(self)}
        return sharded_in_parts(self, parts, prefix, sharded_offsets, metadata, group)


class SlottedDeltaNet(PagedPart, TorchDeltaNet):
    """The delta net of `gpt_spec`: trains as TorchDeltaNet, generates from state slots once adopted."""

"""Modules of models with `Extensions`, as a layer spec builds them: megatron-core's own classes and a little more.

They train on any device of torch. `specs.gpt_spec` names those that belong to layers, `extend` gives a built model
those around its decoder. Parameter names beyond megatron-core's are those of Megatron-Bridge.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_infer.models.core_attention import TorchNorm, init_device
from megatron_infer.models.extensions import Extensions, extensions_of
from megatron_infer.models.mcore_compat import (
    ColumnParallelLinear,
    LanguageModelEmbedding,
    MLATransformerConfig,
    RowParallelLinear,
    SelfAttention,
    TransformerConfig,
    build_module,
    copy_to_tensor_model_parallel_region,
    is_layer_window_attention,
    reduce_from_tensor_model_parallel_region,
    sharded_tensors,
)
from megatron_infer.models.rotary import DeviceAgnosticRotary, angles


@dataclass
class ExtendedConfig(TransformerConfig):
    """A TransformerConfig that also has `Extensions`."""

    extensions: Extensions = field(default_factory=Extensions)


@dataclass
class ExtendedLatentConfig(MLATransformerConfig):
    """An MLATransformerConfig that also has `Extensions`."""

    extensions: Extensions = field(default_factory=Extensions)


def extended_config(settings: Mapping[str, Any]) -> type[TransformerConfig]:
    """The class of a config with these fields and `extensions`."""
    return ExtendedLatentConfig if settings.get("multi_latent_attention") else ExtendedConfig


class NormedRowParallelLinear(RowParallelLinear):
    """The last linear of an attention or MLP, with a norm of its sum over the ranks."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = TorchNorm(config, output_size)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        # The layer would add the bias to the normed sum.
        return self.post_layernorm(output if bias is None else output + bias), None


class WholeHeadNorm(torch.nn.Module):
    """RMS norm of queries or keys over all heads of all tensor-parallel ranks; each rank has its heads' weights."""

    of_queries: bool

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float | None = None, **_: Any) -> None:
        """hidden_size: of a head, as for the norm of one."""
        super().__init__()
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise NotImplementedError("norms over all heads are RMS norms with weights around 1")
        ranks = config.tensor_model_parallel_size
        heads = config.num_attention_heads if self.of_queries else config.num_query_groups
        if heads % ranks:
            raise NotImplementedError(f"a norm over all heads: {heads} heads on {ranks} tensor-parallel ranks")
        self.eps: float = config.layernorm_epsilon if eps is None else eps
        self.global_dim = heads * hidden_size
        """Width of all heads of all ranks."""
        self.tp_group: Any = None
        """Set by `extend`; needed where there are several ranks."""
        width = self.global_dim // ranks
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype, device=init_device(config)))
        if ranks > 1:
            self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            self.weight.partition_dim, self.weight.partition_stride = 0, 1  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads, H], this rank's heads."""
        wide = x.flatten(-2).float()
        squares = wide.square().sum(-1, keepdim=True)
        if wide.shape[-1] != self.global_dim:
            assert self.tp_group is not None, "extend(model) has not been called"
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
            # Each rank norms heads of its own by the sum: its gradient is that of all ranks.
            squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        normed = wide * torch.rsqrt(squares / self.global_dim + self.eps)
        return (normed * self.weight).to(x.dtype).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return sharded_tensors(self, prefix, {"weight": 0}, sharded_offsets, metadata, self.tp_group)


class QueryNorm(WholeHeadNorm):
    of_queries = True


class KeyNorm(WholeHeadNorm):
    of_queries = False


class TwoRopeAttention(SelfAttention):
    """Takes its part of the angles of two ropes side by side: the first where the layer has a window, else the
    second."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if rotary_pos_emb is not None:
            local, everywhere = rotary_pos_emb.chunk(2, dim=-1)
            rotary_pos_emb = local if has_window(self.config, self.layer_number) else everywhere
        return super().forward(
            hidden_states, attention_mask, key_value_states, inference_context, rotary_pos_emb, *args, **kwargs
        )


class MixedHeadsAttention(TwoRopeAttention):
    """Attention whose layers with a window may have another number of KV heads, and alone have sinks; values may have
    another width than keys, and a factor. Parameters are those of Megatron-Bridge's MiMo-V2-Flash."""

    def __init__(
        self, config: TransformerConfig, submodules: Any, layer_number: int, *args: Any, **kwargs: Any
    ) -> None:
        extensions, is_local = extensions_of(config), has_window(config, layer_number)
        self.most_query_groups = max(config.num_query_groups, extensions.local_query_groups or 0)
        config = copy.copy(config)
        if is_local and extensions.local_query_groups is not None:
            config.num_query_groups = extensions.local_query_groups
        if not is_local and extensions.local_sinks:
            config.softmax_type = "vanilla"
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self.value_dim = extensions.value_dim or config.kv_channels
        self.value_scale = extensions.value_scale
        keys, heads = config.num_query_groups * config.kv_channels, config.num_attention_heads
        of_linear = {"config": config, "tp_group": self.pg_collection.tp, "is_expert": False}
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            heads * config.kv_channels + keys + config.num_query_groups * self.value_dim,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear or config.add_qkv_bias,
            skip_bias_add=False,
            **of_linear,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            heads * self.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            **of_linear,
        )

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, n, H] queries, [s, b, k, H] keys and [s, b, k, value_dim] values."""
        mixed, _bias = self.linear_qkv(hidden_states)
        groups, dim = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        queries = self.num_attention_heads_per_partition // groups * dim
        query, key, value = mixed.unflatten(-1, (groups, -1)).split([queries, dim, self.value_dim], dim=-1)
        query = query.unflatten(-1, (-1, dim)).flatten(2, 3)
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value * self.value_scale


def has_window(config: Any, layer_number: int) -> bool:
    """Whether layer number `layer_number`, from 1 on, has a window."""
    found: bool = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    return found


class TwoRopes(DeviceAgnosticRotary):
    """Angles of a rope for layers with a window, then those of its own for the others, side by side."""

    rope_local: DeviceAgnosticRotary

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """[P, 1, 1, 2 * rotary_dim] fp32."""
        ropes = (self.rope_local, self)
        if torch.accelerator.is_available():
            for rope in ropes:
                rope.inv_freq = rope.inv_freq.to(torch.accelerator.current_accelerator())
        return torch.cat([angles(rope, max_seq_len, offset) for rope in ropes], dim=-1)[:, None, None, :]


class ScaledEmbedding(LanguageModelEmbedding):
    """Embeddings times `Extensions.embedding_scale`, or `embedding_multiplier`."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) * self.scale()

    def scale(self) -> float:
        """The former is rounded to the dtype of the embeddings."""
        extensions = extensions_of(self.config)
        scale = extensions.embedding_scale
        if scale is None:
            return extensions.embedding_multiplier
        return torch.tensor(scale, dtype=self.word_embeddings.weight.dtype).item()


class CappedOutput(ColumnParallelLinear):
    """Logits capped by `Extensions.logit_softcap`."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        logits, bias = super().forward(*args, **kwargs)
        return self.softcap * torch.tanh(logits / self.softcap), bias

    @property
    def softcap(self) -> float:
        cap = extensions_of(self.config).logit_softcap
        assert cap is not None
        return cap


class ScaledOutput(ColumnParallelLinear):
    """Logits times `Extensions.lm_head_multiplier`."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        logits, bias = super().forward(*args, **kwargs)
        return logits * extensions_of(self.config).lm_head_multiplier, bias


def extend(model: Any) -> Any:
    """Give a GPTModel or MambaModel that was built of an ExtendedConfig what its config says of embedding, rope and
    output layer, and its norms over all heads their group. No parameter and no state-dict key changes.
    """
    extensions = extensions_of(model.config)
    for module in model.modules():
        if isinstance(module, WholeHeadNorm):
            module.tp_group = model.pg_collection.tp
    scales = extensions.embedding_scale is not None or extensions.embedding_multiplier != 1.0
    if scales and hasattr(model, "embedding"):
        model.embedding.__class__ = ScaledEmbedding
    if extensions.lm_head_multiplier != 1.0 and hasattr(model, "output_layer"):
        model.output_layer.__class__ = ScaledOutput
    if extensions.logit_softcap is not None and hasattr(model, "output_layer"):
        model.output_layer.__class__ = CappedOutput
    if extensions.local_rotary_base is not None:
        rope = model.rotary_pos_emb
        rope.__class__ = TwoRopes
        rope.rope_local = DeviceAgnosticRotary(
            kv_channels=model.config.kv_channels,
            rotary_percent=model.rotary_percent,
            rotary_interleaved=model.config.rotary_interleaved,
            rotary_base=extensions.local_rotary_base,
            use_cpu_initialization=model.config.use_cpu_initialization,
        )
    return model

"""Specs of hybrid decoders for any device of torch: Mamba-2 mixers, attention, MLPs and experts by a pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_infer.config.mamba_state import LAYER_SYMBOLS
from megatron_infer.errors import ConfigError
from megatron_infer.models.core_attention import TorchNorm
from megatron_infer.models.extensions import MULTIPLIERS, extensions_of
from megatron_infer.models.mamba_mixer import SlottedMambaMixer
from megatron_infer.models.mcore_compat import (
    ColumnParallelLinear,
    HybridStack,
    HybridStackSubmodules,
    IdentityOp,
    MambaLayerSubmodules,
    ModuleSpec,
    RowParallelLinear,
    TransformerConfig,
    TransformerLayerSubmodules,
    get_bias_dropout_add,
    submodules_of,
    with_module,
)
from megatron_infer.models.paged_layers import (
    PAGED_LAYERS,
    PagedMambaLayer,
    PagedMLPLayer,
    PagedPart,
    PagedTransformerLayer,
    paged_class,
)
from megatron_infer.models.parallel_layer import AttentionBesideMixer, ParallelLayer, ParallelLayerSubmodules
from megatron_infer.models.specs import layer_spec

UNSUPPORTED_SYMBOLS: dict[str, str] = {
    "G": "gated delta net",
    "D": "sparse attention",
    "+": "multi-latent attention",
    "|": "pipeline stage boundary",
    "/": "multi-token prediction",
}
"""Symbols of later megatron-core versions that are not supported here."""


def check_hybrid_pattern(pattern: Sequence[str], *, num_layers: int | None = None) -> None:
    """Raise ConfigError, naming symbol, position and the known symbols, for a layer pattern that cannot be built.

    pattern: "M*-M", or a list of its symbols. num_layers: the config's, which the pattern must have.
    """
    if not pattern:
        raise ConfigError("the layer pattern is empty")
    known = ", ".join(f"{symbol} ({what})" for symbol, what in LAYER_SYMBOLS.items())
    for i, symbol in enumerate(pattern):
        where = f"layer pattern {''.join(pattern)!r}, position {i}: {symbol!r}"
        if symbol in UNSUPPORTED_SYMBOLS:
            raise ConfigError(f"{where} ({UNSUPPORTED_SYMBOLS[symbol]}) is not supported; known are {known}")
        if symbol not in LAYER_SYMBOLS:
            raise ConfigError(f"{where} is no layer symbol; known are {known}")
    if num_layers is not None and len(pattern) != num_layers:
        raise ConfigError(
            f"layer pattern {''.join(pattern)!r} has {len(pattern)} layers, the config has num_layers={num_layers}"
        )


class TorchHybridStack(HybridStack):
    """megatron-core's hybrid stack with a final norm of ours, as its own needs Transformer Engine.

    Raises ConfigError for a pattern that cannot be built, before it builds anything.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *args: Any,
        post_layer_norm: bool = True,
        post_process: bool = True,
        **kwargs: Any,
    ) -> None:
        whole, part = kwargs.get("hybrid_override_pattern"), kwargs.get("layer_type_list")  # 0.16, 0.19
        if whole is not None or part is not None:
            check_hybrid_pattern(whole or part, num_layers=None if whole is None else config.num_layers)
        pattern = "".join(whole or part or ())
        if "E" in pattern and submodules.moe_layer is IdentityOp:
            raise ConfigError(f"layer pattern {pattern!r} has experts (E), but config.num_moe_experts is not set")
        super().__init__(config, submodules, *args, post_layer_norm=False, post_process=post_process, **kwargs)
        self.post_layer_norm = post_layer_norm
        if post_process and post_layer_norm:
            self.final_norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)


@dataclass
class MixerSubmodules:
    """The two linears of a Mamba mixer, named as in megatron-core's MambaMixerSubmodules."""

    in_proj: Any
    out_proj: Any


def hybrid_spec(
    config: TransformerConfig, *, norm_groups: int | None = None, parallel: bool = False, **mixer_options: Any
) -> ModuleSpec:
    """A hybrid stack spec with paged layers that also trains without CUDA, triton or Transformer Engine.

    Pass it as MambaModel's `mamba_stack_spec` (HybridModel's `hybrid_stack_spec`). Parameter names are those of
    megatron-core's local modules; distributed checkpoints have the keys of its own Transformer Engine spec.
    norm_groups and mixer_options (d_conv, bias, norm_epsilon, dt_limit, ...: options of megatron-core's mixer that are
    in no config): see `mamba_mixer.TorchMambaMixer`. parallel: layers that attend have a mixer beside it.
    """
    if not extensions_of(config).has_only(MULTIPLIERS if parallel else ()):
        raise ConfigError("a hybrid with the extensions of a config is not supported")
    plain = submodules_of(layer_spec(config, has_experts=False))
    mixer = ModuleSpec(
        module=SlottedMambaMixer,
        params={"norm_groups": norm_groups, **mixer_options},
        submodules=MixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    mamba = MambaLayerSubmodules(
        norm=TorchNorm,
        mixer=mixer,
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    attention: dict[str, Any] = {
        "input_layernorm": TorchNorm,
        "self_attention": plain.self_attention,
        "self_attn_bda": get_bias_dropout_add,
        "sharded_state_dict_keys_map": {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    }
    if parallel:
        attention["self_attention"] = with_module(plain.self_attention, paged_class(PagedPart, AttentionBesideMixer))
        attends = ModuleSpec(
            module=PAGED_LAYERS[ParallelLayer], submodules=ParallelLayerSubmodules(**attention, mixer=mixer)
        )
    else:
        attends = ModuleSpec(module=PagedTransformerLayer, submodules=TransformerLayerSubmodules(**attention))
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=TorchNorm,
        mlp=plain.mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    )
    stack = HybridStackSubmodules(
        mamba_layer=ModuleSpec(module=PagedMambaLayer, submodules=mamba),
        attention_layer=attends,
        mlp_layer=ModuleSpec(module=PagedMLPLayer, submodules=mlp),
    )
    if config.num_moe_experts is not None:
        expert = submodules_of(layer_spec(config, has_experts=True))
        experts = TransformerLayerSubmodules(pre_mlp_layernorm=TorchNorm, mlp=expert.mlp, mlp_bda=get_bias_dropout_add)
        stack.moe_layer = ModuleSpec(module=PagedTransformerLayer, submodules=experts)
    return ModuleSpec(module=TorchHybridStack, submodules=stack)

"""Layer specs with paged attention, for models built by spec."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from megatron_infer.errors import AdoptionError, ConfigError
from megatron_infer.models.core_attention import TorchCoreAttention, TorchNorm
from megatron_infer.models.delta_net import SlottedDeltaNet, TorchDeltaNet
from megatron_infer.models.extended_modules import (
    KeyNorm,
    MixedHeadsAttention,
    NormedRowParallelLinear,
    QueryNorm,
    TwoRopeAttention,
)
from megatron_infer.models.extensions import OF_INDEXERS, Extensions, extensions_of
from megatron_infer.models.mamba_mixer import TorchMambaMixer, derives_from_stock_mixer
from megatron_infer.models.mcore_compat import (
    ColumnParallelLinear,
    GatedDeltaNet,
    GatedDeltaNetSubmodules,
    HybridStackSubmodules,
    IdentityOp,
    MLASelfAttention,
    ModuleSpec,
    RowParallelLinear,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    latent_attention_on_cpu,
    layer_offset,
    spec_module,
    submodules_of,
    with_module,
)
from megatron_infer.models.moe import DeviceAgnosticRouter, LatentMoELayer, SoftmaxRouter
from megatron_infer.models.paged_layers import (
    PAGED_ATTENTION,
    PAGED_LAYERS,
    PagedPart,
    PagedTransformerLayer,
    paged_class,
)
from megatron_infer.models.rotary import DeviceAgnosticRotary, DeviceAgnosticYarn
from megatron_infer.models.sparse_module import TorchSparseAttention
from megatron_infer.models.stage_layers import delta_layers, expert_layers


def with_inference(spec: Any) -> Any:
    """A copy of a layer, block or hybrid stack spec whose attention, mixers and stock layers run paged with a step.

    The rest of the spec is unchanged: parameters, checkpoint keys and training are the same. Classes of your own (a
    layer, a subclass of SelfAttention, a core attention) stay too; by passing them here you state that they attend as
    megatron-core's do (causal softmax of scaled dot products), which is what the paged path computes.
    Raises AdoptionError.
    """
    spec = copy.deepcopy(spec)
    stack = spec if isinstance(spec, HybridStackSubmodules) else getattr(spec, "submodules", None)
    if isinstance(stack, HybridStackSubmodules):
        _page_stack(stack)
        return spec
    block = spec if isinstance(spec, TransformerBlockSubmodules) else getattr(spec, "submodules", None)
    if isinstance(block, TransformerBlockSubmodules):
        block.layer_specs = [_paged_layer(layer, f"layer_specs[{i}]") for i, layer in enumerate(block.layer_specs)]
        return spec
    return _paged_layer(spec, "")


def _paged_layer(spec: Any, name: str) -> Any:
    attention = getattr(getattr(spec, "submodules", None), "self_attention", None)
    if attention is None:
        raise AdoptionError(name, f"{spec!r:.120} is not a decoder layer's spec: it has no submodules.self_attention")
    found = spec_module(attention)
    if not (isinstance(found, type) and issubclass(found, (*PAGED_ATTENTION, TorchDeltaNet, GatedDeltaNet))):
        what = getattr(found, "__qualname__", repr(found))
        where = f"{name}.self_attention".lstrip(".")
        known = "megatron-core's SelfAttention nor MLASelfAttention"
        raise AdoptionError(where, f"{what} is neither {known} nor derived from one of them")
    if not issubclass(found, PagedPart):
        attention.module = paged_class(PagedPart, found)
    if spec.module is TransformerLayer:
        spec.module = PagedTransformerLayer
    return spec


def _page_stack(stack: HybridStackSubmodules) -> None:
    """Put paged classes into every layer of a hybrid stack, in place."""
    for layer in (stack.mlp_layer, stack.moe_layer, stack.mamba_layer):
        if layer is not IdentityOp:
            layer.module = PAGED_LAYERS.get(layer.module, layer.module)
    if stack.attention_layer is not IdentityOp:
        _paged_layer(stack.attention_layer, "attention_layer")
    mamba = stack.mamba_layer
    if mamba is IdentityOp:
        return
    mixer = getattr(getattr(mamba, "submodules", None), "mixer", None)
    found = spec_module(mixer)
    if not (isinstance(found, type) and (issubclass(found, TorchMambaMixer) or derives_from_stock_mixer(found))):
        what = getattr(found, "__qualname__", repr(found))
        raise AdoptionError("mamba_layer.mixer", f"{what} is neither megatron-core's MambaMixer nor derived from it")
    if not issubclass(found, PagedPart):
        paged = paged_class(PagedPart, found)
        if isinstance(mixer, type):
            mamba.submodules.mixer = paged
        else:
            mixer.module = paged


class TorchLatentAttention(PAGED_ATTENTION[MLASelfAttention]):  # type: ignore[misc]
    """Stock latent attention of exactly the submodules that its spec names, built without CUDA too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with latent_attention_on_cpu(DeviceAgnosticRotary, DeviceAgnosticYarn):
            super().__init__(*args, **kwargs)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Of 0.19.2, which else puts Transformer Engine's linears with norms inside in the place of plain ones."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def gpt_spec(
    config: TransformerConfig,
    *,
    pp_rank: int | None = None,
    vp_stage: int | None = None,
    stock: bool = False,
) -> TransformerBlockSubmodules:
    """A decoder spec with paged layers that also trains where there is no CUDA: torch's SDPA and norms.

    Pass it as GPTModel's `transformer_layer_spec`. State-dict and checkpoint keys are those of megatron-core's local
    spec. `config.moe_layer_freq` decides which layers have experts. pp_rank: the pipeline stage of these layers; None
    takes it from megatron-core's global state. vp_stage: the chunk of that stage, where it has several. stock: with the
    classes of megatron-core's local spec, which train on CUDA only, and which adoption makes paged in place.
    """
    count = config.num_layers
    has_experts = [False] * count if config.num_moe_experts is None else expert_layers(count, config.moe_layer_freq)
    is_delta = delta_layers(count, getattr(config, "linear_attention_freq", None))
    if stock and any(is_delta):
        raise ConfigError("megatron-core's own gated delta nets need flash-linear-attention; use the paged spec")
    kinds = list(zip(has_experts, is_delta, strict=True))
    made = {
        (experts, delta): layer_spec(config, has_experts=experts, is_delta=delta, stock=stock)
        for experts, delta in set(kinds)
    }
    layers = [made[kind] for kind in kinds]
    norm = submodules_of(layers[0]).input_layernorm
    count = get_num_layers_to_build(config, vp_stage, pp_rank)
    if count != config.num_layers:
        first = layer_offset(config, pp_rank, vp_stage)
        layers = layers[first : first + count]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchNorm if norm is IdentityOp else norm)


def mtp_spec(config: TransformerConfig, block: TransformerBlockSubmodules) -> Any:
    """The `mtp_block_spec` of a GPTModel whose MTP layers have the norms and the last layer of `block`, as `gpt_spec`
    gives it; None for a config without MTP layers."""
    if not config.mtp_num_layers:
        return None
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlockSubmodules,
        get_mtp_layer_spec_for_backend,
    )

    last = block.layer_specs[-1]
    norm = block.layer_norm
    backend = SimpleNamespace(column_parallel_linear=lambda: ColumnParallelLinear, layer_norm=lambda *_, **__: norm)
    layer = get_mtp_layer_spec_for_backend(last, backend)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers)


def layer_spec(
    config: TransformerConfig, *, has_experts: bool, stock: bool = False, is_delta: bool = False
) -> ModuleSpec:
    """One paged decoder layer with torch's SDPA and norms, and an MLP or experts. stock: see `gpt_spec`.

    is_delta: with a gated delta net in the place of attention.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        multi_latent_attention=config.multi_latent_attention,
    )
    layer = submodules_of(spec)
    extensions = extensions_of(config)
    if has_experts:  # stock where CUDA is available
        submodules_of(layer.mlp).router = SoftmaxRouter if extensions.softmax_scores else DeviceAgnosticRouter
        if getattr(config, "moe_latent_size", None) and not stock:
            layer.mlp = with_module(layer.mlp, LatentMoELayer)
    if stock and config.multi_latent_attention:
        raise ConfigError("megatron-core's local spec has no core attention for latents; use specs.gpt_spec as it is")
    if stock:
        if extensions != Extensions():
            raise ConfigError("stock=True, but megatron-core has no modules for the config's extensions")
        return spec
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp if extensions.norms == "after" else TorchNorm
    if is_delta:
        if extensions != Extensions():
            raise ConfigError("gated delta nets with the extensions of a config are not supported")
        parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=TorchNorm, out_proj=RowParallelLinear)
        layer.self_attention = ModuleSpec(module=SlottedDeltaNet, submodules=parts)
        norm = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}  # as Transformer Engine's spec saves it
        layer.sharded_state_dict_keys_map = layer.sharded_state_dict_keys_map | norm
        return with_inference(spec)
    attention = submodules_of(layer.self_attention)
    attention.core_attention = TorchCoreAttention
    if config.multi_latent_attention and not extensions.has_only(OF_INDEXERS):
        raise ConfigError("latent attention with the extensions of a config is not supported")
    if config.multi_latent_attention:
        layer.self_attention.module = TorchLatentAttention
        if getattr(config, "experimental_attention_variant", None) == "dsa":
            attention.core_attention = TorchSparseAttention
        norm = TorchNorm if config.qk_layernorm else IdentityOp
        attention.q_layernorm, attention.kv_layernorm = (IdentityOp if config.q_lora_rank is None else norm), norm
    elif config.qk_layernorm and not config.qk_l2_norm:
        attention.q_layernorm = attention.k_layernorm = TorchNorm
    if extensions.whole_head_norms and not config.qk_layernorm:
        raise ConfigError("whole_head_norms=True needs qk_layernorm=True")
    if extensions.local_rotary_base is not None and config.window_size is None:
        raise ConfigError(
            f"local_rotary_base={extensions.local_rotary_base:g} needs layers with a window (window_size)"
        )
    if extensions.whole_head_norms:
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
    if extensions.norms != "before":
        if has_experts:
            raise ConfigError(f"norms {extensions.norms} experts are not supported")
        attention.linear_proj = submodules_of(layer.mlp).linear_fc2 = NormedRowParallelLinear
    if extensions.mixes_heads and (extensions.local_rotary_base is None or extensions.whole_head_norms):
        raise ConfigError(
            "heads that differ between layers need two ropes (local_rotary_base), and no whole_head_norms"
        )
    if extensions.local_rotary_base is not None:
        layer.self_attention.module = MixedHeadsAttention if extensions.mixes_heads else TwoRopeAttention
    return with_inference(spec)

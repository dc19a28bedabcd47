"""The kinds of models that every promise of the engine is tested with, and buffers that hold so many blocks of them."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.model_shape import ModelShape, kv_block_bytes
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.kernels.activations import ScaledActivation, tanh_gelu
from megatron_infer.models.adopt import adopt
from megatron_infer.models.extensions import Extensions
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_delta, tiny_gpt, tiny_hybrid, tiny_mamba

KINDS = ("attention", "hybrid", "mamba", "latent", "delta", "softcapped", "sparse", "parallel")
"""Attention with MLPs; Mamba, attention with sinks, MLP and latent experts in one stack; Mamba alone; latent attention
with MLPs; delta nets and gated attention; all that Gemma's families have; latent attention to chosen keys; attention
and Mamba side by side, with all factors of Falcon-H1."""
RECURRENT = ("hybrid", "mamba", "delta", "parallel")
HYBRID_PATTERN = "M*-ME*M"
UNALIGNED = 1e-4
"""Of fp32 log probabilities computed in other pieces by kernels that round: see test_scan_tolerance."""
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
    "qk_layernorm": True,
    "num_query_groups": 4,
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale_all_dim": 0.5,
}
"""Latent attention, as DeepSeek-V3's with yarn."""
SPARSE: dict[str, Any] = LATENT | {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 16,  # of few heads all may score 0, and of equal scores the model's own choice is open
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 12,
}
"""Sparse attention over latents, as DeepSeek-V3.2's."""
LATENT_EXPERTS: dict[str, Any] = {"moe_latent_size": 24, "moe_shared_expert_intermediate_size": 32}
"""Experts in a latent space, as Nemotron 3 Super's."""
SOFTCAPPED: dict[str, Any] = {
    "extensions": Extensions(
        norms="both", embedding_scale=8.0, attention_softcap=2.0, logit_softcap=8.0, local_rotary_base=100.0
    ),
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "softmax_scale": 0.4,
    "window_size": (19, 0),
    "window_attn_skip_freq": 2,
    "activation_func": tanh_gelu,
    "share_embeddings_and_output_weights": True,
}
"""As Gemma 2 and 3: every other layer has a window and a rope of its own."""
MIXED: dict[str, Any] = {
    "extensions": Extensions(
        local_rotary_base=100.0, local_query_groups=4, local_sinks=True, value_dim=12, value_scale=0.7
    ),
    "softmax_type": "learnable",
    "qk_layernorm": True,
    "window_size": (19, 0),
    "window_attn_skip_freq": 2,
}
"""As MiMo-V2-Flash: layers with a window have more KV heads, and sinks; values are narrower than keys."""
PARALLEL: dict[str, Any] = {
    "extensions": Extensions(
        embedding_multiplier=2.5,
        lm_head_multiplier=0.8,
        key_multiplier=0.7,
        attention_in_multiplier=1.2,
        attention_out_multiplier=0.9,
        ssm_in_multiplier=1.1,
        ssm_out_multiplier=0.7,
        ssm_multipliers=(0.7, 1.1, 1.2, 0.8, 0.9),
        mlp_multipliers=(1.3, 0.6),
    ),
    "activation_func": ScaledActivation(F.silu, 1.3, 0.6),
    "position_embedding_type": "rope",
}
"""As Falcon-H1's."""
STATES_GIB = 4 / 1024
"""Room for states of a prefix cache, in every kind that keeps them."""


def make_model(kind: str, **settings: Any) -> torch.nn.Module:
    settings = {"vocab_size": 128, "max_sequence_length": 512, "init_method_std": 0.2} | settings
    if kind == "attention":
        return tiny_gpt(**settings)
    if kind == "hybrid":
        own = {"position_embedding_type": "rope", "softmax_type": "learnable", **LATENT_EXPERTS}
        return tiny_hybrid(HYBRID_PATTERN, **own | settings)
    if kind == "latent":
        return tiny_gpt(**LATENT | settings)
    if kind == "sparse":
        return tiny_gpt(**SPARSE | settings)
    if kind == "parallel":
        return tiny_hybrid("P-P-", **PARALLEL | settings)
    if kind == "delta":
        return tiny_delta(**settings)
    if kind == "mixed":
        return tiny_gpt(**MIXED | settings)
    if kind == "softcapped":
        return tiny_gpt(**SOFTCAPPED | settings)
    return tiny_mamba(num_layers=3, **settings)


def recurrent_part(model: torch.nn.Module) -> torch.nn.Module:
    """The part of the first layer that keeps a state."""
    layer = model.decoder.layers[0]
    return getattr(layer, "mixer", None) or layer.self_attention


def is_native(engine: DynamicInferenceEngine) -> bool:
    """Whether every kernel whose sums could be ordered by the schedule is one that promises the same bits."""
    chosen = engine.kernels
    return chosen.attention.name == "native" and (chosen.scan is None or chosen.scan.name == "native")


def prefix_caching(kind: str, policy: str = "lru") -> dict[str, Any]:
    """Settings that turn the prefix cache on."""
    settings = {"enable_prefix_caching": True, "prefix_caching_eviction_policy": policy}
    return settings | ({"prefix_caching_mamba_gb": STATES_GIB} if kind in RECURRENT else {})


def bytes_of(model: torch.nn.Module, block_size: int) -> tuple[int, int]:
    """Bytes of (a block, a state slot); 0 of what the model does not keep."""
    shape: ModelShape = adopt(model).shape
    block = kv_block_bytes(
        num_layers=shape.num_attention_layers,
        block_size=block_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype_bytes=shape.kv_dtype_bytes,
        planes=shape.kv_planes,
    )
    return block, 0 if shape.state is None else shape.state.slot_bytes


def buffers(
    model: torch.nn.Module,
    *,
    blocks: int,
    block_size: int,
    max_requests: int,
    paused_blocks: int = 0,
    draft: torch.nn.Module | Literal["mtp"] | None = None,
) -> dict[str, Any]:
    """Settings of a pool of `blocks` usable blocks, so many of which the paused may keep, and all the states.

    The states are taken from both buffers in proportion (see `split_pool`), so both are larger by their share.
    """
    block, slot = bytes_of(model, block_size)
    if draft == "mtp":
        config = InferenceConfig(block_size_tokens=block_size, buffer_size_gb=1, speculative={"method": "mtp"})
        block = config.resolve(adopt(model).shape).block_bytes
    elif draft is not None:
        block += bytes_of(draft, block_size)[0]
    states = max_requests * slot
    if not block:  # blocks take no memory
        return {"buffer_size_gb": (states + slot) / 2**30}  # one is for padding
    main, paused = (blocks + 1.25) * block, (paused_blocks + 0.25) * block if paused_blocks else 0.0
    share = states / (main + paused)
    return {
        "buffer_size_gb": main * (1 + share) / 2**30,
        "paused_buffer_size_gb": paused * (1 + share) / 2**30 if paused else None,
    }


def poison(engine: DynamicInferenceEngine) -> None:
    """NaN in every slot and block whose content nobody may go on from; the dummies stay as they are."""
    context, store = inspect(engine).context, inspect(engine).store
    contents = context.pool.contents()
    blocks = set(range(context.num_blocks)) - set(context.held_blocks()) - contents.keys()
    if store.layout.block_bytes:
        store.kv_cache[:, :, sorted(blocks)] = float("nan")
    if store.states is None:
        return
    live = {*context.held_state_slots(), context.num_rows}
    if context.states is not None:
        live |= set(context.states.slots.slots_of(contents.keys()))
    unused = sorted(set(range(store.layout.num_state_slots)) - live)
    store.states.conv_SLCW[unused] = float("nan")
    store.states.ssm_SLHPN[unused] = float("nan")

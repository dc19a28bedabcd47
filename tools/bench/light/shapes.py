"""Models of known shapes with random weights, made on the device without a file; whose steps' work is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.model_description import HybridDescription, ModelDescription

PATTERN_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def _llama(layers: int, hidden: int, heads: int, groups: int, ffn: int, vocabulary: int, name: str) -> ModelDescription:
    transformer = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": hidden // heads,
        "ffn_hidden_size": ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-5,
        "gated_linear_unit": True,
        "activation": "silu",
        "add_bias_linear": False,
        "add_qkv_bias": False,
    }
    return ModelDescription(
        architecture="LlamaForCausalLM",
        transformer=transformer,
        vocab_size=vocabulary,
        max_sequence_length=32768,
        rotary_base=500000.0,
        name=name,
    )


def _hybrid(
    pattern: str, base: ModelDescription, ffn: int, mixer: dict[str, Any], vocabulary: int, name: str
) -> ModelDescription:
    changed = {
        "num_layers": len(pattern),
        "ffn_hidden_size": ffn,
        "gated_linear_unit": False,
        "activation": "relu2",
        "is_hybrid_model": True,
        **mixer,
    }
    return replace(
        base,
        architecture="NemotronHForCausalLM",
        transformer=dict(base.transformer) | changed,
        vocab_size=vocabulary,
        position_embedding="none",
        hybrid=HybridDescription(pattern=pattern, norm_groups=mixer["mamba_num_groups"]),
        name=name,
    )


LLAMA_8B = _llama(32, 4096, 32, 8, 14336, 128256, "llama-8b")
TINY_LLAMA = _llama(2, 64, 4, 2, 96, 256, "tiny-llama")
_MIXER_8B = {"mamba_num_heads": 128, "mamba_head_dim": 64, "mamba_state_dim": 128, "mamba_num_groups": 8}
_MIXER_TINY = {"mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_state_dim": 16, "mamba_num_groups": 2}
_MIXER_SMALL = {"mamba_num_heads": 24, "mamba_head_dim": 64, "mamba_state_dim": 128, "mamba_num_groups": 1}
_EXPERTS: dict[str, Any] = {
    "num_moe_experts": 16,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 768,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
    "moe_grouped_gemm": False,
    "moe_aux_loss_coeff": 0.0,
}
PLANS = {
    "llama-8b": LLAMA_8B,
    "hybrid-8b": _hybrid(PATTERN_8B, LLAMA_8B, 21504, _MIXER_8B, 131072, "hybrid-8b"),
    "llama-1b-4": _llama(4, 2048, 32, 8, 8192, 128256, "llama-1b-4"),
    "moe": _hybrid("*E" * 6, _llama(12, 768, 12, 4, 3072, 32768, "moe"), 3072, _MIXER_SMALL | _EXPERTS, 32768, "moe"),
    "hybrid": _hybrid("M-M*-M-M-M*-M-", _llama(14, 768, 12, 4, 3072, 32768, ""), 3072, _MIXER_SMALL, 32768, "hybrid"),
    "tiny-llama": TINY_LLAMA,
    "tiny-hybrid": _hybrid("M*-M", TINY_LLAMA, 96, _MIXER_TINY, 256, "tiny-hybrid"),
}
"""Llama-3-8B's shape, an 8B hybrid's (Mamba-2, MLPs, four attention layers), 4 of the 16 layers of Llama-3.2-1B, what a
CPU runs of a mixture of experts and of a hybrid, and tiny ones of the same kinds."""


def random_model(plan: ModelDescription, dtype: torch.dtype, device: torch.device) -> Any:
    """The plan's model on `device` with weights drawn there; norms as initialised, so that nothing overflows."""
    model = build_model(plan, dtype=dtype, device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.02)
            elif name.endswith(("bias", "dt_bias")):
                parameter.zero_()
            elif "A_log" in name:
                parameter.fill_(1.0)
            else:
                parameter.fill_(1.0)
    return model

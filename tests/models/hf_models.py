"""Tiny models of transformers of every family, with random parameters: states, routers and biases matter."""

from __future__ import annotations

from typing import Any

import torch

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "logits_scaling": 1.7,
}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM4_MOE = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 16,
}
GEMMA2 = {
    "head_dim": 16,
    "sliding_window": 7,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 2.0,
}
SIGMOID_MOE = {"num_experts": 6, "num_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
DELTA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 40}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LATENT = {
    "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 4,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
SPARSE = {"index_topk": 7, "index_head_dim": 32, "index_n_heads": 16}  # many heads: of few all scores may be 0
LATENT_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
PHI3_LONG = {"pad_token_id": 0, "eos_token_id": 2, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_attention_bias": ("LlamaConfig", {"attention_bias": True}),
    "llama_all_biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama_mlp_bias": ("LlamaConfig", {"mlp_bias": True}),
    "llama_head_dim": ("LlamaConfig", {"head_dim": 16}),
    "llama_mha": ("LlamaConfig", {"num_key_value_heads": 6}),
    "llama_mqa": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama3_rope": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama3_rope_native": (
        "LlamaConfig",
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192, "factor": 32.0}},
    ),
    "llama_linear_rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama_yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "qwen3_yarn": (
        "Qwen3Config",
        {
            "head_dim": 16,
            "rope_parameters": YARN
            | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    "mistral_yarn": ("MistralConfig", {"sliding_window": None, "rope_parameters": YARN | {"attention_factor": 1.3}}),
    "mistral_window": ("MistralConfig", {"sliding_window": 7}),
    "mistral_no_window": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_window_from_layer": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_bias": ("Qwen3Config", {"head_dim": 8, "attention_bias": True}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "phi3": ("Phi3Config", {"pad_token_id": 0, "eos_token_id": 2}),
    "phi3_partial_rotary": (
        "Phi3Config",
        {
            "pad_token_id": 0,
            "eos_token_id": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3_longrope": ("Phi3Config", PHI3_LONG | {"rope_parameters": LONGROPE}),
    "phi3_longrope_partial": (
        "Phi3Config",
        PHI3_LONG
        | {
            "rope_parameters": LONGROPE
            | {"partial_rotary_factor": 0.5, "short_factor": [1.0, 1.3], "long_factor": [1.5, 4.0], "factor": 3.0}
        },
    ),
    "llama_dynamic_rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "smollm3_yarn": ("SmolLM3Config", {"no_rope_layer_interval": 2, "pad_token_id": 0, "rope_parameters": YARN}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5}),
    "mixtral_window_three": (
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 7, "head_dim": 16},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        QWEN_MOE | {"num_experts_per_tok": 3, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    ),
    "qwen3_moe_window": (
        "Qwen3MoeConfig",
        QWEN_MOE | {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 7},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", QWEN_MOE | {"norm_topk_prob": True}),
    "qwen3_moe_probabilities": ("Qwen3MoeConfig", QWEN_MOE | {"head_dim": 16}),
    "qwen3_moe_dense_layers": ("Qwen3MoeConfig", QWEN_MOE | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_moe_every_second": ("Qwen3MoeConfig", QWEN_MOE | {"num_experts_per_tok": 1, "decoder_sparse_step": 2}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", GEMMA2),
    "gemma2_no_caps": (
        "Gemma2Config",
        GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24, "num_hidden_layers": 7},
    ),
    "gemma3_linear_rope": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 20.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            },
        },
    ),
    "gemma3_no_window": ("Gemma3TextConfig", {"head_dim": 16, "layer_types": ["full_attention"] * 3}),
    "olmo2": ("Olmo2Config", {}),
    "olmo2_bias": ("Olmo2Config", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3Config", {"sliding_window": 7, "num_hidden_layers": 5}),
    "olmo3_yarn": (
        "Olmo3Config",
        {
            "sliding_window": 7,
            "num_hidden_layers": 5,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": YARN | {"attention_factor": 1.0},
            },
        },
    ),
    "exaone4": ("Exaone4Config", {"sliding_window": 7, "num_hidden_layers": 5}),
    "exaone4_no_window": (
        "Exaone4Config",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "rope_parameters": LLAMA3},
    ),
    "glm4": ("Glm4Config", {"head_dim": 16, "attention_bias": True, "pad_token_id": 0}),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmoe_normalised": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8, "intermediate_size": 24},
    ),
    "glm4_moe": ("Glm4MoeConfig", GLM4_MOE | {"use_qk_norm": True, "routed_scaling_factor": 2.5}),
    "glm4_moe_bias": ("Glm4MoeConfig", GLM4_MOE | {"attention_bias": True, "first_k_dense_replace": 2}),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "num_attention_heads": 8,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 7,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 7,
            "rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
    "gpt_oss_limit": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "swiglu_limit": 0.5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", DELTA | QWEN_MOE | SHARED),
    "qwen3_next_dense_layer": (
        "Qwen3NextConfig",
        DELTA | QWEN_MOE | SHARED | {"norm_topk_prob": False, "mlp_only_layers": [1], "linear_num_value_heads": 6},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5_bias": (
        "Qwen3_5TextConfig",
        DELTA
        | {"attention_bias": True, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}
        | {"layer_types": None, "full_attention_interval": 2},
    ),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", DELTA | QWEN_MOE | SHARED),
    "deepseek_v3": ("DeepseekV3Config", LATENT | {"rope_parameters": LATENT_YARN}),
    "deepseek_v3_one_group": (
        "DeepseekV3Config",
        LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "v_head_dim": 32},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        LATENT
        | {"q_lora_rank": None, "rope_parameters": LATENT_YARN | {"mscale_all_dim": 0.7}, "norm_topk_prob": False},
    ),
    "deepseek_v2_groups": (
        "DeepseekV2Config",
        LATENT | {"topk_method": "group_limited_greedy", "topk_group": 4, "norm_topk_prob": False},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {name: value for name, value in LATENT.items() if name != "first_k_dense_replace"}
        | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "dense"]},
    ),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16}),
    "ernie4_5_bias": ("Ernie4_5Config", {"use_bias": True, "tie_word_embeddings": False}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24, "tie_word_embeddings": False},
    ),
    "ernie4_5_moe_every_second": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "num_hidden_layers": 5, "moe_layer_interval": 2}
        | {"moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_layer_end_index": 4},
    ),
    "exaone_moe": ("ExaoneMoeConfig", SIGMOID_MOE | {"head_dim": 16, "sliding_window": 7, "sliding_window_pattern": 2}),
    "hy_v3": ("HYV3Config", SIGMOID_MOE | {"head_dim": 16}),
    "dots1": (
        "Dots1Config",
        GLM4_MOE | {"norm_topk_prob": True, "first_k_dense_replace": 1, "sliding_window": 7, "max_window_layers": 2},
    ),
    "nemotron": ("NemotronConfig", {"eos_token_id": 3}),
    "nemotron_biases": ("NemotronConfig", {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 1.0}),
    "deepseek_v32": ("DeepseekV32Config", LATENT | SPARSE | {"rope_parameters": LATENT_YARN}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", LATENT | SPARSE | {"n_group": 1, "topk_group": 1}),
    "glm_moe_dsa_shared": (
        "GlmMoeDsaConfig",
        LATENT | SPARSE | {"n_group": 1, "topk_group": 1, "indexer_types": ["full", "shared", "full"]},
    ),
    "dense_granite": ("GraniteConfig", FACTORS | {"attention_bias": True, "mlp_bias": True}),
    "dense_granite_tied": ("GraniteConfig", FACTORS | {"tie_word_embeddings": True}),
    "granite_moe": ("GraniteMoeConfig", FACTORS | {"num_local_experts": 5, "intermediate_size": 24}),
    "gpt2": ("GPT2Config", {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256}),
}

HYBRID_SIZES = {"vocab_size": 131, "hidden_size": 48, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
ATTENTION = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256}
MAMBA2 = {"num_heads": 12, "head_dim": 8, "state_size": 16, "num_hidden_layers": 3, "n_groups": 2, "chunk_size": 16}
NEMOTRON = ATTENTION | {
    "head_dim": 8, "intermediate_size": 80, "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 8,
    "n_groups": 2, "chunk_size": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40, "hybrid_override_pattern": "MM*-M-",
}  # fmt: skip
BAMBA = ATTENTION | {
    "intermediate_size": 80, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 12,
    "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16,
}  # fmt: skip
GRANITE = ATTENTION | {
    "intermediate_size": 24, "shared_intermediate_size": 80, "num_hidden_layers": 3, "num_local_experts": 0,
    "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 12, "mamba_d_state": 16, "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
FALCON_H1 = ATTENTION | {
    "intermediate_size": 80, "num_hidden_layers": 3, "mamba_n_heads": 12, "mamba_d_ssm": 96, "mamba_d_state": 16,
    "mamba_n_groups": 2, "mamba_chunk_size": 16, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.7,
    "key_multiplier": 0.6, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.9, "ssm_multipliers": [0.7, 1.1, 1.2, 0.8, 0.9], "mlp_multipliers": [1.4, 0.6],
}  # fmt: skip
NO_CONV_BIAS = {"mamba_conv_bias": False, "mamba_proj_bias": True}
HYBRID: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2Config", MAMBA2),
    "mamba2_one_group": ("Mamba2Config", MAMBA2 | {"n_groups": 1}),
    "mamba2_tied": ("Mamba2Config", MAMBA2 | {"tie_word_embeddings": True, "n_groups": 4}),
    "mamba2_biases": ("Mamba2Config", MAMBA2 | {"use_bias": True, "use_conv_bias": False}),
    "mamba2_limits": ("Mamba2Config", MAMBA2 | {"time_step_limit": (0.4, 0.9), "conv_kernel": 3}),
    "mamba2_epsilon": ("Mamba2Config", MAMBA2 | {"layer_norm_epsilon": 0.02}),
    "nemotron_h": ("NemotronHConfig", NEMOTRON),
    "nemotron_h_one_group": ("NemotronHConfig", NEMOTRON | {"n_groups": 1, "head_dim": 16}),
    "nemotron_h_biases": ("NemotronHConfig", NEMOTRON | {"mlp_bias": True, "use_bias": True, "use_conv_bias": False}),
    "nemotron_h_time_step": ("NemotronHConfig", NEMOTRON | {"time_step_min": 0.5, "layer_norm_epsilon": 0.01}),
    "nemotron_h_experts": ("NemotronHConfig", NEMOTRON | {"hybrid_override_pattern": "MEM*E-"}),
    "nemotron_h_experts_scaled": (
        "NemotronHConfig",
        NEMOTRON | {"hybrid_override_pattern": "ME*E", "routed_scaling_factor": 2.5, "num_experts_per_tok": 3},
    ),
    "nemotron_h_latent_experts": (
        "NemotronHConfig",
        NEMOTRON
        | {
            "hybrid_override_pattern": "ME*E",
            "moe_latent_size": 32,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
        },
    ),
    "nemotron_h_one_expert": (
        "NemotronHConfig",
        NEMOTRON | {"hybrid_override_pattern": "ME*", "num_experts_per_tok": 1, "norm_topk_prob": False},
    ),
    "bamba": ("BambaConfig", BAMBA),
    "bamba_tied": ("BambaConfig", BAMBA | {"tie_word_embeddings": True, "mamba_n_groups": 1}),
    "bamba_biases": ("BambaConfig", BAMBA | NO_CONV_BIAS | {"attention_bias": True, "mlp_bias": True}),
    "bamba_full_rotary": (
        "BambaConfig",
        BAMBA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 1.0}},
    ),
    "bamba_linear_rope": (
        "BambaConfig",
        BAMBA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "bamba_yarn": ("BambaConfig", BAMBA | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    "bamba_limits": ("BambaConfig", BAMBA | {"time_step_limit": (0.4, 0.9), "rms_norm_eps": 0.02}),
    "falcon_h1": ("FalconH1Config", FALCON_H1),
    "falcon_h1_norm": (
        "FalconH1Config",
        FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True},
    ),
    "granite": ("GraniteMoeHybridConfig", GRANITE),
    "granite_rope": ("GraniteMoeHybridConfig", GRANITE | {"position_embedding_type": "rope"}),
    "granite_factors": ("GraniteMoeHybridConfig", GRANITE | FACTORS | {"mamba_n_groups": 1}),
    "granite_factors_tied": ("GraniteMoeHybridConfig", GRANITE | FACTORS | {"tie_word_embeddings": True}),
    "granite_tied": (
        "GraniteMoeHybridConfig",
        GRANITE | {"tie_word_embeddings": True, "residual_multiplier": 0.5},
    ),
    "granite_biases": ("GraniteMoeHybridConfig", GRANITE | FACTORS | NO_CONV_BIAS | {"attention_bias": True}),
    "granite_experts": (
        "GraniteMoeHybridConfig",
        GRANITE | FACTORS | {"num_local_experts": 5, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    ),
}


CASES = DENSE | HYBRID


def config_of(case: str, **changes: Any) -> Any:
    """The transformers config of a model."""
    import transformers  # not at the top: ranks import this file, and make no models of it

    kind, options = CASES[case]
    sizes = HYBRID_SIZES if case in HYBRID else {"vocab_size": 131} if case == "gpt2" else SIZES
    return getattr(transformers, kind)(**(sizes | options | changes))


def random_model(case: str, **changes: Any) -> Any:
    """A transformers model in fp32. changes: of its config."""
    import transformers

    config = config_of(case, **changes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw(model, 1.0 if case in HYBRID else 0.75)
    return model


def draw(model: torch.nn.Module, scale: float) -> None:
    """Give a model random parameters and correction biases."""
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if "correction_bias" in name}
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(_drawn(name, tensor, scale))


def _drawn(name: str, tensor: torch.Tensor, scale: float) -> torch.Tensor:
    if name.endswith("A_log"):
        return torch.log(torch.empty_like(tensor).uniform_(0.3, 3.0))
    if name.endswith("dt_bias"):
        return torch.empty_like(tensor).uniform_(-2.0, 1.0)
    noise = scale * torch.randn_like(tensor)
    if name.endswith("correction_bias"):
        return 0.2 * noise
    if (("norm" in name or "ln_" in name) and name.endswith("weight")) or name.endswith(".D"):
        return 1.0 + 0.3 * noise
    if "conv1d" in name:
        return 0.5 * noise
    return noise * (0.4 if "embed" in name else 0.2)


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    """What transformers computes."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0]

"""The text families of Megatron-Bridge 0.6.2 as tiny models: config.json with the keys that each has on the hub.

Names of keys, their nesting and what is absent are the hub's, sizes are not. Where transformers has no class of a
family, `reference` makes a config of one that computes the same, and `renamed` gives the tensors their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """config: of the hub. reference: keys that differ in the config of transformers' class, None for no key."""

    config: Config
    reference: Config = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement) of tensors' names, in order."""
    fused_qkv: str = ""
    """The name of queries', keys' and values' projections as one tensor below a layer."""
    copied: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement): tensors that are there a second time, for layers that only draft."""
    ones: str = ""
    """A part of the names of vectors that the reference keeps as they start."""
    hub: Config = field(default_factory=dict)
    """Keys of a hub's config.json that differ from what the bridge is found by."""
    sigmoid_scores: bool = False
    """Whether the recipe's routers score by sigmoid, and transformers' by softmax. The recipe's own forward is then
    compared with that of a transformers model which scores by sigmoid too, the directory with transformers as it is."""
    differs: str = ""
    """What the bridge's recipe computes otherwise than transformers, where that is known."""
    variant: bool = False
    """Whether this is a second form of a family, which is not counted."""

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])


def _of(model_type: str, architecture: str, *without: str, **keys: Any) -> dict[str, Any]:
    """A decoder's config; `without` are common keys that this family does not have."""
    common = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    kept = {key: value for key, value in common.items() if key not in without}
    return {"architectures": [architecture], "model_type": model_type, **kept, **keys}


EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5}
GROUPS = {"n_group": 2, "topk_group": 1}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "attention_bias": False, "rope_scaling": None,
}  # fmt: skip
DEEPSEEK = LATENT | EXPERTS | SIGMOID | GROUPS | {
    "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "aux_loss_alpha": 0.001, "seq_aux": True, "num_nextn_predict_layers": 0,
}  # fmt: skip
DEEPSEEK_V2 = LATENT | EXPERTS | ONE_GROUP | {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "moe_layer_freq": 1,
    "aux_loss_alpha": 0.001,
}  # fmt: skip
DEEPSEEK_YARN = {
    "type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SARVAM_YARN = DEEPSEEK_YARN | {"factor": 40, "original_max_position_embeddings": 4096}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
}  # fmt: skip
QWEN35_ROPE = {"rope_theta": 10000000, "rope_type": "default", "partial_rotary_factor": 0.25}
MIXERS = ["linear_attention", "full_attention"]
NEMOTRON_H = {
    "hybrid_override_pattern": "M*-E", "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "chunk_size": 16, "expand": 2, "use_conv_bias": True,
    "use_bias": False, "mamba_proj_bias": False, "mlp_bias": False, "attention_bias": False, "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu", "layer_norm_epsilon": 1e-5, "time_step_min": 0.001, "time_step_max": 0.1,
    "time_step_floor": 1e-4, "residual_in_fp32": False, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 32,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, **ONE_GROUP,
}  # fmt: skip
TWO_NORMS = (
    "without q_lora_rank megatron-core 0.19.2 norms the input of the queries a second time, by a weight that the "
    "bridge does not load; the reference's input norms are one, where both compute the same"
)
NEMOTRON_H_LACKS = ("nemotron_h", "NemotronHForCausalLM", "rope_theta", "hidden_act", "rms_norm_eps")
LING_NAMES = (
    (r"model\.embed_tokens", "model.word_embeddings"),
    (r"self_attn\.o_proj", "attention.dense"),
    (r"self_attn\.q_norm", "attention.query_layernorm"),
    (r"self_attn\.k_norm", "attention.key_layernorm"),
    ("e_score_correction_bias", "expert_bias"),
)
"""From GLM-4.5's names to those of Ling and Sarvam."""
GLM_KEYS = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8}
FALCON = {
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "mamba_norm_before_gate": False, "mamba_rms_norm": True, "projectors_bias": False, "attention_bias": False,
    "mlp_bias": False, "embedding_multiplier": 5.6, "lm_head_multiplier": 0.4, "key_multiplier": 0.7,
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8, "mlp_multipliers": [0.9, 0.6], "ssm_multipliers": [0.7, 0.5, 0.9, 1.1, 0.8],
}  # fmt: skip
STEP = {
    "num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 32,
    "share_expert_dim": 32, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"],
    "partial_rotary_factors": [0.5, 1.0], "rope_theta": [5e6, 1e4], "zero_centered": True, "use_qk_norm": True,
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 8, "num_attention_groups": 2, "head_dim": 16,
    },
    "use_head_wise_attn_gate": True, "use_moe_router_bias": True, "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0, "need_fp32_gate": True, "moe_layers_enum": "1", "num_nextn_predict_layers": 0,
}  # fmt: skip
MIMO_V2 = EXPERTS | {
    "layernorm_epsilon": 1e-5, "hybrid_layer_pattern": [0, 1], "sliding_window_size": 8, "sliding_window": 8,
    "moe_layer_freq": [0, 1], "attention_value_scale": 0.707, "partial_rotary_factor": 0.334, "v_head_dim": 16,
    "head_dim": 24, "swa_head_dim": 24, "swa_v_head_dim": 16, "swa_num_attention_heads": 4,
    "swa_rope_theta": 10000, "rope_theta": 5000000, "swa_num_key_value_heads": 4,
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "n_routed_experts": 4, "n_shared_experts": None, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": None, **ONE_GROUP,
}  # fmt: skip
DECI_ATTENTION = {
    "n_heads_in_group": 2, "no_op": False, "replace_with_linear": False, "num_sink_tokens": None, "sparsify": None,
    "unshifted_sink": False, "use_prefill_window_in_sink_attention": False, "window_length": None,
}  # fmt: skip
DECI_FFN = {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False, "sparsify": None}
DEEPSEEK_V4 = {
    "q_lora_rank": 32, "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 8,
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "hc_mult": 2, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_hidden_layers": 4, "rope_scaling": DEEPSEEK_YARN, **EXPERTS,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family(_of("llama", "LlamaForCausalLM")),
    "llama 3 rope": Family(
        _of(
            "llama", "LlamaForCausalLM", rope_theta=500000.0,
            rope_scaling={
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        variant=True,
    ),
    "mistral": Family(_of("mistral", "MistralForCausalLM", sliding_window=8)),
    "qwen2": Family(_of("qwen2", "Qwen2ForCausalLM", "head_dim")),
    "qwen3": Family(_of("qwen3", "Qwen3ForCausalLM")),
    "qwen3_moe": Family(
        _of("qwen3_moe", "Qwen3MoeForCausalLM", num_experts=4, norm_topk_prob=True, decoder_sparse_step=1, **EXPERTS)
    ),
    "qwen3_next": Family(
        _of(
            "qwen3_next", "Qwen3NextForCausalLM", num_experts=4, shared_expert_intermediate_size=32,
            partial_rotary_factor=0.25, norm_topk_prob=True, decoder_sparse_step=1, **EXPERTS, **DELTA,
        )
    ),
    "qwen3_5": Family(
        _of(
            "qwen3_5_text", "Qwen3_5ForCausalLM", "rope_theta", layer_types=MIXERS, rope_parameters=QWEN35_ROPE,
            attn_output_gate=True, **DELTA,
        )
    ),
    "qwen3_5_moe": Family(
        _of(
            "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "intermediate_size", "rope_theta", layer_types=MIXERS,
            rope_parameters=QWEN35_ROPE, num_experts=4, shared_expert_intermediate_size=32, attn_output_gate=True,
            **EXPERTS, **DELTA,
        )
    ),
    "gemma": Family(
        _of(
            "gemma", "GemmaForCausalLM", hidden_act="gelu", hidden_activation="gelu_pytorch_tanh",
            tie_word_embeddings=True,
        )
    ),
    "gemma2": Family(
        _of(
            "gemma2", "Gemma2ForCausalLM", "hidden_act", hidden_activation="gelu_pytorch_tanh", sliding_window=8,
            query_pre_attn_scalar=16, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
            tie_word_embeddings=True,
        )
    ),
    "gemma3": Family(
        _of(
            "gemma3_text", "Gemma3ForCausalLM", "hidden_act", hidden_activation="gelu_pytorch_tanh", sliding_window=8,
            query_pre_attn_scalar=16, rope_theta=1000000.0, rope_local_base_freq=10000.0, sliding_window_pattern=6,
            num_hidden_layers=6, rope_scaling=None, tie_word_embeddings=True,
        )
    ),
    "gemma4": Family(
        _of(
            "gemma4_text", "Gemma4ForCausalLM", "hidden_act", "rope_theta", hidden_activation="gelu_pytorch_tanh",
            sliding_window=8, num_hidden_layers=6, tie_word_embeddings=True, vocab_size_per_layer_input=256,
            hidden_size_per_layer_input=16, global_head_dim=32, num_kv_shared_layers=0, final_logit_softcapping=30.0,
        )
    ),
    "gpt_oss": Family(
        _of(
            "gpt_oss", "GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
            attention_bias=True, rope_theta=150000, swiglu_limit=7.0, rms_norm_eps=1e-5,
            layer_types=["sliding_attention", "full_attention"],
            rope_scaling={
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        )
    ),
    "olmoe": Family(
        _of("olmoe", "OlmoeForCausalLM", "head_dim", num_key_value_heads=4, num_experts=4, num_experts_per_tok=2)
    ),
    "nemotron": Family(
        _of(
            "nemotron", "NemotronForCausalLM", "rms_norm_eps", hidden_act="relu2", norm_eps=1e-5,
            partial_rotary_factor=0.5,
        )
    ),
    "nemotron_h": Family(_of(*NEMOTRON_H_LACKS, **NEMOTRON_H)),
    "nemotron_h, latent experts": Family(
        _of(*NEMOTRON_H_LACKS, moe_latent_size=32, **NEMOTRON_H),
        variant=True,
    ),
    "falcon_h1": Family(_of("falcon_h1", "FalconH1ForCausalLM", rms_norm_eps=1e-5, **FALCON)),
    "glm4_moe": Family(
        _of(
            "glm4_moe", "Glm4MoeForCausalLM", n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1,
            partial_rotary_factor=0.5, attention_bias=True, use_qk_norm=False, norm_topk_prob=True,
            routed_scaling_factor=2.5, rope_scaling=None, **EXPERTS, **ONE_GROUP,
        )
    ),
    "glm4_moe_lite": Family(
        _of(
            "glm4_moe_lite", "Glm4MoeLiteForCausalLM", "head_dim", "num_key_value_heads", rope_interleave=True,
            n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, norm_topk_prob=True,
            routed_scaling_factor=1.8, **LATENT, **EXPERTS, **ONE_GROUP,
        )
    ),
    "glm_moe_dsa": Family(
        _of(
            "glm_moe_dsa", "GlmMoeDsaForCausalLM", "head_dim", "num_key_value_heads", num_hidden_layers=4,
            first_k_dense_replace=3, n_routed_experts=4, n_shared_experts=1, index_topk=8, index_head_dim=16,
            index_n_heads=24, indexer_rope_interleave=True, norm_topk_prob=True, routed_scaling_factor=2.5,
            **LATENT, **EXPERTS, **ONE_GROUP,
        )
    ),
    "deepseek_v2": Family(
        _of("deepseek_v2", "DeepseekV2ForCausalLM", "head_dim", "num_key_value_heads", **DEEPSEEK_V2),
    ),
    "deepseek_v2, no q_lora": Family(
        _of(
            "deepseek_v2", "DeepseekV2ForCausalLM", "head_dim", "num_key_value_heads",
            **(DEEPSEEK_V2 | {"q_lora_rank": None}),
        ),
        ones="input_layernorm",
        differs=TWO_NORMS,
        variant=True,
    ),
    "deepseek_v3": Family(_of("deepseek_v3", "DeepseekV3ForCausalLM", "head_dim", "num_key_value_heads", **DEEPSEEK)),
    "deepseek_v3, yarn": Family(
        _of(
            "deepseek_v3", "DeepseekV3ForCausalLM", "head_dim", "num_key_value_heads",
            **(DEEPSEEK | {"rope_scaling": DEEPSEEK_YARN}),
        ),
        variant=True,
    ),
    "deepseek_v3, mtp": Family(
        _of(
            "deepseek_v3", "DeepseekV3ForCausalLM", "head_dim", "num_key_value_heads",
            **(DEEPSEEK | {"num_nextn_predict_layers": 1}),
        ),
        variant=True,
    ),
    "deepseek_v4": Family(_of("deepseek_v4", "DeepseekV4ForCausalLM", "intermediate_size", **DEEPSEEK_V4)),
    "kimi_k2": Family(
        _of("kimi_k2", "KimiK2ForCausalLM", "head_dim", "num_key_value_heads", **(DEEPSEEK | ONE_GROUP)),
        reference={"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
        hub={"architectures": ["DeepseekV3ForCausalLM"]},
    ),
    "ernie4_5_moe": Family(
        _of(
            "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "head_dim", moe_num_experts=4, moe_k=2, moe_intermediate_size=32,
            moe_num_shared_experts=1, moe_layer_start_index=1, moe_layer_end_index=1, moe_layer_interval=1,
            rope_theta=500000.0, use_bias=False, tie_word_embeddings=True,
        ),
        sigmoid_scores=True,
        differs="the recipe scores experts by sigmoid, transformers by softmax: the live model is compared with "
        "transformers' forward with sigmoid scores, the directory with transformers as it is",
    ),
    "exaone4": Family(
        _of(
            "exaone4", "Exaone4ForCausalLM", "head_dim", rms_norm_eps=1e-5, tie_word_embeddings=True,
            sliding_window=None, sliding_window_pattern=None, layer_types=["full_attention", "full_attention"],
        )
    ),
    "exaone_moe": Family(
        _of(
            "exaone_moe", "ExaoneMoEForCausalLM", num_experts=4, num_shared_experts=1, first_k_dense_replace=1,
            sliding_window=8, norm_topk_prob=True, routed_scaling_factor=2.5, **EXPERTS, **ONE_GROUP,
        ),
        reference={"architectures": ["ExaoneMoeForCausalLM"]},
    ),
    "hy_v3": Family(
        _of("hy_v3", "HYV3ForCausalLM", num_experts=4, num_shared_experts=1, first_k_dense_replace=1, **EXPERTS)
    ),
    "minimax_m2": Family(
        _of(
            "minimax_m2", "MiniMaxM2ForCausalLM", num_local_experts=4, num_experts_per_tok=2, rotary_dim=8,
            use_qk_norm=True, scoring_func="sigmoid", use_routing_bias=True,
        )
    ),
    "mimo": Family(
        _of("mimo", "MiMoForCausalLM", num_nextn_predict_layers=1, attention_bias=True),
        reference={"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        copied=(
            (r"model\.layers\.0\.", "model.mtp_layers.0."),
            (r"model\.norm\.", "model.mtp_layers.0.token_layernorm."),
            (r"model\.norm\.", "model.mtp_layers.0.hidden_layernorm."),
            (r"model\.norm\.", "model.mtp_layers.0.final_layernorm."),
        ),
    ),
    "mimo_v2_flash": Family(
        _of("mimo_v2_flash", "MiMoV2FlashForCausalLM", "rms_norm_eps", **MIMO_V2),
        reference={"sliding_window_size": 7},
        hub={"sliding_window_size": 7},
        differs="the bridge's window is sliding_window_size and transformers' is one more: the reference and the "
        "directory say one less",
    ),
    "step3p5": Family(_of("step3p5", "Step3p5ForCausalLM", "rope_theta", **STEP)),
    "bailing_moe_v2": Family(
        _of(
            "bailing_moe_v2", "BailingMoeV2ForCausalLM", num_experts=8, num_shared_experts=1, first_k_dense_replace=1,
            use_qk_norm=True, partial_rotary_factor=0.5, routed_scaling_factor=2.5, score_function="sigmoid",
            norm_topk_prob=True, moe_router_enable_expert_bias=True, num_nextn_predict_layers=0, use_qkv_bias=False,
            use_bias=False, moe_shared_expert_intermediate_size=32, rope_scaling=None, **EXPERTS, **GROUPS,
        ),
        reference=GLM_KEYS | {"n_shared_experts": 1, "attention_bias": False},
        renamed=LING_NAMES,
        fused_qkv="attention.query_key_value",
    ),
    "sarvam_moe": Family(
        _of(
            "sarvam_moe", "SarvamMoEForCausalLM", num_experts=8, num_shared_experts=1, first_k_dense_replace=1,
            use_qk_norm=True, routed_scaling_factor=2.5, norm_topk_prob=True, moe_shared_expert_intermediate_size=32,
            **EXPERTS,
        ),
        reference=GLM_KEYS | ONE_GROUP | {"n_shared_experts": 1, "attention_bias": False, "partial_rotary_factor": 1.0},
        renamed=LING_NAMES,
        fused_qkv="attention.query_key_value",
    ),
    "sarvam_mla": Family(
        _of(
            "sarvam_mla", "SarvamMLAForCausalLM", "head_dim", "num_key_value_heads", num_experts=8,
            num_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True,
            moe_shared_expert_intermediate_size=32, q_head_dim=24,
            **(LATENT | {"q_lora_rank": None, "rope_scaling": SARVAM_YARN | {"type": "deepseek_yarn"}}), **EXPERTS,
        ),
        reference={"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8,
                   "n_shared_experts": 1, "rope_scaling": SARVAM_YARN, **ONE_GROUP},
        ones="input_layernorm",
        differs=TWO_NORMS,
    ),
    "llama_nemotron": Family(
        _of(
            "nemotron-nas", "DeciLMForCausalLM", "intermediate_size", "num_key_value_heads", intermediate_size=None,
            num_key_value_heads=None, block_configs=[{"attention": DECI_ATTENTION, "ffn": DECI_FFN}] * 2,
        ),
        reference={"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2,
                   "intermediate_size": 256},
    ),
}  # fmt: skip

OUT_OF_SCOPE = {
    "images, video or audio as input": (
        "Ernie4_5_VLMoeForConditionalGeneration", "Exaone4_5_ForConditionalGeneration",
        "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration", "Glm4vMoeForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "MiniMaxM3SparseForConditionalGeneration", "Mistral3ForConditionalGeneration",
        "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "Qwen2AudioForConditionalGeneration",
        "Qwen2_5OmniForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3ASRForConditionalGeneration",
        "Qwen3OmniMoeForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Step3p7ForConditionalGeneration",
    ),
    "not autoregressive (diffusion)": ("NemotronLabsDiffusionModel",),
}  # fmt: skip
"""Reason -> architectures that the bridge registers and the census leaves out."""
SAME_FAMILY = {"ExaoneMoeForCausalLM": "exaone_moe"}
"""A second name of an architecture -> its family."""

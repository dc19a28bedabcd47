"""Descriptions of small models as files, without weights: a configuration is resolved from these alone."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_infer.pipelines import PipelineConfig

MIB = 1 << 20
COMMON = {
    "vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 96, "num_hidden_layers": 4,
    "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_head": 4,
    "n_layer": 2, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
HYBRID = COMMON | {
    "architectures": ["BambaForCausalLM"], "model_type": "bamba", "intermediate_size": 96, "num_hidden_layers": 4,
    "attn_layer_indices": [1], "mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1,
    "mamba_chunk_size": 16, "mamba_expand": 2, "mamba_d_conv": 4, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {"llama": LLAMA, "gpt2": GPT2, "hybrid": HYBRID, "own": LLAMA | {"architectures": ["OwnForCausalLM"]}}


def write_models(folder: Path) -> None:
    """One directory for each of MODELS."""
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))


def resolved(free_mib: float = 1024.0, **values: object) -> PipelineConfig:
    """The config of `llama` unless another model is given, resolved for so much free memory."""
    config = PipelineConfig(**{"model_path": "llama", "defer_resolve": True, "device": "cpu"} | values)
    config.resolve(free_bytes=int(free_mib * MIB))
    return config


def in_effect(config: PipelineConfig, name: str) -> tuple[object, str]:
    return config.effective[name].value, config.effective[name].source

"""A model built from a Hugging Face directory computes what transformers computes."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from plain_forward import full_logits

from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source

if find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

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
CASES = {
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
    "gpt2": ("GPT2Config", {}),
}


def random_hf_model(kind: str, options: dict):
    """A transformers model whose every parameter is random (norms and biases too), in fp32."""
    import transformers  # not at the top: ranks of other tests import this file, and need its names alone

    if kind == "GPT2Config":
        sizes = {"vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256}
    else:
        sizes = dict(SIZES)
    config = getattr(transformers, kind)(**(sizes | options))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "embed" in name else 0.15))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    model = random_hf_model(*CASES[case])
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, 131, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    built = build_model(open_source(tmp_path))
    got = full_logits(built, ids)
    assert expected.abs().max() > 0.5
    assert (got - expected).abs().max() < 1e-4


def test_sharded_safetensors_with_index_load(tmp_path):
    model = random_hf_model(*CASES["llama"])
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    built = build_model(open_source(tmp_path))
    ids = list(range(40))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert (full_logits(built, ids) - expected).abs().max() < 1e-4


def test_bfloat16_parameters_are_the_rounded_ones_and_bfloat16_files_load_exactly_into_fp32(tmp_path):
    model = random_hf_model(*CASES["qwen2"])
    model.save_pretrained(tmp_path / "fp32")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    rounded = build_model(open_source(tmp_path / "fp32"), dtype="bfloat16")
    widened = build_model(open_source(tmp_path / "bf16"), dtype="float32")
    assert open_source(tmp_path / "bf16").config().dtype == "bfloat16"
    for a, b in zip(rounded.parameters(), widened.parameters(), strict=True):
        assert a.dtype == torch.bfloat16
        assert b.dtype == torch.float32
        assert torch.equal(a.float(), b)


def test_padded_vocabulary_entries_are_zero_and_the_rest_is_unchanged(tmp_path):
    model = random_hf_model(*CASES["llama"])
    model.save_pretrained(tmp_path)
    built = build_model(open_source(tmp_path), vocab_multiple=64)
    assert built.vocab_size == 192
    assert built.output_layer.weight[131:].abs().sum() == 0
    assert built.embedding.word_embeddings.weight[131:].abs().sum() == 0
    ids = list(range(30))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert (full_logits(built, ids)[:, :131] - expected).abs().max() < 1e-4


def test_end_tokens_of_both_configs_count(tmp_path):
    model = random_hf_model(*CASES["llama"])
    model.generation_config.eos_token_id = [5, 9]
    model.save_pretrained(tmp_path)
    assert open_source(tmp_path).config().eos_ids == (5, 9, model.config.eos_token_id)
    (tmp_path / "generation_config.json").unlink()
    assert open_source(tmp_path).config().eos_ids == (2,)

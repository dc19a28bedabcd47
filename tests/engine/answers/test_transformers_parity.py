"""Against something we did not write: transformers' own models, same weights, fp32, greedy."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_forward import worst_error

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.llm import LLM

transformers = pytest.importorskip("transformers")

CONFIG = InferenceConfig(
    buffer_size_gb=0.2,
    block_size_tokens=16,
    max_sequence_length=256,
    max_requests=32,
    max_tokens=128,
    enable_chunked_prefill=True,
    enable_prefix_caching=True,
    prefix_caching_eviction_policy="lru",
)
COMMON = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama3_rope": (
        "LlamaConfig",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "attention_bias": True,
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
}


def compare(llm: LLM, reference: torch.nn.Module, prompts: list[list[int]], num_tokens: int) -> None:
    """Greedy tokens equal token by token; logprobs of the reference's forward over them within 1e-4."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)

    def logits_of(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return reference(torch.tensor([ids])).logits[0]

    assert worst_error(llm.generate(prompts, params), logits_of) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_random_model_gives_the_same_tokens_as_transformers(family: str, tmp_path: Path) -> None:
    name, overrides = FAMILIES[family]
    torch.manual_seed(3)
    config = getattr(transformers, name)(**{**COMMON, **overrides})
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    rng = random.Random(4)
    prompts = [[rng.randrange(211) for _ in range(rng.randint(1, 90))] for _ in range(20)]
    compare(LLM(str(tmp_path), config=CONFIG, dtype="float32", threads=1), reference, prompts, 64)

"""use_legacy_module: a model of files built of megatron-core's own classes computes what the one of our spec does."""

from __future__ import annotations

import json

import pytest
from hf_models import random_model
from model_files import HYBRID

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError
from megatron_infer.models.core_attention import TorchNorm
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source
from megatron_infer.models.mcore_compat import DotProductAttention, TransformerLayer

MODELS = ("llama_all_biases", "llama3_rope", "mistral_window", "qwen3", "smollm3", "phi3", "gpt2")
PROMPTS = [[5 * i % 127 + 2 for i in range(n)] for n in (40, 3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_stock_classes_give_the_bits_of_the_paged_spec(name, dtype, tmp_path):
    random_model(name).save_pretrained(tmp_path)
    answers = []
    for flag in (False, True):
        model = build_model(open_source(tmp_path), dtype=dtype, use_legacy_module=flag)
        layer = model.decoder.layers[0]
        assert (type(layer) is TransformerLayer) == flag == (not isinstance(layer.input_layernorm, TorchNorm))
        assert isinstance(layer.self_attention.core_attention, DotProductAttention) == flag
        config = InferenceConfig(buffer_size_gb=0.01, block_size_tokens=16, max_sequence_length=64, max_requests=2)
        params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, prompt_logprobs=0, ignore_eos=True)
        outputs = DynamicInferenceEngine(model, config).generate(PROMPTS, params)
        answers.append([(one.prompt_logprobs, one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs])
    assert answers[0] == answers[1]


def test_a_hybrid_is_built_of_the_paged_spec_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    description = open_source(tmp_path).config()
    with pytest.raises(ConfigError, match=r"use_legacy_module=True: a hybrid's stock classes need .*; leave it False"):
        build_model(description, use_legacy_module=True)

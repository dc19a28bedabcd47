"""use_legacy_module: a model of files built of megatron-core's own classes computes what the one of our spec does."""

from __future__ import annotations

import json

import pytest
import torch
from hf_models import CASES, SIZES
from model_files import HYBRID

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError
from megatron_infer.models.core_attention import TorchNorm
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source
from megatron_infer.models.mcore_compat import DotProductAttention, TransformerLayer

transformers = pytest.importorskip("transformers")

MODELS = {
    name: CASES[name] for name in ("llama_all_biases", "llama3_rope", "mistral_window", "qwen3", "smollm3", "phi3")
}
MODELS["gpt2"] = ("GPT2Config", {"vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256})
PROMPTS = [[5 * i % 127 + 2 for i in range(n)] for n in (40, 3)]


def description_of(kind: str, options: dict, folder):
    sizes = {} if kind == "GPT2Config" else SIZES
    config = getattr(transformers, kind)(**(sizes | options))
    config.architectures = [kind.replace("Config", "LMHeadModel" if kind == "GPT2Config" else "ForCausalLM")]
    config.save_pretrained(folder)
    return open_source(folder).config()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_stock_classes_give_the_bits_of_the_paged_spec(name, dtype, tmp_path):
    description = description_of(*MODELS[name], tmp_path)
    built = {flag: build_model(description, dtype=dtype, use_legacy_module=flag) for flag in (False, True)}
    torch.manual_seed(1)
    weights = {key: torch.randn_like(one) * 0.2 for key, one in built[False].named_parameters()}
    answers = []
    for flag, model in built.items():
        layer = model.decoder.layers[0]
        assert (type(layer) is TransformerLayer) == flag == (not isinstance(layer.input_layernorm, TorchNorm))
        assert isinstance(layer.self_attention.core_attention, DotProductAttention) == flag
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and all("extra_state" in one for one in missing)
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

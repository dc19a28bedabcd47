"""Layers of different shapes (Llama-Nemotron): other MLP widths, layers without attention, layers without MLP."""

from __future__ import annotations

import json

import paged_step
import pytest
import torch
from plain_forward import full_logits

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import AdoptionError
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.adopt import adopt
from megatron_infer.models.core_attention import TorchCoreAttention, TorchNorm
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import CONFIG, MODEL, cpu_rotary, init_single_process, randomize_vectors

ATTENDS = {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False}
WIDE = {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False}
NOTHING = {"n_heads_in_group": None, "ffn_mult": None, "no_op": True, "replace_with_linear": False}
LINEAR = {"n_heads_in_group": None, "ffn_mult": None, "no_op": False, "replace_with_linear": True}
PROMPT = [5, 17, 3, 99, 42, 8, 8, 61] * 5


def model_of(*blocks):
    """A model with an (attention, MLP) pair of settings for each layer, as Llama-Nemotron's config gives them."""
    from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
    from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig

    init_single_process()
    known = mcore.config_fields()
    settings = {name: value for name, value in CONFIG.items() if name in known}
    layers = {"block_configs": [{"attention": attention, "ffn": ffn} for attention, ffn in blocks]}
    config = HeterogeneousTransformerConfig(
        **settings | {"num_layers": len(blocks), "use_cpu_initialization": True},
        heterogeneous_layers_config_encoded_json=json.dumps(layers | {"num_attention_heads": 4}),
    )
    spec = get_gpt_heterogeneous_layer_spec(config)
    for layer in spec.layer_specs:
        parts = layer.submodules
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            if getattr(parts, norm) is not mcore.IdentityOp:
                setattr(parts, norm, TorchNorm)
        if mcore.spec_module(parts.self_attention) is mcore.SelfAttention:
            parts.self_attention.submodules.core_attention = TorchCoreAttention
    spec.layer_norm = TorchNorm
    with torch.random.fork_rng(devices=[]), cpu_shim(1):
        torch.manual_seed(0)
        model = mcore.GPTModel(config, spec, **MODEL)
        randomize_vectors(model)
    return cpu_rotary(model).eval()


pytestmark = [
    pytest.mark.filterwarnings("ignore:Apex is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without CUDA"),
]


def test_layers_without_attention_or_mlp_and_of_other_widths_give_the_answers_of_the_models_own_forward():
    model = model_of(
        (ATTENDS, WIDE), (NOTHING, WIDE | {"ffn_mult": 0.5}), (ATTENDS, NOTHING), (ATTENDS, WIDE | {"ffn_mult": 3.0})
    )
    adopted = adopt(model)
    assert (adopted.shape.num_layers, adopted.shape.num_attention_layers) == (4, 3)
    assert paged_step.worst_difference(model, adopted) < 1e-5
    config = InferenceConfig(
        buffer_size_gb=0.02, block_size_tokens=16, max_sequence_length=128, enable_prefix_caching=True
    )
    engine = DynamicInferenceEngine(model, config)
    asked = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for mode in (None, "persist", "offload", "recompute"):
        if mode is not None:
            engine.suspend(mode)
            engine.resume()
        drawn = engine.generate([PROMPT], asked)[0].outputs[0].token_ids
        expected = full_logits(model, PROMPT + drawn)[len(PROMPT) - 1 : -1].argmax(-1)
        assert drawn == expected.tolist()


@pytest.mark.parametrize(
    ("attention", "mlp", "message"),
    [
        (ATTENDS | {"n_heads_in_group": 1}, WIDE, r"layers\.1\.self_attention: .* one cache holds them all"),
        (LINEAR, WIDE, r"layers\.1\.self_attention: attention class .*ColumnParallelLinearGathered"),
        (ATTENDS, LINEAR, r"layers\.1\.mlp: class .*ColumnParallelLinearGathered"),
    ],
    ids=["other kv heads", "linear attention", "linear MLP"],
)
def test_what_is_not_known_of_such_layers_is_refused_by_name(attention, mlp, message):
    with pytest.raises(AdoptionError, match=message):
        adopt(model_of((ATTENDS, WIDE), (attention, mlp)))

"""torch_dist checkpoints of hybrid models: exact, with a plan, without one, and as Megatron-LM leaves them."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.nn.functional as F
from hf_models import random_model
from plain_forward import full_logits

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import CheckpointSource, description_from_model, save_checkpoint
from megatron_infer.models.loading.sources import open_source
from megatron_infer.testing.tiny import tiny_hybrid

IDS = list(range(40))


def same(a, b):
    """Every parameter and persistent buffer, bit for bit."""
    left, right = a.state_dict(), b.state_dict()
    tensors = [name for name, value in left.items() if isinstance(value, torch.Tensor)]
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in tensors)


CASES = [
    "mamba2_tied",
    "mamba2_biases",
    "mamba2_limits",
    "nemotron_h_biases",
    "nemotron_h_time_step",
    "nemotron_h_experts_scaled",
    "bamba_full_rotary",
    "bamba_linear_rope",
    "granite_factors_tied",
    "granite_experts",
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_plan", [True, False])
def test_save_then_load_is_exact(case, with_plan, tmp_path):
    random_model(case).save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    model = build_model(source)
    save_checkpoint(model, tmp_path / "ckpt", description=source.config() if with_plan else None)
    loaded = build_model(CheckpointSource(tmp_path / "ckpt"))
    assert same(model, loaded)
    assert torch.equal(full_logits(model, IDS), full_logits(loaded, IDS))


def test_weights_that_were_scaled_when_loaded_are_not_scaled_again(tmp_path):
    hf = random_model("granite_factors_tied")
    hf.save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    save_checkpoint(build_model(source), tmp_path / "ckpt", description=source.config())
    with torch.inference_mode():
        expected = hf(torch.tensor([IDS]), use_cache=False).logits[0]
    assert (full_logits(build_model(CheckpointSource(tmp_path / "ckpt")), IDS) - expected).abs().max() < 1e-4


PATTERN = "M*-ME"
SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "ffn_hidden_size": 80,
    "mamba_state_dim": 16,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "layernorm_epsilon": 1e-3,
    "normalization": "RMSNorm",
    "gated_linear_unit": False,
    "activation_func": F.gelu,
    "add_bias_linear": False,
    "position_embedding_type": "none",
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 1.5,
    "vocab_size": 128,
    "max_sequence_length": 256,
}
ARGUMENTS = {
    "hybrid_override_pattern": PATTERN, "num_layers": 5, "hidden_size": 48, "num_attention_heads": 6,
    "group_query_attention": True, "num_query_groups": 2, "ffn_hidden_size": 80, "kv_channels": 8,
    "mamba_state_dim": 16, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_num_heads": None,
    "norm_epsilon": 1e-3, "normalization": "RMSNorm", "swiglu": False, "add_bias_linear": False,
    "position_embedding_type": "none", "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 1.5, "padded_vocab_size": 128, "max_position_embeddings": 256,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip


def megatron_lm(folder, **changes):
    """A checkpoint as Megatron-LM leaves it: iteration folder, arguments in common.pt, no plan file."""
    model = tiny_hybrid(PATTERN, **SIZES)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, 4))
    iteration = folder / "iter_0000003"
    save_checkpoint(model, iteration)
    (iteration / "megatron_infer.json").unlink()
    (folder / "latest_checkpointed_iteration.txt").write_text("3\n")
    torch.save({"args": argparse.Namespace(**(ARGUMENTS | changes)), "iteration": 3}, iteration / "common.pt")
    return model


def test_megatron_lm_checkpoint_describes_itself_by_its_arguments(tmp_path):
    model = megatron_lm(tmp_path)
    loaded = build_model(CheckpointSource(tmp_path))
    assert same(model, loaded)
    assert torch.equal(full_logits(model, IDS), full_logits(loaded, IDS))
    plan = open_source(tmp_path).config()
    assert plan.hybrid == description_from_model(model).hybrid
    assert plan.transformer["mamba_num_heads"] == 12
    assert plan.transformer["layernorm_epsilon"] == 1e-3
    assert plan.hybrid.norm_epsilon == 1e-5, "megatron-core's mixer knows no other"


def test_a_pattern_can_come_from_ratios(tmp_path):
    ratios = {"hybrid_attention_ratio": 0.25, "hybrid_mlp_ratio": 0.25, "is_hybrid_model": True, "num_layers": 4}
    megatron_lm(tmp_path, hybrid_override_pattern=None, num_experts=None, **ratios)
    pattern = open_source(tmp_path).config().hybrid.pattern
    assert sorted(pattern) == sorted("MM*-")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "M*-G-"}, r"'M\*-G-' must have 5 symbols"),
        ({"hybrid_override_pattern": "M*-"}, r"'M\*-' must have 5 symbols"),
        ({"mamba_state_dim": None}, "arguments lack mamba_state_dim"),
        ({"moe_latent_size": 8}, "moe_latent_size=8"),
        ({"hybrid_override_pattern": "M*-M-"}, "trained with num_experts"),
        ({"quick_geglu": True}, "trained with quick_geglu"),
    ],
)
def test_arguments_that_are_missing_or_not_supported_are_named(changes, message, tmp_path):
    megatron_lm(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        open_source(tmp_path)


def test_checkpoint_keys_are_those_of_megatron_core(tmp_path):
    """Its Transformer Engine spec keeps norms in the linears behind them, its mixer saves in_proj in five parts."""
    megatron_lm(tmp_path)
    keys = {name for name, _ in open_source(tmp_path).tensors()}
    parts = {f"decoder.layers.0.mixer.in_proj.weight.{part}" for part in ("z", "x", "B", "C", "dt")}
    parts |= {f"decoder.layers.0.mixer.conv1d.{kind}.{part}" for part in "xBC" for kind in ("weight", "bias")}
    parts |= {f"decoder.layers.0.mixer.{name}" for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")}
    parts |= {"decoder.layers.0.mixer.in_proj.layer_norm_weight", "decoder.final_norm.weight"}
    parts |= {"decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"}
    parts |= {"decoder.layers.2.mlp.linear_fc1.layer_norm_weight", "decoder.layers.4.mlp.router.expert_bias"}
    assert parts <= keys


def test_mixers_that_a_plan_cannot_describe_are_refused():
    model = tiny_hybrid(PATTERN, **SIZES)
    mixer = model.decoder.layers[0].mixer
    mixer.D_has_hdim = True
    with pytest.raises(ModelError, match="D_has_hdim"):
        description_from_model(model)
    mixer.D_has_hdim = False
    mixer.norm.eps = 1e-3
    with pytest.raises(ModelError, match="mixers differ"):
        description_from_model(model)

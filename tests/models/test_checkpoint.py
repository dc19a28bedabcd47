"""torch_dist checkpoints, also as Megatron-LM leaves them: exact, standing alone, clear when they cannot be used."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hf_models import random_model
from model_kinds import LATENT, SPARSE
from plain_forward import full_logits

from megatron_infer.errors import ModelError
from megatron_infer.models.adopt import adopt
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import (
    CheckpointSource,
    description_from_model,
    save_checkpoint,
    write_description,
)
from megatron_infer.models.loading.description_shape import shape_of
from megatron_infer.models.loading.hf_export import write_hugging_face
from megatron_infer.models.loading.sources import open_source
from megatron_infer.models.mcore_compat import quick_gelu
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import DELTA, EXPERTS, YARN, tiny_gpt, tiny_hybrid

sys.path.insert(0, str(Path(__file__).parent.parent / "text"))
from vocabularies import byte_level

IDS = list(range(40))


def built(case, folder, **options):
    random_model(case).save_pretrained(folder)
    source = open_source(folder)
    return source, build_model(source, **options)


def same(a, b):
    """Every parameter and persistent buffer, bit for bit."""
    left, right = a.state_dict(), b.state_dict()
    tensors = [name for name, value in left.items() if isinstance(value, torch.Tensor)]
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in tensors)


CASES = [
    *("llama_all_biases", "qwen3", "qwen2_window_from_layer", "llama3_rope", "gpt2", "mamba2_tied", "mamba2_biases"),
    *("mamba2_limits", "nemotron_h_biases", "nemotron_h_time_step", "nemotron_h_experts_scaled", "bamba_full_rotary"),
    *("bamba_linear_rope", "granite_factors_tied", "granite_experts", "qwen3_5", "qwen3_5_bias"),
]


@pytest.mark.parametrize(("case", "dtype"), [*((case, "float32") for case in CASES), ("llama_tied", "bfloat16")])
@pytest.mark.parametrize("with_plan", [True, False])
def test_save_then_load_is_exact(case, dtype, with_plan, tmp_path):
    source, model = built(case, tmp_path / "hf", dtype=dtype)
    save_checkpoint(model, tmp_path / "ckpt", description=source.config() if with_plan else None)
    loaded = build_model(CheckpointSource(tmp_path / "ckpt"), dtype=dtype)
    assert same(model, loaded)
    assert torch.equal(full_logits(model, IDS), full_logits(loaded, IDS))


def test_the_directory_stands_alone_with_its_tokenizer(tmp_path):
    source, model = built("llama", tmp_path / "hf")
    save_checkpoint(model, tmp_path / "ckpt", description=source.config(), tokenizer=byte_level())
    moved = tmp_path / "moved"
    (tmp_path / "ckpt").rename(moved)
    shutil.rmtree(tmp_path / "hf")
    opened = open_source(moved)
    assert opened.config() == source.config()
    assert opened.tokenizer().encode("hello é") == byte_level().encode("hello é")
    assert set(source.config().eos_ids) <= set(opened.tokenizer().eos_ids)
    assert same(model, build_model(opened))
    assert any("linear_qkv" in name for name, _ in opened.tensors())


@pytest.mark.parametrize("with_plan", [True, False])
def test_a_multi_token_prediction_layer_is_saved_and_loaded(with_plan, tmp_path):
    source, _ = built("llama_tied", tmp_path / "hf")
    description = replace(source.config(), transformer={**source.config().transformer, "mtp_num_layers": 1})
    model = build_model(description)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    save_checkpoint(model, tmp_path / "ckpt", description=description if with_plan else None)
    saved = CheckpointSource(tmp_path / "ckpt")
    assert same(model, build_model(saved))
    assert any(name.startswith("mtp.") for name in model.state_dict())
    for dtype in ("float32", "bfloat16"):
        shape = shape_of(saved.config(), dtype=dtype)
        assert shape == adopt(build_model(saved, dtype=dtype)).shape and shape.num_mtp_layers == 1
    with pytest.raises(ModelError, match="mtp_num_layers is 1"):
        write_hugging_face(saved, tmp_path / "written")


def test_padded_vocabulary_can_differ_between_save_and_load(tmp_path):
    source, model = built("llama", tmp_path / "hf", vocab_multiple=64)
    save_checkpoint(model, tmp_path / "ckpt", description=source.config())
    loaded = build_model(CheckpointSource(tmp_path / "ckpt"))
    assert loaded.vocab_size == 131
    assert torch.equal(loaded.output_layer.weight, model.output_layer.weight[:131])


def test_saving_does_not_change_the_model_and_needs_no_cuda(tmp_path, monkeypatch):
    def no_cuda(*_, **__):
        raise AssertionError("CUDA was asked for")

    _, model = built("llama", tmp_path / "hf")
    before = {name: value.clone() for name, value in model.named_parameters()}
    monkeypatch.setattr(torch.cuda, "synchronize", no_cuda)
    monkeypatch.setattr(torch.cuda, "current_device", no_cuda)
    save_checkpoint(model, tmp_path / "ckpt")
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())


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
HYBRID_ARGUMENTS = {
    "hybrid_override_pattern": PATTERN, "num_layers": 5, "hidden_size": 48, "num_attention_heads": 6,
    "group_query_attention": True, "num_query_groups": 2, "ffn_hidden_size": 80, "kv_channels": 8,
    "mamba_state_dim": 16, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_num_heads": None,
    "norm_epsilon": 1e-3, "normalization": "RMSNorm", "swiglu": False, "add_bias_linear": False,
    "position_embedding_type": "none", "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 1.5, "padded_vocab_size": 128, "max_position_embeddings": 256,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
GPT_ARGUMENTS = {
    "num_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "group_query_attention": True,
    "num_query_groups": 2, "ffn_hidden_size": 80, "kv_channels": 8, "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope", "rotary_base": 50000,
    "rotary_percent": 1.0, "use_rope_scaling": True, "rope_scaling_factor": 32.0, "max_position_embeddings": 256,
    "untie_embeddings_and_output_weights": True, "padded_vocab_size": 131, "params_dtype": torch.float32,
}  # fmt: skip
ROUTED = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 2,
    "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 2.5, "moe_shared_expert_intermediate_size": 40,
}  # fmt: skip
"""Experts as DeepSeek-V3's."""
LATENT_ARGUMENTS = {
    "num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "group_query_attention": False, "num_query_groups": 1,
    "ffn_hidden_size": 96, "kv_channels": 16, "normalization": "RMSNorm", "norm_epsilon": 1e-5, "swiglu": True,
    "add_bias_linear": False, "position_embedding_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0,
    "max_position_embeddings": 256, "untie_embeddings_and_output_weights": True, "padded_vocab_size": 128,
    "multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16, "qk_layernorm": True, "rope_type": None, "rotary_scaling_factor": 4.0, "mscale": 1.0,
    "mscale_all_dim": 0.5, "num_experts": 4, "moe_layer_freq": [0, 1, 1], "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48, "moe_router_load_balancing_type": "seq_aux_loss", "moe_grouped_gemm": True,
    "moe_expert_capacity_factor": None, "moe_router_pre_softmax": False, "moe_shared_expert_gate": False, **ROUTED,
}  # fmt: skip
"""Without beta_fast, beta_slow and original_max_position_embeddings, which are no arguments."""


def latent_model():
    own = {"num_layers": 3, "moe_layer_freq": [0, 1, 1], "original_max_position_embeddings": 4096}
    return tiny_gpt(**LATENT | EXPERTS | ROUTED | own)


def megatron_lm(folder, kind, **changes):
    """A checkpoint as Megatron-LM leaves it: iteration folder, arguments in common.pt, no plan file."""
    from megatron.core.transformer.enums import AttnBackend

    if kind == "gpt":
        _, model = built("llama3_rope_native", folder / "hf")
    elif kind == "latents":
        model = latent_model()
    else:
        model = tiny_hybrid(PATTERN, **SIZES)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.linspace(-0.3, 0.3, 4))
    iteration = folder / "iter_0000012"
    save_checkpoint(model, iteration)
    (iteration / "megatron_infer.json").unlink()
    (folder / "latest_checkpointed_iteration.txt").write_text("12\n")
    given = {"gpt": GPT_ARGUMENTS, "latents": LATENT_ARGUMENTS, "hybrid": HYBRID_ARGUMENTS}[kind]
    arguments = given | {"attention_backend": AttnBackend.auto}
    common = {"args": argparse.Namespace(**arguments | changes), "iteration": 12, "checkpoint_version": 3.0}
    torch.save(common, iteration / "common.pt")
    return model


@pytest.mark.parametrize("kind", ["gpt", "latents", "hybrid"])
def test_megatron_lm_checkpoint_describes_itself_by_its_arguments(kind, tmp_path):
    model = megatron_lm(tmp_path, kind)
    loaded = build_model(CheckpointSource(tmp_path))
    assert same(model, loaded)
    assert torch.equal(full_logits(model, IDS), full_logits(loaded, IDS))
    plan = open_source(tmp_path).config()
    assert open_source(tmp_path / "iter_0000012").config() == plan
    if kind == "hybrid":
        assert plan.hybrid == description_from_model(model).hybrid
        assert plan.transformer["mamba_num_heads"] == 12
        assert plan.transformer["layernorm_epsilon"] == 1e-3
        assert plan.hybrid.norm_epsilon == 1e-5, "megatron-core's mixer knows no other"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt", {"padded_vocab_size": None}, "arguments lack padded_vocab_size"),
        ("gpt", {"quick_geglu": True, "qk_l2_norm": True}, "trained with quick_geglu, qk_l2_norm"),
        ("latents", {"moe_router_load_balancing_type": ["sinkhorn"]}, "load_balancing_type='sinkhorn'"),
        ("latents", {"moe_expert_capacity_factor": 1.25}, r"moe_expert_capacity_factor=1\.25"),
        ("latents", {"experimental_attention_variant": "dsa"}, "trained with experimental_attention_variant"),
        ("hybrid", {"hybrid_override_pattern": "M*-G-"}, r"'M\*-G-' must have 5 symbols"),
        ("hybrid", {"hybrid_override_pattern": "M*-"}, r"'M\*-' must have 5 symbols"),
        ("hybrid", {"mamba_state_dim": None}, "arguments lack mamba_state_dim"),
        ("hybrid", {"moe_shared_expert_gate": True}, "moe_shared_expert_gate=True"),
        ("hybrid", {"hybrid_override_pattern": "M*-M-"}, "trained with num_experts"),
        ("hybrid", {"quick_geglu": True}, "trained with quick_geglu"),
    ],
)
def test_arguments_that_are_missing_or_not_supported_are_named(kind, changes, message, tmp_path):
    megatron_lm(tmp_path, kind, **changes)
    with pytest.raises(ModelError, match=message):
        open_source(tmp_path)


def test_a_pattern_can_come_from_ratios(tmp_path):
    ratios = {"hybrid_attention_ratio": 0.25, "hybrid_mlp_ratio": 0.25, "is_hybrid_model": True, "num_layers": 4}
    megatron_lm(tmp_path, "hybrid", hybrid_override_pattern=None, num_experts=None, **ratios)
    pattern = open_source(tmp_path).config().hybrid.pattern
    assert sorted(pattern) == sorted("MM*-")


def test_checkpoint_keys_are_those_of_megatron_core(tmp_path):
    """Its Transformer Engine spec keeps norms in the linears behind them, its mixer saves in_proj in five parts."""
    megatron_lm(tmp_path, "hybrid")
    keys = {name for name, _ in open_source(tmp_path).tensors()}
    parts = {f"decoder.layers.0.mixer.in_proj.weight.{part}" for part in ("z", "x", "B", "C", "dt")}
    parts |= {f"decoder.layers.0.mixer.conv1d.{kind}.{part}" for part in "xBC" for kind in ("weight", "bias")}
    parts |= {f"decoder.layers.0.mixer.{name}" for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")}
    parts |= {"decoder.layers.0.mixer.in_proj.layer_norm_weight", "decoder.final_norm.weight"}
    parts |= {"decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"}
    parts |= {"decoder.layers.2.mlp.linear_fc1.layer_norm_weight", "decoder.layers.4.mlp.router.expert_bias"}
    assert parts <= keys


@pytest.mark.long
def test_checkpoint_saved_asynchronously_is_loaded_once_it_is_whole(tmp_path):
    from megatron.core import dist_checkpointing

    model, folder = tiny_gpt(**EXPERTS), tmp_path / "checkpoint"
    folder.mkdir()
    with cpu_shim(4):
        request = dist_checkpointing.save(model.sharded_state_dict(), str(folder), async_sharded_save=True)
        with pytest.raises(ModelError, match=r"no metadata\.json: .* cut short"):
            CheckpointSource(folder)
        request.execute_sync()
    assert len(list(folder.glob("*.distcp"))) == 2, "each writer has a file"
    write_description(folder, description_from_model(model))
    assert same(model, build_model(CheckpointSource(folder)))


class _Reduced:
    """What a pickle has of this object is a call."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def test_a_member_of_an_enum_may_be_kept_by_its_name(tmp_path):
    from megatron.core.transformer.enums import AttnBackend

    megatron_lm(tmp_path, "gpt")
    plan = open_source(tmp_path).config()
    file = tmp_path / "iter_0000012" / "common.pt"
    arguments = GPT_ARGUMENTS | {"attention_backend": _Reduced(getattr, AttnBackend, "auto")}  # as Python 3.11.2 has it
    torch.save({"args": argparse.Namespace(**arguments)}, file)
    assert open_source(tmp_path).config() == plan


@pytest.mark.parametrize(
    "call", [(print, "code of the file ran"), (getattr, argparse.Namespace, "__init__"), (getattr, print, "__self__")]
)
def test_a_pickle_with_code_is_refused(tmp_path, capsys, call):
    megatron_lm(tmp_path, "gpt")
    torch.save({"args": _Reduced(*call)}, tmp_path / "iter_0000012" / "common.pt")
    with pytest.raises(ModelError, match=r"common\.pt: cannot be read safely"):
        open_source(tmp_path)
    assert "ran" not in capsys.readouterr().out


def test_damaged_checkpoints_name_the_place(tmp_path):
    source, model = built("llama", tmp_path / "hf")
    folder = tmp_path / "ckpt"
    save_checkpoint(model, folder, description=source.config())
    plan = folder / "megatron_infer.json"
    text = plan.read_text()

    plan.write_text(text.replace('"num_layers": 3', '"num_layers": 4'))
    with pytest.raises(ModelError, match=r"cannot be loaded: .*mismatch"):
        build_model(CheckpointSource(folder))
    plan.write_text(text.replace('"hidden_size": 48', '"hidden_size": 96'))
    with pytest.raises(ModelError, match=r"cannot be loaded: .*mismatch"):
        build_model(CheckpointSource(folder))
    plan.write_text(json.dumps({"format": 99, "plan": {}}))
    with pytest.raises(ModelError, match=r"megatron_infer\.json: format 99"):
        open_source(folder)
    plan.write_text(json.dumps({"format": 1, "plan": {"colour": "red"}}))
    with pytest.raises(ModelError, match="colour"):
        open_source(folder)
    plan.write_text(text)
    data = next(folder.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        build_model(CheckpointSource(folder))
    (folder / "metadata.json").unlink()
    with pytest.raises(ModelError, match=r"metadata\.json"):
        open_source(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"position_embedding_type": "yarn", **YARN},
        {"rotary_percent": 0.5, **YARN},
        {"rotary_interleaved": True, "layernorm_zero_centered_gamma": True},
        {"activation_func": quick_gelu, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
        {"softmax_type": "learnable", "window_size": (4, 0), "window_attn_skip_freq": 2},
        LATENT,
        {**LATENT, "q_lora_rank": None, "rope_type": "rope", "rotary_scaling_factor": 1.0, "qk_layernorm": False},
        DELTA | EXPERTS | {"moe_layer_freq": [0, 1, 1]},
        EXPERTS | ROUTED,
        SPARSE | EXPERTS,
    ],
    ids=[
        *("yarn", "a factor of rotation", "interleaved", "quick GeGLU", "sinks", "latents", "latents, whole queries"),
        *("delta nets", "experts", "sparse latents"),
    ],
)
def test_a_live_model_is_described_with_all_that_it_computes(fields, tmp_path):
    model = tiny_gpt(**fields)
    save_checkpoint(model, tmp_path / "checkpoint")
    loaded = build_model(open_source(tmp_path / "checkpoint"))
    torch.testing.assert_close(full_logits(loaded, IDS), full_logits(model, IDS), atol=1e-5, rtol=0)
    num_parameters = shape_of(description_from_model(model), dtype="float32").num_parameters
    assert num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_parts_a_plan_cannot_describe_are_refused(tmp_path):
    _, model = built("llama", tmp_path / "hf")
    model.config.activation_func = torch.tanh
    with pytest.raises(ModelError, match="activation"):
        description_from_model(model)
    model = tiny_gpt(**EXPERTS)
    model.config.moe_router_load_balancing_type = ["sinkhorn"]
    model.config.moe_expert_capacity_factor = 1.5
    with pytest.raises(ModelError, match=r"capacity_factor=1\.5, moe_router_load_balancing_type='sinkhorn'"):
        description_from_model(model)
    model = tiny_gpt(**LATENT)
    model.config.experimental_attention_variant = "another"
    with pytest.raises(ModelError, match="experimental_attention_variant='another'"):
        description_from_model(model)


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

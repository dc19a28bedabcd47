"""Checkpoints of Megatron-Bridge, and those that do not say how their model is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
import transformers
import yaml
from hf_models import logits_of, random_model
from plain_forward import full_logits

from megatron_infer.cli.main import main
from megatron_infer.errors import ModelError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import (
    DESCRIPTION_FILE,
    CheckpointSource,
    save_checkpoint,
    write_description,
)
from megatron_infer.models.loading.sources import open_source
from megatron_infer.rl.updates import apply

IDS = list(range(1, 40))
FIELDS: dict[str, Any] = {
    "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
    "activation_func": {"_call_": False, "_target_": "torch.nn.functional.silu"},
    "add_bias_linear": False, "add_qkv_bias": False, "attention_output_gate": False,
    "attention_backend": {"_args_": [5], "_call_": True, "_name_": "auto",
                          "_target_": "megatron.core.transformer.enums.AttnBackend"},
    "bf16": False, "ffn_hidden_size": 80, "fp16": False, "gated_linear_unit": True, "hidden_size": 48,
    "init_method": {"_target_": "functools.partial", "_call_": True, "_args_": []}, "kv_channels": 16,
    "layernorm_epsilon": 1e-6, "make_vocab_size_divisible_by": 1, "multi_latent_attention": False,
    "normalization": "RMSNorm", "num_attention_heads": 6, "num_layers": 3, "num_moe_experts": None,
    "num_query_groups": 2, "params_dtype": {"_call_": False, "_target_": "torch.float32"},
    "position_embedding_type": "rope", "qk_layernorm": True, "rope_scaling": False, "rope_scaling_factor": 1.0,
    "rotary_base": 10000.0, "rotary_percent": 1.0, "seq_len_interpolation_factor": None, "seq_length": 256,
    "share_embeddings_and_output_weights": True, "should_pad_vocab": False, "softmax_scale": None,
    "softmax_type": "vanilla", "vocab_size": 131, "window_size": None,
    "transformer_layer_spec": {"_call_": False, "_target_": "megatron.bridge.models.gpt_provider.default_layer_spec"},
}  # fmt: skip
"""As Bridge 0.6.2 writes them for this model."""
LATENT_EXPERTS: dict[str, Any] = {
    "_target_": "megatron.bridge.models.mla_provider.MLAModelProvider", "multi_latent_attention": True,
    "beta_fast": 32, "beta_slow": 1, "kv_lora_rank": 32, "mscale": 1.0, "mscale_all_dim": 1.0, "num_query_groups": 6,
    "original_max_position_embeddings": 32, "q_lora_rank": 24, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16,
    "rope_type": "yarn", "rotary_scaling_factor": 4.0, "v_head_dim": 16, "share_embeddings_and_output_weights": False,
    "moe_aux_loss_coeff": 0.001, "moe_expert_capacity_factor": None, "moe_ffn_hidden_size": 24,
    "moe_grouped_gemm": True, "moe_layer_freq": [0, 1, 1], "moe_permute_fusion": True, "moe_router_dtype": "fp32",
    "moe_router_enable_expert_bias": True, "moe_router_group_topk": 2, "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_num_groups": 4, "moe_router_pre_softmax": True, "moe_router_score_function": "sigmoid",
    "moe_router_topk": 4, "moe_router_topk_scaling_factor": 2.5, "moe_shared_expert_gate": False,
    "moe_shared_expert_intermediate_size": 48, "moe_token_dispatcher_type": "alltoall", "num_moe_experts": 8,
}  # fmt: skip
"""As it writes them for a DeepSeek-V3 of these sizes, with those above."""
CASES: dict[str, dict[str, Any]] = {"qwen3": {}, "deepseek_v3": LATENT_EXPERTS}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path, torch.Tensor]:
    """(a Hugging Face directory, a checkpoint of it without a description, logits of transformers)."""
    return saved_of("qwen3", tmp_path)


def saved_of(case: str, folder: Path) -> tuple[Path, Path, torch.Tensor]:
    model = random_model(case, tie_word_embeddings=case == "qwen3")
    expected = logits_of(model, IDS)
    model.save_pretrained(folder / "hf")
    source = open_source(folder / "hf")
    save_checkpoint(build_model(source), folder / "run" / "iter_0000003", description=source.config())
    (folder / "run" / "iter_0000003" / DESCRIPTION_FILE).unlink()
    (folder / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    return folder / "hf", folder / "run", expected


def write_config(run: Path, **changes: Any) -> None:
    text = yaml.safe_dump({"model": {**FIELDS, **changes}, "train": {"train_iters": 3}})
    (run / "iter_0000003" / "run_config.yaml").write_text(text)


def error_of(source: Any, expected: torch.Tensor) -> float:
    return float((full_logits(build_model(source), IDS)[:, :131] - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_checkpoint_of_bridge_is_the_model_of_its_run_config(case: str, tmp_path: Path) -> None:
    _, run, expected = saved_of(case, tmp_path)
    write_config(run, **CASES[case])
    assert error_of(open_source(run), expected) < 1e-5


def test_checkpoint_without_a_description_takes_a_hugging_face_directory(saved: Any, tmp_path: Path) -> None:
    folder, run, expected = saved
    with pytest.raises(ModelError, match=r"no megatron_infer\.json.*--hf-config DIR.*docs/checkpoints\.md"):
        open_source(run)
    assert main(["convert", str(run), str(tmp_path / "out"), "--hf-config", str(folder)]) == 0
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert (logits_of(reloaded, IDS) - expected).abs().max() < 1e-5 * expected.abs().max()
    write_description(run / "iter_0000003", open_source(folder).config())
    assert error_of(CheckpointSource(run), expected) < 1e-5
    with pytest.raises(ModelError, match="describes itself"):
        open_source(folder, hf_config=folder)


def test_directory_of_torch_takes_the_description_of_a_hugging_face_directory(saved: Any, tmp_path: Path) -> None:
    folder, _, expected = saved
    tensors = {name: one.detach() for name, one in build_model(open_source(folder)).named_parameters()}
    torch.distributed.checkpoint.save({"model": tensors}, checkpoint_id=tmp_path / "torch")
    description = open_source(folder).config()
    model = build_model(description)
    apply(model, tmp_path / "torch")
    save_checkpoint(model, tmp_path / "to", description=description)
    assert error_of(open_source(tmp_path / "to"), expected) < 1e-5


REFUSED = {
    "their_provider": ({"_target_": "megatron.bridge.models.gemma.gemma_provider.GemmaModelProvider"},
                       "its model is a GemmaModelProvider, which may compute more than its fields say"),
    "gelu_gate": ({"activation_func": {"_target_": "torch._C._nn.gelu"}}, "'gelu' with gated_linear_unit=True"),
    "softcap": ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0"),
    "zero_centered": ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma=True"),
    "sinks": ({"softmax_type": "learnable"}, "softmax_type='learnable'"),
    "yarn": ({"position_embedding_type": "yarn"}, "position_embedding_type='yarn'"),
    "capacity": ({"num_moe_experts": 8, "moe_expert_capacity_factor": 1.5}, r"moe_expert_capacity_factor=1\.5"),
    "no_width": ({"hidden_size": None}, "lack hidden_size"),
    "widths": ({"hidden_size": [64], "kv_channels": None}, "damaged: TypeError"),
    "no_heads": ({"num_attention_heads": 0, "kv_channels": None}, "damaged: ZeroDivisionError"),
    "base": ({"rotary_base": "large"}, "damaged: ValueError.*'large'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_a_run_config_does_not_say_is_refused_by_name(mistake: str, saved: Any) -> None:
    _, run, _ = saved
    changes, message = REFUSED[mistake]
    write_config(run, **changes)
    with pytest.raises(ModelError, match=message):
        open_source(run)


@pytest.mark.security
@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.mkdir [MADE]",
        "a: [",
        "- 1",
        "model: 3",
        "[" * 3000,
        "model: {a: 1}\n" + "#" * (5 << 20),
    ],
)
def test_run_config_runs_nothing_and_what_is_none_is_refused(text: str, saved: Any, tmp_path: Path) -> None:
    _, run, _ = saved
    path = run / "iter_0000003" / "run_config.yaml"
    path.write_text(text.replace("MADE", json.dumps(str(tmp_path / "made"))))
    with pytest.raises(ModelError, match=r"run_config\.yaml"):
        open_source(run)
    assert not (tmp_path / "made").exists()

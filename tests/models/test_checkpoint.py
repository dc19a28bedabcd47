"""torch_dist checkpoints: exact, standing alone, and clear when they cannot be used."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_models import random_model
from plain_forward import full_logits

from megatron_infer.errors import ModelError
from megatron_infer.models.adopt import adopt
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import CheckpointSource, description_from_model, save_checkpoint
from megatron_infer.models.loading.description_shape import shape_of
from megatron_infer.models.loading.hf_export import write_hugging_face
from megatron_infer.models.loading.sources import open_source

sys.path.insert(0, str(Path(__file__).parent.parent / "text"))
from vocabularies import byte_level


def built(case, folder, **options):
    random_model(case).save_pretrained(folder)
    source = open_source(folder)
    return source, build_model(source, **options)


def equal(a, b):
    left, right = dict(a.named_parameters()), dict(b.named_parameters())
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["llama_all_biases", "qwen3", "qwen2_window_from_layer", "llama3_rope", "gpt2"])
@pytest.mark.parametrize("with_plan", [True, False])
def test_save_then_load_is_exact(case, with_plan, tmp_path):
    source, model = built(case, tmp_path / "hf")
    save_checkpoint(model, tmp_path / "ckpt", description=source.config() if with_plan else None)
    loaded = build_model(CheckpointSource(tmp_path / "ckpt"))
    assert equal(model, loaded)
    ids = list(range(40))
    assert torch.equal(full_logits(model, ids), full_logits(loaded, ids))


def test_bfloat16_survives(tmp_path):
    source, model = built("llama_tied", tmp_path / "hf", dtype="bfloat16")
    save_checkpoint(model, tmp_path / "ckpt", description=source.config())
    assert equal(model, build_model(CheckpointSource(tmp_path / "ckpt"), dtype="bfloat16"))


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
    assert equal(model, build_model(opened))
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
    assert equal(model, build_model(saved))
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


def megatron_lm(folder, tmp_path, **changes):
    """A checkpoint as Megatron-LM leaves it: iteration folder, arguments in common.pt, no plan file."""
    source, model = built("llama3_rope_native", tmp_path / "hf")
    iteration = folder / "iter_0000012"
    save_checkpoint(model, iteration, description=source.config())
    (iteration / "megatron_infer.json").unlink()
    (folder / "latest_checkpointed_iteration.txt").write_text("12\n")
    config = source.config().transformer
    arguments = {
        "num_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "group_query_attention": True,
        "num_query_groups": 2, "ffn_hidden_size": 80, "kv_channels": 8, "normalization": "RMSNorm",
        "norm_epsilon": config["layernorm_epsilon"],
        "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope", "rotary_base": 50000,
        "rotary_percent": 1.0, "use_rope_scaling": True, "rope_scaling_factor": 32.0, "max_position_embeddings": 256,
        "untie_embeddings_and_output_weights": True, "padded_vocab_size": 131, "params_dtype": torch.float32,
    }  # fmt: skip
    arguments |= changes
    from megatron.core.transformer.enums import AttnBackend

    namespace = argparse.Namespace(**arguments, attention_backend=AttnBackend.auto)
    torch.save({"args": namespace, "iteration": 12, "checkpoint_version": 3.0}, iteration / "common.pt")
    return model


def test_megatron_lm_checkpoint_describes_itself_by_its_arguments(tmp_path):
    model = megatron_lm(tmp_path / "run", tmp_path)
    loaded = build_model(CheckpointSource(tmp_path / "run"))
    assert equal(model, loaded)
    ids = list(range(40))
    assert torch.equal(full_logits(model, ids), full_logits(loaded, ids))
    assert open_source(tmp_path / "run" / "iter_0000012").config() == open_source(tmp_path / "run").config()


def test_megatron_lm_arguments_that_are_missing_or_not_supported_are_named(tmp_path):
    megatron_lm(tmp_path / "a", tmp_path, padded_vocab_size=None)
    with pytest.raises(ModelError, match=r"arguments lack padded_vocab_size"):
        open_source(tmp_path / "a")
    megatron_lm(tmp_path / "b", tmp_path, num_experts=8, quick_geglu=True)
    with pytest.raises(ModelError, match=r"trained with num_experts, quick_geglu"):
        open_source(tmp_path / "b")


class _Runs:
    def __reduce__(self):
        return (print, ("code of the file ran",))


def test_a_pickle_with_code_is_refused(tmp_path, capsys):
    megatron_lm(tmp_path / "a", tmp_path)
    torch.save({"args": _Runs()}, tmp_path / "a" / "iter_0000012" / "common.pt")
    with pytest.raises(ModelError, match=r"common\.pt: cannot be read safely"):
        open_source(tmp_path / "a")
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


def test_parts_a_plan_cannot_describe_are_refused(tmp_path):
    _, model = built("llama", tmp_path / "hf")
    model.config.activation_func = torch.tanh
    with pytest.raises(ModelError, match="activation"):
        description_from_model(model)
    model.config.num_moe_experts = 4
    with pytest.raises(ModelError, match="num_moe_experts=4"):
        description_from_model(model)

"""Models written as Hugging Face directories: the tensors they came from, or a refusal that leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import stat

import pytest
import torch
from hf_models import HYBRID, logits_of
from plain_forward import full_logits
from safetensors.torch import load_file
from test_checkpoint import built, byte_level
from test_checkpoint_attacks import Call, put_metadata

from megatron_infer.cli.main import main
from megatron_infer.errors import ModelError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.models.loading.hf_export import write_hugging_face
from megatron_infer.models.loading.sources import open_source

IDS = list(range(40))


def tensors_in(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same_tensors(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(folder of a Hugging Face model, its torch_dist checkpoint with a tokenizer)"""
    folder = tmp_path_factory.mktemp("llama")
    source, model = built("llama3_rope", folder / "hf")
    save_checkpoint(model, folder / "checkpoint", description=source.config(), tokenizer=byte_level())
    return folder / "hf", folder / "checkpoint"


@pytest.mark.parametrize("case", ["llama_tied", "llama_attention_bias", "qwen2", "qwen3_bias", "gpt2"])
@pytest.mark.parametrize("is_megatrons", [True, False], ids=["megatron", "described"])
def test_a_checkpoint_becomes_the_tensors_it_was_made_of(case, is_megatrons, tmp_path):
    """is_megatrons: its description is what can be read off a model that Megatron trained."""
    source, model = built(case, tmp_path / "hf")
    save_checkpoint(model, tmp_path / "checkpoint", description=None if is_megatrons else source.config())
    done = write_hugging_face(open_source(tmp_path / "checkpoint"), tmp_path / "out")
    theirs, ours = tensors_in(tmp_path / "hf"), tensors_in(tmp_path / "out")
    added = {name for name in ours if name not in theirs}  # zeros: a Megatron model has a bias everywhere or nowhere
    assert not added or (is_megatrons and not any(ours[name].any() for name in added))
    assert same_tensors(theirs, {name: one for name, one in ours.items() if name not in added})
    assert done.num_tensors == len(ours) and done.no_tokenizer is not None
    loaded = build_model(open_source(tmp_path / "out"))
    assert torch.equal(full_logits(loaded, IDS), full_logits(model, IDS))


def test_command_writes_what_transformers_and_the_engine_read(llama, tmp_path, capsys):
    import transformers

    hf, checkpoint = llama
    out = tmp_path / "new" / "out"
    assert main(["convert", str(checkpoint), str(out), "--max-shard-gb", "0.0001"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2 and same_tensors(tensors_in(out), tensors_in(hf))
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in tensors_in(hf).values())
    opened, original = open_source(out), open_source(hf)
    assert opened.config() == original.config() and opened.tokenizer().encode("hi é") == byte_level().encode("hi é")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        logits = theirs(torch.tensor([IDS])).logits[0]
    assert torch.allclose(full_logits(build_model(opened), IDS).reshape(logits.shape), logits, atol=2e-4)


WRITTEN = (
    *("mixtral", "mixtral_window_three", "qwen2_moe", "qwen3_moe_window", "qwen3_moe_dense_layers", "glm4_moe_bias"),
    *("gpt_oss", "gpt_oss_limit", "exaone_moe", "hy_v3", "dots1", "nemotron_biases", "ernie4_5_moe_every_second"),
    *("deepseek_v2_groups", "deepseek_v3", "deepseek_v3_one_group", "glm4_moe_lite", "glm_moe_dsa_shared"),
    *("mistral_window", "smollm3_yarn", "phi3_longrope_partial", "glm4", "gemma", "gemma2", "gemma2_no_caps"),
    *("gemma3_linear_rope", "gemma3_no_window", "olmo2_bias", "olmo3_yarn", "exaone4", "exaone4_no_window"),
    *("olmoe", "olmoe_normalised", "minimax_m2", "mimo_v2_flash", "nemotron_h_time_step", "nemotron_h_latent_experts"),
    *("mamba2_tied", "mamba2_biases", "mamba2_limits", "bamba_tied", "bamba_biases", "bamba_limits"),
)


@pytest.mark.parametrize("case", WRITTEN)
@pytest.mark.parametrize("through_checkpoint", [False, True])
def test_a_directory_is_written_as_it_was_read(case, through_checkpoint, tmp_path):
    """Tensors and description to the bit, and what transformers computes of both."""
    import transformers

    source, model = built(case, tmp_path / "hf")
    if through_checkpoint:
        save_checkpoint(model, tmp_path / "checkpoint", description=source.config())
        source = open_source(tmp_path / "checkpoint")
    write_hugging_face(source, tmp_path / "out")
    assert same_tensors(tensors_in(tmp_path / "out"), tensors_in(tmp_path / "hf"))
    assert open_source(tmp_path / "out").config() == open_source(tmp_path / "hf").config()
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / one, attn_implementation="eager").eval()
        for one in ("hf", "out")
    )
    difference = (logits_of(before, IDS) - logits_of(after, IDS)).abs().max()
    assert difference < 1e-4 if case in HYBRID else difference == 0  # the size of a scan's chunks is not kept


def test_dtype_may_be_another(llama, tmp_path):
    hf, checkpoint = llama
    write_hugging_face(open_source(checkpoint), tmp_path / "out", dtype="bfloat16")
    expected = {name: one.bfloat16() for name, one in tensors_in(hf).items()}
    assert same_tensors(tensors_in(tmp_path / "out"), expected)
    assert open_source(tmp_path / "out").config().dtype == "bfloat16"


@pytest.mark.parametrize("case", ["dense_granite", "granite_factors"])
def test_what_no_config_here_says_is_refused_by_its_name(case, tmp_path):
    source, _ = built(case, tmp_path / "hf")
    named = {"dense_granite": "scales is", "granite_factors": "scales is"}[case]
    with pytest.raises(ModelError, match=named):
        write_hugging_face(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_bias_that_has_no_place_is_not_left_out(tmp_path):
    source, model = built("llama_attention_bias", tmp_path / "hf")
    with torch.no_grad():
        model.decoder.layers[0].mlp.linear_fc2.bias.fill_(1.0)
    save_checkpoint(model, tmp_path / "checkpoint", description=source.config())
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.linear_fc2\.bias is not zero"):
        write_hugging_face(open_source(tmp_path / "checkpoint"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf"]


@pytest.mark.parametrize("wrong", ["there", "foreign_class", "missing_shard", "cut_shard", "no_place"])
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(wrong, llama, tmp_path, capsys):
    checkpoint, out, ran = shutil.copytree(llama[1], tmp_path / "checkpoint"), tmp_path / "out", tmp_path / "ran"
    data = next(checkpoint.glob("*.distcp"))
    if wrong == "there":
        out.mkdir()
        (out / "mine").touch()
    elif wrong == "foreign_class":
        put_metadata(checkpoint, Call(os.mkdir, str(ran)))
    elif wrong == "missing_shard":
        data.unlink()
    elif wrong == "cut_shard":
        data.write_bytes(data.read_bytes()[:1000])
    else:
        (tmp_path / "file").touch()
        out = tmp_path / "file" / "out"
    before = sorted(tmp_path.rglob("*"))
    assert main(["convert", str(checkpoint), str(out)]) == 1
    said = {
        "there": "exists",
        "foreign_class": "mkdir is none of the classes",
        "missing_shard": "is no .distcp file of this directory",
        "cut_shard": "cannot be loaded",
        "no_place": "cannot be written",
    }
    assert said[wrong] in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before and not ran.exists()
    for size in ("0", "-1", "inf", "nan"):
        assert main(["convert", str(checkpoint), str(out), "--max-shard-gb", size]) == 2
        assert "--max-shard-gb is" in capsys.readouterr().err


def test_files_can_be_read_by_whom_the_directory_can(llama, tmp_path):
    write_hugging_face(open_source(llama[1]), tmp_path / "out")
    modes = {stat.S_IMODE(path.stat().st_mode) & 0o444 for path in (tmp_path / "out").iterdir()}
    assert modes == {0o444}

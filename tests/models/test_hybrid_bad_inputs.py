"""Hybrid models that cannot be done exactly are refused by name; files that do not fit say where."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import transformers
from hybrid_models import random_hybrid
from safetensors.torch import load_file, save_file

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.hf_config import description_from_config
from megatron_infer.models.loading.hf_names import Shard
from megatron_infer.models.loading.sources import open_source


def edit(folder, change):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("mamba2", {"architectures": ["Zamba2ForCausalLM"]}, "Zamba2ForCausalLM.*not supported.*shared.*LoRA"),
        ("mamba2", {"architectures": None, "model_type": "zamba2"}, "Zamba2ForCausalLM.*not supported"),
        ("mamba2", {"architectures": ["JambaForCausalLM"]}, "Mamba-1"),
        ("mamba2", {"architectures": ["FalconH1ForCausalLM"]}, "side by side"),
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
        ("nemotron_h_experts", {"n_group": 2}, "n_group=2"),
        ("nemotron_h_experts", {"moe_latent_size": 16}, "moe_latent_size=16"),
        ("nemotron_h_experts", {"norm_topk_prob": False}, "norm_topk_prob=False with num_experts_per_tok=2"),
        ("nemotron_h_experts", {"mlp_bias": True}, "mlp_bias=True"),
        ("bamba", {"mamba_d_head": 16}, "mamba_expand x hidden_size = 96, but mamba_n_heads x mamba_d_head = 192"),
        ("bamba", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ("bamba", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported"),
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
    ],
)
def test_configs_that_cannot_be_done_exactly_are_refused_by_name(case, change, message, tmp_path):
    random_hybrid(case).save_pretrained(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        open_source(tmp_path)


def test_missing_unexpected_and_misshaped_tensors_are_one_error_that_lists_them_all(tmp_path):
    random_hybrid("nemotron_h_experts").save_pretrained(tmp_path)
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


@pytest.mark.parametrize("case", ["mamba2", "granite_factors"])
def test_a_tied_model_with_a_head_of_its_own_is_refused(case, tmp_path):
    """transformers takes the head that is there; a copy of the embedding changes nothing."""
    random_hybrid(case).save_pretrained(tmp_path)
    edit(tmp_path, {"tie_word_embeddings": True})
    with pytest.raises(ModelError, match=r"tie_word_embeddings is true, but lm_head.weight is not .*embed"):
        build_model(open_source(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = next(name for name in tensors if "embed" in name)
    save_file(tensors | {"lm_head.weight": tensors[embedding].clone()}, tmp_path / "model.safetensors")
    build_model(open_source(tmp_path))


def test_a_bias_that_the_config_does_not_announce_is_unexpected(tmp_path):
    random_hybrid("mamba2_biases").save_pretrained(tmp_path)
    edit(tmp_path, {"use_bias": False})
    with pytest.raises(ModelError, match=r"unexpected \(6\): .*layers\.0\.mixer\.in_proj\.bias"):
        build_model(open_source(tmp_path))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("mamba2_one_group", {}, "mamba_num_groups 1 cannot be split over 2"),
        (
            "nemotron_h_experts",
            {"moe_shared_expert_intermediate_size": 41},
            "moe_shared_expert_intermediate_size 41 cannot be split over 2",
        ),
    ],
)
def test_splits_that_do_not_divide_are_refused(case, changes, message, tmp_path):
    random_hybrid(case, **changes).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    with pytest.raises(ModelError, match=message):
        source.load_into(build_model(source), Shard(rank=0, size=2))


def test_older_spellings_mean_the_same(tmp_path):
    random_hybrid("nemotron_h").save_pretrained(tmp_path)
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
    random_hybrid("nemotron_h_biases", time_step_min=0.5, conv_kernel=3).save_pretrained(tmp_path)
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
    random_hybrid(case, num_key_value_heads=6).save_pretrained(tmp_path)
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


@pytest.mark.parametrize("case", OLDER_KEYS)
def test_keys_of_published_checkpoints_change_nothing(case, tmp_path, recwarn):
    """Keys that released models carry and that the modelling files do not read (or read as what they already do)."""
    random_hybrid(case).save_pretrained(tmp_path)
    plan = open_source(tmp_path).config()
    edit(tmp_path, OLDER_KEYS[case])
    assert open_source(tmp_path).config() == plan
    assert not [str(warning.message) for warning in recwarn if "keys not known" in str(warning.message)]


def test_every_key_that_transformers_writes_is_known(tmp_path, recwarn):
    for case in ("mamba2", "nemotron_h_experts", "bamba", "granite_experts"):
        random_hybrid(case).save_pretrained(tmp_path / case)
        open_source(tmp_path / case)
    assert not [str(warning.message) for warning in recwarn if "keys not known" in str(warning.message)]

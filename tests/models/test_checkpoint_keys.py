"""Checkpoints whose tensors have the keys of another layer spec, or lie beside others, are read all the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hf_models import logits_of, random_model
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from plain_forward import full_logits

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import sync_strategy
from megatron_infer.models.loading.checkpoint_keys import NORMS
from megatron_infer.models.loading.sources import open_source

IDS = list(range(1, 40))


@pytest.fixture
def one(tmp_path):
    """A mixture's directory, its model, and transformers' logits."""
    theirs = random_model("qwen3_moe")
    theirs.save_pretrained(tmp_path / "hf")
    model = build_model(open_source(tmp_path / "hf"))
    return SimpleNamespace(folder=tmp_path / "hf", path=tmp_path / "run", model=model, logits=logits_of(theirs, IDS))


def save(one, *, stacked, rename=(), beside=()):
    """Save the model as a job with other settings does. beside: keys of further tensors."""
    if stacked:  # a job whose layers are of one kind says so by a number
        assert all(one.model.config.moe_layer_freq)
        one.model.config.moe_layer_freq = 1
    wanted = one.model.sharded_state_dict()

    def renamed(leaf):
        for given, other in rename:
            leaf.key = leaf.key.replace(given, other)
        return leaf

    wanted = dict_list_map_inplace(renamed, wanted)
    wanted |= {key: ShardedTensor.from_rank_offsets(key, torch.ones(3)) for key in beside}
    one.path.mkdir()
    dist_checkpointing.save(wanted, str(one.path), sharded_strategy=sync_strategy())
    return open_source(one.path, hf_config=one.folder)


@pytest.mark.few
@pytest.mark.parametrize("stacked", [False, True], ids=["by layer", "stacked"])
@pytest.mark.parametrize("spelled", ["as modules", "within linears"])
def test_norms_and_layers_are_found_however_the_job_spelled_them(one, stacked, spelled):
    pairs = [(part, module) if spelled == "as modules" else (module, part) for module, part in NORMS[:2]]
    source = save(one, stacked=stacked, rename=pairs)
    keys = [key for key, _ in source.tensors()]
    assert any(key.startswith("decoder.layers.mlp.") for key in keys) == stacked
    assert any("pre_mlp_layernorm." in key for key in keys) == (spelled == "as modules")
    assert (full_logits(build_model(source), IDS) - one.logits).abs().max() < 1e-4


def test_what_a_job_saves_beside_the_model_is_left_out_and_other_tensors_are_named(one):
    beside = ["optimizer.state.exp_avg.decoder.final_layernorm.weight", "mtp.layers.0.enorm.weight"]
    source = save(one, stacked=False, beside=beside)
    assert (full_logits(build_model(source), IDS) - one.logits).abs().max() < 1e-4


def test_a_tensor_too_many_is_unexpected_and_one_too_few_missing(one):
    rename = [("decoder.final_layernorm.", "decoder.last_norm.")]
    source = save(one, stacked=False, rename=rename)
    with pytest.raises(
        ModelError, match=r"missing \(1\): decoder.final_layernorm.weight; unexpected \(1\): decoder.last_norm.weight"
    ):
        build_model(source)

"""Indexers' choices are those of the model's own forward, and a training forward under replay attends to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engines import finish, make_engine, run
from model_kinds import SPARSE, make_model

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ModelError, RequestError
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.extensions import Extensions
from megatron_infer.models.index_replay import replay_index_choices
from megatron_infer.models.sparse_module import TorchIndexer
from megatron_infer.rl import sample_file
from megatron_infer.rl.rollout import Rollout

TOP_K = SPARSE["dsa_indexer_topk"]
PROMPTS = [[7 * i % 120 for i in range(40)], [5, 6, 7], [7 * i % 120 for i in range(33)] + [9, 11]]
PARAMS = SamplingParams(max_tokens=14, seed=1, ignore_eos=True, return_index_choices=True, return_sampled_logprobs=True)
SHARED = {"num_layers": 3, "extensions": Extensions(index_shared=(False, True, False))}
MODELS = {"every layer": {"num_layers": 2}, "one layer shares": SHARED}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"enable_chunked_prefill": True, "max_tokens": 16},
    "prefix cache": {"prefix": "lru", "max_requests": 1},
    "recomputed": {"pool_blocks": 8},
    "in torch": {"attention_backend": "torch"},
    "overlap": {"overlap": True},
}


class Generated:
    """A model and what it generated."""

    def __init__(self, settings: dict[str, Any], **engine: Any) -> None:
        self.model = make_model("sparse", **settings)
        self.engine = make_engine(self.model, **engine)
        outputs = run(self.engine, [(prompt, PARAMS) for prompt in PROMPTS])
        self.samples = [output.outputs[0] for output in outputs]
        self.choices = [sample.index_choices for sample in self.samples]
        self.sequences = [prompt + one.token_ids for prompt, one in zip(PROMPTS, self.samples, strict=True)]

    def logits(self, order=(0, 1, 2), *, width: int = 60) -> torch.Tensor:
        ids = torch.tensor([self.sequences[i] + [0] * (width - len(self.sequences[i])) for i in order])
        return self.model(ids, torch.arange(width)[None].expand(len(ids), -1), None)

    def masks(self, ids: list[int]) -> list[torch.Tensor]:
        """bool [positions, keys] of each layer's indexer in the model's own forward."""
        seen: list[torch.Tensor] = []
        hooks = [
            one.register_forward_hook(lambda _, args, out: seen.append(out[0]))
            for one in self.model.modules()
            if isinstance(one, TorchIndexer)
        ]
        with torch.no_grad():
            self.model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
        for hook in hooks:
            hook.remove()
        return seen


def shake(model: torch.nn.Module) -> None:
    """Indexers that choose otherwise; nothing else of the model depends on their weights."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".indexer." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.5)


@pytest.mark.parametrize("settings", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_choices_are_those_of_the_models_own_indexers(way, settings):
    rollout = Generated(MODELS[settings], **WAYS[way])
    for ids, found in zip(rollout.sequences, rollout.choices, strict=True):
        layers = rollout.masks(ids)
        assert found.dtype == np.int32 and found.shape == (len(ids) - 1, len(layers), TOP_K)
        for layer, mask in enumerate(layers):
            for position, keys in enumerate(found[:, layer]):
                count = min(position + 1, TOP_K)
                assert keys[:count].tolist() == mask[position].nonzero()[:, 0].tolist()
                assert (keys[count:] == -1).all()


@pytest.fixture(scope="module", params=MODELS)
def rollout(request) -> Generated:
    return Generated(MODELS[request.param])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0)])
def test_an_indexer_that_has_moved_attends_as_in_generation(rollout, order):
    wanted = rollout.logits(order).detach()
    before = {name: value.clone() for name, value in rollout.model.state_dict().items() if value is not None}
    shake(rollout.model)
    try:
        free = rollout.logits(order).detach()
        with replay_index_choices(rollout.model, rollout.choices, rollout.sequences):
            replayed = rollout.logits(order)
            replayed.logsumexp(-1).sum().backward()
        after = rollout.logits(order).detach()
    finally:
        rollout.model.load_state_dict(before, strict=False)
    for row, i in enumerate(order):
        known = len(rollout.sequences[i]) - 1
        assert torch.equal(replayed[row, :known], wanted[row, :known])
    assert not torch.equal(free, wanted), "the indexers were not moved"
    assert torch.equal(after, free), "nothing of a replay is left"


def _dsa(model: torch.nn.Module) -> None:
    """megatron-core's DSAttention around the model's indexers, in the place of ours."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAttentionSubmodules

    for layer in model.decoder.layers:
        ours, groups = layer.self_attention.core_attention, layer.self_attention.pg_collection
        theirs = mcore.DSAttention(
            model.config,
            DSAttentionSubmodules(indexer=torch.nn.Identity),
            layer.layer_number,
            mcore.AttnMaskType.causal,
            "self",
            softmax_scale=ours.softmax_scale,
            pg_collection=groups,
        )
        theirs.indexer = ours.indexer
        layer.self_attention.core_attention = theirs


@pytest.mark.skipif(not hasattr(mcore.DSAttention, "_get_index_share_topk_holder"), reason="megatron-core before 0.19")
def test_megatron_cores_own_sparse_attention_replays_too(monkeypatch):
    rollout = Generated(MODELS["every layer"])
    ours = rollout.logits().detach()
    _dsa(rollout.model)
    own = rollout.logits().detach()
    with replay_index_choices(rollout.model, rollout.choices, rollout.sequences):
        same = rollout.logits().detach()
        shake(rollout.model)
        moved = rollout.logits().detach()
    free = rollout.logits().detach()
    for row, ids in enumerate(rollout.sequences):
        known = slice(0, len(ids) - 1)
        torch.testing.assert_close(own[row, known], ours[row, known], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(same[row, known], own[row, known], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(moved[row, known], own[row, known], rtol=1e-5, atol=1e-5)
    assert (free - own).abs().max() > 1e-2


REFUSED = {
    "has 1 layers": lambda choices: [one[:, :1] for one in choices],
    "not integers": lambda choices: [one.astype(np.float32) for one in choices],
    "is uint64": lambda choices: [one.astype(np.uint64) for one in choices],
    "is of 5 positions": lambda choices: [one[:5] for one in choices],
    "do not see": lambda choices: [np.roll(one, 1, axis=0) + 1 for one in choices],
    "2 arrays of 3": lambda choices: choices[:2],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_choices_that_do_not_fit_are_refused_by_name(rollout, reason):
    choices = REFUSED[reason](rollout.choices)
    with pytest.raises(ModelError, match=reason), replay_index_choices(rollout.model, choices, rollout.sequences):
        pass


def test_models_and_forwards_that_do_not_fit_are_refused_by_name(rollout):
    given = rollout.choices, rollout.sequences
    with (
        pytest.raises(ModelError, match="no sparse attention"),
        replay_index_choices(make_model("latent"), *given),
    ):
        pass
    packed = torch.tensor([[token for ids in rollout.sequences for token in ids]])
    with (
        pytest.raises(ModelError, match="one a row and padded at the end, not packed"),
        replay_index_choices(rollout.model, *given),
    ):
        rollout.model(packed, torch.arange(packed.shape[1])[None], None)
    with pytest.raises(RequestError, match="return_index_choices: the model has no layers with an indexer"):
        make_engine(make_model("latent")).add_request([5, 6], PARAMS)


def test_samples_of_a_prompt_and_a_suspended_request_keep_their_choices():
    model = make_model("sparse", num_layers=2)
    engine = make_engine(model)
    params = SamplingParams(n=2, max_tokens=10, seed=3, ignore_eos=True, return_index_choices=True)
    (wanted,) = run(engine, [(PROMPTS[0], params)])

    def suspend(engine):
        if engine.num_steps % 4 == 3:
            engine.suspend("recompute")
            engine.resume()

    (found,) = run(make_engine(model), [(PROMPTS[0], params)], suspend)
    for one, other in zip(wanted.outputs, found.outputs, strict=True):
        assert one.token_ids == other.token_ids and np.array_equal(one.index_choices, other.index_choices)
    first, second = (one.index_choices for one in wanted.outputs)
    assert np.array_equal(first[: len(PROMPTS[0])], second[: len(PROMPTS[0])])


def test_samples_their_files_and_saved_requests_keep_choices(tmp_path):
    model = make_model("sparse", num_layers=2)
    groups = Rollout(make_engine(model)).generate(PROMPTS, PARAMS)
    back = sample_file.decode(sample_file.encode(groups))
    engine = make_engine(model)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, PARAMS, request_id=str(number))
    for _ in range(6):
        engine.step()
    engine.save_requests(tmp_path / "kept")
    other = make_engine(model)
    other.load_requests(tmp_path / "kept")
    done = finish(other)
    for number, (group, again) in enumerate(zip(groups, back, strict=True)):
        (sample,), (kept,), (loaded,) = group.samples, again.samples, done[str(number)].outputs
        assert sample.index_choices.shape == (len(sample.ids) - 1, 2, TOP_K)
        assert np.array_equal(sample.index_choices, kept.index_choices)
        assert np.array_equal(sample.index_choices, loaded.index_choices)

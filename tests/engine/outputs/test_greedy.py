"""Greedy steps that find their tokens without all logits: the same answers, only where nothing else is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import engines
import pytest
import torch
from engines import each_of, tokens_of
from model_kinds import make_model

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.kernels import argmax_linear
from megatron_infer.kernels.argmax_linear import ArgmaxLinear

VOCAB = 300
PROMPTS = [[5, 6, 7, 8, 9] * 4, list(range(20, 60)), [250], [7, 7, 8, 7, 7, 8, 7, 7]]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "chunks": {"enable_chunked_prefill": True, "max_tokens": 16},
    "n-gram drafts": {"speculative": {"num_speculative_tokens": 4, "adaptive": False}},
    "batch invariant": {"batch_invariant": True},
}


make_engine = partial(engines.make_engine, max_sequence_length=128, max_requests=8)
kind = each_of(["attention", "hybrid"])


@pytest.fixture(scope="module")
def model(kind) -> torch.nn.Module:
    return make_model(kind, vocab_size=VOCAB)


@pytest.fixture
def taken(monkeypatch) -> list[int]:
    """Rows of each product that was not made with the whole output layer."""
    monkeypatch.setattr(argmax_linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(argmax_linear, "LEAST_SAVED", -1.0)
    rows: list[int] = []
    run = ArgmaxLinear.__call__

    def counted(self: ArgmaxLinear, x_TX: torch.Tensor, weight: torch.Tensor, count: int) -> Any:
        found = run(self, x_TX, weight, count)
        if found is not None:
            rows.append(len(x_TX))
        return found

    monkeypatch.setattr(ArgmaxLinear, "__call__", counted)
    return rows


@pytest.mark.parametrize("way", WAYS)
def test_greedy_answers_are_those_of_all_logits(model, way, taken, monkeypatch):
    found = tokens_of(make_engine(model, **WAYS[way]).generate(PROMPTS, GREEDY))
    assert len(taken) >= 20
    taken.clear()
    monkeypatch.setattr(argmax_linear, "LEAST_BYTES", 1 << 60)
    assert tokens_of(make_engine(model, **WAYS[way]).generate(PROMPTS, GREEDY)) == found
    assert not taken


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 0},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 4, "stop_token_ids": [2]},
        {"return_sampled_logprobs": True},
    ],
    ids=str,
)
def test_a_step_with_a_row_that_needs_logits_computes_them(model, asked, taken):
    engine = make_engine(model)
    alone = tokens_of(engine.generate(PROMPTS[:1], GREEDY))
    taken.clear()
    other = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0, **asked)
    together = engine.generate(PROMPTS[:2], [GREEDY, other])
    assert tokens_of(together)[:1] == alone and not taken
    if "logprobs" in asked:
        assert all(together[1].outputs[0].logprobs)


def test_hooks_see_all_logits_from_the_step_they_are_added_in(model, taken):
    engine = make_engine(model)
    engine.add_request(PROMPTS[0], GREEDY)
    for _ in range(4):
        engine.step()
    assert len(taken) >= 3
    taken.clear()
    engine.on_logits(lambda logits, metadata: logits.index_fill_(1, torch.tensor([11]), 1e4))
    answer = next(output for _ in range(17) for output in engine.step() if output.finished)
    assert answer.outputs[0].token_ids[-15:] == [11] * 15 and not taken


@pytest.fixture
def changing(model) -> Iterator[torch.nn.Module]:
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    yield model
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if isinstance(value, torch.Tensor):
                value.copy_(before[name])


def test_new_weights_are_those_that_tokens_follow_from(changing, taken):
    engine = make_engine(changing)
    for version, mode in enumerate((None, "offload", "recompute"), start=1):
        with torch.no_grad():
            for value in changing.parameters():
                value.add_(torch.randn_like(value), alpha=0.05)
        engine.set_weight_version(version)
        if mode is not None:
            engine.suspend(mode)
            engine.resume()
        taken.clear()
        found = tokens_of(engine.generate(PROMPTS, GREEDY))
        assert taken
        with_logits = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0, logprobs=0)
        assert tokens_of(make_engine(changing).generate(PROMPTS, with_logits)) == found

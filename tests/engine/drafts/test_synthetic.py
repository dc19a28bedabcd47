"""Drafts that are kept at a given rate: as many as asked for, marked, kept out of the cache, servers and sessions."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structured_case
import torch
from engines import finish, tokens_of
from model_kinds import make_model
from test_speculative import ON, VOCAB, make_engine, prompts

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator.replica import Replica
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError
from megatron_infer.rl.session import RolloutSession
from megatron_infer.scheduler.drafts import DraftPlanner

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}


def synthetic(rate: float, **more: Any) -> dict[str, Any]:
    return {"speculative": {**ON["speculative"], "synthetic_acceptance_rate": rate, **more}}


def ask(engine: DynamicInferenceEngine, **more: Any) -> list[list[int]]:
    return tokens_of(engine.generate(prompts(), SamplingParams(**GREEDY | more)))


@pytest.mark.parametrize("kind", ["attention", pytest.param("hybrid", marks=pytest.mark.long)])
def test_as_many_drafts_are_kept_as_asked_for(kind):
    model = make_model(kind, vocab_size=VOCAB)
    plain = ask(make_engine(model))
    for rate in (0.0, 0.6, 1.0):
        engine = make_engine(model, **synthetic(rate))
        answers = ask(engine, n=1)
        found = engine.spec_decode_metrics()
        assert all(map(len, answers)) and (answers == plain) is (rate == 0.0)
        assert ask(make_engine(model, **synthetic(rate))) == answers
        if rate == 0.6:
            for _ in range(3):  # more choices: the standard error is about 0.02
                ask(engine, temperature=1.0)
            found = engine.spec_decode_metrics()
        both = zip(found.accepted_per_position, found.drafted_per_position, strict=True)
        kept = [accepted / drafted for accepted, drafted in both]
        expected = [rate**place for place in range(1, 6)]
        assert kept == pytest.approx(expected, abs=0.07), (rate, found)
        assert found.drafted_per_position[0] == found.num_verifications


def test_outputs_are_marked_unless_they_were_drawn_one_by_one(model):
    engine = make_engine(model, **synthetic(1.0))
    params = [SamplingParams(**GREEDY), SamplingParams(**GREEDY, speculate=False)]
    marked, drawn = (output.outputs[0] for output in engine.generate(prompts()[:1] * 2, params))
    assert marked.is_synthetic and not drawn.is_synthetic
    plain = make_engine(model).generate(prompts()[0], SamplingParams(**GREEDY))[0].outputs[0]
    assert drawn.token_ids == plain.token_ids != marked.token_ids and not plain.is_synthetic


def test_a_saved_request_stays_marked(model, tmp_path):
    engine = make_engine(model, **synthetic(1.0))
    engine.add_request(prompts()[0], SamplingParams(**GREEDY), request_id="one")
    engine.step()
    engine.step()
    engine.save_requests(tmp_path / "saved")
    other = make_engine(model)
    other.load_requests(tmp_path / "saved")
    assert finish(other)["one"].outputs[0].is_synthetic


def test_nothing_of_it_is_published(model, caplog):
    settings = {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru"}
    for more, found in ((synthetic(0.5), False), (ON, True)):
        engine = make_engine(model, **settings, **more)
        for _ in range(2):
            last = engine.generate(list(range(4, 40)), SamplingParams(**GREEDY))[0]
        assert (last.num_cached_tokens > 0) is found
    assert "tokens of this engine mean nothing" in caplog.text


def test_structured_output_is_drawn_one_by_one():
    params = SamplingParams(max_tokens=40, structured={"regex": "[a-z]{12}"}, seed=3, temperature=1.0)
    plain, engine = structured_case.make_engine(), structured_case.make_engine(**synthetic(1.0))
    wanted, output = (one.generate([9, 8, 7], params)[0].outputs[0] for one in (plain, engine))
    assert output.text == wanted.text and len(output.text) == 12 and not output.is_synthetic
    assert engine.spec_decode_metrics().num_drafted == 0


def test_the_draft_models_drafts_are_kept_at_the_rate(model):
    other = make_model("attention", vocab_size=VOCAB)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-0.7)
    draft = {"method": "draft", "draft_model": other}
    engine = make_engine(model, **synthetic(0.6, **draft))
    for _ in range(3):
        ask(engine)
    found = engine.spec_decode_metrics()
    assert found.accepted_per_position[0] / found.num_verifications == pytest.approx(0.6, abs=0.07)


def test_the_adaptive_depth_learns_the_rate(model, monkeypatch):
    monkeypatch.setattr(DraftPlanner, "set_costs", lambda self, costs: None)  # those that are assumed, not measured
    for rate in (0.0, 1.0):
        engine = make_engine(model, **synthetic(rate, adaptive=True))
        for _ in range(3):
            ask(engine)
        found = engine.spec_decode_metrics()
        share = sum(found.proposals_per_depth[1:]) / sum(found.proposals_per_depth)
        assert (share < 0.3) if rate == 0.0 else (share > 0.8), found


def test_servers_and_sessions_refuse_it(model):
    with pytest.raises(ConfigError, match=r"tokens mean nothing; a session takes no such engine: .*; leave it None"):
        RolloutSession(model, InferenceConfig(**synthetic(0.5)))
    with pytest.raises(ConfigError, match="a server takes no such engine"):
        Replica(make_engine(model, **synthetic(0.5)), "ipc:///nowhere")
    config = InferenceConfig(**synthetic(0.5))
    assert InferenceConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config

"""Speculative decoding: a caller gets what one token a step gives, whatever is asked for and wherever runs end."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import engines
import pytest
import tokenizers
import torch
from engines import finish, submit, suspending
from model_kinds import make_model
from rehearsal import Rehearsal, check_drafted

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.speculative import SpeculativeConfig
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.metrics.definitions import as_row, engine_families
from megatron_infer.errors import ConfigError, RequestError
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.runner.speculative.ngram import NgramProposer
from megatron_infer.scheduler.draft_depth import NO_PROPOSAL, Proposal
from megatron_infer.scheduler.request import Request
from megatron_infer.testing.inspect import inspect
from megatron_infer.text.tokenizer import Tokenizer

VOCAB = 128
ON: dict[str, Any] = {"speculative": {"num_speculative_tokens": 5, "adaptive": False}}


def words() -> Tokenizer:
    """One word a token, so that a stop string can end within any run."""
    known = {f"w{token}": token for token in range(VOCAB)}
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="w0")))


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model("attention", vocab_size=VOCAB, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=48)


def make_engine(model: torch.nn.Module, **settings: Any) -> DynamicInferenceEngine:
    return engines.make_engine(model, tokenizer=words(), **settings)


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(4, VOCAB) for _ in range(rng.randint(3, 40))] for _ in range(6)]


WAYS: dict[str, dict[str, Any]] = {
    "greedy, logprobs": {"temperature": 0.0, "logprobs": 3},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "bias and bad ids": {"temperature": 0.9, "logit_bias": {5: 2.0, 9: -3.0}, "bad_token_ids": [7, 11]},
    "min_p, support": {"min_p": 0.02, "return_support": True, "return_sampled_logprobs": True, "logprobs": 0},
    "four sequences": {"n": 4, "temperature": 0.9, "top_p": 0.9},
    "routing": {"temperature": 0.0, "return_routing": True},
}


def ask(engine: DynamicInferenceEngine, way: dict[str, Any], *, stop: Any = None, **more: Any) -> list[RequestOutput]:
    params = SamplingParams(**{"max_tokens": 30, "seed": 11, "ignore_eos": True, "stop": stop, **way, **more})
    return engine.generate(prompts(), params)


def shown(outputs: list[RequestOutput]) -> list[Any]:
    """Everything of an answer that drafts must leave as it is."""
    return [
        [
            (
                one.token_ids,
                one.text,
                one.logprobs,
                one.cumulative_logprob,
                one.finish_reason,
                one.stop_reason,
                one.raw_logprobs,
                one.processed_logprobs,
                one.support,
                None if one.routing is None else one.routing.tolist(),
                one.spans,
            )
            for one in output.outputs
        ]
        for output in outputs
    ]


def with_logprobs(outputs: Iterable[RequestOutput]) -> list[Any]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def rehearsed(engine: DynamicInferenceEngine, outputs: list[RequestOutput]) -> DynamicInferenceEngine:
    drafts = inspect(engine).drafts
    assert drafts is not None
    drafts.proposer = Rehearsal(out.prompt_token_ids + one.token_ids for out in outputs for one in out.outputs)
    return engine


@pytest.fixture(scope="module")
def plain(model) -> DynamicInferenceEngine:
    return make_engine(model)


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_one_token_a_step(model, plain, way):
    wanted = ask(plain, WAYS[way])
    engine = rehearsed(make_engine(model, **ON), wanted)
    outputs = ask(engine, WAYS[way])
    assert shown(outputs) == shown(wanted)
    check_drafted(engine)
    found = engine.spec_decode_metrics()
    counted = sum(one.num_accepted_drafts for output in outputs for one in output.outputs)
    assert found is not None and counted == found.num_accepted == sum(found.accepted_per_position)
    assert engine.num_steps < plain.num_steps


@pytest.mark.long
def test_stops_end_within_a_run(model, plain):
    whole = ask(plain, WAYS["greedy, logprobs"])
    text, tokens = whole[0].outputs[0].text, whole[0].outputs[0].token_ids
    cases: list[dict[str, Any]] = [
        {"stop": [text[place : place + 3]], "min_tokens": least} for place in range(2, 14, 3) for least in (0, 9)
    ]
    cases += [{"stop_token_ids": [tokens[place]], "min_tokens": least} for place in (3, 6, 9) for least in (0, 12)]
    cases += [{"max_tokens": most} for most in (1, 2, 7)]
    engine = rehearsed(make_engine(model, **ON), whole)
    for case in cases:
        wanted = shown(ask(plain, WAYS["greedy, logprobs"], **case))
        assert shown(ask(engine, WAYS["greedy, logprobs"], **case)) == wanted, case
        engine.reset_prefix_cache()
    check_drafted(engine)


def test_the_last_token_is_never_a_draft_and_the_one_before_it_is(model, plain):
    """Of two tokens the first is drawn by the prompt; of three a step verifies one and draws the last behind it."""
    engine = rehearsed(make_engine(model, **ON), ask(plain, {"temperature": 0.0}))
    for max_tokens, num_drafted in ((2, 0), (3, len(prompts()))):
        ask(engine, {"temperature": 0.0}, max_tokens=max_tokens)
        assert engine.spec_decode_metrics().num_drafted == num_drafted


def test_deltas_add_up_and_come_once_a_step(model, plain):
    wanted = ask(plain, WAYS["greedy, logprobs"])[0].outputs[0]
    engine = rehearsed(make_engine(model, track_generated_token_events=True, **ON), [*ask(plain, {"temperature": 0.0})])
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=3)
    engine.add_request(prompts()[0], params, stream="delta")
    parts = []
    while engine.has_unfinished():
        step = engine.step()
        assert len(step) <= 1
        parts += step
    assert sum((one.outputs[0].token_ids for one in parts), []) == wanted.token_ids
    assert sum((one.outputs[0].logprobs for one in parts), []) == wanted.logprobs
    assert "".join(one.outputs[0].text for one in parts) == wanted.text
    drawn = [event.payload["token"] for event in parts[-1].events if event.kind == "GENERATED_TOKEN"]
    assert drawn == wanted.token_ids and len(parts) < len(drawn)


def test_a_request_may_draw_one_by_one(model, plain):
    wanted = ask(plain, {"temperature": 0.0})
    engine = rehearsed(make_engine(model, **ON), wanted)
    assert shown(ask(engine, {"temperature": 0.0}, speculate=False)) == shown(wanted)
    found = engine.spec_decode_metrics()
    assert found is not None and found.num_drafted == 0
    assert plain.spec_decode_metrics() is None
    assert shown(ask(engine, {"temperature": 0.0}, speculate=True)) == shown(wanted)
    check_drafted(engine)


def test_drafts_asked_of_an_engine_without_them_are_refused(model, plain):
    with pytest.raises(RequestError, match=r"speculate: this engine drafts no tokens; build it with .* or give None"):
        plain.add_request(prompts()[0], SamplingParams(speculate=True))
    with pytest.raises(RequestError, match="prompt 1: speculate"):
        plain.generate(prompts()[:2], [SamplingParams(speculate=False), SamplingParams(speculate=True)])
    assert not plain.has_unfinished()
    for wrong in (1, 0, "yes"):
        with pytest.raises(RequestError, match=r"speculate is .*, it must be True or False or None"):
            SamplingParams(speculate=wrong)
    for value in (None, True, False):
        params = SamplingParams(speculate=value)
        assert SamplingParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params
        assert ("speculate" in params.to_dict()) is (value is not None)


def test_saved_requests_that_ask_for_drafts_continue_without(model, plain, tmp_path):
    wanted = ask(plain, {"temperature": 0.0, "logprobs": 0})[0].outputs[0]
    first = make_engine(model, **ON)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=0, speculate=True)
    first.add_request(prompts()[0], params, request_id="saved")
    for _ in range(3):
        first.step()
    first.save_requests(tmp_path / "saved")
    for settings in ({}, ON):
        second = make_engine(model, **settings)
        second.load_requests(tmp_path / "saved")
        found = finish(second)["saved"].outputs[0]
        assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_priorities_in_a_tiny_pool_change_nothing(kind, overlap):
    """Requests of several priorities preempt each other; some of them draft, some draw one by one."""
    model = make_model(kind, vocab_size=VOCAB)
    drawing = {"temperature": 0.9, "top_k": 9, "max_tokens": 30, "ignore_eos": True, "logprobs": 0}
    params = [
        SamplingParams(**drawing, seed=index, priority=(index * 7) % 4 - 2, speculate=False if index % 3 == 2 else None)
        for index in range(len(prompts()))
    ]
    wanted = make_engine(model).generate(prompts(), params)
    engine = rehearsed(make_engine(model, overlap=overlap, **ON, pool_blocks=11), wanted)
    assert shown(engine.generate(prompts(), params)) == shown(wanted)
    check_drafted(engine)
    counters = engine.stats().counters
    assert counters["evicted"] + counters["paused"] > 0


@pytest.mark.parametrize("mode", ["persist", "recompute", "offload"])
@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_suspends_change_nothing(kind, mode):
    model = make_model(kind, vocab_size=VOCAB)
    wanted = ask(make_engine(model), {"temperature": 0.0, "logprobs": 0})
    engine = rehearsed(make_engine(model, overlap=mode == "offload", **ON), wanted)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=0)
    outputs = engines.run(engine, [(prompt, params) for prompt in prompts()], suspending(mode, 2, 4, 7))
    assert with_logprobs(outputs) == with_logprobs(wanted)
    check_drafted(engine)


def test_a_hybrid_continues_from_the_state_of_the_last_kept_token():
    """Drafted, rejected at every place, then one by one: the recurrent state keeps nothing of what was rejected."""
    model = make_model("hybrid", vocab_size=VOCAB)
    wanted = ask(make_engine(model), {"temperature": 0.0, "logprobs": 2})
    engine = make_engine(model, **ON)
    drafts = inspect(engine).drafts
    assert drafts is not None

    class Alternating(Rehearsal):
        def propose(self, request: Request, most: int) -> Proposal:
            return super().propose(request, most) if request.num_output % 3 == 1 else NO_PROPOSAL

    drafts.proposer = Alternating(out.prompt_token_ids + out.outputs[0].token_ids for out in wanted)
    assert shown(ask(engine, {"temperature": 0.0, "logprobs": 2})) == shown(wanted)
    check_drafted(engine)


def test_saved_requests_continue_with_drafts(model, plain, tmp_path):
    wanted = ask(plain, {"temperature": 0.0, "logprobs": 0})
    first = rehearsed(make_engine(model, **ON), wanted)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=0)
    submit(first, [(prompt, params) for prompt in prompts()])
    for _ in range(3):
        assert not first.step()
    first.save_requests(tmp_path / "saved")
    second = rehearsed(make_engine(model, **ON), wanted)
    second.load_requests(tmp_path / "saved")
    done = finish(second)
    assert with_logprobs(done[str(place)] for place in range(len(wanted))) == with_logprobs(wanted)


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_weights_that_change_between_steps_draw_what_they_would_one_by_one(kind):
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True, logprobs=0)
    wanted = make_engine(make_model(kind, vocab_size=VOCAB)).generate([prompts()[0]], [params])
    found, at = [], 0
    for settings in (ON, {}):
        model = make_model(kind, vocab_size=VOCAB)
        engine = make_engine(model, **settings)
        if settings:
            rehearsed(engine, wanted)
        engine.add_request(prompts()[0], params)
        news: list[RequestOutput] = []
        while not news or len(news[-1].outputs[0].token_ids) < max(at, 9):
            news += engine.step()
        at = len(news[-1].outputs[0].token_ids)  # of the one with drafts; the other draws as many
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        engine.set_weight_version(3)
        while engine.has_unfinished():
            news += engine.step()
        found.append(shown(news[-1:]))
    assert found[0] == found[1]
    spans = found[0][0][0][-1]
    assert [span.first_token for span in spans] == [0, at] and at > 9
    assert found[0] != shown(wanted)


@pytest.mark.parametrize("off", [0, 1], ids=["right", "wrong"])
def test_adaptive_depth_changes_no_answer(model, plain, off):
    wanted = ask(plain, {"temperature": 0.0}, max_tokens=100)
    engine = make_engine(model, speculative={"num_speculative_tokens": 5})
    inspect(engine).drafts.proposer = Heard(wanted, off)
    assert shown(ask(engine, {"temperature": 0.0}, max_tokens=100)) == shown(wanted)
    found = engine.spec_decode_metrics()
    assert found.num_drafted > 0 and found.acceptance_rate == 1 - off


class Heard:
    """Drafts the whole answer, each token off by so much."""

    def __init__(self, outputs: list[RequestOutput], off: int) -> None:
        self._known, self._off = [out.prompt_token_ids + out.outputs[0].token_ids for out in outputs], off

    def propose(self, request: Request, most: int) -> Proposal:
        length = len(request.tokens)
        heard = next(one for one in self._known if one[:length] == request.tokens)
        return Proposal([(token + self._off) % VOCAB for token in heard[length : length + most]])


def test_ngrams_find_the_longest_run_and_go_on_with_a_repetition():
    def propose(tokens: list[int], most: int = 4) -> list[int]:
        request = Request(id="r", tokens=[], prompt_len=1, params=SamplingParams(), max_total=99, seed=0)
        proposer = NgramProposer()
        for token in tokens[:-1]:  # as an answer grows
            request.tokens.append(token)
            proposer.propose(request, most)
        request.tokens.append(tokens[-1])
        alone = Request(id="s", tokens=tokens, prompt_len=1, params=SamplingParams(), max_total=99, seed=0)
        found = list(proposer.propose(request, most).tokens)
        assert found == list(proposer.propose(alone, most).tokens)
        return found

    assert propose([1, 2, 3]) == []
    assert propose([9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2]) == [5, 8, 1, 2]  # 9 1 2 is longer than the later 1 2
    assert propose([1, 2, 5, 1, 2, 6, 1, 2]) == [6, 1, 2, 6]  # of equal runs the latest
    assert propose([4, 7, 8, 7, 8]) == [7, 8, 7, 8]
    often = [token for at in range(20) for token in (40 + at, 4)]
    assert propose([1, 2, 3, 4, 5, *often, 1, 2, 3, 4], most=1) == [5]  # however often 4 came since
    assert propose([2, 6, 3, 2]) == [6, 3, 2, 6]


def test_metrics_are_exported(model, plain):
    wanted = ask(plain, {"temperature": 0.0})
    engine = rehearsed(make_engine(model, **ON), wanted)
    ask(engine, {"temperature": 0.0})
    found = engine.spec_decode_metrics()
    families = {family.name: family for family in engine_families(engine.figures())}
    drafted = families["megatron_infer_engine_drafted_tokens_total"].series
    kept = families["megatron_infer_engine_accepted_drafts_total"].series
    assert sum(one.value for one in drafted.values()) == found.num_drafted
    assert [one.value for _, one in sorted(kept.items())] == found.accepted_per_position
    depths = {
        dict(key)["depth"]: one.value for key, one in families["megatron_infer_engine_draft_depth_total"].series.items()
    }
    assert [depths[str(depth)] for depth in range(6)] == found.proposals_per_depth
    assert sum(depth * count for depth, count in enumerate(found.proposals_per_depth)) == found.num_drafted
    assert sum(found.proposals_per_depth[1:]) == found.num_verifications
    seconds = families["megatron_infer_engine_drafting_seconds_total"].series[()].value
    assert seconds == found.seconds_drafting
    row = as_row(families.values())
    for place, count in enumerate(found.accepted_per_position, 1):
        assert row[f"inference/engine_accepted_drafts_total/{place}"] == count
    assert row["inference/engine_draft_depth_total/5"] == found.proposals_per_depth[5] > 0
    assert families["megatron_infer_engine_verifications_total"].series[()].value == found.num_verifications
    assert 1 < found.mean_tokens_per_step <= 6 and 0 < found.acceptance_rate < 1 and found.seconds_drafting > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "eagle"}, "megatron-core has no EAGLE heads"),
        ({"method": "draft"}, "draft_model is None with method 'draft'; give the model"),
        ({"method": "standalone"}, "named 'draft' here"),
        ({"method": "ngrams"}, "did you mean 'ngram'"),
        ({"method": ("grammar", "eagle")}, "megatron-core has no EAGLE heads"),
        ({"method": ("ngram", "ngram")}, "at least one method, and none twice"),
        ({"method": []}, "at least one method"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0.*leave speculative None"),
        ({"num_speculative_tokens": 16}, "must be below block_size_tokens = 16"),
        ({"verification": "typical-acceptance"}, "changes the distribution"),
        ({"verification": "relaxed"}, "one of same_tokens, residual"),
        ({"draft_model": "small"}, "leave it None, or set method='draft'"),
        ({"num_tokens": 3}, "unknown SpeculativeConfig field"),
        ({"adaptive": 1}, "adaptive is 1"),
        ({"synthetic_acceptance_rate": 1.5}, "synthetic_acceptance_rate is 1.5, it must be a number from 0 to 1"),
        ({"synthetic_acceptance_rate": True}, "synthetic_acceptance_rate is True"),
        ({"synthetic_acceptance_rate": 0.5, "verification": "residual"}, "verifies nothing; leave one of them out"),
    ],
)
def test_wrong_options_are_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        InferenceConfig(block_size_tokens=16, speculative=values)


def test_grammar_proposals_need_a_tokenizer(model):
    with pytest.raises(ConfigError, match="no tokenizer for it"):
        engines.make_engine(model, speculative={"method": "grammar"})


def test_a_config_survives_plain_values():
    for method in ("grammar", ("grammar", "ngram")):
        asked = SpeculativeConfig(method=method, num_speculative_tokens=3, adaptive=False)
        config = InferenceConfig(speculative=asked)
        assert InferenceConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ConfigError, match="must be a SpeculativeConfig"):
        InferenceConfig(speculative="ngram")

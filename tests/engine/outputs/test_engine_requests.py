"""What a request can ask for and what happens to it: n, stops, seeds, logprobs, aborts, errors, events, training."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import engines
import pytest
import torch
from engines import finish, tokens_of
from model_kinds import make_model
from plain_forward import full_logits, worst_error

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.executor import FailedStep
from megatron_infer.errors import DuplicateRequest, InvalidPrompt, PromptTooLong, RequestError, UnknownRequest
from megatron_infer.runner.in_flight import LocalStep
from megatron_infer.testing.inspect import inspect

VOCAB = 128
PROMPT = list(range(5, 45))
make_engine = partial(engines.make_engine, max_sequence_length=200)


def test_n_samples_share_one_prefill_and_equal_n_single_requests(model):
    engine = make_engine(model)
    params = SamplingParams(n=4, seed=11, temperature=1.0, max_tokens=12, ignore_eos=True)
    output = engine.generate(PROMPT, params)[0]
    counters = engine.stats().counters
    assert (counters["prefill_tokens"], counters["decode_tokens"]) == (len(PROMPT), 4 * 11)  # the prompt once
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    alone = make_engine(model).generate(
        PROMPT, SamplingParams(seed=11, temperature=1.0, max_tokens=12, ignore_eos=True)
    )
    assert output.outputs[0].token_ids == alone[0].outputs[0].token_ids
    crowded = make_engine(model, max_requests=4, enable_prefix_caching=True, prefix_caching_eviction_policy="lru")
    again = crowded.generate([list(range(60, 90)), PROMPT], [SamplingParams(max_tokens=5, seed=1), params])[1]
    assert [s.token_ids for s in again.outputs] == [s.token_ids for s in output.outputs]


def test_requests_without_a_seed_differ_and_an_engine_seed_repeats_them(model):
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    first, second = (o.outputs[0].token_ids for o in make_engine(model, seed=5).generate([PROMPT, PROMPT], params))
    assert first != second
    assert tokens_of(make_engine(model, seed=5).generate([PROMPT, PROMPT], params)) == [
        first,
        second,
    ]
    assert make_engine(model, seed=6).generate(PROMPT, params)[0].outputs[0].token_ids != first


def test_stop_token_ends_the_request_and_is_its_stop_reason(model):
    engine = make_engine(model)
    free = engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))[0].outputs[0]
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    output = engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[stop]))[0].outputs[
        0
    ]
    assert output.token_ids == free.token_ids[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    held = engine.generate(
        PROMPT, SamplingParams(temperature=0.0, max_tokens=20, min_tokens=12, stop_token_ids=[stop])
    )[0].outputs[0]
    assert len(held.token_ids) >= 12 and stop not in held.token_ids[:12]


def test_logprobs_carry_rank_and_top_and_sum_up(model):
    engine = make_engine(model)
    output = engine.generate(
        PROMPT, SamplingParams(temperature=0.8, seed=2, max_tokens=10, logprobs=5, ignore_eos=True)
    )[0]
    sample = output.outputs[0]
    assert len(sample.logprobs) == 10
    total = 0.0
    for token, entry in zip(sample.token_ids, sample.logprobs, strict=True):
        assert next(iter(entry)) == token and len(entry) in (5, 6)
        ranks = sorted(item.rank for item in entry.values())
        assert ranks[:5] == [1, 2, 3, 4, 5]
        ordered = sorted(entry.values(), key=lambda item: item.rank)
        assert all(a.logprob >= b.logprob for a, b in zip(ordered, ordered[1:], strict=False))
        total += entry[token].logprob
    assert math.isclose(total, sample.cumulative_logprob, rel_tol=1e-6)


@pytest.mark.parametrize(
    "settings", [{}, {"enable_chunked_prefill": True, "max_tokens": 17}, {"enable_prefix_caching": True}]
)
def test_prompt_logprobs_equal_a_full_forward(model, settings):
    engine = make_engine(model, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2)
    for _ in range(2):  # the second time a prefix cache would hit, were it not for the prompt logprobs
        output = engine.generate(PROMPT, params)[0]
        assert len(output.prompt_logprobs) == len(PROMPT) and output.prompt_logprobs[0] is None
        full = full_logits(model, PROMPT)[:, :VOCAB].log_softmax(-1)
        for position in range(1, len(PROMPT)):
            entry = output.prompt_logprobs[position]
            assert abs(entry[PROMPT[position]].logprob - float(full[position - 1, PROMPT[position]])) < 1e-4
            best = min(entry.items(), key=lambda item: item[1].rank)
            assert best[0] == int(full[position - 1].argmax())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_in_any_state_returns_the_partial_and_frees_everything(model, overlap, steps):
    engine = make_engine(model, overlap=overlap, enable_chunked_prefill=True, max_tokens=24, max_requests=4)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    expected = make_engine(model).generate(PROMPT, params)[0].outputs[0].token_ids
    ids = [engine.add_request(PROMPT, params) for _ in range(6)]
    group = engine.add_request(PROMPT, SamplingParams(n=3, max_tokens=30, seed=1))
    for _ in range(steps):
        engine.step()
    for victim in (ids[0], ids[5], group):
        output = engine.abort(victim)
        assert output.finished and all(sample.finish_reason == "abort" for sample in output.outputs)
        if victim is not group:
            assert output.outputs[0].token_ids == expected[: len(output.outputs[0].token_ids)]
        with pytest.raises(UnknownRequest, match="no request"):
            engine.abort(victim)
    done = finish(engine)
    assert sorted(done) == sorted(ids[1:5])
    assert all(output.outputs[0].token_ids == expected for output in done.values())
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


BAD_REQUESTS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ([], {}, InvalidPrompt, "empty"),
    ([1, VOCAB + 900], {}, InvalidPrompt, "outside the vocabulary"),
    ([1, -1], {}, InvalidPrompt, "outside the vocabulary"),
    ([1, 2.5], {}, InvalidPrompt, "integers"),
    ("text", {}, InvalidPrompt, "tokenizer"),
    (b"bytes", {}, InvalidPrompt, "bytes"),
    ({"text": "x"}, {}, InvalidPrompt, "exactly one of"),
    ({"cache_salt": "x"}, {}, InvalidPrompt, "exactly one of"),
    ({"prompt": "x", "prompt_token_ids": [1]}, {}, InvalidPrompt, "exactly one of"),
    ({"prompt_token_ids": [1], "cache_salt": 7}, {}, InvalidPrompt, "'cache_salt' is a int"),
    ({"prompt_token_ids": [1], "cache_salt": None}, {}, InvalidPrompt, "'cache_salt' is a NoneType"),
    ({"prompt_token_ids": [1], "cache_salt": "x" * 257}, {}, InvalidPrompt, "257 characters, limit is 256"),
    ([1] * 500, {}, PromptTooLong, "500 tokens, limit is 199"),
    (PROMPT, {"request_id": "good"}, DuplicateRequest, "already in the engine"),
    (PROMPT, {"params": SamplingParams(logit_bias={4000: 1.0})}, RequestError, "logit_bias: token id 4000"),
    (PROMPT, {"params": SamplingParams(allowed_token_ids=[3], bad_token_ids=[3])}, RequestError, "no token to draw"),
]


def test_bad_requests_are_refused_with_figures_and_nothing_is_lost(model):
    engine = make_engine(model)
    engine.add_request(PROMPT, SamplingParams(max_tokens=4, temperature=0.0), request_id="good")
    for prompt, more, error, words in BAD_REQUESTS:
        with pytest.raises(error, match=words):
            engine.add_request(prompt, **more)
    with pytest.raises(InvalidPrompt, match="prompt 1: prompt is empty"):
        engine.generate([PROMPT, []])
    done = finish(engine)
    assert list(done) == ["good"] and len(done["good"].outputs[0].token_ids) == 4


def test_only_prompts_of_equal_cache_salt_share(model):
    engine = make_engine(model, enable_prefix_caching=True, prefix_caching_eviction_policy="lru")
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    salted = {"prompt_token_ids": PROMPT, "cache_salt": "x" * 256}
    other = {"prompt_token_ids": PROMPT, "cache_salt": "y"}
    together = engine.generate([PROMPT, salted, other, salted, PROMPT], params)
    assert [output.num_cached_tokens for output in together] == [0, 0, 0, 32, 32]
    engine.add_request(salted, params, request_id="later")
    later = finish(engine)["later"]
    assert later.num_cached_tokens == 32
    assert len({tuple(output.outputs[0].token_ids) for output in (*together, later)}) == 1


def test_prompts_that_share_blocks_within_a_step_answer_as_alone(model):
    """Blocks filled in the step that reads them: also by slices of one token, which kernels treat apart."""
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [PROMPT[:33], PROMPT[:33], [*PROMPT[:16], 7], [*PROMPT[:32], 9, 8], PROMPT[:32], [*PROMPT[:16], 3]]
    alone = [make_engine(model).generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    engine = make_engine(model, enable_prefix_caching=True)
    outputs = engine.generate(prompts, params)
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 16, 32, 16, 16]
    assert tokens_of(outputs) == alone
    assert engine.stats().counters["prefill_tokens"] == 33 + 1 + 1 + 2 + 16 + 1


def test_a_request_larger_than_the_pool_is_refused_with_its_numbers(model):
    size = make_engine(model).sizes.block_bytes / 2**30
    engine = make_engine(model, buffer_size_gb=4.5 * size)
    with pytest.raises(PromptTooLong, match="3 blocks of 16"):
        engine.add_request(list(range(60)))
    with pytest.raises(RequestError, match="raise buffer_size_gb"):
        engine.add_request(PROMPT, SamplingParams(max_tokens=60))
    fits = engine.generate(PROMPT, SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))[0]
    assert len(fits.outputs[0].token_ids) == 9  # 40 + 8 stored tokens fill the pool exactly
    rest = engine.generate(PROMPT, SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True))[0]
    assert len(rest.outputs[0].token_ids) == 9 and rest.outputs[0].finish_reason == "length"


def test_a_failing_forward_ends_its_requests_and_not_the_engine(model, monkeypatch):
    engine = make_engine(model)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    expected = make_engine(model).generate(PROMPT, params)[0].outputs[0].token_ids
    engine.add_request(PROMPT, params, request_id="doomed")
    engine.step()
    real = inspect(engine).adopted.hidden
    monkeypatch.setattr(
        inspect(engine).runner.model, "hidden", lambda step: (_ for _ in ()).throw(MemoryError("no room"))
    )
    output = engine.step()[-1]
    assert output.finished and output.outputs[0].finish_reason == "error" and isinstance(output.error, FailedStep)
    assert "no room" in str(output.error) and output.outputs[0].token_ids == expected[:1]
    monkeypatch.setattr(inspect(engine).runner.model, "hidden", real)
    assert engine.generate(PROMPT, params)[0].outputs[0].token_ids == expected
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_logits_that_are_no_numbers_fail_only_their_request(model):
    engine = make_engine(model)
    params = SamplingParams(max_tokens=4, temperature=0.0)
    weight = model.embedding.word_embeddings.weight
    with torch.no_grad():
        kept = weight[77].clone()
        weight[77] = float("nan")
    try:
        bad, good = engine.generate([[*PROMPT, 77], PROMPT], params, on_error="return")
    finally:
        with torch.no_grad():
            weight[77] = kept
    assert bad.outputs[0].finish_reason == "error" and "not finite" in str(bad.error)
    assert good.outputs[0].finish_reason != "error" and good.error is None


def test_events_and_metrics_tell_the_story(model):
    engine, started = (
        make_engine(model, track_generated_token_events=True, track_paused_request_events=True),
        time.time(),
    )
    output = engine.generate(PROMPT, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))[0]
    kinds = [event.kind for event in output.events]
    assert kinds == ["ADD_ENGINE", "ADD_CONTEXT", *["GENERATED_TOKEN"] * 3, "FINISH"]
    assert [e.payload["token"] for e in output.events if e.kind == "GENERATED_TOKEN"] == output.outputs[0].token_ids
    times = [event.time_s for event in output.events]
    assert started <= times[0] and times == sorted(times) and times[-1] <= time.time(), "wall-clock time, as Megatron's"
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert metrics.num_output_tokens == 3 and metrics.ttft_s >= 0 and metrics.latency_s >= metrics.ttft_s


def test_generate_leaves_other_requests_outputs_for_step(model):
    engine = make_engine(model)
    other = engine.add_request(PROMPT, SamplingParams(max_tokens=2, temperature=0.0), stream="final")
    engine.generate(list(range(9)), SamplingParams(max_tokens=8, temperature=0.0))
    assert other in finish(engine)


@pytest.mark.parametrize("through_data", [False, True])
def test_training_between_rollouts_is_seen_and_logprobs_stay_true(through_data):
    """Engine logprobs equal a fresh full forward before and after optimizer steps."""
    model = make_model("attention", init_method_std=0.1)
    engine = make_engine(model, enable_prefix_caching=True, prefix_caching_eviction_policy="lru")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    ids = torch.tensor([PROMPT])
    keys, answers = list(model.state_dict()), []
    for round_ in range(3):
        (output,) = engine.generate(PROMPT, params)
        answers.append(output.outputs[0].cumulative_logprob)
        assert worst_error([output], partial(full_logits, model), greedy=False) < 1e-4
        assert engine.stats().weight_version == round_
        model.train()
        if through_data:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.data.mul_(1.01)
        else:
            for _ in range(2):
                optimizer.zero_grad()
                model(ids, torch.arange(ids.shape[1])[None], None, labels=ids).mean().backward()
                optimizer.step()
    assert len(set(answers)) == 3 and list(model.state_dict()) == keys and model.training


def test_modules_are_found_in_the_mode_they_were_left_in(model):
    model.train()
    model.decoder.layers[0].eval()
    engine = make_engine(model)
    engine.generate(PROMPT, SamplingParams(max_tokens=2))
    assert model.training and not model.decoder.layers[0].training and model.decoder.layers[1].training
    model.eval()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["forward", "read"])
def test_an_interrupt_of_any_step_loses_no_output_and_no_token(model, monkeypatch, overlap, where):
    """What a step had taken on to hand out, what the step in flight brought, and the step in flight itself."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 4, 9)]
    expected = tokens_of(make_engine(model).generate([PROMPT] * 3, params))
    engine = make_engine(model, overlap=overlap)
    for i, one in enumerate(params):
        engine.add_request(PROMPT, one, request_id=str(i), stream="final")
    engine.add_request(PROMPT, request_id="gone")
    owner, name = (LocalStep, "read") if where == "read" else (inspect(engine).runner, "forward")
    original, calls = getattr(owner, name), [0]

    def interrupted(*args, **options):
        calls[0] += 1
        if calls[0] % 2:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(owner, name, interrupted)
    engine.pause()
    engine.loop.backlog.append(engine.abort("gone"))
    engine.unpause()
    done = {}
    while engine.has_unfinished() and calls[0] < 100:
        try:
            done |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
        except KeyboardInterrupt:
            continue
    assert done == {"gone": [], **{str(i): tokens for i, tokens in enumerate(expected)}}
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_generate_leaves_nothing_of_itself_behind(model, monkeypatch, overlap):
    live = make_model("attention").train()
    engine = make_engine(live, overlap=overlap)
    forward, calls = inspect(engine).runner.forward, [0]

    def interrupted(*args):
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(inspect(engine).runner, "forward", interrupted)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 20)]  # one ends in the step in flight
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT] * 2, params)
    assert not engine.has_unfinished() and live.training
    assert engine.stats().num_free_blocks == engine.stats().num_blocks

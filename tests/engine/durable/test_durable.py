"""Saved and loaded, requests go on as if nothing had happened: tokens, logprobs, text, streams, seeds, order."""

from __future__ import annotations

import math

import pytest
import torch
import vocabularies
from durable_case import PROMPT, VOCAB, Collector, add_all, assert_same, make_engine, make_model, pool_of
from engines import tokens_of
from model_kinds import KINDS, RECURRENT

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.executor import FailedStep
from megatron_infer.errors import SnapshotError
from megatron_infer.scheduler.request import FinishReason, Status, VersionSpan
from megatron_infer.testing.inspect import inspect

STEPS = [0, 1, 2, 3, 5, 8, 14, 20]


@pytest.fixture(scope="module")
def uninterrupted(model) -> Collector:
    engine = make_engine(model)
    add_all(engine)
    return Collector().step(engine)


TARGETS = {
    "same": {},
    "smaller blocks": {"block_size_tokens": 8},
    "larger blocks": {"block_size_tokens": 32},
    "small pool": {"max_requests": 4},
    "small steps, overlap": {"max_tokens": 17, "overlap": True},
    "whole prompts, cache": {"enable_chunked_prefill": False, "max_tokens": 256, "prefix": "lru"},
}
ONLY_ATTENTION = ("larger blocks", "small pool")
CASES = [(kind, name) for kind in KINDS for name in TARGETS if kind == "attention" or name not in ONLY_ATTENTION]
every_kind = pytest.mark.parametrize("kind", KINDS, indirect=True)


@pytest.mark.parametrize("kv", [False, True], ids=["tokens", "kv"])
@pytest.mark.parametrize(("kind", "target"), CASES, indirect=["kind"])
def test_a_load_goes_on_with_the_same_tokens_and_logprobs(model, kind, uninterrupted, tmp_path, target, kv):
    settings = dict(TARGETS[target])
    if target == "small pool":
        settings["buffer_size_gb"] = pool_of(model, 13)
    states = set()
    for steps in STEPS[CASES.index((kind, target)) % 2 :: 2]:
        source = make_engine(model, max_requests=6, overlap=steps % 2 == 0)
        add_all(source)
        seen = Collector().step(source, steps)
        source.save_requests(tmp_path / "requests", kv=kv)
        states |= {request.status for request in all_requests(source)}
        states |= {
            "mid prefill" for request in inspect(source).scheduler.admitted_requests.prefilling if request.scheduled
        }
        engine = make_engine(model, **settings)
        report = engine.load_requests(tmp_path / "requests")
        seen.take(report.finished)
        assert sorted([*report.loaded, *seen.finished]) == sorted(["0", "1", "2", "biased", "group"])
        assert_same(seen.step(engine), uninterrupted)
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
        if not kv:
            assert not report.with_kv
        elif kind in RECURRENT:  # whatever had begun goes on where it was
            assert not report.recomputed and (report.with_kv or not steps), (steps, report)
        if kv and target == "same":  # whatever had begun goes on where it was, and nothing is computed twice
            assert not report.recomputed
            twice = source.stats().counters["prefill_tokens"] + engine.stats().counters["prefill_tokens"]
            assert twice == len(PROMPT) * 3 - 3 + VOCAB + 5
    assert states >= {Status.WAITING, Status.RUNNING, Status.FINISHED, "mid prefill"}


def all_requests(engine):
    return [sample.request for group in engine.output_processor.requests for sample in group.sequences]


@pytest.mark.parametrize("kv", [False, True], ids=["tokens", "kv"])
def test_paused_and_evicted_requests_are_saved_like_others(model, tmp_path, kv):
    params = SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True)
    want = Collector()
    reference = make_engine(model, seed=3)
    for _ in range(4):
        reference.add_request(PROMPT, params)
    want.step(reference)
    source = make_engine(model, seed=3, buffer_size_gb=pool_of(model, 14), paused_buffer_size_gb=pool_of(model, 4))
    for _ in range(4):
        source.add_request(PROMPT, params)
    seen = Collector()
    while not (source.stats().num_paused and source.stats().counters["evicted"]):
        assert source.has_unfinished(), "nobody was paused beside an evicted one: the pool is not tight enough"
        seen.step(source, 1)
    source.save_requests(tmp_path / "requests", kv=kv)
    engine = make_engine(model, buffer_size_gb=pool_of(model, 11))
    report = engine.load_requests(tmp_path / "requests")
    if kv:  # the oldest come back with what they had, as far as there is room
        assert report.with_kv and report.recomputed
        assert "no room" in next(iter(report.recomputed.values()))
    assert seen.step(engine).tokens == want.tokens


@every_kind
def test_samples_that_have_not_forked_share_one_prefill_after_the_load(model, tmp_path):
    params = SamplingParams(n=4, seed=11, max_tokens=12, ignore_eos=True)
    want = make_engine(model).generate(PROMPT, params)[0].outputs
    for steps, computed_before in ((0, 0), (1, 17)):
        source = make_engine(model, max_tokens=17)
        source.add_request(PROMPT, params)
        Collector().step(source, steps)
        source.save_requests(tmp_path / "requests", kv=True)
        engine = make_engine(model)
        engine.load_requests(tmp_path / "requests")
        done = Collector().step(engine)
        assert [done.tokens["0", index] for index in range(4)] == [one.token_ids for one in want]
        assert engine.stats().counters["prefill_tokens"] == len(PROMPT) - computed_before


def test_blocks_shared_by_samples_are_stored_once_and_shared_again(model, tmp_path):
    source = make_engine(model)
    source.add_request(list(range(96)), SamplingParams(n=4, max_tokens=12, ignore_eos=True))
    Collector().step(source, 4)
    source.save_requests(tmp_path / "requests", kv=True)
    engine = make_engine(model)
    assert engine.load_requests(tmp_path / "requests").with_kv == ["0"]
    used = [each.stats().num_blocks - each.stats().num_free_blocks for each in (source, engine)]
    assert used[0] == used[1] == 6 + 4
    block = source.sizes.block_bytes
    assert 10 * block < (tmp_path / "requests").stat().st_size < 11 * block


def test_every_field_comes_back_exactly(model, tmp_path):
    source = make_engine(model, max_requests=6, track_generated_token_events=True)
    add_all(source)
    Collector().step(source, 5)
    sample = source.output_processor.get("0").sequences[0]
    for entry, odd in zip(sample.logprobs, (-math.inf, -0.1 - 2**-54, -5e-324), strict=False):
        next(iter(entry.values())).logprob = odd
    sample.cumulative_logprob = -1 / 3
    source.save_requests(tmp_path / "requests")
    engine = make_engine(model, track_generated_token_events=True)
    engine.load_requests(tmp_path / "requests")
    pairs = zip(source.output_processor.requests, engine.output_processor.requests, strict=True)
    for old, new in pairs:
        for name in ("id", "prompt", "prompt_ids", "params", "mode", "prompt_logprobs"):
            assert getattr(old, name) == getattr(new, name), name
        assert old.events == new.events, "kinds, payloads, and the wall-clock times"
        if old.metrics.first_token_time is not None:
            assert new.metrics.ttft_s == pytest.approx(old.metrics.ttft_s, abs=1e-6)
        assert new.metrics.arrival_time > old.metrics.arrival_time - 1e-6  # an age: counted from now
        for a, b in zip(old.sequences, new.sequences, strict=True):
            assert (a.index, a.logprobs, a.cumulative_logprob, a.sent) == (
                b.index,
                b.logprobs,
                b.cumulative_logprob,
                b.sent,
            )
            fields = ("id", "tokens", "prompt_len", "params", "max_total", "seed", "stop_ids", "cache")
            for name in (*fields, "history", "finish_reason", "stop_reason"):
                assert getattr(a.request, name) == getattr(b.request, name), name
    order = [
        request.id for request in sorted(all_requests(source), key=lambda r: r.arrival) if not request.finish_reason
    ]
    arrived = [
        request.id for request in sorted(all_requests(engine), key=lambda r: r.arrival) if not request.finish_reason
    ]
    assert arrived == order and len(order) > 4


def test_a_failed_sample_keeps_its_error_while_the_others_go_on(model, tmp_path):
    params = SamplingParams(n=2, seed=5, max_tokens=10, ignore_eos=True)
    want = make_engine(model).generate(PROMPT, params)[0].outputs
    source = make_engine(model)
    rid = source.add_request(PROMPT, params)
    Collector().step(source, 4)
    broken = source.output_processor.get(rid).sequences[0].request
    source.output_processor.set_error(broken, FailedStep("logits are not finite"))
    inspect(source).scheduler.finish(broken, FinishReason.ERROR)
    source.save_requests(tmp_path / "requests")
    engine = make_engine(model)
    engine.load_requests(tmp_path / "requests")
    output = Collector().step(engine).finished[rid]
    assert type(output.error) is FailedStep and str(output.error) == "logits are not finite"
    assert [one.finish_reason for one in output.outputs] == ["error", "length"]
    assert output.outputs[0].token_ids == want[0].token_ids[:4]
    assert output.outputs[1].token_ids == want[1].token_ids


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("stream", ["delta", "cumulative"])
def test_text_and_streams_go_on_across_the_load_within_a_stop_string(tmp_path, kind, stream):
    tokenizer = getattr(vocabularies, kind)()
    text_model = make_model(vocab_size=tokenizer.vocab_size)
    settings = {"tokenizer": tokenizer, "overlap": True}
    params = {"max_tokens": 30, "temperature": 1.2, "seed": 2, "ignore_eos": True}
    free = make_engine(text_model, **settings).generate("hello", SamplingParams(**params))[0].outputs[0]
    assert len(free.text) > 20
    stop = [free.text[12:18], "never there"]
    deltas = ("0",) if stream == "delta" else ()
    reference = make_engine(text_model, **settings)
    reference.add_request("hello", SamplingParams(**params, stop=stop), stream=stream)
    want = Collector().step(reference, deltas=deltas)
    assert want.ends == {("0", 0): ("stop", stop[0])} and want.text["0", 0] == free.text[: free.text.find(stop[0])]
    num_held = 0
    for steps in range(1, len(want.tokens["0", 0]) + 1):
        source = make_engine(text_model, **settings)
        source.add_request("hello", SamplingParams(**params, stop=stop), stream=stream)
        seen = Collector().step(source, steps, deltas=deltas)
        source.save_requests(tmp_path / "requests", kv=steps % 2 == 0)
        if len(source.output_processor):
            num_held += bool(source.output_processor.requests[0].sequences[0]._stops._held)
        engine = make_engine(text_model, **settings)
        report = engine.load_requests(tmp_path / "requests")
        seen.take(report.finished, deltas=deltas)
        seen.step(engine, deltas=deltas)
        assert (seen.tokens, seen.text, seen.ends) == (want.tokens, want.text, want.ends)
    assert num_held  # some saves fell into the stop string


def test_other_weights_mark_only_the_tokens_drawn_after_the_load(model, tmp_path):
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    source = make_engine(model)
    rid = source.add_request(PROMPT, params)
    Collector().step(source, 4)
    source.save_requests(tmp_path / "requests", kv=True)
    drawn = list(source.output_processor.get(rid).sequences[0].request.tokens)

    same = make_engine(model)
    assert same.load_requests(tmp_path / "requests").with_kv == [rid]
    history = same.output_processor.get(rid).sequences[0].request.history
    Collector().step(same)
    assert history.spans == [VersionSpan(0, 0, 0, 0)]

    other = make_engine(make_model(seed=9))
    report = other.load_requests(tmp_path / "requests")
    assert report.recomputed == {rid: "the weights differ from those it was computed with"}
    request = other.output_processor.get(rid).sequences[0].request
    assert request.tokens == drawn
    Collector().step(other)
    version = other.stats().weight_version
    assert version == 1 and request.history.spans == [VersionSpan(0, 0, 0, 0), VersionSpan(4, 1, 1, 1)]
    with pytest.warns(UserWarning, match="the engine had version 1 before"):  # tokens carry it
        other.set_weight_version(0)


def test_a_changed_weight_is_seen_before_kv_is_used(tmp_path):
    model = make_model()
    source = make_engine(model)
    source.add_request(PROMPT, SamplingParams(max_tokens=10, temperature=0.0))
    Collector().step(source, 4)
    source.save_requests(tmp_path / "requests", kv=True)
    engine = make_engine(model)
    with torch.no_grad():
        model.decoder.layers[1].mlp.linear_fc2.weight.data[3, 5] += 1e-3  # neither version nor pointer tells
    report = engine.load_requests(tmp_path / "requests")
    assert not report.with_kv and engine.stats().weight_version == 1


def test_unseeded_requests_draw_the_same_and_the_seed_counter_goes_on(model, tmp_path):
    params = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)
    want = tokens_of(make_engine(model, seed=5).generate([PROMPT] * 3, params))
    source = make_engine(model, seed=5)
    ids = [source.add_request(PROMPT, params) for _ in range(2)]
    Collector().step(source, 3)
    source.save_requests(tmp_path / "requests")
    engine = make_engine(model, seed=5)
    engine.load_requests(tmp_path / "requests")
    ids.append(engine.add_request(PROMPT, params))
    assert ids == ["0", "1", "2"]
    done = Collector().step(engine)
    assert [done.tokens[rid, 0] for rid in ids] == want


def test_saving_changes_nothing_and_an_output_on_its_way_is_in_the_file(model, uninterrupted, tmp_path):
    engine = make_engine(model, overlap=True)
    add_all(engine)
    seen = Collector()
    found = set()
    while engine.has_unfinished():
        engine.save_requests(tmp_path / "requests", kv=True)  # drains: what ended by that waits for the next step
        loaded = make_engine(model).load_requests(tmp_path / "requests")
        found |= {output.request_id for output in loaded.finished}
        assert sorted([*loaded.loaded, *(o.request_id for o in loaded.finished), *seen.finished]) == sorted(
            ["0", "1", "2", "biased", "group"]
        )
        seen.step(engine, 1)
    assert_same(seen, uninterrupted)
    assert len(found) > 2


def test_ids_that_are_taken_are_refused_by_name(model, tmp_path):
    source = make_engine(model)
    source.add_request(PROMPT, request_id="mine")
    source.save_requests(tmp_path / "requests")
    with pytest.raises(SnapshotError, match="'mine' is in the engine already"):
        source.load_requests(tmp_path / "requests")
    assert source.stats().num_requests == 1

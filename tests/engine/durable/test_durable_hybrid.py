"""Requests of models with recurrent state outlive their process: killed anywhere, or saved there and loaded here."""

from __future__ import annotations

import random
import signal

import durable_child
import pytest
from durable_case import Collector, make_engine
from engines import each_of
from model_kinds import RECURRENT, make_model
from test_durable_kill import Victims, assert_nothing_is_lost, notes

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import SnapshotError

kind = each_of(RECURRENT)


@pytest.fixture(scope="module")
def victims():
    made = Victims()
    yield made
    made.close()


@pytest.fixture(scope="module")
def uninterrupted(model) -> Collector:
    engine = make_engine(model, seed=4)
    add_all(engine)
    return Collector().step(engine)


def add_all(engine) -> None:
    for index in range(durable_child.NUM_REQUESTS):
        engine.add_request(durable_child.prompt_of(index), durable_child.params_of(index))


@pytest.mark.long
def test_a_kill_at_any_moment_loses_nothing(kind, model, uninterrupted, victims, tmp_path):
    assert victims.run(tmp_path / "whole", kind=kind) == 0
    assert_nothing_is_lost(model, tmp_path / "whole", uninterrupted)
    num_calls = int(next(value for name, value in notes(tmp_path / "whole") if name == "calls"))
    for kill_at in sorted(random.Random(1).sample(range(1, num_calls + 1), 5)):
        path = tmp_path / f"at{kill_at}"
        assert victims.run(path, kind=kind, kill_at=kill_at) == -signal.SIGKILL
        assert_nothing_is_lost(model, path, uninterrupted)


@pytest.mark.parametrize("block_size", [16, 8, 32])
def test_what_another_process_saved_goes_on_here_from_its_states(
    kind, model, uninterrupted, victims, tmp_path, block_size
):
    path = tmp_path / "requests"
    assert victims.run(path, kind=kind, save_after=9) == 0
    engine = make_engine(model, block_size_tokens=block_size, prefix="lru")
    report = engine.load_requests(path)
    assert len(report.with_kv) >= 4 and not report.recomputed  # the others had ended there
    done = Collector().step(engine)
    assert set(done.finished) == set(report.loaded)
    for key, tokens in done.tokens.items():
        assert tokens == uninterrupted.tokens[key] and done.ends[key] == uninterrupted.ends[key]
    assert engine.stats().counters["prefill_tokens"] == 0, "something was computed twice"


def test_states_of_another_model_are_not_gone_on_from(kind, model, uninterrupted, tmp_path):
    """Same vocabulary: the requests are computed anew by the model at hand. Another vocabulary: the file is refused."""
    source = make_engine(model, seed=4)
    add_all(source)
    Collector().step(source, 6)
    path = tmp_path / "requests"
    source.save_requests(path, kv=True)
    greedy = {
        state.id: list(state.sequences[0].request.tokens)
        for state in source.output_processor.requests
        if state.params.temperature == 0 and len(state.sequences[0].request.tokens) > len(state.prompt_ids)
    }
    assert greedy
    others = {
        "the weights differ from those it was computed with": make_model(kind, seed=7),
        "the model's state.conv_shape is [256, 4], it was [192, 4]": make_model(kind, mamba_state_dim=32),
        "the model's": make_model("attention"),
    }
    for reason, other in others.items():
        engine = make_engine(other)
        report = engine.load_requests(path)
        assert report.recomputed.keys() >= greedy.keys() and not report.with_kv
        assert all(why.startswith(reason) for why in report.recomputed.values())
        done = Collector().step(engine)
        for name, tokens in greedy.items():
            prompt, limit = durable_child.prompt_of(int(name)), durable_child.params_of(int(name)).max_tokens
            drawn = tokens[len(prompt) :]
            rest = SamplingParams(temperature=0.0, max_tokens=limit - len(drawn), ignore_eos=True)
            assert done.tokens[name, 0] == drawn + make_engine(other).generate(tokens, rest)[0].outputs[0].token_ids
    with pytest.raises(SnapshotError, match="saved with vocab_size 128, this engine's is 160"):
        make_engine(make_model(kind, vocab_size=160)).load_requests(path)

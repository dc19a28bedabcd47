"""suspend and resume of models with recurrent state: whatever goes away and when, the same tokens and the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_kinds import RECURRENT, make_model, prefix_caching
from suspend_case import (
    MODES,
    SITUATIONS,
    Engine,
    Suspender,
    answers,
    decoding,
    logprobs,
    make_engine,
    run,
)

from megatron_infer.errors import TransitionFailed
from megatron_infer.schedule.params import SamplingParams

MET = ("mid prefill chunk", "mid decode", "paused rows", "shared prefixes", "groups of 4")


@pytest.fixture(scope="module", params=RECURRENT)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind) -> torch.nn.Module:
    torch.manual_seed(0)
    return make_model(kind)


def settings_of(kind: str, situation: str) -> tuple[dict[str, Any], int, Any]:
    settings, n, holds = SITUATIONS[situation]
    if situation == "shared prefixes":
        settings = {**settings, **prefix_caching(kind)}
    return settings, n, holds


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("situation", MET)
def test_suspended_equals_uninterrupted(model, kind, situation, overlap):
    if kind == "mamba" and situation == "paused rows":
        pytest.skip("without attention layers nobody lacks a block")
    settings, n, holds = settings_of(kind, situation)
    plain = run(make_engine(model, overlap=overlap, **settings), "sampled", n)
    for mode in MODES:
        suspender = Suspender(holds, mode)
        engine = make_engine(model, overlap=overlap, **settings)
        done = run(engine, "sampled", n, suspender)
        assert suspender.count >= 2, f"{situation} was met {suspender.count} times"
        assert answers(done) == answers(plain), mode
        assert torch.allclose(logprobs(done), logprobs(plain), rtol=0, atol=1e-5), mode
        if mode != "recompute" and not overlap:
            assert torch.equal(logprobs(done), logprobs(plain)), f"{mode}: other bits"
        assert (suspender.copied > 0) == (mode == "offload")


def test_offload_takes_the_states_of_live_rows_and_no_more(model):
    engine = make_engine(model)
    for prompt in ([3, 4, 5], [9] * 40, [7] * 20):
        engine.add_request(prompt)
    for _ in range(3):
        engine.step()
    store, context = engine.parts.runner.store, engine.parts.context
    assert len(context.held_state_slots()) == 3
    copied = 3 * store.state.slot_bytes + len(context.held_blocks()) * store.block_bytes
    suspended = engine.suspend("offload").tags["kv_cache"]
    assert suspended.bytes_copied == copied and store.resident_bytes() == 0
    assert engine.resume().tags["kv_cache"].bytes_copied == copied
    assert store.host_bytes() == 0


def test_states_of_requests_aborted_while_suspended_stay_behind(model):
    engine = make_engine(model)
    names = [engine.add_request([3 + i] * 20) for i in range(3)]
    engine.step()
    engine.suspend("offload")
    engine.abort(names[1])
    store = engine.parts.runner.store
    resumed = engine.resume().tags["kv_cache"]
    blocks = len(engine.parts.context.held_blocks())
    assert resumed.bytes_copied == 2 * store.state.slot_bytes + blocks * store.block_bytes


def test_snapshots_behind_shared_blocks_go_along(kind, model):
    """A request that comes after the resume finds the prefix that a live one holds, and goes on from its state."""
    prompt = [5 + i % 90 for i in range(70)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = make_engine(model).generate([prompt], greedy)[0].outputs[0].token_ids
    engine = make_engine(model, **prefix_caching(kind))
    engine.add_request(prompt, greedy, request_id="holder", stream="final")
    for _ in range(3):
        engine.step()
    assert len(engine.parts.context.held_state_slots()) > 1, "no snapshot is held"
    engine.suspend("offload")
    engine.resume()
    engine.add_request(prompt, greedy, request_id="late", stream="final")
    done = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert done["late"].num_cached_tokens == 64
    assert done["late"].outputs[0].token_ids == done["holder"].outputs[0].token_ids == plain


def test_prefix_of_a_request_that_ended_while_its_memory_was_away_is_not_found(kind, model):
    """LRU books keep the blocks and states of whoever ends; what a resume does not bring back must not be in them."""
    prompt = [5 + i % 90 for i in range(70)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = make_engine(model).generate([prompt], greedy)[0].outputs[0].token_ids
    engine = make_engine(model, **prefix_caching(kind, "lru"))
    gone = engine.add_request(prompt, greedy)
    for _ in range(3):
        engine.step()
    with engine.suspended("offload"):
        engine.abort(gone)
    done = engine.generate([prompt], greedy)[0]
    assert done.outputs[0].token_ids == plain and done.num_cached_tokens == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_failure_at_every_step_of_suspend_and_resume_is_undone_and_a_retry_works(model, mode):
    """The n-th thing a transition does fails, for every n; the answers are those of a calm run."""
    plain = answers(run(make_engine(model), "greedy", 1))
    faults = {"suspend": 0, "resume": 0}

    def disturb(engine: Engine) -> None:
        if engine.num_steps not in (3, 8) or not decoding(engine):
            return
        for command, before in (("suspend", "running"), ("resume", "suspended")):
            call = {"suspend": lambda: engine.suspend(mode), "resume": engine.resume}[command]
            for n in range(100):
                left = n

                def fail(what: str) -> None:
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise MemoryError(f"planted at {what}")

                engine.lifecycle.observers.append(fail)
                try:
                    call()
                    break
                except TransitionFailed:
                    assert engine.state == before
                    assert engine.parts.runner.store.is_released == (before == "suspended" and mode != "persist")
                    faults[command] += 1
                finally:
                    engine.lifecycle.observers.remove(fail)

    assert answers(run(make_engine(model), "greedy", 1, disturb)) == plain
    fewest = 2 if mode == "persist" else 4
    assert faults["suspend"] >= fewest and faults["resume"] >= fewest, faults

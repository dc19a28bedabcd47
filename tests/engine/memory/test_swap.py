"""Evicted requests that wait in host memory: prices are measured, memory comes back, suspends between lose nothing.

With a hybrid model they wait there with their recurrent state. Pure Mamba models never evict: their blocks take no
memory (see test_same_answer, test_suspend).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_kinds import UNALIGNED, buffers, bytes_of, is_native, make_model, prefix_caching

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import TransitionFailed
from megatron_infer.scheduler.policy import CostModel
from megatron_infer.testing.inspect import inspect

NUM_ROWS = 8
PROMPTS = [list(range(i + 4, i + 40)) for i in range(8)]
PARAMS = SamplingParams(temperature=0.9, top_k=30, max_tokens=40, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module", params=["attention", "hybrid"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind) -> torch.nn.Module:
    return make_model(kind, vocab_size=128, max_sequence_length=256)


def make_engine(model: torch.nn.Module, *, blocks: int = 12, swap: int = 64, **settings: Any) -> DynamicInferenceEngine:
    """blocks: of the pool; swap: blocks the host has room for, with the states of all rows on top."""
    block_bytes, slot_bytes = bytes_of(model, 16)
    config = {
        **buffers(model, blocks=blocks, block_size=16, max_requests=NUM_ROWS),
        "swap_buffer_size_gb": (swap * block_bytes + NUM_ROWS * slot_bytes) / 2**30 + 1e-9 if swap else 0,
        "block_size_tokens": 16,
        "max_sequence_length": 128,
        "max_requests": NUM_ROWS,
        "max_tokens": 256,
        "check_invariants": True,
        "seed": 5,
        **settings,
    }
    return DynamicInferenceEngine(model, InferenceConfig(**config))


def answers(engine: DynamicInferenceEngine, disturb: Any = None) -> dict[str, tuple[list[int], list[float]]]:
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, PARAMS, request_id=str(i), stream="final")
    done = {}
    while engine.has_unfinished():
        if disturb is not None:
            disturb(engine)
        for output in engine.step():
            if output.finished:
                sample = output.outputs[0]
                values = [entry[t].logprob for t, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
                done[output.request_id] = (sample.token_ids, values)
    return done


@pytest.fixture(scope="module")
def expected(model: torch.nn.Module) -> dict[str, tuple[list[int], list[float]]]:
    return answers(make_engine(model, blocks=100, swap=0))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
@pytest.mark.parametrize("caching", [False, True], ids=["", "prefix cache"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_swapped_requests_survive_suspends_and_their_memory_comes_back(model, kind, expected, mode, caching, overlap):
    engine = make_engine(model, preemption_mode="swap", overlap=overlap, **(prefix_caching(kind) if caching else {}))
    host = inspect(engine).context.swap
    num_states = host.num_free_states
    assert num_states == (NUM_ROWS if kind == "hybrid" else 0)
    away = {"suspends": 0, "swapped": 0}

    def suspend(engine: DynamicInferenceEngine) -> None:
        waiting = len(inspect(engine).scheduler.preemption.swapped)
        if waiting and away["suspends"] < 5 and engine.num_steps % 7 == 0:
            with engine.suspended(mode):
                store = inspect(engine).store
                held = 0 if kind == "attention" or mode == "recompute" else waiting
                assert host.num_free_states == num_states - held, "each waits with its state"
                assert store.is_released == (mode != "persist")
                assert mode != "recompute" or store.host_bytes() == 0, "recompute frees all, the swap buffer too"
            away["suspends"] += 1
            away["swapped"] += waiting

    got = answers(engine, suspend)
    assert {k: v[0] for k, v in got.items()} == {k: v[0] for k, v in expected.items()}
    for name, (_, values) in got.items():
        bits = expected[name][1]
        assert values == (bits if is_native(engine) else pytest.approx(bits, rel=0, abs=UNALIGNED)), name
    counters = engine.stats().counters
    assert away["suspends"] >= 2 and counters["swapped_out"] >= 2
    assert (counters["swapped_in"] > 0) or mode == "recompute"
    assert (host.num_free, host.num_free_states) == (host.num_slots, num_states)
    engine.drain()
    assert inspect(engine).store.host_bytes() == 0, "host memory of requests that are gone is still held"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("demand", [2, 4, 8])
def test_everyone_finishes_with_the_same_tokens_however_small_the_pool(model, demand, mode):
    """Each request ends with 5 blocks; the pool has 13."""
    count, blocks = 13 * demand // 5 + 1, 13
    prompts = [list(range(i % 50 + 4, i % 50 + 40)) for i in range(count)]

    def run(engine: DynamicInferenceEngine) -> tuple[list[Any], dict[str, int]]:
        return engine.generate(prompts, PARAMS), engine.stats().counters

    swap = {} if mode == "recompute" else {"preemption_mode": mode}
    tight = make_engine(model, blocks=blocks, swap=0 if mode == "recompute" else 64, paused_buffer_size_gb=0, **swap)
    want, calm = run(make_engine(model, blocks=8 * 5 + 1, swap=0))
    got, counters = run(tight)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]
    assert calm["evicted"] == 0 < counters["evicted"] == sum(o.metrics.num_evictions for o in got)
    assert counters["finished"] == count and counters["paused"] - counters["resumed"] <= counters["evicted"]
    assert counters["swapped_in"] == counters["swapped_out"] <= counters["evicted"]
    assert (counters["swapped_out"] > 0) or mode != "swap"
    assert (counters["recomputed_tokens"] > 0) == (counters["evicted"] > counters["swapped_out"])
    assert tight.stats().num_free_blocks == blocks


def test_prices_are_what_was_measured(model, kind):
    engine = make_engine(model)
    first = inspect(engine).scheduler.preemption.costs
    assert first.copy_s_per_block > 0 and first.copy_s_per_block != CostModel().copy_s_per_block
    assert (first.copy_s_per_state > 0) == (kind == "hybrid")
    assert first.prefill_s_per_token == CostModel().prefill_s_per_token, "no step has told yet"
    answers(engine)
    costs = inspect(engine).scheduler.preemption.costs
    assert first.copy_s_per_state != costs.copy_s_per_state or kind == "attention", "it follows what moves take"
    assert costs.prefill_s_per_token != first.prefill_s_per_token and costs.prefill_s_per_token > 0
    assert inspect(make_engine(model, swap=0)).cost_meter is None


@pytest.mark.parametrize(
    ("kind", "prefill", "state", "swaps"),
    [
        ("attention", 10.0, 0.0, True),
        ("attention", 0.0, 0.0, False),
        ("hybrid", 10.0, 1.0, True),
        ("hybrid", 0.01, 1e-3, True),
        ("hybrid", 0.01, 1.0, False),  # as above, but for the state
    ],
    indirect=["kind"],
)
def test_auto_takes_what_is_cheaper_by_the_prices(model, expected, prefill, state, swaps, monkeypatch):
    engine = make_engine(model)
    monkeypatch.setattr(inspect(engine).cost_meter, "after_step", lambda plan, seconds, step: None)
    costs = CostModel(prefill_s_per_token=prefill, copy_s_per_block=1e-3, copy_s_per_state=state)
    inspect(engine).scheduler.set_costs(costs)
    got = answers(engine)
    counters = engine.stats().counters
    assert counters["evicted"] > 2 and (counters["swapped_out"] > 0) == swaps
    assert (counters["recomputed_tokens"] == 0) == swaps
    assert {k: v[0] for k, v in got.items()} == {k: v[0] for k, v in expected.items()}


def test_a_failed_step_recomputes_what_may_not_have_arrived(model, expected):
    engine = make_engine(model, preemption_mode="swap")
    runner, failures = inspect(engine).runner, 0
    forward = runner.forward

    def interrupted(plan: Any, writes: Any) -> Any:
        nonlocal failures
        if plan.copies_before and failures < 3:
            failures += 1
            raise KeyboardInterrupt  # before a single copy was made
        return forward(plan, writes)

    runner.forward = interrupted
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, PARAMS, request_id=str(i), stream="final")
    done = {}
    while engine.has_unfinished():
        try:
            done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        except KeyboardInterrupt:
            continue
    assert failures == 3 and done == {k: v[0] for k, v in expected.items()}


def until_swapped(engine: DynamicInferenceEngine) -> dict[str, Any]:
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, PARAMS, request_id=str(i), stream="final")
    done = {}
    while not inspect(engine).scheduler.preemption.swapped:
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    return done


@pytest.mark.parametrize("before", ["", "offload"])
def test_a_suspend_that_drops_the_cache_drops_what_was_swapped_out_with_it(model, before):
    engine = make_engine(model, preemption_mode="swap")
    until_swapped(engine)
    if before:
        engine.suspend(before)
    swapped = inspect(engine).store.host_bytes()
    report = engine.suspend("recompute")
    assert swapped > 0 == inspect(engine).store.host_bytes() == report.tags["kv_cache"].bytes_resident
    engine.resume()


def test_moves_that_fail_on_the_way_to_a_standstill_are_not_taken_as_done(model, expected, monkeypatch):
    engine = make_engine(model, preemption_mode="swap")
    done = until_swapped(engine)
    scheduler, store = inspect(engine).scheduler, inspect(engine).store
    victim = scheduler.running_set.decoding[-1]
    scheduler.preemption.evict(victim)  # between two steps, as a plan for which nothing was left to run does
    run_copies = store.run_copies

    def full(copies: Any) -> None:
        if copies:
            raise MemoryError("planted")

    monkeypatch.setattr(store, "run_copies", full)
    with pytest.raises(TransitionFailed, match="planted"):
        engine.suspend("offload")
    monkeypatch.setattr(store, "run_copies", run_copies)
    while engine.has_unfinished():
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    assert done == {k: v[0] for k, v in expected.items()}

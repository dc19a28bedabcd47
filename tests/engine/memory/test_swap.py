"""Evicted requests that wait in host memory: prices are measured, memory comes back, suspends between lose nothing.

With a hybrid model they wait there with their recurrent state. Pure Mamba models never evict: their blocks take no
memory (see test_same_answer, test_suspend).
"""

from __future__ import annotations

from typing import Any

import engines
import pytest
import torch
from engines import each_of, logprobs_of, submit, tokens_of
from model_kinds import UNALIGNED, bytes_of, is_native

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import TransitionFailed
from megatron_infer.scheduler.policy import CostModel
from megatron_infer.testing.inspect import inspect

NUM_ROWS = 8
PROMPTS = [list(range(i + 4, i + 40)) for i in range(8)]
PARAMS = SamplingParams(temperature=0.9, top_k=30, max_tokens=40, ignore_eos=True, logprobs=0)
kind = each_of(["attention", "hybrid"])


def make_engine(model: torch.nn.Module, *, blocks: int = 12, swap: int = 64, **settings: Any) -> DynamicInferenceEngine:
    """blocks: of the pool; swap: blocks the host has room for, with the states of all rows on top."""
    block_bytes, slot_bytes = bytes_of(model, 16)
    room = (swap * block_bytes + NUM_ROWS * slot_bytes) / 2**30 + 1e-9 if swap else 0
    sizes = {"max_sequence_length": 128, "max_requests": NUM_ROWS, "max_tokens": 256, "swap_buffer_size_gb": room}
    return engines.make_engine(model, pool_blocks=blocks, **sizes | {"seed": 5} | settings)


def answers(engine: DynamicInferenceEngine, disturb: Any = None) -> dict[str, tuple[list[int], list[float]]]:
    outputs = engines.run(engine, [(prompt, PARAMS) for prompt in PROMPTS], disturb)
    return {output.request_id: (output.outputs[0].token_ids, logprobs_of(output.outputs[0])) for output in outputs}


def check_same(engine: DynamicInferenceEngine, got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {k: v[0] for k, v in got.items()} == {k: v[0] for k, v in expected.items()}
    for name, (_, values) in got.items():
        bits = expected[name][1]
        assert values == (bits if is_native(engine) else pytest.approx(bits, rel=0, abs=UNALIGNED)), name


@pytest.fixture(scope="module")
def expected(model: torch.nn.Module) -> dict[str, tuple[list[int], list[float]]]:
    return answers(make_engine(model, blocks=100, swap=0))


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
@pytest.mark.parametrize("caching", [False, True], ids=["", "prefix cache"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_swapped_requests_survive_suspends_and_their_memory_comes_back(model, kind, expected, mode, caching, overlap):
    engine = make_engine(model, preemption_mode="swap", overlap=overlap, prefix="lru" if caching else None)
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

    check_same(engine, answers(engine, suspend), expected)
    counters = engine.stats().counters
    assert away["suspends"] >= 2 and counters["swapped_out"] >= 2
    assert (counters["swapped_in"] > 0) or mode == "recompute"
    assert (host.num_free, host.num_free_states) == (host.num_slots, num_states)
    engine.drain()
    assert inspect(engine).store.host_bytes() == 0, "host memory of requests that are gone is still held"


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
    assert tokens_of(got) == tokens_of(want)
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
    assert first.copy_s_per_state == inspect(engine).store.copy_s_per_state
    assert first.prefill_s_per_token == CostModel().prefill_s_per_token, "no step has told yet"
    answers(engine)
    costs = inspect(engine).scheduler.preemption.costs
    assert first.copy_s_per_state != costs.copy_s_per_state or kind == "attention", "it follows what moves take"
    assert costs.prefill_s_per_token != first.prefill_s_per_token and costs.prefill_s_per_token > 0
    without = make_engine(model, swap=0)
    without.generate(PROMPTS, PARAMS)
    costs = inspect(without).scheduler.preemption.costs
    assert costs.prefill_s_per_token != first.prefill_s_per_token, "a coordinator compares it with a move"


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

    def interrupted(plan: Any, *more: Any) -> Any:
        nonlocal failures
        if plan.copies_before and failures < 3:
            failures += 1
            raise KeyboardInterrupt  # before a single copy was made
        return forward(plan, *more)

    runner.forward = interrupted
    submit(engine, [(prompt, PARAMS) for prompt in PROMPTS])
    done = {}
    while engine.has_unfinished():
        try:
            done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        except KeyboardInterrupt:
            continue
    assert failures == 3 and done == {k: v[0] for k, v in expected.items()}


def until_swapped(engine: DynamicInferenceEngine) -> dict[str, Any]:
    submit(engine, [(prompt, PARAMS) for prompt in PROMPTS])
    done = {}
    while not inspect(engine).scheduler.preemption.swapped:
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    return done


@pytest.mark.parametrize("kind", ["hybrid"], indirect=True)
def test_host_memory_for_one_state_swaps_one_and_computes_the_others(model, expected):
    block_bytes, slot_bytes = bytes_of(model, 16)
    room = (slot_bytes + 5 * block_bytes) / 2**30 + 1e-9
    engine = make_engine(model, preemption_mode="swap", swap_buffer_size_gb=room)
    check_same(engine, answers(engine), expected)
    counters = engine.stats().counters
    assert 0 < counters["swapped_out"] < counters["evicted"] and counters["recomputed_tokens"] > 0
    engine.drain()
    assert inspect(engine).store.host_bytes() == 0


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
    victim = scheduler.admitted_requests.decoding[-1]
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

"""Features that meet in the recurrent state: groups fork it, prefixes load it, it waits on the host, steps fail.

Blocks can be written twice without harm, a state that has gone a step too far cannot be taken back; and what lies in a
slot or block that nobody has is NaN here, so that whoever reads it shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import engines
import pytest
import torch
from engines import each_of, logprobs_of, tokens_of
from model_kinds import RECURRENT, UNALIGNED, bytes_of, is_native, poison

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.testing.inspect import inspect

pytestmark = pytest.mark.filterwarnings('ignore:preemption_mode="swap" has no effect')
"""Pure Mamba models are in the tables of those who swap, too."""
VOCAB = 128
Answers = dict[str, list[tuple[list[int], list[float]]]]
SWAP = {"preemption_mode": "swap", "swap_buffer_size_gb": 0.02}
WAYS: dict[str, dict[str, Any]] = {
    "prefix": {"prefix": "lru"},
    "prefix, evicted": {"prefix": "lru", "pool_blocks": 18},
    "prefix, swapped": {"prefix": "lru", "pool_blocks": 18, **SWAP},
    "prefix, chunked, few rows": {
        "prefix": "ref_zero",
        "max_requests": 5,
        "enable_chunked_prefill": True,
        "max_tokens": 24,
    },
    "two states": {"prefix": "lru", "states": 2, "max_requests": 4},
}
DISTURBED = [("", False), ("", True), ("offload", True), ("recompute", False)]
"""How the engine is suspended now and then, and whether steps overlap."""
kind = each_of(RECURRENT)


def make_engine(model: torch.nn.Module, *, states: int | None = None, **settings: Any) -> DynamicInferenceEngine:
    """states: how many the prefix cache may keep."""
    if states is not None:
        settings["prefix_caching_mamba_gb"] = (states + 0.5) * bytes_of(model, 16)[1] / 2**30
    engine = engines.make_engine(model, **{"max_requests": 10} | settings)
    assert states in (None, engine.sizes.num_cached_states)
    return engine


def workload() -> list[tuple[list[int], SamplingParams]]:
    """Groups of 3 and single requests, in turn; stems end at a block's end and within one."""
    rng = random.Random(11)
    stem = [rng.randrange(4, VOCAB) for _ in range(48)]
    work = []
    for i, shared in enumerate([48, 40, 48, 0, 33, 48, 40]):
        prompt = stem[:shared] + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(
            n=3 if i % 2 == 0 else 1, temperature=0.9, top_k=40, seed=i, max_tokens=24, ignore_eos=True, logprobs=0
        )
        work.append((prompt, params))
    return work


def answer(output: RequestOutput) -> list[tuple[list[int], list[float]]]:
    return [(s.token_ids, logprobs_of(s)) for s in output.outputs]


def finish(engine: DynamicInferenceEngine, disturb: Callable[[], None] = lambda: None) -> dict[str, RequestOutput]:
    return engines.finish(engine, lambda engine: (disturb(), poison(engine)))


def run(engine: DynamicInferenceEngine, disturb: Callable[[], None] = lambda: None) -> Answers:
    """Two rounds of the workload, the second of which finds prefixes of the first."""
    done = {}
    for number in range(2):
        for i, (prompt, params) in enumerate(workload()):
            engine.add_request(prompt, params, request_id=f"{number}.{i}", stream="final")
        done |= finish(engine, disturb)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks, "a block leaked"
    assert inspect(engine).context.num_free_rows == engine.sizes.max_requests, "a row leaked"
    return {name: answer(output) for name, output in done.items()}


def check_same(engine: DynamicInferenceEngine, got: Answers, wanted: Answers) -> None:
    assert got.keys() == wanted.keys()
    for name, samples in got.items():
        for (tokens, values), (other, bits) in zip(samples, wanted[name], strict=True):
            assert tokens == other, name
            assert values == (bits if is_native(engine) else pytest.approx(bits, rel=0, abs=UNALIGNED)), name


@pytest.fixture(scope="module")
def expected(model, kind) -> Answers:
    """One request after the other, nothing switched on."""
    engine = make_engine(model)
    answers = {str(i): answer(engine.generate([p], q)[0]) for i, (p, q) in enumerate(workload())}
    return {f"{number}.{i}": answers[i] for number in range(2) for i in answers}


@pytest.mark.parametrize(("mode", "overlap"), DISTURBED, ids=["", "overlap", "offload, overlap", "recompute"])
@pytest.mark.parametrize("way", WAYS)
def test_groups_and_prefixes_answer_the_same(model, kind, expected, way, mode, overlap):
    engine = make_engine(model, overlap=overlap, **WAYS[way])

    def suspend() -> None:
        if mode and engine.num_steps in (4, 12, 20, 45, 55):
            engine.suspend(mode)
            engine.resume()

    check_same(engine, run(engine, suspend), expected)
    counters = engine.stats().counters
    assert counters["forked"] > 0 and counters["prefix_hits"] > 0 and counters["states_loaded"] > 0
    tight = "pool_blocks" in WAYS[way] and kind != "mamba"  # whose blocks take no memory
    assert (counters["evicted"] > 0) or not tight, "the pool was not tight enough to test"
    assert (counters["swapped_in"] > 0) == (tight and "preemption_mode" in WAYS[way])


@pytest.mark.parametrize("where", ["before it", "behind its forward", "behind its draw"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_failed_step_leaves_no_state_a_token_too_far(model, kind, expected, overlap, where, monkeypatch):
    engine = make_engine(model, overlap=overlap, prefix="lru", enable_chunked_prefill=True, max_tokens=40)
    runner, failures, steps = inspect(engine).runner, 0, 0
    forward, sample = runner.forward, runner.sample

    def fails() -> bool:
        nonlocal failures
        failures += steps in (3, 9, 10, 21, 40)
        return steps in (3, 9, 10, 21, 40)

    def failing_forward(*work: Any) -> Any:
        nonlocal steps
        steps += 1
        if where == "before it" and fails():
            raise KeyboardInterrupt
        flight = forward(*work)
        if where == "behind its forward" and fails():
            raise KeyboardInterrupt
        return flight

    def failing_sample(*work: Any) -> None:
        sample(*work)
        if where == "behind its draw" and fails():
            raise KeyboardInterrupt

    step = engine.step

    def patient_step() -> list[RequestOutput]:
        try:
            return step()
        except KeyboardInterrupt:
            return []

    monkeypatch.setattr(runner, "forward", failing_forward)
    monkeypatch.setattr(runner, "sample", failing_sample)
    monkeypatch.setattr(engine, "step", patient_step)
    check_same(engine, run(engine), expected)
    assert failures == 5


PROMPT = [5 + i % 90 for i in range(70)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    ("mode", "held", "hit"), [("persist", False, 64), ("offload", False, 0), ("offload", True, 64)]
)
def test_states_behind_free_blocks_go_with_an_offload_and_are_not_hit(model, kind, mode, held, hit):
    plain = make_engine(model).generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    engine = make_engine(model, prefix="lru")
    engine.add_request(PROMPT, GREEDY, request_id="first", stream="final")
    if not held:
        finish(engine)
    else:
        engine.step()
    slots = inspect(engine).context.states.slots
    assert slots.num_cached > 0
    kept = slots.num_cached
    engine.suspend(mode)
    assert slots.num_cached == (0 if mode == "offload" and not held else kept)
    engine.resume()
    engine.add_request(PROMPT, GREEDY, request_id="late", stream="final")
    done = finish(engine)
    assert done["late"].num_cached_tokens == hit
    assert all(output.outputs[0].token_ids == plain for output in done.values())
    assert engine.stats().counters["states_loaded"] == (hit > 0)


def test_a_prefix_is_hit_as_far_as_a_state_was_kept_and_no_further(model, kind):
    """Blocks alone are of no use; where two prompts part the next one finds a state, at the latest."""
    engine = make_engine(model, prefix="lru")
    others = [PROMPT[:40] + [100 + i] * 20 for i in range(3)]
    plain = [make_engine(model).generate([other], GREEDY)[0].outputs[0].token_ids for other in others]
    engine.generate([PROMPT], GREEDY)
    outputs = [engine.generate([other], GREEDY)[0] for other in others]
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 32]
    assert tokens_of(outputs) == plain

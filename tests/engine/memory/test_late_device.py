"""Whole runs on a GPU's code paths over a device that is far behind: the tokens are those of a plain run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import engines
import pytest
import torch
from late_device import LateDevice, LateGpu, LateStream
from model_kinds import make_model, prefix_caching
from static_kernels import STATIC, StaticScan

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import RankFailure
from megatron_infer.memory.copy_pipeline import CopyPipeline
from megatron_infer.memory.device import HostRead
from megatron_infer.memory.layerwise_restore import LayerwiseRestore
from megatron_infer.memory.store import CacheStore
from megatron_infer.runner.batch import BatchBuilder
from megatron_infer.runner.cuda_graphs.captured_draw import CapturedDraw, RowMirror
from megatron_infer.runner.cuda_graphs.graph_pool import CudaRecorder, GraphPool
from megatron_infer.runner.cuda_graphs.padded_step import PaddedStep
from megatron_infer.runner.model_runner import ModelRunner
from megatron_infer.runner.row_tensors import RowTensors
from megatron_infer.runner.sampling.sampler import Sampler
from megatron_infer.runner.step_buffer import StepBuffer
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_hybrid

VOCAB = 128
SIZES: dict[str, Any] = {
    "max_sequence_length": 64,
    "max_requests": 6,
    "max_tokens": 48,
    "enable_chunked_prefill": True,
    "overlap": True,
    "num_cuda_graphs": 0,
}
GRAPHS: dict[str, Any] = {
    "num_cuda_graphs": -1,
    "cuda_graph_max_tokens": 24,
    "use_cuda_graphs_for_non_decode_steps": True,
    "cuda_graph_capture": "first_use",
}
SWAP: dict[str, Any] = {"preemption_mode": "swap", "swap_buffer_size_gb": 0.01}
KINDS = ("attention", "mamba", "hybrid")


def make_engine(model: torch.nn.Module, **settings: Any) -> DynamicInferenceEngine:
    return engines.make_engine(model, **SIZES | settings)


@pytest.fixture(autouse=True)
def static_kernels(monkeypatch):
    monkeypatch.setenv("MEGATRON_INFER_BACKEND", STATIC)


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    made = {kind: make_model(kind, vocab_size=VOCAB, max_sequence_length=64) for kind in ("attention", "mamba")}
    return made | {"hybrid": tiny_hybrid("M*M*", vocab_size=VOCAB, max_sequence_length=64, init_method_std=0.2)}


@pytest.fixture(scope="module")
def expected(models) -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_INFER_BACKEND", STATIC)
        return {kind: answers(make_engine(models[kind], overlap=False)) for kind in KINDS}


def work(kind: str = "attention") -> list[tuple[list[int], SamplingParams]]:
    """Greedy, drawn and filtered requests, siblings, and some that only the host can draw for; few of a slow kind."""
    rng, made = random.Random(3), []
    stem = [rng.randrange(4, VOCAB) for _ in range(20)]
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 1, "n": 2},
        {"temperature": 0.8, "seed": 2, "top_k": 12, "logprobs": 1},
        {"temperature": 1.1, "seed": 3, "top_p": 0.8},
        {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.3},
    ]
    for i in range(7 if kind == "attention" else 3):
        prompt = stem[: rng.choice([0, 16, 20])] + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 18))]
        made.append((prompt, SamplingParams(max_tokens=rng.randint(6, 24), ignore_eos=True, **ways[i % len(ways)])))
    return made


def answers(
    engine: DynamicInferenceEngine, *, between: Callable[[DynamicInferenceEngine, int], object] = lambda *_: None
) -> dict[str, list[list[int]]]:
    """Tokens by request; between(engine, step) after each step. An interrupt of a step is answered with the next."""
    kind = "attention" if not inspect(engine).adopted.ssm_specs else "mamba"
    for i, (prompt, params) in enumerate(work(kind)):
        engine.add_request(prompt, params, request_id=str(i))
    found: dict[str, list[list[int]]] = {}
    step = 0
    while engine.has_unfinished():
        assert step < 1000, "it goes on for ever"
        step += 1
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            continue
        for output in outputs:
            if output.finished:
                found[output.request_id] = [one.token_ids for one in output.outputs]
        between(engine, step)
    return found


def late_answers(monkeypatch, model, *, between=lambda *_: None, keeps_up: float = 0.0, **settings: Any):
    gpu = LateGpu(monkeypatch, keeps_up=keeps_up)
    engine = make_engine(model, **settings)
    with gpu.on():
        found = answers(engine, between=between)
    assert gpu.furthest > 200, "the device was never far behind"
    if "num_cuda_graphs" in settings:
        pool = inspect(engine).runner.graphs.pool
        assert gpu.counts["replays"] == pool.counts.replays > 10 and not pool.refused
    return engine, found


def suspends(*modes: str) -> Callable[[DynamicInferenceEngine, int], None]:
    """Every five steps."""

    def between(engine: DynamicInferenceEngine, step: int) -> None:
        if step % 5 == 0:
            engine.suspend(modes[step // 5 % len(modes)])
            engine.resume()

    return between


def wakes(engine: DynamicInferenceEngine, step: int) -> None:
    """Suspends one on the heels of another, and what else comes before a restore's copies are done."""
    if step % 5:
        return
    for _ in range(step // 5 % 3):
        engine.suspend("offload")
        engine.resume()
    if step == 5 and "3" in engine.output_processor:
        aborts(engine, 4)


def aborts(engine: DynamicInferenceEngine, step: int) -> None:
    if step == 4:
        engine.abort("3")
        engine.add_request(*work()[3], request_id="3")


# name -> (kind, settings, between the steps)
RUNS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "graphs": ("attention", GRAPHS, aborts),
    "swap": ("attention", {**SWAP, **prefix_caching("attention"), "pool_blocks": 6}, aborts),
    "graphs and swap": ("attention", {**GRAPHS, **SWAP, "pool_blocks": 6}, suspends("offload")),
    "suspends": ("attention", GRAPHS, suspends("recompute", "offload", "persist")),
    "static pointers": (
        "attention",
        {**GRAPHS, "static_kv_memory_pointers": True},
        suspends("recompute", "offload", "persist"),
    ),
    "layers": ("attention", {**SWAP, **prefix_caching("attention"), "pool_blocks": 7}, wakes),
    "steps in flight": ("attention", {**GRAPHS, "max_steps_in_flight": 4}, suspends("offload")),
    "layers of a hybrid": ("hybrid", {}, wakes),
    "states": ("mamba", {**GRAPHS, **prefix_caching("mamba")}, suspends("offload")),
}


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.long] * (one != "graphs")) for one in RUNS])
def test_a_device_far_behind_draws_the_same_tokens(name, models, expected, monkeypatch):
    kind, settings, between = RUNS[name]
    keeps_up = 0.02 if name == "swap" else 0.0
    engine, found = late_answers(monkeypatch, models[kind], between=between, keeps_up=keeps_up, **settings)
    assert found == expected[kind]
    if "preemption_mode" in settings:
        assert engine.stats().counters["swapped_in"]


# ---------------------------------------------------------------------- what stops in the middle


SEAMS = (
    *((BatchBuilder, name) for name in ("build", "derive")),
    *((RowTensors, name) for name in ("put_writes", "apply_writes", "admit")),
    *((StepBuffer, name) for name in ("upload", "advance_mirror")),
    *((GraphPool, name) for name in ("ready", "launch")),
    *((PaddedStep, name) for name in ("prepare", "run")),
    *((CacheStore, name) for name in ("run_copies", "_copy_blocks")),
    *((CopyPipeline, name) for name in ("offload", "reload")),
    *((ModelRunner, name) for name in ("_set_rows", "run_layers", "finish", "sample")),
    *((LateDevice, name) for name in ("upload", "begin_read")),
    (RowMirror, "refresh"),
    (Sampler, "sample"),
    (CapturedDraw, "output"),
    (HostRead, "wait"),
)


@pytest.mark.long
def test_interrupts_anywhere_in_a_step_change_no_token(models, expected, monkeypatch):
    """Ctrl-C before and after whatever a step does on the device, one on the heels of another now and then."""
    rng, gpu = random.Random(3), LateGpu(monkeypatch)
    engine = make_engine(models["attention"], **GRAPHS, **SWAP, **prefix_caching("attention"), pool_blocks=6)
    stopped: list[str] = []

    def maybe(where: str) -> None:
        if gpu.captured is None and len(stopped) < 12 and rng.random() < 0.01:
            stopped.append(where)
            raise KeyboardInterrupt(where)

    def seam(function: Any, name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            maybe(f"before {name}")
            result = function(*args, **kwargs)
            maybe(f"after {name}")
            return result

        return run

    for owner, name in SEAMS:
        monkeypatch.setattr(owner, name, seam(getattr(owner, name), name))
    with gpu.on():
        assert answers(engine) == expected["attention"], stopped
    assert len(stopped) == 12


def test_interrupts_between_layers_that_are_on_their_way_change_no_token(models, expected, monkeypatch):
    wait_for_layer, calls = LayerwiseRestore.wait_for_layer, [0]

    def stopped(self, layer):
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise KeyboardInterrupt
        wait_for_layer(self, layer)
        if calls[0] % 5 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(LayerwiseRestore, "wait_for_layer", stopped)
    _, found = late_answers(monkeypatch, models["attention"], between=wakes)
    assert found == expected["attention"] and calls[0] > 9


def test_an_interrupt_of_the_wait_behind_an_interrupt_leaves_the_engine_whole(models, expected, monkeypatch):
    engine = make_engine(models["attention"])
    launches, waits = [], []
    sample, wait = ModelRunner.sample, HostRead.wait

    def sampled(self, *args):
        launches.append(1)
        if len(launches) == 6:
            raise KeyboardInterrupt
        return sample(self, *args)

    def waited(self):
        if len(launches) == 6 and not waits:
            waits.append(1)
            raise KeyboardInterrupt
        return wait(self)

    monkeypatch.setattr(ModelRunner, "sample", sampled)
    monkeypatch.setattr(HostRead, "wait", waited)
    assert answers(engine) == expected["attention"] and waits


@pytest.mark.long
def test_a_wait_for_the_device_ends_when_another_rank_is_gone_and_costs_no_token(models, expected, monkeypatch):
    gpu, looks = LateGpu(monkeypatch, keeps_up=0.02), [0]
    engine = make_engine(models["attention"], **GRAPHS)
    device = engine.device

    def look() -> None:
        looks[0] += 1

    device.on_wait = look
    with gpu.on():
        assert answers(engine) == expected["attention"] and looks[0]
        read = device.begin_read(torch.zeros(1) + 1)
        looks[0] = 0

        def look_and_miss() -> None:
            looks[0] += 1
            if looks[0] == 3:
                raise RankFailure(1, "decode of step 4", "its process has ended")

        device.on_wait = look_and_miss
        monkeypatch.setattr("late_device.LateEvent.query", lambda self: False)
        monkeypatch.setattr("late_device.LateEvent.synchronize", lambda self: pytest.fail("it waits for ever"))
        with pytest.raises(RankFailure):
            read.wait()


@pytest.mark.long
@pytest.mark.parametrize("ordered", [True, False], ids=["", "not ordered"])
def test_a_warm_up_that_raises_is_over_before_the_step_it_was_for(ordered, models, expected, monkeypatch):
    """Its calls are enqueued beside the step's: late, they would find the step's rows in the mirror."""
    gpu, run, calls = LateGpu(monkeypatch, keeps_up=0.03), StaticScan.run, [0]
    engine = make_engine(models["mamba"], **GRAPHS)

    def raising(self, *args):
        if gpu.stream:
            calls[0] += 1
            if calls[0] % 5 == 0:
                raise RuntimeError("no such kernel")
        return run(self, *args)

    monkeypatch.setattr(StaticScan, "run", raising)
    if not ordered:
        wait_stream, main = LateStream.wait_stream, 0
        monkeypatch.setattr(
            LateStream,
            "wait_stream",
            lambda self, other: wait_stream(self, other) if self.number != main else None,
        )
    try:
        with gpu.on():
            is_right = answers(engine) == expected["mamba"]
    except IndexError:  # garbage is no index
        is_right = False
    assert is_right is ordered
    assert set(inspect(engine).runner.graphs.pool.refused.values()) == {"no such kernel"}
    assert isinstance(inspect(engine).runner.graphs.pool.recorder, CudaRecorder)

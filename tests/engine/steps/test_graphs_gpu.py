"""What only a GPU shows of CUDA graphs: captures of the real thing, bit for bit, and the memory that they take."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engines import tokens_of
from model_kinds import make_model

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.runner.cuda_graphs.graph_pool import GRAPHS_VARIABLE, GraphPool
from megatron_infer.testing.eager_recorder import EAGER
from megatron_infer.testing.inspect import inspect

pytestmark = pytest.mark.gpu
VOCAB = 128
BASE: dict[str, Any] = {
    "buffer_size_gb": 0.25,
    "block_size_tokens": 16,
    "max_sequence_length": 160,
    "max_requests": 16,
    "max_tokens": 256,
    "enable_chunked_prefill": True,
    "check_invariants": True,
    "num_cuda_graphs": 0,
    "use_cuda_graphs_for_non_decode_steps": True,
    "overlap": False,
}


@pytest.fixture(scope="module", params=["attention", "hybrid"])
def model(request) -> torch.nn.Module:
    return make_model(request.param, vocab_size=VOCAB, max_sequence_length=160).to("cuda")


def make_engine(model, **settings: Any) -> DynamicInferenceEngine:
    return DynamicInferenceEngine(model, InferenceConfig(**{**BASE, **settings}), device="cuda")


def pool_of(engine: DynamicInferenceEngine) -> GraphPool:
    assert inspect(engine).runner.graphs is not None, engine.kernels.table()
    return inspect(engine).runner.graphs.pool


def work() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(3)
    prompts = [[rng.randrange(4, VOCAB) for _ in range(rng.randint(2, 90))] for _ in range(24)]
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 1}, {"top_k": 9, "seed": 2}]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **ways[i % 3]) for i in range(len(prompts))]
    return prompts, params


def answers(engine: DynamicInferenceEngine) -> list[list[int]]:
    return tokens_of(engine.generate(*work()))


@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"cuda_graph_all_prefills": True}])
def test_tokens_are_those_of_the_padded_step_run_eagerly_and_of_the_exact_one(model, monkeypatch, settings):
    plain = {name: value for name, value in settings.items() if name != "cuda_graph_all_prefills"}
    exact = answers(make_engine(model, **plain))
    engine = make_engine(model, num_cuda_graphs=-1, **settings)
    replayed, pool = answers(engine), pool_of(engine)
    assert pool.counts.replays > 20 and pool.counts.uncaptured == 0 and not pool.refused, pool.refused
    monkeypatch.setenv(GRAPHS_VARIABLE, EAGER)
    assert replayed == answers(make_engine(model, num_cuda_graphs=-1, **settings)) == exact


def test_a_replay_has_the_bits_of_the_same_step_run_eagerly(model):
    engine = make_engine(model, num_cuda_graphs=-1)
    runner, graphs = inspect(engine).runner, inspect(engine).runner.graphs
    launch, compared = graphs.launch, []

    def both(shape, batch, **named):
        store = runner.store
        kept = [store.kv_cache]
        if store.states is not None:
            kept += [store.states.conv_SLCW, store.states.ssm_SLHPN]
        before = [tensor.clone() for tensor in kept]
        graphs._step.refresh()
        graphs._step.run(shape)
        eager = graphs._step.out.logits_SV[: batch.num_sampled].clone()
        for tensor, was in zip(kept, before, strict=True):
            tensor.copy_(was)
        left = launch(shape, batch, **named)
        compared.append(bool(torch.equal(graphs._step.out.logits_SV[: batch.num_sampled], eager)))
        return left

    graphs.launch = both
    answers(engine)
    assert len(compared) > 20 and all(compared)


def test_a_capture_leaves_what_lives_alone_and_its_memory_is_measured_and_given_back(model):
    engine = make_engine(model, num_cuda_graphs=8)
    expected, pool, store = answers(engine), pool_of(engine), inspect(engine).store
    freed = engine.suspend(tags=["graphs"]).tags["graphs"].bytes_freed
    assert freed > 0 == pool.num_bytes
    engine.resume()
    dummy = store.layout.dummy_block
    before = store.kv_cache[:, :, :dummy].clone()
    with torch.inference_mode():
        for shape in pool.index.shapes:
            pool.ready(shape)
    assert set(pool.captured) == set(pool.index.shapes), pool.refused
    assert torch.equal(store.kv_cache[:, :, :dummy], before)
    assert answers(engine) == expected


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_graphs_survive_persist_and_are_captured_again_where_the_cache_moved(model, mode):
    engine = make_engine(model, num_cuda_graphs=-1)
    expected, pool = answers(engine), pool_of(engine)
    captures = pool.counts.captures
    engine.suspend(mode=mode)
    engine.resume()
    assert answers(engine) == expected
    assert (pool.counts.captures == captures) == (mode == "persist")


def test_a_replay_sees_weights_that_were_updated_in_place(model):
    engine = make_engine(model, num_cuda_graphs=-1)
    first, pool = answers(engine), pool_of(engine)
    captures = pool.counts.captures
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    second = answers(engine)
    assert second == answers(make_engine(model)) != first and pool.counts.captures == captures


def test_no_memory_left_means_no_graph_and_the_same_answers(model, monkeypatch):
    expected = answers(make_engine(model))
    engine = make_engine(model, num_cuda_graphs=-1)
    monkeypatch.setattr(engine.device, "available_bytes", lambda: 0)
    assert answers(engine) == expected
    assert not pool_of(engine).captured and pool_of(engine).counts.uncaptured > 0

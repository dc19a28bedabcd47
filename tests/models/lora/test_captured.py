"""Captured steps of requests with adapters; on the CPU by the stand-in of a graph."""

from __future__ import annotations

import engines
import pytest
from lora_cases import random_adapter
from replay_recorder import REPLAY
from static_kernels import STATIC

from megatron_infer import LoRAConfig, SamplingParams
from megatron_infer.kernels.select import BACKEND_VARIABLE
from megatron_infer.runner.cuda_graphs.graph_pool import GRAPHS_VARIABLE
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

SIZES = {"max_sequence_length": 64, "max_requests": 4, "max_tokens": 48, "enable_chunked_prefill": True}
GRAPHS = {"num_cuda_graphs": -1, "cuda_graph_max_tokens": 48, "use_cuda_graphs_for_non_decode_steps": True}
MODELS = {"gpt": tiny_gpt, "hybrid": lambda: tiny_hybrid("M*-ME", moe_shared_expert_intermediate_size=32)}
PROMPTS = [[7 * i % 121 + 3 for i in range(5 + 9 * j)] for j in range(4)]


def engine_of(model, *, max_loras=2, **settings):
    return engines.make_engine(model, lora=LoRAConfig(max_loras=max_loras, max_rank=16), **SIZES | settings)


def tokens_of(engine, names):
    params = [SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, adapter=name) for name in names]
    return engines.tokens_of(engine.generate(PROMPTS, params))


def answers(engine, adapters):
    """Of adapters that are loaded, replaced and moved to other slots between requests; and of the base model."""
    for name in "abc":
        engine.load_adapter(name, adapters[name])
    rounds = [("a", None, "b", "a"), (None,) * 4, ("c", "b", None, "a")]
    got = [tokens_of(engine, names) for names in rounds]
    engine.load_adapter("a", adapters["d"], replace=True)
    return [*got, tokens_of(engine, ("a", "b", "a", None))]


@pytest.mark.parametrize(("name", "at_start"), [("gpt", False), pytest.param("hybrid", True, marks=pytest.mark.long)])
def test_captured_steps_serve_adapters_that_are_loaded_later(name, at_start, monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, STATIC)
    model = MODELS[name]()
    adapters = {name: random_adapter(model, name, rank=3 * i + 2, seed=i) for i, name in enumerate("abcd")}
    expected = answers(engine_of(model), adapters)
    assert len({str(tokens) for tokens in expected}) == 4, "the adapters change what is drawn"
    monkeypatch.setenv(GRAPHS_VARIABLE, REPLAY)
    engine = engine_of(model, **GRAPHS, cuda_graph_capture="start" if at_start else "first_use")
    assert answers(engine, adapters) == expected
    pool = inspect(engine).runner.graphs.pool
    assert pool.counts.replays == engine.stats().counters["steps"] and not pool.refused and not pool.counts.eager
    assert {shape.has_adapters for shape in pool.captured} == {False, True}
    with_adapters = [shape for shape in pool.index.shapes if shape.has_adapters]
    assert len(with_adapters) * 2 == len(pool.index.shapes)
    if at_start:
        assert {shape for shape in pool.index.shapes if shape.is_decode_only} <= set(pool.captured)


def test_a_captured_step_without_adapters_calls_none_of_their_kernels(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, STATIC)
    monkeypatch.setenv(GRAPHS_VARIABLE, REPLAY)
    model = tiny_gpt()
    engine = engine_of(model, **GRAPHS)
    engine.load_adapter("a", random_adapter(model, "a"))
    lora = inspect(engine).runner.builder._kernels.lora
    monkeypatch.setattr(type(lora), "run", lambda *_: pytest.fail("a product of adapters in a step without any"))
    assert len(tokens_of(engine, (None,) * 4)) == 4


def test_steps_with_adapters_run_eagerly_where_their_kernel_decides_on_the_host(monkeypatch):
    """The native kernel sorts tokens on the host: its graphs are for steps without adapters."""
    from megatron_infer.kernels.lora import TorchLoRA

    monkeypatch.setenv(BACKEND_VARIABLE, STATIC)
    monkeypatch.setenv(GRAPHS_VARIABLE, REPLAY)
    monkeypatch.setattr(TorchLoRA, "graph_safe", False)
    model = tiny_gpt()
    engine = engine_of(model, **GRAPHS)
    engine.load_adapter("a", random_adapter(model, "a"))
    tokens_of(engine, ("a", None, None, None))
    tokens_of(engine, (None,) * 4)
    counts = inspect(engine).runner.graphs.pool.counts
    assert counts.eager["adapters"] > 0 and counts.replays > 0
    assert counts.eager["adapters"] + counts.replays == engine.stats().counters["steps"]

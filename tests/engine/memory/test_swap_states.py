"""Evicted requests of models with recurrent state wait on the host with it and go on with the same tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from model_kinds import RECURRENT, buffers, make_model, prefix_caching

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.testing.inspect import inspect

PROMPTS = [[4 + (7 * i + j) % 90 for j in range(20 + 3 * i)] for i in range(6)]
PARAMS = SamplingParams(temperature=0.9, top_k=30, max_tokens=40, ignore_eos=True, logprobs=0)
MIB = 1 / 1024


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return make_model("hybrid")


def make_engine(model: torch.nn.Module, *, blocks: int = 12, **settings: Any) -> DynamicInferenceEngine:
    base = {
        "block_size_tokens": 16,
        "max_sequence_length": 128,
        "max_requests": 8,
        "max_tokens": 256,
        "check_invariants": True,
        "seed": 5,
        **buffers(model, blocks=blocks, block_size=16, max_requests=8),
    }
    return DynamicInferenceEngine(model, InferenceConfig(**{**base, **settings}))


def answers(engine: DynamicInferenceEngine) -> dict[str, tuple[list[int], list[float]]]:
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, PARAMS, request_id=str(i), stream="final")
    done = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                sample = output.outputs[0]
                values = [entry[t].logprob for t, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
                done[output.request_id] = (sample.token_ids, values)
    return done


@pytest.fixture(scope="module")
def expected(model: torch.nn.Module) -> dict[str, tuple[list[int], list[float]]]:
    return answers(make_engine(model, blocks=100))


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {name: tokens for name, (tokens, _) in got.items()} == {name: one[0] for name, one in expected.items()}
    for name, (_, values) in got.items():
        assert values == pytest.approx(expected[name][1], abs=1e-5)


def test_host_memory_for_one_state_swaps_one_and_computes_the_others(model, expected):
    state, block = (make_engine(model).sizes.state_slot_bytes, make_engine(model).sizes.block_bytes)
    budget = (state + 5 * block) / 2**30 + 1e-9
    engine = make_engine(model, preemption_mode="swap", swap_buffer_size_gb=budget)
    assert_same(answers(engine), expected)
    counters = engine.stats().counters
    assert 0 < counters["swapped_out"] < counters["evicted"] and counters["recomputed_tokens"] > 0
    engine.drain()
    assert inspect(engine).store.host_bytes() == 0


def test_prices_of_states_are_what_was_measured(model):
    engine = make_engine(model, swap_buffer_size_gb=16 * MIB, preemption_mode="swap")
    first = inspect(engine).scheduler.preemption.costs
    assert 0 < first.copy_s_per_state == inspect(engine).store.copy_s_per_state
    answers(engine)
    assert engine.stats().counters["swapped_out"] > 0
    assert inspect(engine).cost_meter.costs.copy_s_per_state not in (0.0, first.copy_s_per_state)


@pytest.mark.parametrize("kind", RECURRENT)
def test_sizes_are_what_the_store_takes(kind):
    model = make_model(kind)
    engine = make_engine(model, **prefix_caching(kind))
    sizes, store = engine.sizes, inspect(engine).store
    assert sizes.num_cached_states > 0 and sizes.state_slot_bytes == engine.shape.state.slot_bytes
    assert sizes.kv_bytes + sizes.state_bytes <= store.layout.num_bytes < sizes.kv_bytes + sizes.state_bytes + 4096
    assert sizes.kv_bytes == store.kv_cache.nbytes and (kind == "hybrid") == (sizes.kv_bytes > 0)
    assert store.states.ssm_SLHPN.shape[0] == sizes.max_requests + 1 + sizes.num_cached_states


@pytest.mark.parametrize("kind", RECURRENT)
def test_state_config_of_a_live_model_is_its_own(kind):
    model = make_model(kind)
    config = MambaInferenceStateConfig.from_model(torch.nn.ModuleDict({"module": model}))
    state = make_engine(model).shape.state
    assert (config.mamba_conv_states_shape, config.mamba_ssm_states_shape) == (state.conv_shape, state.ssm_shape)
    assert config.layer_type_list.count("M") == state.num_layers
    assert MambaInferenceStateConfig.from_model(make_model("attention")) is None
    chosen = dataclasses.replace(config, ssm_states_dtype="bfloat16")
    store = inspect(make_engine(model, mamba_inference_state_config=chosen)).runner.store
    assert store.states.layer(0).ssm_SHPN.dtype == torch.bfloat16

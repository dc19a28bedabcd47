"""The first promise: nothing the scheduler does changes an answer. Every feature on and off, alone and in pairs."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from megatron_infer.config import InferenceConfig
from megatron_infer.engine import DynamicInferenceEngine
from megatron_infer.outputs import RequestOutput
from megatron_infer.schedule.params import SamplingParams
from megatron_infer.testing.tiny import tiny_gpt

VOCAB = 128
BLOCK = 16
BASE: dict[str, Any] = {
    "buffer_size_gb": 0.05,
    "block_size_tokens": BLOCK,
    "max_sequence_length": 160,
    "max_requests": 16,
    "max_tokens": 512,
    "check_invariants": True,
}

FEATURES: dict[str, dict[str, Any]] = {
    "chunked": {"enable_chunked_prefill": True, "max_tokens": 24},
    "prefix_lru": {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru"},
    "prefix_ref_zero": {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "ref_zero"},
    "overlap": {"overlap": True},
    "shuffled": {"order": 7},
    "block256": {"block_size_tokens": 256},
    "few_rows": {"max_requests": 4},
    "tiny_pool": {"pool_blocks": 14},
    "tiny_pool_paused": {"pool_blocks": 14, "paused_blocks": 7},
    "tiny_pool_swap": {"pool_blocks": 14, "preemption_mode": "swap", "swap_buffer_size_gb": 0.05},
}
PAIRS = [
    pair
    for pair in itertools.combinations(FEATURES, 2)
    if not {"prefix_lru", "prefix_ref_zero"} <= set(pair)
    and not all(name.startswith("tiny_pool") for name in pair)
    and not ("block256" in pair and any(name.startswith("tiny_pool") for name in pair))
]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return tiny_gpt(vocab_size=VOCAB, max_sequence_length=512, init_method_std=0.2)


def make_engine(model: torch.nn.Module, **settings: Any) -> DynamicInferenceEngine:
    """An engine on the tiny model; pool_blocks / paused_blocks size the pool in blocks."""
    settings = {**BASE, **settings}
    settings.pop("order", None)
    pool, paused = settings.pop("pool_blocks", None), settings.pop("paused_blocks", None)
    if pool is not None:
        probe = DynamicInferenceEngine(model, InferenceConfig(**{**BASE, **settings}))
        gib = probe.parts.sizes.block_bytes / 2**30
        settings["buffer_size_gb"] = (pool + 1) * gib + 1e-9
        if paused is not None:
            settings["paused_buffer_size_gb"] = paused * gib + 1e-9
    return DynamicInferenceEngine(model, InferenceConfig(**settings))


def workload(kind: str) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(5)
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    prompts, params = [], []
    for i in range(12):
        shared = stem[: rng.choice([0, 0, 16, 33, 40])]
        prompts.append(shared + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 60))])
        common = {"max_tokens": rng.randint(6, 40), "ignore_eos": True}
        if kind == "greedy":
            params.append(SamplingParams(temperature=0.0, **common))
        else:
            extra: dict[str, Any] = [
                {},
                {"top_k": 12},
                {"top_p": 0.8},
                {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
            ][i % 4]
            params.append(SamplingParams(temperature=0.9, seed=i, **extra, **common))
    return prompts, params


def run(engine: DynamicInferenceEngine, kind: str, order: int | None = None) -> list[list[int]]:
    prompts, params = workload(kind)
    places = list(range(len(prompts)))
    if order is not None:
        random.Random(order).shuffle(places)
    outputs: dict[int, RequestOutput] = dict(
        zip(places, engine.generate([prompts[i] for i in places], [params[i] for i in places]), strict=True)
    )
    assert engine.parts.context.num_free_rows == engine.parts.sizes.max_requests, "a row leaked"
    assert engine.stats().num_free_blocks == engine.stats().num_blocks, "a block leaked"
    return [outputs[i].outputs[0].token_ids for i in range(len(prompts))]


@pytest.fixture(scope="module")
def expected(model: torch.nn.Module) -> dict[str, list[list[int]]]:
    """One request at a time, nothing switched on."""
    answers = {}
    for kind in ("greedy", "sampled"):
        prompts, params = workload(kind)
        engine = make_engine(model)
        answers[kind] = [
            engine.generate([p], [q])[0].outputs[0].token_ids for p, q in zip(prompts, params, strict=True)
        ]
    return answers


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("feature", FEATURES)
def test_tokens_are_the_same_with_the_feature(model, expected, feature, kind):
    settings = FEATURES[feature]
    engine = make_engine(model, **settings)
    assert run(engine, kind, settings.get("order")) == expected[kind]
    if feature.startswith("tiny_pool"):
        assert engine.stats().counters["evicted"] or engine.stats().counters["paused"], (
            "the pool was not tight enough to test"
        )
    counters = engine.stats().counters
    assert (counters["swapped_in"] == counters["swapped_out"] > 0) == (feature == "tiny_pool_swap")


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_tokens_are_the_same_with_two_features(model, expected, pair, kind):
    settings: dict[str, Any] = {}
    for name in pair:
        settings.update(FEATURES[name])
    assert run(make_engine(model, **settings), kind, settings.get("order")) == expected[kind]


def test_second_run_hits_the_prefix_cache_and_answers_the_same(model, expected):
    engine = make_engine(model, **FEATURES["prefix_lru"])
    assert run(engine, "greedy") == expected["greedy"]
    hits = engine.stats().counters["prefix_hit_tokens"]
    assert run(engine, "greedy") == expected["greedy"]
    assert engine.stats().counters["prefix_hit_tokens"] > hits


def test_first_tokens_equal_the_full_forward_of_the_training_path(model):
    prompts, _ = workload("greedy")
    engine = make_engine(model, enable_chunked_prefill=True, max_tokens=24)
    outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = prompt + output.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)[0].float()
        logprobs = logits.log_softmax(-1)
        for i, (token, entry) in enumerate(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)):
            position = len(prompt) + i - 1
            assert token == int(logits[position, :VOCAB].argmax())
            assert abs(entry[token].logprob - float(logprobs[position, token])) < 1e-4

"""The first promise: nothing the scheduler does changes an answer. Every feature on and off, alone and in pairs."""

from __future__ import annotations

import itertools
import random
from typing import Any

import engines
import pytest
import torch
from engines import each_of
from model_kinds import KINDS, RECURRENT
from rehearsal import DRAFTS, check_drafted, rehearse

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.testing.inspect import inspect

pytestmark = pytest.mark.filterwarnings('ignore:preemption_mode="swap" has no effect')
"""Pure Mamba models are in the tables of those who swap, too."""
VOCAB = 128

FEATURES: dict[str, dict[str, Any]] = {
    "chunked": {"enable_chunked_prefill": True, "max_tokens": 24},
    "prefix_lru": {"prefix": "lru"},
    "prefix_ref_zero": {"prefix": "ref_zero"},
    "overlap": {"overlap": True},
    "in_flight_3": {"max_steps_in_flight": 3},
    "shuffled": {"order": 7},
    "block256": {"block_size_tokens": 256},
    "few_rows": {"max_requests": 4},
    "tiny_pool": {"pool_blocks": 14},
    "tiny_pool_paused": {"pool_blocks": 14, "paused_blocks": 7},
    "prefill_first": {"batching": "prefill_first", "max_batch_total_tokens": 200},
    "phased": {
        "batching": "phased",
        "min_batch_size_tg": 2,
        "max_queue_size_tg": 4,
        "ce_delay_ms": 2,
        "enable_prioritize_first_decode": True,
        "admission_watermark": 0.8,
    },
    "drafts": DRAFTS,
    "tiny_pool_swap": {"pool_blocks": 14, "preemption_mode": "swap", "swap_buffer_size_gb": 0.01},
}
PAIRS = [
    pair
    for pair in itertools.combinations(FEATURES, 2)
    if not {"prefix_lru", "prefix_ref_zero"} <= set(pair)
    and not all(name.startswith("tiny_pool") for name in pair)
    and not ("block256" in pair and any(name.startswith("tiny_pool") for name in pair))
]
ORDERS = ("prefill_first", "phased", "in_flight_3")
ORDER_PAIRS = [pair for pair in PAIRS if set(ORDERS) & set(pair) and set(pair) != {"prefill_first", "phased"}]
PAIRS = [pair for pair in PAIRS if not set(ORDERS) & set(pair)]
QUICK = {
    ("chunked", "prefix_lru"),
    ("chunked", "tiny_pool_paused"),
    ("prefix_lru", "tiny_pool"),
    ("prefix_ref_zero", "block256"),
    ("overlap", "drafts"),
    ("overlap", "tiny_pool_swap"),
    ("shuffled", "few_rows"),
    ("tiny_pool", "drafts"),
    ("chunked", "phased"),
    ("prefix_lru", "prefill_first"),
    ("overlap", "phased"),
    ("in_flight_3", "tiny_pool_swap"),
    ("in_flight_3", "drafts"),
    ("few_rows", "prefill_first"),
}
"""Each feature with one that acts on what it acts on; the other pairs are long."""


kind = each_of([*KINDS, pytest.param("mixed", marks=pytest.mark.slow)])


def pairs_of(pairs: list[tuple[str, str]]) -> Any:
    assert {*PAIRS, *ORDER_PAIRS} >= QUICK
    marked = [pytest.param(pair, marks=() if pair in QUICK else pytest.mark.long) for pair in pairs]
    return pytest.mark.parametrize("pair", marked, ids="+".join)


def make_engine(model: torch.nn.Module, *, order: int | None = None, **settings: Any) -> DynamicInferenceEngine:
    """order: of the requests; the engine has nothing to do with it."""
    return engines.make_engine(model, **settings)


def workload(drawing: str) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(5)
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    prompts, params = [], []
    for i in range(12):
        shared = stem[: rng.choice([0, 0, 16, 33, 40])]
        prompts.append(shared + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 60))])
        common = {"max_tokens": rng.randint(6, 40), "ignore_eos": True}
        if drawing == "greedy":
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


def run(
    engine: DynamicInferenceEngine, drawing: str, order: int | None = None, answers: list[list[int]] | None = None
) -> list[list[int]]:
    """answers: what is drafted, where the engine drafts."""
    prompts, params = workload(drawing)
    if answers is not None:
        rehearse(engine, prompts, answers)
    places = list(range(len(prompts)))
    if order is not None:
        random.Random(order).shuffle(places)
    outputs: dict[int, RequestOutput] = dict(
        zip(places, engine.generate([prompts[i] for i in places], [params[i] for i in places]), strict=True)
    )
    assert inspect(engine).context.num_free_rows == engine.sizes.max_requests, "a row leaked"
    assert engine.stats().num_free_blocks == engine.stats().num_blocks, "a block leaked"
    return [outputs[i].outputs[0].token_ids for i in range(len(prompts))]


@pytest.fixture(scope="module")
def expected(model: torch.nn.Module) -> dict[str, list[list[int]]]:
    """One request at a time, nothing switched on."""
    answers = {}
    for drawing in ("greedy", "sampled"):
        prompts, params = workload(drawing)
        engine = make_engine(model)
        answers[drawing] = [
            engine.generate([p], [q])[0].outputs[0].token_ids for p, q in zip(prompts, params, strict=True)
        ]
    return answers


@pytest.mark.parametrize("drawing", ["greedy", "sampled"])
@pytest.mark.parametrize("feature", FEATURES)
def test_tokens_are_the_same_with_the_feature(model, kind, expected, feature, drawing):
    settings = FEATURES[feature]
    engine = make_engine(model, **settings)
    assert run(engine, drawing, settings.get("order"), expected[drawing]) == expected[drawing]
    check_drafted(engine)
    if feature.startswith("tiny_pool") and kind != "mamba":  # whose blocks take no memory
        assert engine.stats().counters["evicted"] or engine.stats().counters["paused"], (
            "the pool was not tight enough to test"
        )
    counters = engine.stats().counters
    assert (counters["swapped_in"] == counters["swapped_out"] > 0) == (feature == "tiny_pool_swap" and kind != "mamba")
    assert (counters["states_loaded"] > 0) == (kind in RECURRENT and feature.startswith("prefix"))


@pytest.mark.parametrize("drawing", ["greedy", "sampled"])
@pairs_of(PAIRS)
def test_tokens_are_the_same_with_two_features(model, kind, expected, pair, drawing):
    settings: dict[str, Any] = {}
    for name in pair:
        settings.update(FEATURES[name])
    engine = make_engine(model, **settings)
    assert run(engine, drawing, settings.get("order"), expected[drawing]) == expected[drawing]
    check_drafted(engine)


@pytest.mark.parametrize("drawing", ["greedy", "sampled"])
@pairs_of(ORDER_PAIRS)
def test_tokens_are_the_same_in_another_order_with_a_feature(model, kind, expected, pair, drawing):
    test_tokens_are_the_same_with_two_features(model, kind, expected, pair, drawing)


def test_second_run_hits_the_prefix_cache_and_answers_the_same(model, kind, expected):
    engine = make_engine(model, **FEATURES["prefix_lru"])
    assert run(engine, "greedy") == expected["greedy"]
    hits = engine.stats().counters["prefix_hit_tokens"]
    assert run(engine, "greedy") == expected["greedy"]
    assert engine.stats().counters["prefix_hit_tokens"] > hits


def test_first_tokens_equal_the_full_forward_of_the_training_path(model, kind):
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

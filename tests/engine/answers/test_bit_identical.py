"""Nothing the scheduler does changes an answer to the bit: log probabilities are torch.equal, in fp32 and in bf16."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import engines
import pytest
import torch
from engines import each_of
from model_kinds import RECURRENT, is_native, make_model
from rehearsal import DRAFTS, check_drafted, rehearse

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.testing.tiny import EXPERTS

pytestmark = pytest.mark.filterwarnings('ignore:preemption_mode="swap" has no effect')
"""Pure Mamba models are in the tables of those who swap, too."""
VOCAB = 128
make_engine = partial(engines.make_engine, max_sequence_length=320)
MAX_SUSPENDS = 6
"""Who is set back every few steps without end would never finish."""
PREFIX = {"prefix": "lru"}
CHUNKED = {"enable_chunked_prefill": True, "max_tokens": 24}
TINY_POOL = {"pool_blocks": 22}
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "alone": ({"max_requests": 1}, False),
    "chunked": (CHUNKED, False),
    "chunks of 1": ({"enable_chunked_prefill": True, "max_tokens": 1, "max_requests": 1}, False),
    "prefix": (PREFIX, False),
    "tiny pool": (TINY_POOL, False),
    "tiny pool, swap": ({**TINY_POOL, "preemption_mode": "swap", "swap_buffer_size_gb": 0.01}, False),
    "overlap": ({"overlap": True}, False),
    "suspended": ({}, True),
    "suspended, overlap": ({"overlap": True}, True),
    "suspended, chunked": (CHUNKED, True),
    "all of it": ({**PREFIX, **CHUNKED, **TINY_POOL, "overlap": True}, True),
    "drafts": (DRAFTS, False),
    "drafts, all of it": ({**DRAFTS, **PREFIX, **CHUNKED, "pool_blocks": 19, "overlap": True}, True),
}
"""Settings, and whether the engine is suspended with recomputation every few steps.

A tiny pool is none to pure Mamba models, whose blocks take no memory.
"""
FEW = {"alone": 3, "chunks of 1": 3}
"""Ways of many steps, for so many requests."""
Answer = tuple[list[int], torch.Tensor]
GATED = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("attention", {}),
    "experts": ("attention", {**EXPERTS, **GATED}),
    "hybrid": ("hybrid", {}),
    "mamba": ("mamba", {}),
    "softcapped": ("softcapped", {}),
    "delta": ("delta", {}),
    "latent": ("latent", {}),
    "parallel": ("parallel", {}),
}
"""Kind, and what its model is built with."""
IN_BF16 = {"delta": {**EXPERTS, **GATED}}
"""More of some models in bf16."""
DTYPES = (torch.float32, torch.bfloat16)


name = each_of(MODELS)


@pytest.fixture(scope="module")
def kind(name) -> str:
    return MODELS[name][0]


@pytest.fixture(scope="module")
def model_in(name, kind) -> Callable[[torch.dtype], torch.nn.Module]:
    """dtype -> the model, built once."""

    @cache
    def make(dtype: torch.dtype) -> torch.nn.Module:
        more = IN_BF16.get(name, {}) if dtype is torch.bfloat16 else {}
        model = make_model(kind, vocab_size=VOCAB, params_dtype=dtype, **MODELS[name][1], **more)
        engine = make_engine(model)
        if not is_native(engine):
            pytest.skip(f"kernels that promise rounding only:\n{engine.kernels.table()}")
        return model

    return make


def workload(drawing: str) -> list[tuple[list[int], SamplingParams]]:
    """Prompts to past 128 tokens (a tile of keys), one of them with its output past 256 (a partition)."""
    rng = random.Random(5)
    stem = [rng.randrange(4, VOCAB) for _ in range(120)]
    work = []
    for i, (shared, own, drawn) in enumerate([(0, 1, 30), (48, 17, 40), (120, 30, 120), (48, 3, 25), (120, 9, 30)] * 2):
        prompt = stem[:shared] + [rng.randrange(4, VOCAB) for _ in range(own)]
        how: dict[str, Any] = {"temperature": 0.0}
        if drawing == "sampled":
            how = {"temperature": 0.9, "seed": i, **[{}, {"top_k": 12}, {"top_p": 0.8}][i % 3]}
        how["prompt_logprobs"] = 0 if i % 2 else None  # the others may hit the prefix cache
        work.append((prompt, SamplingParams(max_tokens=drawn, ignore_eos=True, logprobs=2, **how)))
    return work


class Suspender:
    """Suspends with recomputation every few steps."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._due = iter(range(engine.num_steps + 3, engine.num_steps + 3 + 9 * MAX_SUSPENDS, 9))
        self._next = next(self._due)

    def __call__(self, engine: DynamicInferenceEngine) -> None:
        if engine.num_steps == self._next:
            engine.suspend("recompute")
            engine.resume()
            self._next = next(self._due, -1)


def run(
    engine: DynamicInferenceEngine, drawing: str, *, suspended: bool = False, count: int | None = None
) -> list[Answer]:
    """(tokens, log probabilities of its prompt, its tokens and the likeliest ones) of the first `count` requests."""
    return list(map(answer, engines.run(engine, workload(drawing)[:count], Suspender(engine) if suspended else None)))


def answer(output: RequestOutput) -> Answer:
    sample = output.outputs[0]
    entries = [entry for entry in [*(output.prompt_logprobs or []), *sample.logprobs] if entry is not None]
    values = [entry[token].logprob for entry in entries for token in sorted(entry)]
    return sample.token_ids, torch.tensor(values, dtype=torch.float64)


def check_same(answers: list[Answer], wanted: list[Answer]) -> None:
    for i, ((tokens, values), (other, bits)) in enumerate(zip(answers, wanted, strict=True)):
        assert tokens == other, f"request {i}: other tokens"
        assert torch.equal(values, bits), f"request {i}: {(values - bits).abs().max()} off"


@pytest.fixture(scope="module")
def plain(model_in) -> Callable[[torch.dtype, str], list[Answer]]:
    """(dtype, drawing) -> the answers of an engine with nothing switched on, computed once."""
    return cache(lambda dtype, drawing: run(make_engine(model_in(dtype)), drawing))


@pytest.mark.parametrize("way", WAYS)
def test_logprobs_have_the_same_bits(model_in, name, kind, plain, way):
    """Greedy or drawn, in fp32 or bf16 in turn: each model and each way has all four."""
    number = [*MODELS].index(name) + [*WAYS].index(way)
    drawing, dtype = ("greedy", "sampled")[number % 2], DTYPES[number // 2 % 2]
    model, wanted = model_in(dtype), plain(dtype, drawing)[: FEW.get(way)]
    settings, suspended = WAYS[way]
    engine = make_engine(model, **settings)
    rehearse(engine, [prompt for prompt, _ in workload(drawing)[: FEW.get(way)]], [tokens for tokens, _ in wanted])
    check_same(run(engine, drawing, suspended=suspended, count=FEW.get(way)), wanted)
    check_drafted(engine)
    counters = engine.stats().counters
    tight = "pool_blocks" in settings and kind != "mamba"
    assert counters["evicted"] or not tight, "the pool was not tight enough to test"
    assert (counters["swapped_in"] > 0) == (tight and "preemption_mode" in settings)
    if "prefix" in settings:
        before = counters["prefix_hit_tokens"]
        check_same(run(engine, drawing, suspended=suspended), wanted)
        counters = engine.stats().counters
        assert counters["prefix_hit_tokens"] > before
        assert (counters["states_loaded"] > 0) == (kind in RECURRENT)

"""The engine on Triton's attention gives the tokens it gives on torch's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.kernels.select import BACKEND_VARIABLE
from megatron_infer.testing.tiny import tiny_gpt

pytestmark = pytest.mark.triton

SETTINGS: dict[str, Any] = {
    "buffer_size_gb": 0.02,
    "block_size_tokens": 16,
    "max_sequence_length": 96,
    "max_requests": 4,
    "max_tokens": 24,
    "enable_chunked_prefill": True,
    "check_invariants": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window_and_sinks": {"window_size": (11, 0), "softmax_type": "learnable", "rotary_percent": 0.5},
}


def workload(num_stem: int = 34) -> list[list[int]]:
    rng = random.Random(5)
    stem = [rng.randrange(4, 128) for _ in range(num_stem)]
    return [
        stem + [rng.randrange(4, 128) for _ in range(rng.randint(1, 9))],
        [rng.randrange(4, 128) for _ in range(3)],
        stem + [rng.randrange(4, 128) for _ in range(5)],
    ]


def generate(
    model: torch.nn.Module, backend: str, monkeypatch, prompts: list[list[int]] | None = None, **settings: Any
) -> tuple[list[list[int]], int]:
    """(tokens of each request, prompt tokens found in the prefix cache)."""
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    engine = DynamicInferenceEngine(model, InferenceConfig(**SETTINGS, **settings))
    assert engine.kernels.attention.name == backend
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs = engine.generate(workload() if prompts is None else prompts, params)
    return [output.outputs[0].token_ids for output in outputs], engine.stats().counters["prefix_hit_tokens"]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_those_of_torch(device, monkeypatch, kind):
    model = tiny_gpt(init_method_std=0.2, **KINDS[kind])
    want, _ = generate(model, "torch", monkeypatch)
    got, _ = generate(model, "triton", monkeypatch)
    assert got == want
    got, hits = generate(model, "triton", monkeypatch, enable_prefix_caching=True)
    assert got == want and hits > 0

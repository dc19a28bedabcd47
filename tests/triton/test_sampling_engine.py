"""Seeded requests get the same tokens from an engine on each backend, whatever they ask for."""

from __future__ import annotations

import pytest
import torch

from megatron_infer.config import InferenceConfig
from megatron_infer.engine import DynamicInferenceEngine
from megatron_infer.kernels.select import BACKEND_VARIABLE
from megatron_infer.kernels.triton.launch import listening
from megatron_infer.schedule.params import SamplingParams
from megatron_infer.testing.tiny import tiny_gpt

pytestmark = pytest.mark.triton

WISHES = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"top_k": 7, "logprobs": 2},
    {"min_p": 0.05, "repetition_penalty": 1.3, "bad_token_ids": [3, 4]},
)


def tokens_of(model, **settings):
    base = {"buffer_size_gb": 0.01, "block_size_tokens": 16, "max_sequence_length": 64, "max_requests": 8}
    engine = DynamicInferenceEngine(model, InferenceConfig(**{**base, **settings}))
    params = [SamplingParams(seed=i, max_tokens=3, ignore_eos=True, **wish) for i, wish in enumerate(WISHES)]
    kernels = set()
    with listening(lambda launch, kernel, *rest: kernels.add(kernel.__name__)):
        outputs = engine.generate([[1 + i, 2, 3] for i in range(len(WISHES))], params)
    return [output.outputs[0].token_ids for output in outputs], kernels


def test_seeded_tokens_are_the_same_on_every_backend(device, monkeypatch):
    torch.manual_seed(1)
    model = tiny_gpt(vocab_size=60, max_sequence_length=64, init_method_std=0.2).to(device)
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    got, kernels = tokens_of(model)
    assert {"draw_kernel", "best_kernel", "score_kernel"} <= kernels
    for name in ("torch",) if device.type == "cuda" else ("torch", "native"):
        monkeypatch.setenv(BACKEND_VARIABLE, name)
        assert tokens_of(model)[0] == got
    assert len({tuple(tokens) for tokens in got}) > 1

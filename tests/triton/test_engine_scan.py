"""An engine whose norms, scans and experts run in Triton gives the tokens of one that runs torch."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.kernels.select import BACKEND_VARIABLE
from megatron_infer.kernels.triton.launch import listening

pytestmark = pytest.mark.triton
PROMPTS = [[5, 9, 3], [7] * 21, [1, 2, 3, 4] * 5, [11]]


@pytest.fixture(scope="module")
def model(device) -> torch.nn.Module:
    from megatron_infer.testing.tiny import tiny_hybrid

    sizes = {"hidden_size": 32, "mamba_head_dim": 32, "num_attention_heads": 2, "num_query_groups": 1}
    return tiny_hybrid("ME*M", vocab_size=64, init_method_std=0.2, mamba_num_groups=1, **sizes).to(device)


def generate(model, monkeypatch, backend, **settings):
    """(tokens and routing of each prompt, names of what was chosen, names of the kernels that ran)."""
    from megatron_infer.config.sampling_params import SamplingParams
    from megatron_infer.engine.engine import DynamicInferenceEngine

    monkeypatch.setitem(os.environ, BACKEND_VARIABLE, backend)
    settings = {"max_requests": 4, "max_sequence_length": 64, "block_size_tokens": 16, "max_tokens": 64} | settings
    engine = DynamicInferenceEngine(model, InferenceConfig(buffer_size_gb=0.01, **settings))
    ran = set()
    with listening(lambda launch, kernel, *_: ran.add(kernel.fn.__name__)):
        outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=4, temperature=0.0, return_routing=True))
    got = [(output.outputs[0].token_ids, output.outputs[0].routing.tolist()) for output in outputs]
    return got, {row.chosen for row in engine.kernels.rows}, ran


def test_greedy_tokens_and_their_experts_equal_those_of_torch_whole_and_in_chunks(model, monkeypatch):
    want, chosen, ran = generate(model, monkeypatch, "torch")
    assert not ran and "triton" not in chosen
    assert len({token for tokens, _ in want for token in tokens}) > 4, "a model that says one thing shows nothing"
    for settings in ({}, {"enable_chunked_prefill": True, "max_tokens": 24}):
        got, chosen, ran = generate(model, monkeypatch, "triton", **settings)
        assert got == want
        assert "triton" in chosen
        assert {
            "scan_decode",
            "scan_segments",
            "_convolve_decode",
            "_norm",
            "_choose",
            "_grouped_linear",
            "_add_up",
        } <= ran

"""An engine on FlashInfer's, flash-attn's or mamba-ssm's kernels (stand-ins of them) answers as one on torch's."""

from __future__ import annotations

import fake_packages
import pytest
import torch

from megatron_infer import DynamicInferenceEngine, InferenceConfig, SamplingParams
from megatron_infer.kernels import (
    flash_attn_attention,
    flashinfer_attention,
    flashinfer_rope,
    mamba_ssm_scan,
)
from megatron_infer.kernels.select import BACKEND_VARIABLE
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

SHAPE = {"hidden_size": 128, "num_attention_heads": 2, "num_query_groups": 1}
PROMPTS = [[(7 * i + j) % 120 for j in range(length)] for i, length in enumerate((3, 40, 19, 70))]


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    fake_packages.install(monkeypatch, "flashinfer", "flash_attn", "mamba_ssm", "causal_conv1d")
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 1024)
    for module in (flashinfer_attention, flash_attn_attention, flashinfer_rope, mamba_ssm_scan):
        monkeypatch.setattr(module, "unavailable", lambda device, dtype: None)
    monkeypatch.setattr(mamba_ssm_scan, "conv_unavailable", lambda: None)
    # In 16 bits a near tie turns now and then; what is held here are indices, and fp32 shows them.
    for module in (fake_packages, flashinfer_attention, flash_attn_attention, flashinfer_rope, mamba_ssm_scan):
        monkeypatch.setattr(module, "DTYPES", (torch.float32,))


def answers(model, **settings):
    """(tokens of every request, which backends ran) with chunks, shared prefixes and decode rows in one step."""
    base = {"buffer_size_gb": 0.05, "max_requests": 4, "max_tokens": 32, "max_sequence_length": 128}
    base |= {"enable_chunked_prefill": True, "check_invariants": True, "block_size_tokens": 16}
    engine = DynamicInferenceEngine(model, InferenceConfig(**base | settings))
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
        engine.add_request(prompt, params, request_id=str(number))
    done = {}
    while len(done) < len(PROMPTS):
        done |= {out.request_id: list(out.outputs[0].token_ids) for out in engine.step() if out.finished}
    return done, {row.operation: row.chosen for row in engine.kernels.rows}


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({"attention_backend": "flashinfer"}, {"attention": "flashinfer"}),
        ({"attention_backend": "flash_attn", "block_size_tokens": 256}, {"attention": "flash_attn"}),
        (
            {"attention_backend": "flashinfer", "use_flashinfer_fused_rope": None, "overlap": True},
            {"attention": "flashinfer", "rotation": "flashinfer"},
        ),
        (
            {"attention_backend": "torch", "use_flashinfer_fused_rope": True},
            {"attention": "torch", "rotation": "flashinfer"},
        ),
    ],
)
def test_the_option_moves_attention_and_no_token(settings, chosen):
    model = tiny_gpt(**SHAPE, window_size=(30, 0), window_attn_skip_freq=2)
    wanted, plain = answers(model, attention_backend="torch")
    assert plain["attention"] == "torch" and "rotation" not in plain
    got, rows = answers(model, **settings)
    assert {name: rows[name] for name in chosen} == chosen
    assert got == wanted


def test_the_scan_of_mamba_ssm_gives_the_same_tokens(monkeypatch):
    settings = {"attention_backend": "torch", "mamba_memory_ratio": 0.5}
    model = tiny_hybrid("M*-M", **SHAPE)
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    wanted, _ = answers(model, **settings)
    monkeypatch.setenv(BACKEND_VARIABLE, "mamba_ssm")
    got, rows = answers(model, **settings | {"attention_backend": "auto"})
    assert rows["selective scan"] == "mamba_ssm"
    assert got == wanted

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
    flashinfer_topk,
    mamba_ssm_scan,
)
from megatron_infer.kernels.select import BACKEND_VARIABLE
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.replay_recorder import REPLAY
from megatron_infer.testing.static_kernels import STATIC
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


def test_sampling_by_flashinfer_draws_a_seeds_tokens_behind_the_graphs(monkeypatch):
    monkeypatch.setattr(flashinfer_topk, "unavailable", lambda device: None)
    monkeypatch.setenv(BACKEND_VARIABLE, STATIC)
    monkeypatch.setenv("MEGATRON_INFER_GRAPHS", REPLAY)
    model, asked = tiny_gpt(**SHAPE), []
    params = [SamplingParams(max_tokens=6, top_k=20, top_p=0.95, seed=i, ignore_eos=True) for i in range(4)]

    def drawn(**settings):
        base = {"buffer_size_gb": 0.05, "max_requests": 4, "max_tokens": 32, "max_sequence_length": 128}
        base |= {"enable_chunked_prefill": True, "block_size_tokens": 16, "num_cuda_graphs": -1}
        engine = DynamicInferenceEngine(model, InferenceConfig(**base | settings))
        if engine.kernels.search is not None:
            search = inspect(engine).runner.sampler.search
            inspect(engine).runner.sampler.search = lambda *given: asked.append(given) or search(*given)
        return engine, [out.outputs[0].token_ids for out in engine.generate(PROMPTS, params)]

    plain, wanted = drawn()
    assert inspect(plain).runner.graphs.pool.counts.replays and not inspect(plain).runner.graphs.drawn_outside
    engine, got = drawn(sampling_backend="flashinfer")
    chosen = {row.operation: row.chosen for row in engine.kernels.rows}
    assert chosen["argmax, sampling"] == "flashinfer" and got == wanted and asked
    replays, outside = inspect(engine).runner.graphs.pool.counts.replays, inspect(engine).runner.graphs.drawn_outside
    assert outside == {"FlashInfer draws behind the graph": engine.figures().graph_draws_outside}
    assert 0 < engine.figures().graph_draws_outside <= replays


def test_the_scan_of_mamba_ssm_gives_the_same_tokens(monkeypatch):
    settings = {"attention_backend": "torch", "mamba_memory_ratio": 0.5}
    model = tiny_hybrid("M*-M", **SHAPE)
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    wanted, _ = answers(model, **settings)
    monkeypatch.setenv(BACKEND_VARIABLE, "mamba_ssm")
    got, rows = answers(model, **settings | {"attention_backend": "auto"})
    assert rows["selective scan"] == "mamba_ssm"
    assert got == wanted

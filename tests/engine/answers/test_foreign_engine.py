"""An engine on FlashInfer's or flash-attn 3's kernels (stand-ins of them) answers as one on torch's."""

from __future__ import annotations

import fake_packages
import pytest
import torch
from replay_recorder import REPLAY

from megatron_infer import DynamicInferenceEngine, InferenceConfig, SamplingParams
from megatron_infer.config.inference import ConfigWarning
from megatron_infer.kernels import backend_candidates, optional_packages, select
from megatron_infer.kernels.packages import (
    flash_attn_attention,
    flash_attn_prompts,
    flashinfer_attention,
    flashinfer_rope,
)
from megatron_infer.runner.cuda_graphs.graph_pool import GRAPHS_VARIABLE
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

SHAPE = {"hidden_size": 128, "num_attention_heads": 2, "num_query_groups": 1}
PROMPTS = [[(7 * i + j) % 120 for j in range(length)] for i, length in enumerate((3, 40, 19, 70))]
BASE = {"buffer_size_gb": 0.05, "max_requests": 4, "max_tokens": 32, "max_sequence_length": 128}
BASE |= {"enable_chunked_prefill": True, "check_invariants": True, "block_size_tokens": 16}


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    fake_packages.install(monkeypatch, "flashinfer", "flash_attn_interface")
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 1024)
    for module in (flashinfer_attention, flash_attn_attention, flash_attn_prompts, flashinfer_rope):
        monkeypatch.setattr(module, "unavailable", lambda device, dtype: None)
    # In 16 bits a near tie turns now and then; what is held here are indices, and fp32 shows them.
    monkeypatch.setattr(optional_packages, "HALF", (torch.float32,))


def answers(model, **settings):
    """(tokens of every request, which backends ran) with chunks, shared prefixes and decode rows in one step."""
    done, engine = run(model, **settings)
    return done, {row.operation: row.chosen for row in engine.kernels.rows}


def run(model, **settings):
    engine = DynamicInferenceEngine(model, InferenceConfig(**BASE | settings))
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
        engine.add_request(prompt, params, request_id=str(number))
    done = {}
    while len(done) < len(PROMPTS):
        done |= {out.request_id: list(out.outputs[0].token_ids) for out in engine.step() if out.finished}
    return done, engine


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({"attention_backend": "flashinfer"}, {"attention": "flashinfer"}),
        ({"attention_backend": "flash_attn"}, {"attention": "flash_attn"}),
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


@pytest.fixture
def replays(monkeypatch):
    """Steps are recorded and repeated by a stand-in, which sees what torch is asked to do and nothing else."""
    monkeypatch.setenv(GRAPHS_VARIABLE, REPLAY)
    monkeypatch.setattr(select, "_library_if", lambda *args: (None, "not here"))
    monkeypatch.setattr(select.packing, "unavailable", lambda dtype: "not here")


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.long)])
def test_decode_steps_on_flashinfer_are_replayed_with_the_pages_of_their_own_step(replays, overlap):
    model = tiny_gpt(**SHAPE, window_size=(30, 0), window_attn_skip_freq=2)
    settings = {"attention_backend": "flashinfer", "overlap": overlap}
    wanted, _ = run(model, **settings)
    got, engine = run(model, **settings, num_cuda_graphs=-1, use_cuda_graphs_for_non_decode_steps=True)
    assert got == wanted
    pool = inspect(engine).runner.graphs.pool
    assert pool.counts.replays > 4 and not pool.refused and not pool.counts.uncaptured
    assert all(shape.is_decode_only for shape in pool.index.shapes), "its prefill wrapper has no graphs of padded steps"
    rows = {row.operation: row for row in engine.kernels.rows}
    assert rows["CUDA graphs"].reasons == {"steps that prefill": "attention 'flashinfer' decides on the host in them"}
    wrappers = engine.kernels.attention._of_graphs
    assert len(wrappers) == 2 * len(pool.captured), "one for each number of rows and kind of layer"


def test_prompts_that_no_graph_can_hold_are_told_of_where_all_must_be_captured(replays):
    asked = {"attention_backend": "flashinfer", "num_cuda_graphs": -1}
    asked |= {"cuda_graph_all_prefills": True, "use_cuda_graphs_for_non_decode_steps": True}
    with pytest.warns(ConfigWarning, match="cuda_graph_all_prefills=True, and attention 'flashinfer' decides on"):
        DynamicInferenceEngine(tiny_gpt(**SHAPE), InferenceConfig(**BASE | asked))


@pytest.fixture
def on_hopper(monkeypatch):
    """`auto` chooses as where FlashInfer is the best for decode rows and flash-attn 3 is installed."""
    flashinfer = next(one for one in backend_candidates.ATTENTION if one.name == "flashinfer")
    monkeypatch.setattr(backend_candidates, "ATTENTION", (flashinfer,))
    monkeypatch.setattr(backend_candidates, "_to_try", lambda candidates, device, forced: candidates)
    for name in ("OPS", "STEP", "SAMPLING"):
        monkeypatch.setattr(backend_candidates, name, ())


@pytest.mark.parametrize("graphs", [0, -1])
def test_decode_rows_and_prompts_run_on_a_backend_each(on_hopper, replays, graphs):
    model = tiny_gpt(**SHAPE, window_size=(30, 0), window_attn_skip_freq=2)
    wanted, alone = answers(model, block_size_tokens=64)
    assert alone["attention, decode"] == alone["attention, prefill"] == "flashinfer", "blocks are no whole tiles"
    got, engine = run(model, block_size_tokens=128, num_cuda_graphs=graphs, use_cuda_graphs_for_non_decode_steps=True)
    assert got == wanted
    rows = {row.operation: row for row in engine.kernels.rows}
    assert (rows["attention, decode"].chosen, rows["attention, prefill"].chosen) == ("flashinfer", "flash_attn_3")
    assert "published rate" in rows["attention, prefill"].reasons["flashinfer"]
    if graphs:
        pool = inspect(engine).runner.graphs.pool
        assert {shape.is_decode_only for shape in pool.captured} == {False, True} and not pool.refused

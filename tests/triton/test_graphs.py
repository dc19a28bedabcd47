"""Steps on Triton's kernels, captured with adapters: as a CUDA graph, or on the CPU by a stand-in."""

from __future__ import annotations

import pytest
import torch
from engines import make_engine, run
from launches import kernels_launched
from lora_cases import random_adapter
from model_kinds import make_model
from replay_recorder import REPLAY, ReplayRecorder

from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.kernels.select import BACKEND_VARIABLE
from megatron_infer.runner.cuda_graphs.graph_pool import GRAPHS_VARIABLE
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

pytestmark = pytest.mark.triton


def test_the_stand_in_repeats_launches_with_the_numbers_of_the_capture(device):
    if device.type != "cpu":
        pytest.skip("the stand-in is for a CPU")
    from megatron_infer.kernels.triton.elementwise import make

    ops, x = make(device, torch.float32), torch.arange(1.0, 33.0).view(2, 16)
    weight, out = torch.ones(16), torch.empty(2, 16)
    eps = [1e-9]
    with torch.inference_mode():
        tape = ReplayRecorder().capture(lambda: out.copy_(ops.rms_norm(x, weight, eps[0])))
        first = out.clone()
        x.mul_(-3.0)
        eps[0] = 1e6
        with kernels_launched() as launched:
            tape.replay()
    assert len(launched) == 1, "the one launch of the capture, none of the warm-up"
    torch.testing.assert_close(out, -first, rtol=1e-6, atol=1e-6)


def answered(model, asked, *, adapters=(), **settings):
    """(the samples of requests of (prompt, parameters), the engine)."""
    engine = make_engine(model, max_sequence_length=64, max_requests=3, max_tokens=48, **settings)
    for adapter in adapters:
        engine.load_adapter(adapter.name, adapter)
    return [output.outputs[0] for output in run(engine, asked)], engine


def replayed(model, asked, device, monkeypatch, **settings):
    """The same on Triton's kernels, every step replayed."""
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    if device.type == "cpu":
        monkeypatch.setenv(GRAPHS_VARIABLE, REPLAY)
    found, engine = answered(model, asked, num_cuda_graphs=-1, use_cuda_graphs_for_non_decode_steps=True, **settings)
    counts = inspect(engine).runner.graphs.pool.counts
    assert counts.replays == engine.stats().counters["steps"] > 2 and counts.uncaptured == 0
    return found, engine


def tokens(samples):
    return [one.token_ids for one in samples]


def test_an_engine_with_adapters_answers_the_same_with_replayed_triton_steps_and_in_torch(device, monkeypatch):
    model = tiny_gpt(num_layers=1, vocab_size=64, max_sequence_length=64, init_method_std=0.2).to(device)
    adapters = [random_adapter(model, name, rank=rank, seed=rank) for name, rank in (("a", 3), ("b", 20))]
    greedy = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
    asked = [([5, 6, 7], SamplingParams(**greedy, adapter=name)) for name in ("a", "b", None)]
    settings = {"adapters": adapters, "lora": LoRAConfig(max_loras=2, max_rank=20)}
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    expected = tokens(answered(model, asked, **settings)[0])
    got, engine = replayed(model, asked, device, monkeypatch, **settings)
    assert tokens(got) == expected and len({str(one) for one in expected}) == 3
    assert [row.chosen for row in engine.kernels.rows if row.operation == "adapters"] == ["triton"]


@pytest.mark.parametrize("kind", ["delta", "latent", pytest.param("sparse", marks=pytest.mark.slow)])
def test_models_of_the_newer_kinds_answer_the_same_with_replayed_triton_steps_and_in_torch(device, monkeypatch, kind):
    model = make_model(kind, vocab_size=64, max_sequence_length=64).to(device)
    greedy = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    asked, choosing = (
        [(prompt, SamplingParams(**greedy, return_index_choices=ask)) for prompt in ([5, 6, 7] * 9, [8, 9], [3] * 14)]
        for ask in (False, True)
    )
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    expected = tokens(answered(model, asked)[0])
    choices = [one.index_choices.tolist() for one in answered(model, choosing)[0]] if kind == "sparse" else None
    got, _ = replayed(model, asked, device, monkeypatch)
    assert tokens(got) == expected and len({str(one) for one in expected}) == 3
    if choices is not None:
        got, engine = answered(model, choosing, num_cuda_graphs=-1)
        assert [one.index_choices.tolist() for one in got] == choices, "steps that return choices run eagerly"
        counts = inspect(engine).runner.graphs.pool.counts
        assert counts.eager["index choices asked for"] == engine.stats().counters["steps"]

"""Logits of a bf16 model are the output layer's sums in fp32, on every backend and in all that is made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import make_engine
from static_kernels import STATIC
from torch import Tensor

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.kernels import packing
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.testing.eager_recorder import EAGER
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

PROMPTS = [[5, 9, 33, 71, 8, 100, 2], [90, 41, 7]]
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0)
WAYS: dict[str, dict[str, Any]] = {
    "native": {},
    "vendor": {"linear_backend": "vendor"},
    "torch": {},
    "reference": {},
    "exact": {"batch_invariant": True},
    "padded for graphs": {
        "num_cuda_graphs": -1,
        "cuda_graph_max_tokens": 16,
        "use_cuda_graphs_for_non_decode_steps": True,
    },
}


@pytest.fixture(params=WAYS)
def engine(request, monkeypatch) -> DynamicInferenceEngine:
    way = request.param
    if way == "vendor" and (reason := packing.unavailable(torch.bfloat16)):
        pytest.skip(reason)
    if way in ("torch", "reference"):
        monkeypatch.setenv("MEGATRON_INFER_BACKEND", way)
    if way == "padded for graphs":
        monkeypatch.setenv("MEGATRON_INFER_BACKEND", STATIC)
        monkeypatch.setenv("MEGATRON_INFER_GRAPHS", EAGER)
    model = tiny_gpt(params_dtype=torch.bfloat16, init_method_std=0.2, vocab_size=128).eval()
    return make_engine(model, max_sequence_length=64, max_requests=4, **WAYS[way])


def test_what_is_drawn_and_returned_comes_of_sums_that_are_not_rounded(engine, monkeypatch):
    logits_of, seen = AdoptedModel.logits, []

    def kept(self, hidden_SD: Tensor, ops: Any) -> Tensor:
        seen.append((hidden_SD.clone(), logits_of(self, hidden_SD, ops)))
        return seen[-1][1]

    monkeypatch.setattr(AdoptedModel, "logits", kept)
    outputs = engine.generate(PROMPTS, DRAWN)
    hidden, logits = (torch.cat(parts) for parts in zip(*seen, strict=True))
    want = hidden.double() @ inspect(engine).adopted.output_weight().detach().double().T
    assert logits.dtype is torch.float32 and (logits - want).abs().max() < 1e-5 * hidden.abs().sum(-1).max()
    rounding = (logits.bfloat16().double() - want).abs().max()
    logprobs = want.log_softmax(-1)
    for output in outputs:
        entries = [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]
        assert len(entries) == 12 + len(output.prompt_token_ids) - 1
        for token, one in (pair for entry in entries for pair in entry.items()):
            assert (logprobs[:, token] - one.logprob).abs().min() < 1e-4 < rounding

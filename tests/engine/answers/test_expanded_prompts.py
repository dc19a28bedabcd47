"""Latent attention whose long chunks of prompts attend to full keys and values: the answers are the model's own."""

from __future__ import annotations

import pytest
import torch
from engines import make_engine, run
from model_kinds import make_model
from plain_forward import full_logits, worst_error
from rehearsal import DRAFTS

from megatron_infer.config import model_shape
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.kernels.native.native_latent import NativeLatentAttention

WAYS = {
    "whole": {},
    "chunks, the last of them short": {"enable_chunked_prefill": True, "max_tokens": 50},
    "prefix hits": {"prefix": "lru", "max_requests": 2},
    "recomputed outputs": {"pool_blocks": 14},
    "overlap, drafts": {"overlap": True, **DRAFTS},
}
STEM = [7 * i % 120 for i in range(64)]
PROMPTS = [STEM + [3 * i % 97 + j for i in range(37 + j)] for j in range(3)] + [[5, 6, 7], STEM + [9] * 12]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=1)


@pytest.fixture(autouse=True)
def expanded(monkeypatch, native_kernels) -> list[int]:
    """Chunks of 32 queries expand in a model of this size; the rows that did, of each call."""
    monkeypatch.setattr(model_shape, "LEAST_EXPANDED", 1)
    monkeypatch.setattr(model_shape, "MAKING_COST", 1.0)
    rows: list[int] = []
    own = NativeLatentAttention._run_row

    def counted(self, row, *given):
        rows.append(row.count)
        own(self, row, *given)

    monkeypatch.setattr(NativeLatentAttention, "_run_row", counted)
    return rows


@pytest.mark.parametrize("q_lora", [32, None])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_the_models_own_forward(way, q_lora, expanded):
    model = make_model("latent", q_lora_rank=q_lora)
    engine = make_engine(model, **WAYS[way])
    assert "for chunks of prompts from 32 tokens on" in engine.sizes.how["block_bytes"]
    outputs = run(engine, [(prompt, GREEDY) for prompt in PROMPTS])
    assert worst_error(outputs, lambda ids: full_logits(model, ids)) < 2e-4
    assert expanded and min(expanded) >= 32


def test_prompt_logprobs_are_those_of_the_models_own_forward(expanded):
    model = make_model("latent")
    (output,) = run(make_engine(model), [(PROMPTS[0], SamplingParams(max_tokens=1, prompt_logprobs=0))])
    wanted = full_logits(model, PROMPTS[0])[:-1].log_softmax(-1)
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], PROMPTS[0][1:], strict=True)]
    own = wanted.gather(1, torch.tensor(PROMPTS[0][1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), own, rtol=1e-4, atol=2e-4)
    assert expanded


def test_exact_mode_and_shorter_prompts_stay_in_the_latents_space(expanded):
    model = make_model("latent")
    exact = make_engine(model, batch_invariant=True)
    assert "no prompt makes them" in exact.sizes.how["block_bytes"]
    run(exact, [(PROMPTS[0], GREEDY)])
    run(make_engine(model), [(PROMPTS[0][:31], GREEDY)])
    assert not expanded

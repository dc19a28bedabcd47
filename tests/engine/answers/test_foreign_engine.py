"""An engine that rotates by FlashInfer's kernel (a stand-in of it) answers as one on torch's."""

from __future__ import annotations

import fake_packages
import pytest
import torch

from megatron_infer import DynamicInferenceEngine, InferenceConfig, SamplingParams
from megatron_infer.kernels import flashinfer_rope, optional_packages
from megatron_infer.testing.tiny import tiny_gpt

SHAPE = {"hidden_size": 128, "num_attention_heads": 2, "num_query_groups": 1}
PROMPTS = [[(7 * i + j) % 120 for j in range(length)] for i, length in enumerate((3, 40, 19, 70))]
BASE = {"buffer_size_gb": 0.05, "max_requests": 4, "max_tokens": 32, "max_sequence_length": 128}
BASE |= {"enable_chunked_prefill": True, "check_invariants": True, "block_size_tokens": 16}


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    fake_packages.install(monkeypatch)
    monkeypatch.setattr(flashinfer_rope, "unavailable", lambda device, dtype: None)
    # In 16 bits a near tie turns now and then; what is held here are indices, and fp32 shows them.
    monkeypatch.setattr(optional_packages, "HALF", (torch.float32,))


def answers(model, **settings):
    """(tokens of every request, which backends ran) with chunks, shared prefixes and decode rows in one step."""
    engine = DynamicInferenceEngine(model, InferenceConfig(**BASE | settings))
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
        engine.add_request(prompt, params, request_id=str(number))
    done = {}
    while len(done) < len(PROMPTS):
        done |= {out.request_id: list(out.outputs[0].token_ids) for out in engine.step() if out.finished}
    return done, {row.operation: row.chosen for row in engine.kernels.rows}


@pytest.mark.parametrize("overlap", [False, True])
def test_the_option_moves_rotation_and_no_token(overlap):
    model = tiny_gpt(**SHAPE, window_size=(30, 0), window_attn_skip_freq=2)
    wanted, plain = answers(model, attention_backend="torch")
    assert plain["attention"] == "torch" and "rotation" not in plain
    got, rows = answers(model, attention_backend="torch", use_flashinfer_fused_rope=True, overlap=overlap)
    assert (rows["attention"], rows["rotation"]) == ("torch", "flashinfer")
    assert got == wanted

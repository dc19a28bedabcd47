"""Pooled hidden states compared with transformers' own."""

from __future__ import annotations

import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.engine.llm import LLM

CHUNKED = InferenceConfig(
    buffer_size_gb=0.2,
    block_size_tokens=16,
    max_sequence_length=256,
    max_requests=32,
    max_tokens=48,
    enable_chunked_prefill=True,
    enable_prefix_caching=True,
    prefix_caching_eviction_policy="lru",
    check_invariants=True,
)


def assert_equals_transformers(llm: LLM, reference: torch.nn.Module, prompts: list[list[int]]) -> None:
    """The last, the mean and all of the reference's last_hidden_state, within 1e-4."""
    with torch.inference_mode():
        states = [reference(torch.tensor([prompt])).last_hidden_state[0].float() for prompt in prompts]
    for pooling in ("last", "mean", "all"):
        for _ in range(2):  # the second time prefixes are cached
            found = llm.embed(prompts, pooling=pooling, normalize=False)
            for prompt, one, hidden in zip(prompts, found, states, strict=True):
                wanted = {"last": hidden[-1], "mean": hidden.mean(0), "all": hidden}[pooling]
                assert one.prompt_token_ids == prompt
                far = (torch.tensor(one.values) - wanted).abs().max()
                assert far < 1e-4 * max(1.0, float(wanted.abs().max())), (pooling, len(prompt), float(far))

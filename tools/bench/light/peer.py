"""transformers' generate on a model of the same shape, in the same run."""

from __future__ import annotations

import time
from typing import Any

import torch

from light.machine import wait
from megatron_infer.models.loading.model_description import ModelDescription


def llama(plan: ModelDescription, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' LlamaForCausalLM of the plan's shape with random weights, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    parts = plan.transformer
    config = LlamaConfig(
        vocab_size=plan.vocab_size,
        hidden_size=parts["hidden_size"],
        intermediate_size=parts["ffn_hidden_size"],
        num_hidden_layers=parts["num_layers"],
        num_attention_heads=parts["num_attention_heads"],
        num_key_value_heads=parts["num_query_groups"],
        max_position_embeddings=plan.max_sequence_length,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


@torch.inference_mode()
def decode_seconds(model: Any, device: torch.device, *, batch: int, context: int, steps: int) -> float:
    """Seconds a decode step of generate takes: long answers less short ones, so that the prompt does not count."""
    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (batch, context), device=device)
    mask = torch.ones_like(ids)

    def taken(count: int) -> float:
        wait(device)
        begun = time.perf_counter()
        model.generate(
            ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        wait(device)
        return time.perf_counter() - begun

    taken(2)
    short, long = min(taken(2) for _ in range(2)), min(taken(2 + steps) for _ in range(2))
    return max(long - short, 1e-9) / steps

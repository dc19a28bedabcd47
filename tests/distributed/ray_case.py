"""A model for replicas on Ray, and what their answers are compared by."""

from __future__ import annotations


def save_model(path, seed=0):
    """A random Llama of two layers as a Hugging Face directory -> its path."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]

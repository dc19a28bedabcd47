"""Dimensions of models, for tests of sizes."""

from __future__ import annotations

from typing import Any

from megatron_infer.config.model_shape import ModelShape, StateShape

MAMBA_130M = StateShape(
    num_layers=24, conv_shape=(1792, 4), ssm_shape=(24, 64, 128), conv_dtype="float32", ssm_dtype="float32"
)
"""19,562,496 bytes a request."""


def model_shape(**changes: Any) -> ModelShape:
    """Four attention layers in bfloat16, 512 bytes of keys and values a token, but for `changes`."""
    shape = {
        "num_layers": 4,
        "num_attention_layers": 4,
        "num_query_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 8,
        "hidden_size": 32,
        "vocab_size": 128,
        "padded_vocab_size": changes.get("vocab_size", 128),
        "max_position": None,
        "kv_dtype_bytes": 2,
        "dtype": "bfloat16",
        "num_parameters": 100_000,
    }
    return ModelShape(**shape | changes)

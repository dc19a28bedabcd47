"""Token ids in the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids that end an output: end of sequence, of turn, of message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return tuple(dict.fromkeys(id for id in ids if id is not None))

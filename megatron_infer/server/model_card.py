"""What the HTTP process must know of a model, in a folder: its tokenizer, and the ids that end an answer."""

from __future__ import annotations

from typing import Any

from megatron_infer.errors import ModelError
from megatron_infer.text.tokenizer import Tokenizer


def write_card(model: str, folder: str) -> dict[str, Any]:
    """Write a model's tokenizer -> what `read_card` needs beside. Raises ModelError for a model that there is not."""
    from megatron_infer.model_loader.sources import open_source  # torch loads here

    source = open_source(model)
    try:
        tokenizer = source.tokenizer()
    except ModelError:
        return {"name": source.name, "eos_ids": None}
    tokenizer.save(folder)
    return {"name": source.name, "eos_ids": list(tokenizer.eos_ids)}


def read_card(folder: str, *, name: str, eos_ids: list[int] | None) -> Tokenizer | None:
    """The tokenizer in a folder; None where the model has none."""
    return None if eos_ids is None else Tokenizer.from_directory(folder, eos_ids=eos_ids, name=name)

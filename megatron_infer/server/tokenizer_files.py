"""The model's tokenizer as files, so that the HTTP process needs neither torch nor the model."""

from __future__ import annotations

from typing import Any

from megatron_infer.errors import ModelError
from megatron_infer.text.tokenizer import Tokenizer


def save_tokenizer(model: str, folder: str, chat_template: str | None = None) -> dict[str, Any]:
    """Write a model's tokenizer -> arguments of `load_tokenizer`. chat_template: goes before the model's own.

    Raises ModelError for an unknown model.
    """
    from megatron_infer.model_loader.sources import open_source, open_tokenizer  # imports torch

    try:
        tokenizer = open_tokenizer(model)
    except ModelError:
        return {"name": open_source(model).name, "eos_ids": None}
    if chat_template is not None:
        tokenizer.set_chat_template(chat_template)
    tokenizer.save(folder)
    return {"name": tokenizer.name, "eos_ids": list(tokenizer.eos_ids)}


def load_tokenizer(folder: str, *, name: str, eos_ids: list[int] | None) -> Tokenizer | None:
    """The tokenizer in `folder`; None for a model without one. eos_ids: tokens that end an output."""
    return None if eos_ids is None else Tokenizer.from_directory(folder, eos_ids=eos_ids, name=name)

"""The model's tokenizer as files, so that the HTTP process needs neither torch nor the model."""

from __future__ import annotations

import logging
from typing import Any

from megatron_infer.errors import ModelError
from megatron_infer.text.tokenizer import Tokenizer

log = logging.getLogger("megatron_infer.server")


def save_tokenizer(model: str, folder: str, chat_template: str | None = None) -> dict[str, Any]:
    """Write a model's tokenizer -> arguments of `load_tokenizer`. chat_template: goes before the model's own.

    A model without a readable tokenizer is served token ids alone, and the log says why. Raises ModelError for an
    unknown model, and for a chat_template beside no tokenizer.
    """
    from megatron_infer.models.loading.sources import open_source, open_tokenizer  # imports torch

    try:
        tokenizer = open_tokenizer(model)
    except ModelError as error:
        name = open_source(model).name
        if chat_template is not None:
            raise ModelError(f"chat_template goes with a tokenizer: {error}") from None
        log.warning("%s is served without a tokenizer, for token ids alone: %s", name, error)
        return {"name": name, "eos_ids": None}
    if chat_template is not None:
        tokenizer.set_chat_template(chat_template)
    tokenizer.save(folder)
    return {"name": tokenizer.name, "eos_ids": list(tokenizer.eos_ids)}


def load_tokenizer(folder: str, *, name: str, eos_ids: list[int] | None) -> Tokenizer | None:
    """The tokenizer in `folder`; None for a model without one. eos_ids: tokens that end an output."""
    return None if eos_ids is None else Tokenizer.from_directory(folder, eos_ids=eos_ids, name=name)

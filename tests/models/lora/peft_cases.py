"""Adapters of PEFT whose every factor is random, on tiny models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hf_models import random_model

DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_adapter(model: Any, targets: Any, *, seed: int = 1, **options: Any) -> Any:
    """The model under PEFT, with random factors; `save_pretrained` writes the adapter."""
    import peft

    options = {"r": 4, "lora_alpha": 8} | options
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, **options)).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    return wrapped


def saved(tmp_path: Path, kind: str, targets: Any, **options: Any) -> tuple[Path, Path, Any]:
    """(the base model's directory, the adapter's directory, the model under PEFT)."""
    model = random_model(kind)
    model.save_pretrained(tmp_path / "base")
    wrapped = with_adapter(model, targets, **options)
    wrapped.save_pretrained(tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter", wrapped

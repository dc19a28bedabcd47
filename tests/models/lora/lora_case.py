"""Models with an attached adapter whose factors are random."""

from __future__ import annotations

from typing import Any

import torch

from megatron_infer.models.lora.attach import AttachedLoRA, attach_lora

EVERY = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj")


def randomise(adapter: AttachedLoRA, *, std: float = 0.1, seed: int = 3) -> AttachedLoRA:
    """Values that do not depend on the parallel layout are those of the attach itself; these are for one rank."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return adapter


def with_lora(model: Any, *, rank: int = 4, **options: Any) -> AttachedLoRA:
    return randomise(attach_lora(model, rank=rank, alpha=6, **{"targets": EVERY} | options))

"""Random adapters for tiny models, loaded or attached, and what they compute: the model with them merged."""

from __future__ import annotations

from typing import Any

import torch

from megatron_infer.models.lora.adapter import Adapter, LoRAPair
from megatron_infer.models.lora.attach import AttachedLoRA, attach_lora

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj")


def random_adapter(
    model: Any, name: str = "a", *, rank: int = 4, seed: int = 0, scale: float = 1.0, targets: tuple[str, ...] = TARGETS
) -> Adapter:
    """Pairs for all linears of a whole model with these names, routed experts aside."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in targets and ".experts." not in path:
            out, width = module.weight.shape
            a = torch.randn(rank, width, generator=generator) / width**0.5
            b = torch.randn(out, rank, generator=generator) / rank**0.5
            pairs[path] = LoRAPair.of(a, b, scale)
    return Adapter(name, pairs)


def merged(model: Any, adapter: Adapter) -> Any:
    """The same model with the adapter added to its weights."""
    modules = dict(model.named_modules())
    with torch.no_grad():
        for path, pair in adapter.pairs.items():
            weight = modules[path].weight
            weight.copy_(weight.double() + pair.scale * pair.b.double() @ pair.a.double())
    return model


def randomise(adapter: AttachedLoRA, *, std: float = 0.1, seed: int = 3) -> AttachedLoRA:
    """Values that do not depend on the parallel layout are those of the attach itself; these are for one rank."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return adapter


def with_lora(model: Any, *, rank: int = 4, **options: Any) -> AttachedLoRA:
    return randomise(attach_lora(model, rank=rank, alpha=6, **{"targets": TARGETS} | options))

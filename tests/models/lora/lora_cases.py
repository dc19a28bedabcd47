"""Random adapters for tiny models, and what they compute by definition: the model with them merged."""

from __future__ import annotations

from typing import Any

import torch

from megatron_infer.models.lora.adapter import Adapter, LoRAPair

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
            pairs[path] = LoRAPair(a, b, scale)
    return Adapter(name, pairs)


def merged(model: Any, adapter: Adapter) -> Any:
    """The same model with the adapter added to its weights."""
    modules = dict(model.named_modules())
    with torch.no_grad():
        for path, pair in adapter.pairs.items():
            weight = modules[path].weight
            weight.copy_(weight.double() + pair.scale * pair.b.double() @ pair.a.double())
    return model

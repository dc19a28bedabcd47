"""The full forward of a built GPTModel, as training runs it: no cache, no paging."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def full_logits(model: nn.Module, ids: list[int]) -> Tensor:
    """[len(ids), padded vocabulary] in fp32."""
    tokens = torch.tensor([ids])
    positions = torch.arange(len(ids))[None]
    with torch.inference_mode():
        return model(tokens, positions, None)[0].float()

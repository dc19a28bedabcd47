"""Pairs in adapter slots, tokens of them, and the product as it is defined."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_infer.kernels.lora import LoRAWeights

CPU = torch.device("cpu")
SHAPES = ((64, 96, 16), (50, 70, 5), (33, 31, 1), (576, 192, 64))
"""(inputs, outputs, largest rank)"""


def case(width_in, width_out, max_rank, dtype, num_tokens=23, seed=0, device=CPU):
    """Four slots: the largest rank, rank 1, half of it, and one without a pair."""
    generator = torch.Generator().manual_seed(seed)
    weights = LoRAWeights.empty(4, max_rank, width_in, width_out, dtype=dtype, device=device)
    for slot, rank in enumerate((max_rank, 1, max(1, max_rank // 2))):
        a = torch.randn(rank, width_in, generator=generator) / width_in**0.5
        b = torch.randn(rank, width_out, generator=generator) / rank**0.5
        if rank == max_rank:  # block-diagonal, as of queries, keys and values with an A each
            third = width_out // 3
            b[: rank // 2, third : 2 * third] = b[rank // 2 :, :third] = b[:, 2 * third :] = 0
        weights.put(slot, weights.pack([(a, b.T, None)]), 2.0 / (slot + 1))
    x = torch.randn(num_tokens, width_in, generator=generator).to(device, dtype)
    y = torch.randn(num_tokens, width_out, generator=generator).to(device, dtype)
    slots = torch.randint(-1, 4, (num_tokens,), dtype=torch.int32, generator=generator).to(device)
    return weights, x, y, slots


def reference_product(y_TW: Tensor, x_TX: Tensor, slot_T: Tensor, weights: LoRAWeights) -> Tensor:
    """The same by definition: one token after the other, in float64, rounded once."""
    out_TW = y_TW.clone()
    for token, slot in enumerate(slot_T.tolist()):
        if slot >= 0 and (rank := int(weights.rank_S[slot])):
            h_R = weights.a_SRX[slot, :rank].double() @ x_TX[token].double()
            added_W = weights.b_SRW[slot, :rank].double().T @ h_R
            out_TW[token] = (y_TW[token].double() + weights.scale_S[slot].double() * added_W).to(y_TW.dtype)
    return out_TW

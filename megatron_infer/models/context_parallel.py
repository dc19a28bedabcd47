"""Sequences divided over context-parallel ranks: megatron-core's order of positions, and all of them again.

A sequence has 2 * size equal parts; rank r has parts r and 2 * size - 1 - r, so that causal attention costs every rank
the same. Example: size 2, 8 positions: rank 0 has 0 1 6 7, rank 1 has 2 3 4 5.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def positions_of(rank: int, size: int, length: int) -> Tensor:
    """The positions of a rank of `size` in a sequence of `length`, int64 [length / size] on the CPU.

    Raises ValueError unless the sequence has 2 * size equal parts.
    """
    if length % (2 * size):
        raise ValueError(f"{length} positions over {size} context-parallel ranks; give a multiple of {2 * size}")
    parts = torch.arange(length).view(2 * size, -1)
    return parts[[rank, 2 * size - 1 - rank]].flatten()


def take_own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's positions of a tensor whose first dimension is all positions."""
    return x.index_select(0, positions_of(group.rank(), group.size(), len(x)).to(x.device))


def gather_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A tensor of this rank's positions (first dimension) -> of all positions, in order. Every rank of the group calls
    it; gradients are summed over the ranks."""
    out: Tensor = _GatheredPositions.apply(x, group)
    return out


class _GatheredPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts).index_select(0, _places(group.size(), len(x)).to(x.device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return take_own(whole, ctx.group), None


def _places(size: int, own: int) -> Tensor:
    """Where each position is when the ranks' parts are laid end to end."""
    order = torch.cat([positions_of(rank, size, size * own) for rank in range(size)])
    return order.argsort()


def gather_chosen(own_Q: Tensor, places_Q: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """Numbers that the ranks have at places of their own -> [size], on every rank.

    The gradient is `group.size()` times that of this rank's numbers, because DDP then averages over the ranks.
    """
    out: Tensor = _GatheredChosen.apply(own_Q, places_Q, size, group)
    return out


class _GatheredChosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_Q: Tensor, places_Q: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places_Q)
        ctx.num_ranks = group.size()
        whole_P = own_Q.new_zeros(size).index_copy(0, places_Q, own_Q)
        dist.all_reduce(whole_P, group=group)
        return whole_P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (places_Q,) = ctx.saved_tensors
        return grads[0].index_select(0, places_Q) * ctx.num_ranks, None, None, None

"""Sums and gathers over ranks: the one place where the lean path meets a process group.

Legend: T tokens, X any width, n ranks.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.kernels.symmetric_allreduce import SymmetricSum, connect

log = logging.getLogger("megatron_infer")

ONE_SHOT_BYTES = 1 << 17
"""Up to this size each rank takes everyone's parts and adds them up itself: one round instead of two."""


class Reducer:
    """Collectives of one group; every rank gets the same bits, and an element's bits do not depend on its place.

    A ring adds up the parts of different stretches of a tensor in different orders, so that a token's sum would depend
    on which others share its step. On a CPU parts are added in order of rank, in fp32. (Two parts have one order only.)
    On GPUs small tensors go through symmetric memory, in order of rank, and the others through NCCL, in its own.
    """

    __slots__ = ("_small", "group", "rank", "size")

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self._small: dict[torch.dtype, SymmetricSum | None] = {}
        """What adds up small tensors of a dtype on a GPU; None: they go through the group as well."""

    @classmethod
    def of(cls, group: Any) -> Reducer | None:
        """None where there is nobody to talk to: no group, or one rank."""
        return None if group is None or group.size() == 1 else cls(group)

    def members(self) -> list[int]:
        """Global ranks of the group, in order."""
        return sorted(dist.get_process_group_ranks(self.group))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks; x is given up, and may be what comes back.

        Its gradient is the same on every rank: what follows is computed by all of them alike.
        """
        return _Sum.apply(self, x) if _recorded(x) else self.sum_of(x)

    def spread(self, x: Tensor) -> Tensor:
        """x itself, the same on all ranks and on the way to each one's own part of a weight: gradients are added up."""
        return _Spread.apply(self, x) if _recorded(x) else x

    def sum_of(self, x: Tensor) -> Tensor:
        """`all_reduce` without autograd."""
        if self.size > 2 and x.device.type == "cpu":
            return self._sum_in_order(x)
        small = self._small_sums(x) if x.device.type == "cuda" else None
        if small is not None and small.takes(x):
            return small.sum_of(x)
        dist.all_reduce(x, group=self.group)
        return x

    def _small_sums(self, x: Tensor) -> SymmetricSum | None:
        """Connected when a dtype is first summed, by all ranks alike; a graph is captured after that."""
        if x.dtype not in self._small:
            self._small[x.dtype], reason = connect(self.group, x.dtype, x.device)
            if reason:
                log.info("sums of %s over %d ranks go through the process group: %s", x.dtype, self.size, reason)
        return self._small[x.dtype]

    def all_gather(self, x_TX: Tensor) -> Tensor:
        """Everyone's columns side by side, in order of rank -> [T, n * X].

        Each rank goes on with parts of its own: gradients are added up. Where all go on alike, `whole`.
        """
        return self.spread(self.whole(x_TX))

    def whole(self, x_TX: Tensor) -> Tensor:
        """As `all_gather`, for what every rank computes alike from it: the gradient of a rank's columns is its own."""
        return _Gather.apply(self, x_TX) if _recorded(x_TX) else self.columns_of(x_TX)

    def columns_of(self, x_TX: Tensor) -> Tensor:
        """`all_gather` without autograd."""
        parts = [torch.empty_like(x_TX) for _ in range(self.size)]
        dist.all_gather(parts, x_TX.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def _sum_in_order(self, x: Tensor) -> Tensor:
        flat = x.contiguous().view(-1)
        if flat.nbytes <= ONE_SHOT_BYTES:
            parts = [torch.empty_like(flat) for _ in range(self.size)]
            dist.all_gather(parts, flat, group=self.group)
            return _sum(parts).view(x.shape)
        share = -(-flat.numel() // self.size)
        padded = torch.nn.functional.pad(flat, (0, share * self.size - flat.numel()))
        mine = torch.empty_like(padded)
        dist.all_to_all_single(mine, padded, group=self.group)
        parts = [torch.empty_like(mine[:share]) for _ in range(self.size)]
        dist.all_gather(parts, _sum(list(mine.split(share))), group=self.group)
        return torch.cat(parts)[: flat.numel()].view(x.shape)


def _recorded(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reducer: Reducer, x: Tensor) -> Tensor:
        return reducer.sum_of(x.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reducer: Reducer, x: Tensor) -> Tensor:
        ctx.reducer = reducer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, ctx.reducer.sum_of(grads[0].clone(memory_format=torch.contiguous_format))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reducer: Reducer, x: Tensor) -> Tensor:
        ctx.reducer = reducer
        return reducer.columns_of(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0].chunk(ctx.reducer.size, dim=-1)[ctx.reducer.rank]


def _sum(parts: list[Tensor]) -> Tensor:
    """From the first part to the last, in fp32 at least."""
    dtype = parts[0].dtype
    total = parts[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)

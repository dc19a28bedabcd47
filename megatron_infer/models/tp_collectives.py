"""Sums, gathers and exchanges over ranks: the only collectives in a model's layers.

Legend: T tokens of this rank, P tokens that all ranks send to this one, X any width, n ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.kernels.symmetric_allreduce import SymmetricSum, connect

log = logging.getLogger("megatron_infer")

ONE_SHOT_BYTES = 1 << 17
"""Up to this size each rank gathers all parts and adds them itself: one round instead of two."""
SPARED_BYTES = 1 << 18
"""A token goes only where it is needed if that spares a rank so many bytes: the ranks exchange numbers of tokens first.
Between two gloo processes of one machine the numbers take 90 us, and so many bytes 80 us."""


_REDUCERS: WeakValueDictionary[int, Reducer] = WeakValueDictionary()


class Reducer:
    """Collectives of one group; every rank gets the same bits, and an element's bits do not depend on its place.

    A ring adds the parts of different ranges of a tensor in different orders, so that a token's sum would depend on the
    other tokens of the step. On a CPU parts are added in order of rank, in fp32. (Two parts have one order only.) On
    GPUs tensors up to a few MiB are summed through symmetric memory, in order of rank, and the others by NCCL, in its
    own order.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self._small: dict[torch.dtype, SymmetricSum | None] = {}
        """What sums small tensors of a dtype on a GPU; None: the process group does."""

    @classmethod
    def of(cls, group: Any) -> Reducer | None:
        """The one of this group, so that layers share its memory; None where there is no other rank: no group, or a
        group of one."""
        if group is None or group.size() == 1:
            return None
        if (known := _REDUCERS.get(id(group))) is None:  # a reducer keeps its group alive, and the number its own
            known = _REDUCERS[id(group)] = cls(group)
        return known

    @property
    def shared_buffers(self) -> list[Tensor]:
        """Symmetric memory of the small sums made so far, one for each dtype."""
        return [one.shared for one in self._small.values() if one is not None]

    def members(self) -> list[int]:
        """Global ranks of the group, in order."""
        return sorted(dist.get_process_group_ranks(self.group))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks; may overwrite and return x.

        The gradient is the same on every rank, as all ranks compute the same from the sum.
        """
        return _Sum.apply(self, x) if _recorded(x) else self.sum_of(x)

    def spread(self, x: Tensor) -> Tensor:
        """x itself, equal on all ranks, before each rank multiplies it by its own part of a weight: sums gradients."""
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
        """Connects on the first sum of a dtype, which all ranks reach together and before any graph is captured."""
        if x.dtype not in self._small:
            self._small[x.dtype], reason = connect(self.group, x.dtype, x.device)
            if reason:
                log.info("sums of %s over %d ranks go through the process group: %s", x.dtype, self.size, reason)
        return self._small[x.dtype]

    def all_gather(self, x_TX: Tensor) -> Tensor:
        """The columns of all ranks side by side, in order of rank -> [T, n * X].

        Sums gradients, for ranks that compute different things from the result; for ranks that compute the same, see
        `whole`.
        """
        return self.spread(self.whole(x_TX))

    def whole(self, x_TX: Tensor) -> Tensor:
        """`all_gather` for ranks that compute the same from the result: a rank's gradient is that of its columns."""
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


class TokenExchange:
    """Sends each rank's tokens to the ranks that need them and adds up what they answer. Without autograd.

    Every rank of the group calls it in each layer of a step, with or without tokens.
    """

    def __init__(self, group: Any, *, tp: Reducer | None = None) -> None:
        """tp: ranks with the same tokens, among which the sums are added up afterwards. Those of them that are in the
        group each ask a part of it. Example: ranks 0 to 3, tp 0 and 1, 2 and 3: rank 0 asks 0 and 2, rank 1 the others.
        """
        self.group, self.rank, self.size = group, group.rank(), group.size()
        same = 1 if tp is None else len(set(tp.members()) & set(dist.get_process_group_ranks(group)))
        self.asked = [rank % same == self.rank % same for rank in range(self.size)]
        """The ranks that this one sends tokens to, which are those that it gets tokens from."""

    def summed(
        self,
        row_TX: Tensor,
        needed_Tn: Tensor | None,
        counts: Sequence[int],
        answer: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The sum over the ranks of `answer` for each row -> as many rows of the width and dtype of the answers.

        row_TX: uint8, contiguous. needed_Tn: bool, the ranks that a row goes to, the others answer zeros; None: all.
        counts: rows of each rank, known to all ranks. answer([P, X]) -> [P, Y]: rows of all ranks, in order of rank.
        An element's bits do not depend on its place: answers are added in order of rank, in fp32.
        """
        if needed_Tn is None:
            sent_PX = row_TX.repeat(sum(self.asked), 1)
            sends = [len(row_TX) if is_asked else 0 for is_asked in self.asked]
            receives = [count if is_asked else 0 for count, is_asked in zip(counts, self.asked, strict=True)]
            places_P = None
        else:
            needed_Tn = needed_Tn & torch.tensor(self.asked, device=needed_Tn.device)
            rank_P, places_P = needed_Tn.t().nonzero().unbind(1)
            sent_PX = row_TX.index_select(0, places_P)
            number_n = torch.bincount(rank_P, minlength=self.size)
            other_n = torch.empty_like(number_n)
            dist.all_to_all_single(other_n, number_n, group=self.group)
            sends, receives = torch.stack([number_n, other_n]).tolist()
        answer_PY = answer(self._moved(sent_PX, sends, receives))
        parts = self._moved(answer_PY, receives, sends).split(sends)
        if places_P is None:
            return _sum([part for part, is_asked in zip(parts, self.asked, strict=True) if is_asked])
        total_TY = answer_PY.new_zeros(
            len(row_TX), answer_PY.shape[1], dtype=torch.promote_types(answer_PY.dtype, torch.float32)
        )
        for part_PY, places in zip(parts, places_P.split(sends), strict=True):
            total_TY.index_add_(0, places, part_PY.to(total_TY.dtype))
        return total_TY.to(answer_PY.dtype)

    def _moved(self, row_PX: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """The first sends[0] rows to the first rank, and so on -> rows of all ranks, in order of rank."""
        out = row_PX.new_empty(sum(receives), row_PX.shape[1])
        dist.all_to_all_single(out, row_PX.contiguous(), receives, sends, group=self.group)
        return out


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
    """The sum from the first part to the last, in fp32 at least."""
    dtype = parts[0].dtype
    total = parts[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)

"""Products of LoRA adapters: y + scale * B(A x), for each token with its own adapter. Any device, in torch.

The product comes after a linear's own, whose weight is not touched. A step with adapters calls `plan` once and `run`
for each linear. Legend: T tokens, X and W widths of a linear, S adapter slots, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

PackedPair = tuple[Tensor, ...]
"""A and B of one linear as a backend's `AdapterPairs` take them."""
PairBlock = tuple[Tensor, Tensor, Tensor | None]
"""Some ranks of a pair: their A [r, X], their B [n, r], and int32 [n]: which rows of the linear B has; None: all. The
other rows have no entries of these ranks. The ranks of a pair are those of its blocks, one behind the other;
their As have one dtype, and their Bs."""


def dense(blocks: Sequence[PairBlock], width_out: int) -> tuple[Tensor, Tensor]:
    """A [R, X] and B [W, R] of a pair."""
    (a_RX, b_WR, rows), *others = blocks
    if rows is None and not others:
        return a_RX, b_WR
    a_RX = torch.cat([a for a, _, _ in blocks])
    b_WR, first = b_WR.new_zeros(width_out, len(a_RX)), 0
    for a, b, rows in blocks:
        b_WR[slice(None) if rows is None else rows.long(), first : first + len(a)] = b
        first += len(a)
    return a_RX, b_WR


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are. Their sum, which is infinite or NaN if a number is, is read faster than each."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


class AdapterPairs(Protocol):
    """The pairs of all adapter slots for one linear, this rank's part of them."""

    @property
    def num_pairs(self) -> int:
        """Slots that have one. A step that is not captured skips a linear without any."""
        ...

    def put(self, slot: int, pair: PackedPair, scale: float) -> None:
        """Make a slot add scale * B(A x), whatever it added before."""
        ...

    def clear(self, slot: int) -> None:
        """Make a slot add nothing."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class LoRAWeights:
    """`AdapterPairs` as tensors of all slots, which keep their addresses."""

    a_SRX: Tensor
    """Rows behind a slot's rank are zero."""
    b_SRW: Tensor
    """B transposed; rows behind a slot's rank are zero."""
    rank_S: Tensor
    """int32; 0: the slot's adapter has no pair for this linear."""
    scale_S: Tensor
    """fp32."""
    ranks: list[int]
    """`rank_S` on the host: reading that one would wait for the device."""

    @classmethod
    def empty(
        cls, num_slots: int, max_rank: int, width_in: int, width_out: int, *, dtype: torch.dtype, device: torch.device
    ) -> LoRAWeights:
        return cls(
            a_SRX=torch.zeros(num_slots, max_rank, width_in, dtype=dtype, device=device),
            b_SRW=torch.zeros(num_slots, max_rank, width_out, dtype=dtype, device=device),
            rank_S=torch.zeros(num_slots, dtype=torch.int32, device=device),
            scale_S=torch.zeros(num_slots, dtype=torch.float32, device=device),
            ranks=[0] * num_slots,
        )

    @property
    def num_pairs(self) -> int:
        return len(self.ranks) - self.ranks.count(0)

    def pack(self, blocks: Sequence[PairBlock]) -> PackedPair | None:
        """(A, B transposed), on the host; see `LoRABackend.pack`."""
        a_RX, b_WR = dense(blocks, self.b_SRW.shape[2])
        packed = tuple(torch.empty(t.shape, dtype=self.a_SRX.dtype).copy_(t) for t in (a_RX, b_WR.T))
        return packed if all(map(is_finite, packed)) else None

    def put(self, slot: int, pair: PackedPair, scale: float) -> None:
        a_RX, b_RW = pair
        self.clear(slot)
        rank = len(a_RX)
        self.a_SRX[slot, :rank].copy_(a_RX)
        self.b_SRW[slot, :rank].copy_(b_RW)
        self.scale_S[slot] = scale
        self.rank_S[slot] = self.ranks[slot] = rank

    def clear(self, slot: int) -> None:
        if rank := self.ranks[slot]:
            self.a_SRX[slot, :rank] = 0
            self.b_SRW[slot, :rank] = 0
            self.rank_S[slot] = self.ranks[slot] = 0


class LoRABackend(Protocol):
    """Adds adapters' products to a linear's own."""

    name: str
    graph_safe: bool
    """As `AttentionBackend.graphs`: `plan` and `run` may be captured, the slots being read when the step runs."""

    def pairs(
        self, num_slots: int, max_rank: int, width_in: int, width_out: int, *, dtype: torch.dtype, device: torch.device
    ) -> AdapterPairs:
        """For one linear, without any pair; `run` takes them."""
        ...

    def pack(self, given: Sequence[tuple[Any, Sequence[PairBlock]]]) -> list[PackedPair | None]:
        """Copies of pairs of rank 1 or more, each for the `put` of the `pairs()` beside it; from any thread.

        None: numbers are not finite in the linear's dtype."""
        ...

    def plan(self, slot_T: Tensor) -> None:
        """Called once a step, before the first layer. slot_T: int32 slot of each token's adapter, -1: none."""
        ...

    def run(self, y_TW: Tensor, x_TX: Tensor, pairs: Any) -> Tensor:
        """y + scale * B(A x) -> y, overwritten. Sums are fp32, rounded once; tokens without adapter are not changed."""
        ...


class TorchLoRA:
    """Two products with the matrices of all slots, masked between them: work grows with the number of slots."""

    name = "torch"
    graph_safe = True

    _slot_T1: Tensor

    def __init__(self) -> None:
        self._columns: dict[tuple[int, int], Tensor] = {}

    def pairs(
        self, num_slots: int, max_rank: int, width_in: int, width_out: int, *, dtype: torch.dtype, device: torch.device
    ) -> LoRAWeights:
        return LoRAWeights.empty(num_slots, max_rank, width_in, width_out, dtype=dtype, device=device)

    def pack(self, given: Sequence[tuple[LoRAWeights, Sequence[PairBlock]]]) -> list[PackedPair | None]:
        return [weights.pack(blocks) for weights, blocks in given]

    def plan(self, slot_T: Tensor) -> None:
        self._slot_T1 = slot_T.unsqueeze(1)

    def run(self, y_TW: Tensor, x_TX: Tensor, weights: LoRAWeights) -> Tensor:
        num_slots, max_rank, _ = weights.a_SRX.shape
        h_TC = x_TX.float() @ weights.a_SRX.flatten(0, 1).float().T
        own_TC = self._slot_of_column(num_slots, max_rank, x_TX.device) == self._slot_T1
        h_TC = torch.where(own_TC, h_TC * weights.scale_S.repeat_interleave(max_rank), 0.0)
        added_TW = h_TC @ weights.b_SRW.flatten(0, 1).float()
        return y_TW.copy_(torch.where(self._slot_T1 >= 0, y_TW.float() + added_TW, y_TW.float()))

    def _slot_of_column(self, num_slots: int, max_rank: int, device: torch.device) -> Tensor:
        key = (num_slots, max_rank)
        if key not in self._columns:
            self._columns[key] = torch.arange(num_slots, device=device).repeat_interleave(max_rank)
        return self._columns[key]

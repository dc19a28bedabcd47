"""Which tokens a step's rows may draw, as bits made on the host; applied on the device, by a table of 256 bytes.

Legend: S sampled positions, G those with a mask, W words of 32 tokens, M rows of a draw group, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from megatron_infer.runner.sampling.row_params import RowFlags
from megatron_infer.runner.sampling.upload import Upload


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of a step; entry g belongs to sampled position index[g]."""

    index: np.ndarray
    """Ascending: every position whose row has RowFlags.GRAMMAR."""
    bits_GW: np.ndarray
    """int32: token t is allowed where bit t % 32 of word t // 32 is set."""

    def take(self, places: np.ndarray) -> TokenMasks:
        """The masks of positions `places` (ascending), which are numbered from 0 in the result."""
        own = np.isin(self.index, places)
        return TokenMasks(np.searchsorted(places, self.index[own]), self.bits_GW[own])


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows of a draw group that are masked, and the masks of the step that apply to them."""

    rows_G: Tensor | None
    """Places in M; None: all of them, in order."""
    masks: np.ndarray | None
    """Places in the step's G; None: all of them, in order."""

    @classmethod
    def of(cls, flags: np.ndarray, places: np.ndarray, stage: Upload) -> MaskedRows:
        """flags: the step's [S]; places: the group's positions."""
        masked = np.flatnonzero(flags & RowFlags.GRAMMAR)
        own = np.flatnonzero(flags[places] & RowFlags.GRAMMAR)
        return cls(
            None if len(own) == len(places) else stage(own),
            None if len(own) == len(masked) else np.searchsorted(masked, places[own]),
        )

    def apply(self, work_MV: Tensor, masks: TokenMasks, stage: Upload, forbid: Forbid) -> None:
        """Set what is not allowed to -inf."""
        bits = masks.bits_GW if self.masks is None else masks.bits_GW[self.masks]
        assert bits.shape[1] * 32 >= work_MV.shape[1], f"{bits.shape[1] * 32} bits for {work_MV.shape[1]} tokens"
        forbid(work_MV, stage(bits), self.rows_G)


Forbid = Callable[[Tensor, Tensor, Tensor | None], None]
"""forbid(work_MV, bits_GW, rows_G): -inf, in place, where the row's bit is not set; rows_G None: all rows, in order."""


def forbid(work_MV: Tensor, bits_GW: Tensor, rows_G: Tensor | None) -> None:
    """`Forbid` in torch: adds what a table holds for every byte."""
    forbidden_GV = _table(work_MV.device)[bits_GW.view(torch.uint8).int()].flatten(1)[:, : work_MV.shape[1]]
    if rows_G is None:
        work_MV.add_(forbidden_GV)
    else:
        work_MV.index_add_(0, rows_G, forbidden_GV)


@lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    """fp32 [256, 8]: what the bits of a byte forbid."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    return torch.zeros(256, 8).masked_fill(bits == 0, -torch.inf).to(device)

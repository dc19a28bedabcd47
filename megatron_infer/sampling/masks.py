"""Which tokens a step's rows may draw, as bits made on the host; applied on the device by a table of 256 bytes.

Legend: S sampled positions, G those with a mask, W words of 32 tokens, M rows of a lane, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from megatron_infer.sampling.params import Wants


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of a step; entry g belongs to sampled position index[g]."""

    index: np.ndarray
    """Ascending: every position whose row has Wants.GRAMMAR."""
    bits_GW: np.ndarray
    """int32: token t is allowed where bit t % 32 of word t // 32 is set."""

    def take(self, places: np.ndarray) -> TokenMasks:
        """Those of some of the positions, ascending, numbered as in `places`."""
        own = np.isin(self.index, places)
        return TokenMasks(np.searchsorted(places, self.index[own]), self.bits_GW[own])


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """A lane's rows that are masked, and by which of the step's masks."""

    rows_G: Tensor | None
    """None: all of them, in order."""
    masks: np.ndarray | None

    @classmethod
    def of(cls, flags: np.ndarray, places: np.ndarray, device: torch.device) -> MaskedRows:
        """flags: the step's [S]; places: the lane's."""
        everyone = np.flatnonzero(flags & Wants.GRAMMAR)
        own = np.flatnonzero(flags[places] & Wants.GRAMMAR)
        return cls(
            None if len(own) == len(places) else torch.from_numpy(own).to(device),
            None if len(own) == len(everyone) else np.searchsorted(everyone, places[own]),
        )

    def apply(self, work_MV: Tensor, masks: TokenMasks) -> None:
        """-inf for what is not allowed."""
        bits = masks.bits_GW if self.masks is None else masks.bits_GW[self.masks]
        forbidden_GV = forbidden(bits, work_MV.shape[1], work_MV.device)
        if self.rows_G is None:
            work_MV.add_(forbidden_GV)
        else:
            work_MV.index_add_(0, self.rows_G, forbidden_GV)


def forbidden(bits_GW: np.ndarray, vocab_size: int, device: torch.device) -> Tensor:
    """fp32 [G, V]: 0 where the bit is set, else -inf."""
    bytes_GB = torch.from_numpy(bits_GW.view(np.uint8)).to(device, non_blocking=True)
    assert bytes_GB.shape[1] * 8 >= vocab_size, f"{bytes_GB.shape[1] * 8} bits for {vocab_size} tokens"
    return _table(device)[bytes_GB.int()].flatten(1)[:, :vocab_size]


@lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    """fp32 [256, 8]: what the bits of a byte forbid."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    return torch.zeros(256, 8).masked_fill(bits == 0, -torch.inf).to(device)

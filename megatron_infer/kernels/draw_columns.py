"""The parameters of each request row for a draw on the device, and its results: the layout that kernels share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag

import torch
from torch import Tensor


class Column(IntEnum):
    """Rows of the table, int64 [column, row]. The first four are those of `DrawParams.columns_5M` in
    runner/sampling/filters.py; they and TEMPERATURE hold the bits of a float64."""

    INVERSE = 0
    """1 / temperature; 0: greedy."""
    TOP_K = 1
    """V where the filter is off."""
    TOP_P = 2
    MIN_P = 3
    TEMPERATURE = 4
    """1 in a greedy row."""
    STREAM = 5
    """The bits of `rng.mix(seed)`."""
    ASKS = 6
    """`Asks`."""


class Asks(IntFlag):
    """What a row needs from a draw besides its token."""

    RAW = 1
    """The token's log probability under the model's logits."""
    OWN = 2
    """The token's log probability under the distribution that it was drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRoom:
    """The results of draws, [S] each; results that a row did not ask for are undefined."""

    tokens: Tensor
    """int64; 0 where `bad`."""
    bad: Tensor
    """bool: the row had nothing to draw from."""
    raw: Tensor
    """fp32: see Asks.RAW."""
    own: Tensor
    """fp32: see Asks.OWN; in a greedy row, at temperature 1."""
    top: Tensor
    """fp32: the row's largest logit."""
    cut_logit: Tensor
    """fp32, with cut_id (int64): the last candidate that the filters kept; (-inf, V): they cut none."""
    cut_id: Tensor
    mass: Tensor
    """int64: the sum of the weights of the row's logits at temperature 1 where the draw computed it, else 0."""

    @staticmethod
    def make(num_rows: int, device: torch.device) -> DrawRoom:
        tokens, cut_id, mass = torch.zeros((3, num_rows), dtype=torch.int64, device=device)
        raw, own, top, cut_logit = torch.zeros((4, num_rows), dtype=torch.float32, device=device)
        bad = torch.zeros(num_rows, dtype=torch.bool, device=device)
        return DrawRoom(
            tokens=tokens, bad=bad, raw=raw, own=own, top=top, cut_logit=cut_logit, cut_id=cut_id, mass=mass
        )

    def first(self, count: int) -> DrawRoom:
        """The results of the first `count` rows."""
        return DrawRoom(**{one.name: getattr(self, one.name)[:count] for one in fields(self)})

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, one.name).nbytes for one in fields(self))

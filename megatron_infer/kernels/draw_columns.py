"""The parameters of each request row for a draw on the device, and its results: the layout that kernels share.

columns [column, row] int64 (some hold the bits of a float64)     lists [row, LISTED] int64: value bits << 32 | id
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag

import torch
from torch import Tensor

LISTED = 1024
"""Most ids in one row's biases, allowed, bad and stop ids together; rows with more are drawn outside of graphs."""


class Column(IntEnum):
    """Rows of the table. The first four are those of `DrawParams.columns_5M` in runner/sampling/filters.py."""

    INVERSE = 0
    """float64: 1 / temperature; 0: greedy."""
    TOP_K = 1
    """float64; V where the filter is off."""
    TOP_P = 2
    MIN_P = 3
    TEMPERATURE = 4
    """float64; 1 in a greedy row."""
    REPETITION = 5
    PRESENCE = 6
    FREQUENCY = 7
    """REPETITION, PRESENCE and FREQUENCY are float64."""
    STREAM = 8
    """The bits of `rng.mix(seed)`."""
    ASKS = 9
    """`Asks`."""
    PROMPT_LEN = 10
    MIN_TOTAL = 11
    """Length of the sequence below which stop ids are masked."""
    BIASED = 12
    """End of the biased ids in the row's list; they are ascending."""
    ALLOWED = 13
    BAD = 14
    STOP = 15
    """Ends of the allowed, bad and stop ids; each run begins at the end of the one before."""


class Asks(IntFlag):
    """What a row needs from a draw beside the filters of its token."""

    PENALTY = 1
    EDIT = 2
    """Bias, allowed or bad ids."""
    MIN_TOKENS = 4
    ALLOWED = 8
    """The row has a list of allowed ids, maybe an empty one."""
    RAW = 16
    """The token's log probability under the model's logits."""
    OWN = 32
    """The token's log probability under the distribution that it was drawn from."""
    RANK = 64
    """The token's rank in the model's distribution."""
    OWN_RANK = 128
    """Its rank in the distribution that it was drawn from."""


class Mark(IntEnum):
    """Bits of an id's mark while a row's logits are edited; the bits from DRAWN on count drawn tokens."""

    SEEN = 1
    """The id is in the prompt."""
    ALLOWED = 2
    BANNED = 4
    DRAWN = 8
    """Added once for each time that the id was drawn."""


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
    rank: Tensor
    """int64: see Asks.RANK and OWN_RANK."""
    top: Tensor
    """fp32: the row's largest logit, after edits."""
    cut_logit: Tensor
    """fp32, with cut_id (int64): the last candidate that the filters kept; (-inf, V): they cut none."""
    cut_id: Tensor
    mass: Tensor
    """int64: the sum of the weights of the model's logits at temperature 1 where the draw computed it, else 0."""

    @staticmethod
    def make(num_rows: int, device: torch.device) -> DrawRoom:
        tokens, rank, cut_id, mass = torch.zeros((4, num_rows), dtype=torch.int64, device=device)
        raw, own, top, cut_logit = torch.zeros((4, num_rows), dtype=torch.float32, device=device)
        bad = torch.zeros(num_rows, dtype=torch.bool, device=device)
        return DrawRoom(
            tokens=tokens,
            bad=bad,
            raw=raw,
            own=own,
            rank=rank,
            top=top,
            cut_logit=cut_logit,
            cut_id=cut_id,
            mass=mass,
        )

    def first(self, count: int) -> DrawRoom:
        """The results of the first `count` rows."""
        return DrawRoom(**{one.name: getattr(self, one.name)[:count] for one in fields(self)})

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, one.name).nbytes for one in fields(self))

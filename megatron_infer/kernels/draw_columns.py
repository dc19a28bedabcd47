"""What a draw on the device is told of each request row, and what it leaves: shared by the sampler and its backends.

columns [column, row] int64 (some hold the bits of a float64)     lists [row, LISTED] int64: value bits << 32 | id
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag

import torch
from torch import Tensor

LISTED = 1024
"""Ids that one row's bias, allowed, bad and stop ids may be in all; rows with more are drawn outside of graphs."""


class Column(IntEnum):
    """Rows of the table. The first four are those of `filters.DrawParams.columns_5M`."""

    INVERSE = 0
    """float64: 1 / temperature; 0: greedy."""
    TOP_K = 1
    """float64; V when off."""
    TOP_P = 2
    MIN_P = 3
    TEMPERATURE = 4
    """float64; 1 of a greedy row."""
    REPETITION = 5
    PRESENCE = 6
    FREQUENCY = 7
    """float64, as the two before it."""
    STREAM = 8
    """The bits of `rng.mix(seed)`."""
    ASKS = 9
    """`Asks`."""
    PROMPT_LEN = 10
    MIN_TOTAL = 11
    """Sequence length below which stop ids are masked."""
    BIASED = 12
    """Where in the row's list its biased ids end, which are ascending."""
    ALLOWED = 13
    BAD = 14
    STOP = 15
    """Where the allowed, bad and stop ids end, each beginning where those before it end."""


class Asks(IntFlag):
    """What a row wants of a draw beside its token's filters."""

    PENALTY = 1
    EDIT = 2
    """Bias, allowed or bad ids."""
    MIN_TOKENS = 4
    ALLOWED = 8
    """There is a list of allowed ids, maybe an empty one."""
    RAW = 16
    """The token's log probability as the model has it."""
    OWN = 32
    """The one under the distribution that it was drawn from."""
    RANK = 64
    """The token's rank in the model's distribution."""
    OWN_RANK = 128
    """Its rank in the one it was drawn from."""


class Mark(IntEnum):
    """Bits of an id's mark while a row's logits are edited; what lies above them counts drawn tokens."""

    SEEN = 1
    """In the prompt."""
    ALLOWED = 2
    BANNED = 4
    DRAWN = 8
    """Added for each time that the id was drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRoom:
    """Where draws leave what they find, [S] each; what nobody asked for is whatever it was."""

    tokens: Tensor
    """int64; 0 where bad."""
    bad: Tensor
    """bool: the row had nothing to draw from."""
    raw: Tensor
    """fp32: see Asks.RAW."""
    own: Tensor
    """fp32: see Asks.OWN; of a greedy row, as at temperature 1."""
    rank: Tensor
    """int64: see Asks.RANK and OWN_RANK."""
    top: Tensor
    """fp32: the row's largest logit, after edits."""
    cut_logit: Tensor
    """fp32, with cut_id (int64): the last candidate that the filters kept; (-inf, V): nothing was cut."""
    cut_id: Tensor
    mass: Tensor
    """int64: the sum of the weights of the model's logits at temperature 1 where the draw has taken it, else 0."""

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
        """Of the first rows."""
        return DrawRoom(**{one.name: getattr(self, one.name)[:count] for one in fields(self)})

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, one.name).nbytes for one in fields(self))

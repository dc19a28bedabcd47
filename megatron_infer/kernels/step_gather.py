"""Token ids, positions and angles of a step's tokens, gathered on the device by position and request row.

Legend: T tokens, P positions, R rotary dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class StepTokens(NamedTuple):
    """See `StepMetadata` for the fields."""

    token_ids_T: Tensor
    positions_T: Tensor
    kv_pos_T: Tensor
    """token_ids, positions and kv_pos are int64."""
    cos_TR: Tensor | None
    sin_TR: Tensor | None


class StepTables(NamedTuple):
    """The tables on the device."""

    block_table: Tensor
    """int32 [request rows + 1, blocks]."""
    token_pool: Tensor
    """int32 [request rows + 1, positions]."""
    block_size: int
    cos_PR: Tensor | None
    sin_PR: Tensor | None
    """None without rotary embedding."""


Gather = Callable[[Tensor, Tensor, StepTables], StepTokens]
"""gather(position_T, row_T, tables) with int32 positions and rows: device work of fixed shapes only."""


def torch_gather(position_T: Tensor, row_T: Tensor, tables: StepTables) -> StepTokens:
    """`Gather` in torch, for any device."""
    block_table, token_pool, block_size, cos_PR, sin_PR = tables
    rows_T, positions_T = row_T.long(), position_T.long()
    entry_T = torch.add(positions_T // block_size, rows_T, alpha=block_table.shape[1])
    block_T = block_table.view(-1).index_select(0, entry_T)
    place_T = torch.add(positions_T, rows_T, alpha=token_pool.shape[1])
    return StepTokens(
        token_pool.view(-1).index_select(0, place_T).long(),
        positions_T,
        torch.add(positions_T % block_size, block_T.long(), alpha=block_size),
        None if cos_PR is None else cos_PR.index_select(0, positions_T),
        None if sin_PR is None else sin_PR.index_select(0, positions_T),
    )

"""A step's metadata from the lengths of its rows, for tests of kernels and tools/gpu_checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels.base import StateCaptures, StepMetadata

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = tuple[int, int]
"""(q_len, kv_len)"""
CPU = torch.device("cpu")
T = TypeVar("T", bound="DataclassInstance")


def step_of(
    rows: Sequence[Row],
    *,
    num_decode: int = 0,
    table_row: Sequence[int] | np.ndarray,
    dummy_row: int = 0,
    block_table: Tensor | None = None,
    block_size: int = 16,
    dummy_block: int = 0,
    num_padding: int = 0,
    padding_rows: tuple[int, int] = (0, 0),
    captures: Sequence[tuple[int, int, int]] = (),
    num_prompt_queries: np.ndarray | None = None,
    device: torch.device = CPU,
    **more: Any,
) -> StepMetadata:
    """rows: decode rows first. table_row: of the block table, or state slots. block_table: None leaves empty what only
    attention reads.

    num_padding: tokens after the last row. padding_rows: decode rows and rows without tokens that are added, on
    dummy_row, as a graph's shape has them. captures: (row, tokens, slot). num_prompt_queries: None: all of a slice's
    queries. more: other fields.
    """
    own = [(q_len, kv_len, int(place)) for (q_len, kv_len), place in zip(rows, table_row, strict=True)]
    more_decode, more_rows = padding_rows
    padded = [
        *own[:num_decode],
        *[(1, 1, dummy_row)] * more_decode,
        *own[num_decode:],
        *[(0, 0, dummy_row)] * more_rows,
    ]
    num_decode += more_decode
    q_len, kv_len, places = (np.array(column, dtype=np.int32) for column in zip(*padded, strict=True))
    cu_q = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    positions, kv_pos = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    if block_table is not None:
        token_rows = np.repeat(np.arange(len(padded)), q_len)
        positions = np.arange(cu_q[-1]) - cu_q[token_rows] + (kv_len - q_len)[token_rows]
        blocks = block_table.cpu().numpy()[places[token_rows], positions // block_size].astype(np.int64)
        kv_pos = blocks * block_size + positions % block_size
        positions = np.concatenate([positions, np.zeros(num_padding, dtype=np.int64)])
        kv_pos = np.concatenate([kv_pos, np.full(num_padding, dummy_block * block_size)])
    if num_prompt_queries is None:
        num_prompt_queries = np.where(np.arange(len(padded)) < num_decode, 0, q_len).astype(np.int32)
    row, num_tokens, state_slot = np.array(sorted(captures), dtype=np.int32).reshape(-1, 3).T.copy()
    on_device = [torch.from_numpy(array).to(device) for array in (q_len, kv_len, cu_q, places, positions, kv_pos)]
    q_len_R, kv_len_R, cu_q_R1, table_row_R, positions_T, kv_pos_T = on_device
    fields = {"cos_TR": None, "sin_TR": None} | more
    return StepMetadata(
        num_tokens=int(cu_q[-1]) + num_padding,
        num_rows=len(padded),
        num_decode=num_decode,
        q_len=q_len,
        kv_len=kv_len,
        cu_q=cu_q,
        table_row=places,
        num_prompt_queries=num_prompt_queries,
        q_len_R=q_len_R,
        kv_len_R=kv_len_R,
        cu_q_R1=cu_q_R1,
        table_row_R=table_row_R,
        block_table=torch.empty(0, 0, dtype=torch.int32) if block_table is None else block_table.to(device),
        positions_T=positions_T,
        kv_pos_T=kv_pos_T,
        captures=StateCaptures(row=row, num_tokens=num_tokens, state_slot=state_slot),
        **fields,
    )


def moved(values: T, device: torch.device) -> T:
    """A dataclass with its tensors on `device`."""
    given = {one.name: getattr(values, one.name) for one in fields(values)}
    tensors = {name: value.to(device) for name, value in given.items() if isinstance(value, Tensor)}
    return replace(values, **tensors)


def padded_step(
    step: StepMetadata, *, padding_rows: tuple[int, int], num_padding: int, **of: Any
) -> tuple[StepMetadata, Tensor]:
    """(the step in a larger shape, where its tokens are there). of: dummies and blocks, as `step_of` takes them."""
    rows = list(zip(step.q_len.tolist(), step.kv_len.tolist(), strict=True))
    shape = {"padding_rows": padding_rows, "num_padding": num_padding, "num_decode": step.num_decode}
    own = torch.arange(step.num_tokens)
    own[step.num_decode :] += padding_rows[0]
    return step_of(rows, table_row=step.table_row, **shape, **of), own


def spread(values: Tensor, own: Tensor, num_tokens: int, fill: float) -> Tensor:
    """Tokens' values in the larger shape of `padded_step`."""
    wide = values.new_full((num_tokens, *values.shape[1:]), fill)
    wide[own] = values
    return wide

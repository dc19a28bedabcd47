"""Steps of random rows on a device, padded or not, and what attention must give for them in float64.

Legend: `megatron_infer/kernels/base.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, StateCaptures, StepMetadata

Row = tuple[int, int]
"""(q_len, kv_len)"""
NUM_SPARE_ROWS = 3


def error_of(got: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest entry that is wanted; NaN where `got` is not finite."""
    difference = (got.detach().cpu().double() - wanted.double()).abs()
    if not difference.numel():
        return 0.0
    return float(difference.max() / wanted.double().abs().max().clamp_min(1e-6))


@dataclass(frozen=True, slots=True)
class Padding:
    """What is added to a step: decode rows, prefill rows, tokens of nobody."""

    num_decode: int = 0
    num_prefill: int = 0
    num_tokens: int = 0


NO_PADDING = Padding()


def step_of(
    rows: Sequence[Row],
    device: torch.device,
    *,
    num_decode: int,
    block_size: int = 16,
    slots: Sequence[int] | None = None,
    num_slots: int = 0,
    padding: Padding = NO_PADDING,
    captures: Sequence[tuple[int, int, int]] = (),
    angles: tuple[int, torch.dtype] | None = None,
    seed: int = 0,
) -> tuple[StepMetadata, int]:
    """A step of these rows, decode rows first, with scattered blocks -> (step, blocks of its cache).

    The last block is the dummy, the last row of the block table the dummy's. slots: the table row of each row, of so
    many (default: scattered). captures: (row, tokens, slot). angles: (rotary_dim, dtype) of cos and sin.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-kv_len // block_size) for _, kv_len in rows]
    num_blocks = sum(counts) + 3
    dummy = num_blocks - 1
    order = torch.randperm(dummy, generator=generator).tolist()
    num_table_rows = len(rows) + NUM_SPARE_ROWS if slots is None else num_slots
    table = torch.full((num_table_rows, max(counts, default=1) + 2), dummy, dtype=torch.int32)
    if slots is None:
        slots = torch.randperm(num_table_rows - 1, generator=generator)[: len(rows)].tolist()
    positions: list[int] = []
    kv_pos: list[int] = []
    padded: list[tuple[int, int, int]] = []  # q_len, kv_len, table row
    for row, (q_len, kv_len) in enumerate(rows):
        if row == num_decode:
            _pad_decode(padding, padded, positions, kv_pos, dummy * block_size, num_table_rows - 1)
        blocks = [order.pop() for _ in range(counts[row])]
        table[slots[row], : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        padded.append((q_len, kv_len, slots[row]))
        positions += range(kv_len - q_len, kv_len)
        kv_pos += [blocks[p // block_size] * block_size + p % block_size for p in range(kv_len - q_len, kv_len)]
    if len(rows) == num_decode:
        _pad_decode(padding, padded, positions, kv_pos, dummy * block_size, num_table_rows - 1)
    padded += [(0, 0, num_table_rows - 1)] * padding.num_prefill
    positions += [0] * padding.num_tokens
    kv_pos += [dummy * block_size] * padding.num_tokens
    q_len, kv_len, table_row = (np.array(column, dtype=np.int32) for column in zip(*padded, strict=True))
    cu_q = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    cos = sin = None
    if angles is not None:
        angle = torch.rand(len(positions), angles[0], generator=generator) * 6.28
        cos, sin = (part.to(angles[1]).to(device) for part in (angle.cos(), angle.sin()))
    kept = np.array(sorted(captures), dtype=np.int32).reshape(-1, 3).T.copy()
    step = StepMetadata(
        num_tokens=len(positions),
        num_rows=len(padded),
        num_decode=num_decode + padding.num_decode,
        q_len=q_len,
        kv_len=kv_len,
        cu_q=cu_q,
        table_row=table_row,
        num_prompt_queries=np.where(np.arange(len(padded)) < num_decode + padding.num_decode, 0, q_len),
        q_len_R=torch.from_numpy(q_len).to(device),
        kv_len_R=torch.from_numpy(kv_len).to(device),
        cu_q_R1=torch.from_numpy(cu_q).to(device),
        table_row_R=torch.from_numpy(table_row).to(device),
        block_table=table.to(device),
        positions_T=torch.tensor(positions, dtype=torch.int64, device=device),
        kv_pos_T=torch.tensor(kv_pos, dtype=torch.int64, device=device),
        cos_TR=cos,
        sin_TR=sin,
        captures=StateCaptures(row=kept[0], num_tokens=kept[1], state_slot=kept[2]),
    )
    return step, num_blocks


def _pad_decode(
    padding: Padding,
    rows: list[tuple[int, int, int]],
    positions: list[int],
    kv_pos: list[int],
    dummy_position: int,
    dummy_row: int,
) -> None:
    rows += [(1, 1, dummy_row)] * padding.num_decode
    positions += [0] * padding.num_decode
    kv_pos += [dummy_position] * padding.num_decode


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One layer's inputs on a device; q, k and v are views of one fused projection, as in a model."""

    spec: AttendSpec
    step: StepMetadata
    fused: Tensor
    kv_cache: Tensor

    def run(self, backend: Any) -> tuple[Tensor, Tensor]:
        """(out [T, N*H], cache afterwards) on private copies."""
        fused, cache = self.fused.clone(), self.kv_cache.clone()
        backend.plan(self.step)
        q, k, v = self.parts(fused)
        return backend.run(q, k, v, cache, layer=1, spec=self.spec), cache

    def parts(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        heads = fused.view(fused.shape[0], spec.num_kv_heads, spec.group_size + 2, spec.head_dim)
        return heads[:, :, : spec.group_size], heads[:, :, -2], heads[:, :, -1]


def attention_case(
    rows: Sequence[Row],
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_decode: int,
    num_kv_heads: int = 2,
    group_size: int = 4,
    head_dim: int = 64,
    block_size: int = 16,
    window: int | None = None,
    rotary_dim: int = 0,
    interleaved: bool = False,
    sinks: bool = False,
    padding: Padding = NO_PADDING,
    seed: int = 0,
) -> AttentionCase:
    """Random queries, keys, values and a cache of two layers; what lies behind a row's keys is large and finite."""
    generator = torch.Generator().manual_seed(seed)
    angles = (rotary_dim, dtype) if rotary_dim else None
    step, num_blocks = step_of(
        rows, device, num_decode=num_decode, block_size=block_size, padding=padding, angles=angles, seed=seed
    )
    num_heads = num_kv_heads * group_size
    width = num_kv_heads * (group_size + 2) * head_dim
    shape = (2, 2, num_blocks, block_size, num_kv_heads, head_dim)
    cache = torch.randn(*shape, generator=generator)
    cache[:, :, -1] = 1e3
    sinks_N = torch.randn(num_heads, generator=generator).to(device) if sinks else None
    spec = AttendSpec(
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        rotary_dim=rotary_dim,
        rotary_interleaved=interleaved,
        sinks_N=sinks_N,
    )
    fused = torch.randn(step.num_tokens, width, generator=generator)
    return AttentionCase(spec, step, fused.to(dtype).to(device), cache.to(dtype).to(device))


def _rotated(x_TXH: Tensor, step: StepMetadata, spec: AttendSpec) -> Tensor:
    """The leading dims turned, in float64. Source: RoFormer, arXiv:2104.09864."""
    if not spec.rotary_dim or step.cos_TR is None or step.sin_TR is None:
        return x_TXH
    dim = spec.rotary_dim
    shape = (x_TXH.shape[0],) + (1,) * (x_TXH.ndim - 2) + (dim,)
    cos, sin = (part.cpu().double().view(shape) for part in (step.cos_TR, step.sin_TR))
    turn = x_TXH[..., :dim]
    first, second = (turn[..., 0::2], turn[..., 1::2]) if spec.rotary_interleaved else turn.chunk(2, dim=-1)
    if spec.rotary_interleaved:
        other = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        other = torch.cat((-second, first), dim=-1)
    return torch.cat((turn * cos + other * sin, x_TXH[..., dim:]), dim=-1)


def attention_oracle(case: AttentionCase, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out [T, N*H], cache afterwards) in float64 on the CPU, by definition; tokens of nobody are zeros.

    kept: attend to this cache as it is after the step; None: to the exact one.
    """
    spec, step = case.spec, case.step
    q, k, v = (part.cpu().double() for part in case.parts(case.fused))
    q, k = _rotated(q, step, spec), _rotated(k, step, spec)
    cache = case.kv_cache.cpu().double()
    flat = cache[1].flatten(1, 2)
    positions = step.kv_pos_T.cpu()
    # Keys are rounded where they are kept.
    flat[0, positions], flat[1, positions] = k.to(case.fused.dtype).double(), v
    if kept is not None:
        flat = kept[1].cpu().double().flatten(1, 2)
    out_TKGH = torch.zeros_like(q)
    table, block_size = step.block_table.cpu().long(), case.kv_cache.shape[3]
    for row in range(step.num_rows):
        q_len, kv_len, first = (int(part[row]) for part in (step.q_len, step.kv_len, step.cu_q))
        seen = torch.arange(kv_len)
        where = table[int(step.table_row[row])][seen // block_size] * block_size + seen % block_size
        keys, values, queries = flat[0, where], flat[1, where], q[first : first + q_len]
        at = torch.arange(kv_len - q_len, kv_len)
        hidden = seen[None, :] > at[:, None]
        if spec.window is not None:
            hidden |= seen[None, :] <= at[:, None] - spec.window
        scores = torch.einsum("tkgh,pkh->tkgp", queries, keys) * spec.scale
        scores.masked_fill_(hidden[:, None, None, :], float("-inf"))
        if spec.sinks_N is not None:
            sinks = spec.sinks_N.cpu().double().view(1, spec.num_kv_heads, spec.group_size, 1).expand(q_len, -1, -1, 1)
            weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out_TKGH[first : first + q_len] = torch.einsum("tkgp,pkh->tkgh", weights, values)
    return out_TKGH.flatten(1), cache

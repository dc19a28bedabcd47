"""A step's token ids, cache positions and rotation angles in one launch, where torch needs a dozen."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.step_gather import Gather, StepTables, StepTokens
from megatron_infer.kernels.triton.launch import Launcher, cdiv, kernels_unavailable, power_of_2

TOKENS = 16
"""Tokens of one program."""


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_kernel(
    position_ptr,
    row_ptr,
    table_ptr,
    pool_ptr,
    cos_ptr,
    sin_ptr,
    ids_out_ptr,
    positions_out_ptr,
    kv_pos_out_ptr,
    cos_out_ptr,
    sin_out_ptr,
    num_tokens,
    max_blocks,
    max_positions,
    block_size,
    ROTARY: tl.constexpr,
    TOKENS: tl.constexpr,
    DIMS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < num_tokens
    position = tl.load(position_ptr + token, mask=real, other=0)
    row = tl.load(row_ptr + token, mask=real, other=0).to(tl.int64)
    block = tl.load(table_ptr + row * max_blocks + position // block_size, mask=real, other=0).to(tl.int64)
    token_id = tl.load(pool_ptr + row * max_positions + position, mask=real, other=0)
    tl.store(ids_out_ptr + token, token_id.to(tl.int64), mask=real)
    tl.store(positions_out_ptr + token, position.to(tl.int64), mask=real)
    tl.store(kv_pos_out_ptr + token, block * block_size + position % block_size, mask=real)
    if DIMS:
        dim = tl.arange(0, DIMS)
        used = real[:, None] & (dim < ROTARY)[None, :]
        source = position.to(tl.int64)[:, None] * ROTARY + dim[None, :]
        target = token.to(tl.int64)[:, None] * ROTARY + dim[None, :]
        tl.store(cos_out_ptr + target, tl.load(cos_ptr + source, mask=used, other=0.0), mask=used)
        tl.store(sin_out_ptr + target, tl.load(sin_ptr + source, mask=used, other=0.0), mask=used)


unavailable = kernels_unavailable


def make(device: torch.device, dtype: torch.dtype) -> Gather:
    return gather


@functools.cache
def _kernel(rotary_dim: int) -> Launcher:
    dims = power_of_2(rotary_dim) if rotary_dim else 0
    return Launcher(_gather_kernel, ROTARY=rotary_dim, TOKENS=TOKENS, DIMS=dims, num_warps=4)


def gather(position_T: Tensor, row_T: Tensor, tables: StepTables) -> StepTokens:
    """`kernels.step_gather.Gather`, equal to `torch_gather` bit for bit."""
    block_table, token_pool, block_size, cos_PR, sin_PR = tables
    num_tokens = len(position_T)
    # separate tensors: slices of one tensor would be aligned in some steps and not in others, and compile twice
    ids_T, positions_T, kv_pos_T = (position_T.new_empty(num_tokens, dtype=torch.int64) for _ in range(3))
    rotary_dim = 0 if cos_PR is None else cos_PR.shape[1]
    cos_TR = None if cos_PR is None else cos_PR.new_empty(num_tokens, rotary_dim)
    sin_TR = None if sin_PR is None else sin_PR.new_empty(num_tokens, rotary_dim)
    unused = token_pool
    _kernel(rotary_dim)(
        (cdiv(num_tokens, TOKENS),),
        position_T,
        row_T,
        block_table,
        token_pool,
        unused if cos_PR is None else cos_PR,
        unused if sin_PR is None else sin_PR,
        ids_T,
        positions_T,
        kv_pos_T,
        unused if cos_TR is None else cos_TR,
        unused if sin_TR is None else sin_TR,
        num_tokens,
        block_table.shape[1],
        token_pool.shape[1],
        block_size,
    )
    return StepTokens(ids_T, positions_T, kv_pos_T, cos_TR, sin_TR)

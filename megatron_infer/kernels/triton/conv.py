"""The causal convolution before a Mamba-2 scan, in Triton: states by state slot, rows of any lengths.

A slot holds the last W inputs of each channel. A decode row shifts them by one and convolves in one launch. Tokens of
slices are convolved in any order, from their neighbours in the step and, near the beginning of the row, from the slot;
a later launch writes the slot, so that no program reads what another has begun to write. The sum and silu are fp32,
rounded once to the inputs' dtype. Not yet run on a GPU.

Shape legend: kernels/ssm.py, TAPS the power of two above W, BLOCK_C channels and BLOCK_T tokens of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.triton.launch import cdiv, launch, power_of_2

MAX_TAPS = 16
DECODE_CHANNELS = 256
SLICE_CHANNELS = 128
SLICE_TOKENS = 16


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _row_of_tokens(row_ptr, cu_q_ptr, num_tokens, num_rows, BLOCK: tl.constexpr):
    """row[t]: the row of token t; -1 for padding tokens, which the last program writes."""
    row = tl.program_id(0)
    first = tl.load(cu_q_ptr + row)
    stop = tl.load(cu_q_ptr + row + 1, mask=row < num_rows, other=num_tokens)
    value = tl.where(row < num_rows, row, -1)
    for at in range(first, stop, BLOCK):
        token = at + tl.arange(0, BLOCK)
        tl.store(row_ptr + token, tl.full([BLOCK], 0, tl.int32) + value, mask=token < stop)


@triton.jit
def _convolve_decode(
    x_ptr, out_ptr, conv_ptr, weight_ptr, bias_ptr, kv_len_ptr, table_row_ptr, x_stride, slot_stride, num_channels,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, TAPS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One token of each decode row: shift the state, then convolve it."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    tap = tl.arange(0, TAPS)
    inside_C = channel < num_channels
    inside = inside_C[:, None] & (tap < WIDTH)[None, :]
    at = channel[:, None] * WIDTH + tap[None, :]
    slot = conv_ptr + tl.load(table_row_ptr + row).to(tl.int64) * slot_stride
    fresh = tl.load(kv_len_ptr + row) == 1
    older = inside & (tap < WIDTH - 1)[None, :] & (fresh == 0)
    state = tl.load(slot + at + 1, mask=older, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + channel, mask=inside_C, other=0.0)
    state = tl.where((tap == WIDTH - 1)[None, :], x.to(tl.float32)[:, None], state)
    mixed = tl.sum(state * tl.load(weight_ptr + at, mask=inside, other=0.0), axis=1)
    if HAS_BIAS:
        mixed += tl.load(bias_ptr + channel, mask=inside_C, other=0.0)
    mixed = mixed / (1.0 + tl.exp(-mixed))
    tl.store(out_ptr + row * num_channels + channel, mixed.to(out_ptr.dtype.element_ty), mask=inside_C)
    tl.debug_barrier()  # one thread may overwrite a tap that another has yet to read
    tl.store(slot + at, state.to(conv_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_token", "num_tokens"])
def _convolve_slices(
    x_ptr, out_ptr, conv_ptr, weight_ptr, bias_ptr, row_ptr, cu_q_ptr, kv_len_ptr, table_row_ptr,
    x_stride, slot_stride, first_token, num_tokens, num_channels,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Tokens [first_token, num_tokens) of any rows; padding tokens are not written."""
    token = first_token + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_C = channel < num_channels
    row = tl.load(row_ptr + token, mask=token < num_tokens, other=-1)
    mine = row >= 0
    row = tl.maximum(row, 0)
    first = tl.load(cu_q_ptr + row, mask=mine, other=0)
    offset = token - first
    slot = tl.load(table_row_ptr + row, mask=mine, other=0).to(tl.int64) * slot_stride
    q_len = tl.load(cu_q_ptr + row + 1, mask=mine, other=0) - first
    goes_on = mine & (tl.load(kv_len_ptr + row, mask=mine, other=0) > q_len)
    acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for tap in tl.static_range(WIDTH):
        near = (mine & (offset >= WIDTH - 1 - tap))[:, None] & inside_C[None, :]
        source = x_ptr + (token.to(tl.int64) - (WIDTH - 1 - tap))[:, None] * x_stride + channel[None, :]
        x = tl.load(source, mask=near, other=0.0).to(tl.float32)
        if tap < WIDTH - 1:
            kept = (goes_on & (offset < WIDTH - 1 - tap))[:, None] & inside_C[None, :]
            state = conv_ptr + slot[:, None] + channel[None, :] * WIDTH + (tap + 1 + offset)[:, None]
            x += tl.load(state, mask=kept, other=0.0).to(tl.float32)
        acc += x * tl.load(weight_ptr + channel * WIDTH + tap, mask=inside_C, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + channel, mask=inside_C, other=0.0)[None, :]
    acc = acc / (1.0 + tl.exp(-acc))
    target = out_ptr + token.to(tl.int64)[:, None] * num_channels + channel[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mine[:, None] & inside_C[None, :])


@triton.jit(do_not_specialize=["first_row"])
def _keep_inputs(
    x_ptr, conv_ptr, captures_ptr, cu_q_ptr, kv_len_ptr, table_row_ptr, x_stride, slot_stride, first_row, num_channels,
    CAPTURES: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the last W inputs of rows from first_row on to their slots; with CAPTURES, those of captures [*, 3]."""
    if CAPTURES:
        capture = captures_ptr + 3 * tl.program_id(0)
        row = tl.load(capture)
    else:
        row = first_row + tl.program_id(0)
    first = tl.load(cu_q_ptr + row)
    q_len = tl.load(cu_q_ptr + row + 1) - first
    if q_len == 0:
        return
    source_slot = tl.load(table_row_ptr + row).to(tl.int64)
    goes_on = tl.load(kv_len_ptr + row) > q_len
    if CAPTURES:
        length = tl.load(capture + 1)
        target_slot = tl.load(capture + 2).to(tl.int64)
    else:
        length = q_len
        target_slot = source_slot
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    tap = tl.arange(0, TAPS)
    inside = (channel < num_channels)[:, None] & (tap < WIDTH)[None, :]
    offset = length - WIDTH + tap
    token = (first + offset).to(tl.int64)
    x = tl.load(x_ptr + token[None, :] * x_stride + channel[:, None], mask=inside & (offset >= 0)[None, :], other=0.0)
    stored = inside & ((offset < 0) & goes_on)[None, :]
    source = conv_ptr + source_slot * slot_stride + channel[:, None] * WIDTH + (WIDTH + offset)[None, :]
    old = tl.load(source, mask=stored, other=0.0)
    kept = tl.where((offset >= 0)[None, :], x.to(conv_ptr.dtype.element_ty), old)
    tl.debug_barrier()  # one thread may overwrite a tap that another has yet to read
    target = conv_ptr + target_slot * slot_stride + channel[:, None] * WIDTH + tap[None, :]
    tl.store(target, kept, mask=inside)


def rows_of_tokens(cu_q_R1: Tensor, num_tokens: int) -> Tensor:
    """int32 [T] on the device: the row of each token, -1 for padding tokens; one launch."""
    num_rows = cu_q_R1.shape[0] - 1
    row_T = torch.empty(num_tokens, dtype=torch.int32, device=cu_q_R1.device)
    launch(_row_of_tokens, (num_rows + 1,), row_T, cu_q_R1, num_tokens, num_rows, BLOCK=1024, num_warps=4)
    return row_T


def convolve_decode(
    x_TC: Tensor, out_TC: Tensor, conv_SCW: Tensor, weight_CW: Tensor, bias_C: Tensor | None, rows: tuple[Tensor, ...]
) -> None:
    """Tokens 0 .. D-1 of D decode rows; updates the slots. rows: (kv_len_D, table_row_D)."""
    kv_len_D, table_row_D = rows
    channels, width = weight_CW.shape
    block = min(DECODE_CHANNELS, max(16, power_of_2(channels)))
    launch(
        _convolve_decode, (len(kv_len_D), cdiv(channels, block)),
        x_TC, out_TC, conv_SCW, weight_CW, weight_CW if bias_C is None else bias_C, kv_len_D, table_row_D,
        x_TC.stride(0), conv_SCW.stride(0), channels,
        WIDTH=width, HAS_BIAS=bias_C is not None, TAPS=power_of_2(width), BLOCK_C=block, num_warps=4,
    )  # fmt: skip


def convolve_slices(
    x_TC: Tensor,
    out_TC: Tensor,
    conv_SCW: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    rows: tuple[Tensor, ...],
    *,
    first_row: int,
) -> None:
    """Tokens of the rows from first_row on; the rows before have one token each. Reads the slots and writes none.

    rows: (row_T, cu_q_R1, kv_len_R, table_row_R).
    """
    channels, width = weight_CW.shape
    num_tokens = x_TC.shape[0] - first_row
    block = min(SLICE_CHANNELS, max(16, power_of_2(channels)))
    launch(
        _convolve_slices, (cdiv(num_tokens, SLICE_TOKENS), cdiv(channels, block)),
        x_TC, out_TC, conv_SCW, weight_CW, weight_CW if bias_C is None else bias_C, *rows,
        x_TC.stride(0), conv_SCW.stride(0), first_row, x_TC.shape[0], channels,
        WIDTH=width, HAS_BIAS=bias_C is not None, BLOCK_T=SLICE_TOKENS, BLOCK_C=block, num_warps=8,
    )  # fmt: skip


def keep_inputs(
    x_TC: Tensor,
    conv_SCW: Tensor,
    rows: tuple[Tensor, ...],
    *,
    first_row: int,
    captures_E3: Tensor | None = None,
) -> None:
    """Write the last inputs of rows from first_row on to their slots; given captures (row, num_tokens, slot), those of
    the captures instead.

    rows: (cu_q_R1, kv_len_R, table_row_R). Captures read the rows' slots, so they must be written first.
    """
    channels, width = conv_SCW.shape[1:]
    block = min(DECODE_CHANNELS, max(16, power_of_2(channels)))
    count = len(rows[1]) - first_row if captures_E3 is None else len(captures_E3)
    launch(
        _keep_inputs, (count, cdiv(channels, block)),
        x_TC, conv_SCW, rows[0] if captures_E3 is None else captures_E3, *rows,
        x_TC.stride(0), conv_SCW.stride(0), first_row, channels,
        CAPTURES=captures_E3 is not None, WIDTH=width, TAPS=power_of_2(width), BLOCK_C=block, num_warps=4,
    )  # fmt: skip

"""The decode rows of a Mamba-2 scan, and the step sizes of all rows. Legend: kernels/ssm.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softplus(x):
    """log(1 + e^x) to the last digits: x's positive part and log1p of e <= 1 by the series of artanh(e / (2 + e))."""
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    w = z * z
    series = 1.0 / 15.0 + w * (1.0 / 17.0)
    series = 1.0 / 13.0 + w * series
    series = 1.0 / 11.0 + w * series
    series = 1.0 / 9.0 + w * series
    series = 1.0 / 7.0 + w * series
    series = 1.0 / 5.0 + w * series
    series = 1.0 / 3.0 + w * series
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + 2.0 * z * (1.0 + w * series)


@triton.jit
def step_size(dt, bias, dt_min, dt_max):
    """softplus(dt + bias), clamped, in fp32."""
    dt = tl.maximum(_softplus(dt.to(tl.float32) + bias), dt_min, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(dt, dt_max, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scan_decode(
    mixed_ptr, dt_ptr, y_ptr, ssm_ptr, decay_ptr, skip_ptr, dt_bias_ptr, kv_len_ptr, table_row_ptr,
    mixed_stride, dt_stride, y_stride, slot_stride, num_heads, heads_per_group, dt_min, dt_max,
    HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, CHANNEL_SKIP: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One token of each decode row: h <- exp(dt A) h + dt x B^T; y = C h + D x, all in fp32."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    state = tl.arange(0, BLOCK_N)
    inside_P, inside_N = channel < HEAD_DIM, state < STATE_DIM
    inside = inside_P[:, None] & inside_N[None, :]
    slot = tl.load(table_row_ptr + row).to(tl.int64) * slot_stride
    h_ptr = ssm_ptr + slot + (head * HEAD_DIM + channel)[:, None] * STATE_DIM + state[None, :]
    goes_on = tl.load(kv_len_ptr + row) > 1
    h = tl.load(h_ptr, mask=inside & goes_on, other=0.0).to(tl.float32)
    dt = step_size(tl.load(dt_ptr + row * dt_stride + head), tl.load(dt_bias_ptr + head), dt_min, dt_max)
    token = mixed_ptr + row * mixed_stride
    x = tl.load(token + head * HEAD_DIM + channel, mask=inside_P, other=0.0).to(tl.float32)
    inner = num_heads * HEAD_DIM
    b_at = inner + (head // heads_per_group) * STATE_DIM
    c_at = b_at + (num_heads // heads_per_group) * STATE_DIM
    b = tl.load(token + b_at + state, mask=inside_N, other=0.0).to(tl.float32)
    c = tl.load(token + c_at + state, mask=inside_N, other=0.0).to(tl.float32)
    h = h * tl.exp(dt * tl.load(decay_ptr + head)) + (dt * x)[:, None] * b[None, :]
    tl.store(h_ptr, h.to(ssm_ptr.dtype.element_ty), mask=inside)
    if CHANNEL_SKIP:
        skip = tl.load(skip_ptr + head * HEAD_DIM + channel, mask=inside_P, other=0.0)
    else:
        skip = tl.load(skip_ptr + head)
    y = tl.sum(h * c[None, :], axis=1) + skip * x
    tl.store(y_ptr + row * y_stride + head * HEAD_DIM + channel, y.to(y_ptr.dtype.element_ty), mask=inside_P)

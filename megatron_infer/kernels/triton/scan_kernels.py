"""The two kernels of a Mamba-2 scan: one token of each decode row, and slices chunk by chunk.

A slice is cut every CHUNK tokens, counted from its first token of the step. Inside a chunk the scan is a masked product
of C and B on tensor cores; one program carries the state of a head's channels from chunk to chunk in registers:

    decay(s, l) = exp(step[s + 1] + ... + step[l]),   step = dt A <= 0,   l, s tokens of the chunk
    y[l] = sum over s <= l of (C[l] . B[s]) decay(s, l) dt[s] x[s] + exp(step[first] + ... + step[l]) C[l] . h + D x[l]
    h   <- exp(step[first] + ... + step[last]) h + sum over s of decay(s, last) dt[s] x[s] B[s]^T

Sums of steps reach hundreds: they are taken in float64 and kept as a rounded part and a rest, so that differences of
neighbours keep their digits; only exponents <= 0 are ever taken. What bits a row gets depends on where its tokens are
cut into steps, not on its company and not on padding. Captures read a chunk's state on the way and leave it alone; a
step with captures runs a compilation of its own, whose sums may be taken in another order. Operands of products are
rounded to the inputs' dtype, sums are fp32.
Shape legend: kernels/ssm.py, L tokens of a chunk. Source: Mamba-2, arXiv:2405.21060, section 6.
"""

from __future__ import annotations

import triton
import triton.language as tl

FORGOTTEN = tl.constexpr(-128.0)
"""Where a token's log decay stops: e^-128 is zero in fp32 already, and sums of more would drown what is near them."""


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
def _step_size(dt, bias, dt_min, dt_max):
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
    dt = _step_size(tl.load(dt_ptr + row * dt_stride + head), tl.load(dt_bias_ptr + head), dt_min, dt_max)
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


@triton.jit
def _split(sums):
    """float64 -> (rounded to fp32, the rest)."""
    high = sums.to(tl.float32)
    return high, (sums - high.to(tl.float64)).to(tl.float32)


@triton.jit
def _state_behind(h_NP, x_LP, b_LN, dt_L, step_L, high_L, rest_L, inside_L, PRECISION: tl.constexpr):
    """The state behind the tokens that are `inside`, a run from the chunk's first on; step_L is 0 outside of it."""
    end_high, end_rest = _split(tl.sum(step_L.to(tl.float64), axis=0))
    to_end = tl.exp(tl.minimum((end_high - high_L) + (end_rest - rest_L), 0.0))
    weight_L = tl.where(inside_L, to_end * dt_L, 0.0)
    added_NP = tl.dot(
        tl.trans(b_LN), (x_LP.to(tl.float32) * weight_L[:, None]).to(x_LP.dtype), input_precision=PRECISION
    )
    return h_NP * tl.exp(end_high + end_rest) + added_NP


@triton.jit
def _chunk_outputs(h_NP, x_LP, b_LN, c_LN, dt_L, high_L, rest_L, PRECISION: tl.constexpr):
    """y of a chunk that begins with state h, without the skip."""
    at_L = tl.arange(0, x_LP.shape[0])
    between_LL = (high_L[:, None] - high_L[None, :]) + (rest_L[:, None] - rest_L[None, :])
    score_LL = tl.dot(c_LN, tl.trans(b_LN), input_precision=PRECISION)
    score_LL *= tl.exp(tl.minimum(between_LL, 0.0)) * dt_L[None, :]
    score_LL = tl.where(at_L[:, None] >= at_L[None, :], score_LL, 0.0)
    y_LP = tl.dot(c_LN, h_NP.to(c_LN.dtype), input_precision=PRECISION) * tl.exp(high_L + rest_L)[:, None]
    return tl.dot(score_LL.to(x_LP.dtype), x_LP, acc=y_LP, input_precision=PRECISION)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tokens"])
def scan_slices(
    mixed_ptr, dt_ptr, y_ptr, ssm_ptr, decay_ptr, skip_ptr, dt_bias_ptr, cu_q_ptr, kv_len_ptr, table_row_ptr,
    captures_ptr, first_capture_ptr,
    mixed_stride, dt_stride, y_stride, slot_stride, num_heads, heads_per_group, dt_min, dt_max,
    first_row, num_rows, num_tokens,
    HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, CHANNEL_SKIP: tl.constexpr, CAPTURES: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows from first_row on, one program a row, head and BLOCK_P channels; one more row gives nobody's tokens zeros.

    captures [*, 3] are (row, num_tokens, slot) by row, then by num_tokens; row r's are first_capture[r] and on.
    """
    row = first_row + tl.program_id(0)
    head = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    state = tl.arange(0, BLOCK_N)
    at_L = tl.arange(0, CHUNK)
    inside_P, inside_N = channel < HEAD_DIM, state < STATE_DIM
    first = tl.load(cu_q_ptr + row)
    y_ptr += head * HEAD_DIM + channel[None, :]
    dtype = mixed_ptr.dtype.element_ty
    if row == num_rows:
        nothing = tl.zeros([CHUNK, BLOCK_P], dtype)
        for start in range(first, num_tokens, CHUNK):
            token = (start + at_L).to(tl.int64)
            tl.store(y_ptr + token[:, None] * y_stride, nothing, mask=(token < num_tokens)[:, None] & inside_P[None, :])
        return
    q_len = tl.load(cu_q_ptr + row + 1) - first
    if q_len == 0:
        return

    inside_NP = inside_N[:, None] & inside_P[None, :]
    h_at = (head * HEAD_DIM + channel)[None, :] * STATE_DIM + state[:, None]
    slot = tl.load(table_row_ptr + row).to(tl.int64) * slot_stride
    goes_on = tl.load(kv_len_ptr + row) > q_len
    h_NP = tl.load(ssm_ptr + slot + h_at, mask=inside_NP & goes_on, other=0.0).to(tl.float32)
    decay, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
    skip_at = head * HEAD_DIM + channel if CHANNEL_SKIP else head + 0 * channel
    skip_P = tl.load(skip_ptr + skip_at, mask=inside_P, other=0.0)
    inner = num_heads * HEAD_DIM
    b_at = inner + (head // heads_per_group) * STATE_DIM
    c_at = b_at + (num_heads // heads_per_group) * STATE_DIM
    if CAPTURES:
        capture = tl.load(first_capture_ptr + row)
        end_capture = tl.load(first_capture_ptr + row + 1)

    for start in range(0, q_len, CHUNK):
        inside_L = start + at_L < q_len
        token = (first + start + at_L).to(tl.int64)
        source = mixed_ptr + token[:, None] * mixed_stride
        x_LP = tl.load(
            source + (head * HEAD_DIM + channel)[None, :], mask=inside_L[:, None] & inside_P[None, :], other=0.0
        )
        b_LN = tl.load(source + (b_at + state)[None, :], mask=inside_L[:, None] & inside_N[None, :], other=0.0)
        c_LN = tl.load(source + (c_at + state)[None, :], mask=inside_L[:, None] & inside_N[None, :], other=0.0)
        dt_L = tl.load(dt_ptr + token * dt_stride + head, mask=inside_L, other=0.0)
        dt_L = tl.where(inside_L, _step_size(dt_L, dt_bias, dt_min, dt_max), 0.0)
        step_L = tl.where(inside_L, tl.maximum(dt_L * decay, FORGOTTEN), 0.0)
        high_L, rest_L = _split(tl.cumsum(step_L.to(tl.float64), axis=0))

        y_LP = _chunk_outputs(h_NP, x_LP, b_LN, c_LN, dt_L, high_L, rest_L, PRECISION) + skip_P[None, :] * x_LP
        tl.store(y_ptr + token[:, None] * y_stride, y_LP.to(dtype), mask=inside_L[:, None] & inside_P[None, :])

        if CAPTURES:
            reach = start + CHUNK
            while capture < end_capture:
                length = tl.load(captures_ptr + 3 * capture + 1)
                if length <= reach:
                    kept_L = start + at_L < length
                    kept_NP = _state_behind(
                        h_NP, x_LP, b_LN, dt_L, tl.where(kept_L, step_L, 0.0), high_L, rest_L, kept_L, PRECISION
                    )
                    target = tl.load(captures_ptr + 3 * capture + 2).to(tl.int64) * slot_stride
                    tl.store(ssm_ptr + target + h_at, kept_NP.to(ssm_ptr.dtype.element_ty), mask=inside_NP)
                    capture += 1
                else:
                    end_capture = capture  # the next chunk's, or a later one's
            end_capture = tl.load(first_capture_ptr + row + 1)
        h_NP = _state_behind(h_NP, x_LP, b_LN, dt_L, step_L, high_L, rest_L, inside_L, PRECISION)
    tl.store(ssm_ptr + slot + h_at, h_NP.to(ssm_ptr.dtype.element_ty), mask=inside_NP)

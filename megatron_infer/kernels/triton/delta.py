"""The recurrence of a gated delta net in Triton: decode rows in one launch, slices in two.

    1  delta_chunks   every chunk of every head: what its tokens have to do with each other, before any state is known
    2  delta_walk     every row, head and BLOCK_P channels: chunk after chunk, with the state in registers

In a chunk that begins with state h, with s[l] the sum of its log decays up to token l, and k, q of length 1:

    lower[l, m] = beta[l] (k[l] . k[m]) exp(s[l] - s[m])     m < l
    within[l, m] = (q[l] . k[m]) exp(s[l] - s[m])            m <= l
    added = (1 + lower)^-1 beta (v - exp(s) (k h))           what each token adds to the state along its key
    y = exp(s) (q h) + within added;   h <- exp(s[end]) h + sum over l of exp(s[end] - s[l]) k[l] added[l]

(1 + lower)^-1 is solved in blocks of 16 tokens side by side, then across blocks, as powers of the part across vanish
from the fourth on; there TF32 is enough, whose mantissa is no shorter than that of inputs of 16 bit. k and q keep the
inputs' bits: their lengths are factors of sums in fp32. Operands of products are rounded to the inputs' dtype, sums and
states are fp32, and sums of decays are two parts as in `scan_slices`.
A row's bits depend on how its tokens are chunked over steps, not on other rows, captures or padding.
Not yet run on a GPU. Legend: `kernels/ssm.py`, L tokens of a chunk. Source: arXiv:2412.06464, section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.base import StepMetadata
from megatron_infer.kernels.ssm import L2_EPS, RecurrentSpec, SsmWeights
from megatron_infer.kernels.triton.launch import cdiv, launch, power_of_2, precision
from megatron_infer.kernels.triton.scan_decode import step_size
from megatron_infer.kernels.triton.scan_slices import FORGOTTEN, LOG2E, find_segment, place
from megatron_infer.kernels.triton_scratch import delta_shapes, scan_chunk

MAX_STATE_DIM = 128
DECODE_TILE = 4096
"""Entries of the state that a decode program updates."""
SOLVED_AT_ONCE = tl.constexpr(16)
"""Tokens of a block within a chunk, whose triangular system is solved line by line."""
EPS = tl.constexpr(L2_EPS)
NO_CAPTURE = tl.constexpr(1 << 30)


@triton.jit
def delta_decode(
    mixed_ptr, ba_ptr, y_ptr, ssm_ptr, decay_ptr, dt_bias_ptr, kv_len_ptr, table_row_ptr,
    mixed_stride, ba_stride, y_stride, slot_stride,
    NUM_HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One token of each decode row: h <- g h; h <- h + beta (v - h k) k^T; y = h q, all in fp32."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    state = tl.arange(0, BLOCK_N)
    inside_P, inside_N = channel < HEAD_DIM, state < STATE_DIM
    inside = inside_P[:, None] & inside_N[None, :]
    slot = tl.load(table_row_ptr + row).to(tl.int64) * slot_stride
    h_ptr = ssm_ptr + slot + (head * HEAD_DIM + channel)[:, None] * STATE_DIM + state[None, :]
    h = tl.load(h_ptr, mask=inside & (tl.load(kv_len_ptr + row) > 1), other=0.0).to(tl.float32)
    token = mixed_ptr + row * mixed_stride
    WIDTH: tl.constexpr = NUM_HEADS // HEADS_PER_GROUP * STATE_DIM
    at = head // HEADS_PER_GROUP * STATE_DIM + state
    q = tl.load(token + at, mask=inside_N, other=0.0).to(tl.float32)
    k = tl.load(token + WIDTH + at, mask=inside_N, other=0.0).to(tl.float32)
    v = tl.load(token + 2 * WIDTH + head * HEAD_DIM + channel, mask=inside_P, other=0.0).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + EPS) * (STATE_DIM**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + EPS)
    beta, log_decay = _gates(ba_ptr + row * ba_stride + head, True, decay_ptr + head, dt_bias_ptr + head, NUM_HEADS)
    h = h * tl.exp(log_decay)
    error = v - tl.sum(h * k[None, :], axis=1)
    h = h + (beta * error)[:, None] * k[None, :]
    tl.store(h_ptr, h.to(ssm_ptr.dtype.element_ty), mask=inside)
    y = tl.sum(h * q[None, :], axis=1)
    tl.store(y_ptr + row * y_stride + head * HEAD_DIM + channel, y.to(y_ptr.dtype.element_ty), mask=inside_P)


@triton.jit
def _gates(ba_ptr, inside, decay_ptr, dt_bias_ptr, NUM_HEADS: tl.constexpr):
    """(beta, log of the decay) of tokens whose b is at ba_ptr and whose a NUM_HEADS after it."""
    b = tl.load(ba_ptr, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(ba_ptr + NUM_HEADS, mask=inside, other=0.0)
    step = step_size(a, tl.load(dt_bias_ptr), 0.0, float("inf"))
    return 1.0 / (1.0 + tl.exp(-b)), tl.maximum(step * tl.load(decay_ptr), FORGOTTEN)


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr):
    """(1 + lower)^-1 of a strictly lower triangle [L, L]; L is at most 4 * SOLVED_AT_ONCE."""
    at = tl.arange(0, CHUNK)
    same = at[:, None] // SOLVED_AT_ONCE == at[None, :] // SOLVED_AT_ONCE
    near = tl.where(same, lower, 0.0)
    x = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    for line in range(1, SOLVED_AT_ONCE):  # of each block
        here = (at % SOLVED_AT_ONCE == line)[:, None]
        factors = tl.sum(tl.where(here, near, 0.0), axis=0)
        known = tl.sum(tl.where(same, factors[:, None] * x, 0.0), axis=0)
        x = tl.where(here & same, x - known[None, :], x)
    if CHUNK > SOLVED_AT_ONCE:
        across = tl.dot(x, tl.where(same, 0.0, lower), input_precision="tf32")
        twice = tl.dot(across, across, input_precision="tf32")
        x += tl.dot(twice, x, input_precision="tf32")
        x -= tl.dot(across, x, input_precision="tf32")
    return x


@triton.jit
def _load_qk(
    mixed_ptr, token, inside_L, head,
    NUM_HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(q, k as the convolution gave them, [L, N]; their factors [L])."""
    WIDTH: tl.constexpr = NUM_HEADS // HEADS_PER_GROUP * STATE_DIM
    state = tl.arange(0, BLOCK_N)
    inside = inside_L[:, None] & (state < STATE_DIM)[None, :]
    source = mixed_ptr + token[:, None] * (2 * WIDTH + NUM_HEADS * HEAD_DIM)
    source += (head // HEADS_PER_GROUP * STATE_DIM + state)[None, :]
    q_LN, k_LN = tl.load(source, mask=inside, other=0.0), tl.load(source + WIDTH, mask=inside, other=0.0)
    q, k = q_LN.to(tl.float32), k_LN.to(tl.float32)
    q_factor = tl.rsqrt(tl.sum(q * q, 1) + EPS) * (STATE_DIM**-0.5)
    return q_LN, k_LN, q_factor, tl.rsqrt(tl.sum(k * k, 1) + EPS)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tokens"])
def delta_chunks(
    mixed_ptr, ba_ptr, sums_ptr, products_ptr, decay_ptr, dt_bias_ptr, cu_q_ptr,
    ba_stride, first_row, num_rows, num_tokens,
    NUM_HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """products [2, H, T, L]: (1 + lower)^-1 beta, and within. sums [2, H, T]: of log decays in a chunk, in base 2,
    rounded to fp32, and the rest."""
    program = tl.program_id(0)
    head, tile = program % NUM_HEADS, program // NUM_HEADS
    row, chunk, first, stop = find_segment(cu_q_ptr + first_row, tile, num_rows, num_tokens, CHUNK)
    start = first + chunk * CHUNK
    if (row == num_rows) | (start >= stop):
        return
    at_L = tl.arange(0, CHUNK)
    token = (start + at_L).to(tl.int64)
    inside_L = token < stop
    beta, log_decay = _gates(
        ba_ptr + token * ba_stride + head, inside_L, decay_ptr + head, dt_bias_ptr + head, NUM_HEADS
    )
    sums = tl.cumsum(tl.where(inside_L, log_decay, 0.0).to(tl.float64) * LOG2E, axis=0)
    high = sums.to(tl.float32)
    rest = (sums - high.to(tl.float64)).to(tl.float32)
    line = head.to(tl.int64) * num_tokens + token
    plane = num_tokens.to(tl.int64) * NUM_HEADS
    tl.store(sums_ptr + line, high, mask=inside_L)
    tl.store(sums_ptr + plane + line, rest, mask=inside_L)
    q_LN, k_LN, q_factor, k_factor = _load_qk(
        mixed_ptr, token, inside_L, head, NUM_HEADS, HEADS_PER_GROUP, HEAD_DIM, STATE_DIM, BLOCK_N
    )
    decay = tl.exp2(tl.minimum((high[:, None] - high[None, :]) + (rest[:, None] - rest[None, :]), 0.0))
    decay *= k_factor[None, :]
    within = tl.dot(q_LN, tl.trans(k_LN), input_precision=PRECISION) * decay * q_factor[:, None]
    within = tl.where(at_L[:, None] >= at_L[None, :], within, 0.0)
    lower = tl.dot(k_LN, tl.trans(k_LN), input_precision=PRECISION) * decay * (k_factor * beta)[:, None]
    lower = tl.where(at_L[:, None] > at_L[None, :], lower, 0.0)
    target = products_ptr + line[:, None] * CHUNK + at_L[None, :]
    kind = products_ptr.dtype.element_ty
    tl.store(target + plane * CHUNK, within.to(kind), mask=inside_L[:, None])
    tl.store(target, (_inverse(lower, CHUNK) * beta[None, :]).to(kind), mask=inside_L[:, None])


@triton.jit
def _state_after(
    h_NP, k_LN, added_LP, k_factor, high, rest, sums_ptr, plane, count, CHUNK: tl.constexpr, PRECISION: tl.constexpr
):
    """The state after the first `count` tokens of a chunk that begins with h; sums_ptr: the chunk's first."""
    end, end_rest = tl.load(sums_ptr + count - 1), tl.load(sums_ptr + plane + count - 1)
    to_end = tl.exp2(tl.minimum((end - high) + (end_rest - rest), 0.0)) * k_factor
    to_end = tl.where(tl.arange(0, CHUNK) < count, to_end, 0.0)
    written_LP = (added_LP * to_end[:, None]).to(k_LN.dtype)
    h_NP = h_NP * (tl.exp2(end) * tl.exp2(end_rest))
    return tl.dot(tl.trans(k_LN), written_LP, acc=h_NP, input_precision=PRECISION)


@triton.jit
def _capture_length(captures_ptr, capture, num_captures, row):
    """Tokens of the row's capture number `capture` of all; NO_CAPTURE: it is another row's."""
    there = capture < num_captures
    owner = tl.load(captures_ptr + 3 * capture, mask=there, other=-1)
    return tl.where(owner == row, tl.load(captures_ptr + 3 * capture + 1, mask=there, other=0), NO_CAPTURE)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tokens", "num_captures"])
def delta_walk(
    mixed_ptr, sums_ptr, products_ptr, y_ptr, ssm_ptr, captures_ptr, cu_q_ptr, kv_len_ptr, table_row_ptr,
    slot_stride, first_row, num_rows, num_tokens, num_captures,
    NUM_HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    CAPTURES: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Outputs of the rows from first_row on and the states after them; zeros for padding tokens.

    captures [*, 3] = (row, num_tokens, slot), sorted: states on the way, of which the same program writes its part.
    """
    INNER: tl.constexpr = NUM_HEADS * HEAD_DIM
    WIDTH: tl.constexpr = NUM_HEADS // HEADS_PER_GROUP * STATE_DIM
    row, head, channel, h_at, inside_NP = place(tl.program_id(0), NUM_HEADS, HEAD_DIM, STATE_DIM, BLOCK_P, BLOCK_N)
    first = tl.load(cu_q_ptr + first_row + row)
    stop = tl.load(cu_q_ptr + first_row + row + 1, mask=row < num_rows, other=num_tokens)
    at_L = tl.arange(0, CHUNK)
    inside_P = channel < HEAD_DIM
    y_ptr += (head * HEAD_DIM + channel)[None, :]
    if row == num_rows:
        nothing = tl.zeros([CHUNK, BLOCK_P], y_ptr.dtype.element_ty)
        for start in range(first, stop, CHUNK):
            token = (start + at_L).to(tl.int64)
            tl.store(y_ptr + token[:, None] * INNER, nothing, mask=(token < stop)[:, None] & inside_P[None, :])
        return
    if first == stop:
        return
    row += first_row
    slot = tl.load(table_row_ptr + row).to(tl.int64) * slot_stride
    goes_on = tl.load(kv_len_ptr + row) > stop - first
    h_NP = tl.load(ssm_ptr + slot + h_at, mask=inside_NP & goes_on, other=0.0).to(tl.float32)
    plane = num_tokens.to(tl.int64) * NUM_HEADS
    capture = row * 0
    kept = row * 0
    if CAPTURES:
        while tl.load(captures_ptr + 3 * capture, mask=capture < num_captures, other=row) < row:
            capture += 1
        kept = _capture_length(captures_ptr, capture, num_captures, row)
    for start in range(first, stop, CHUNK):
        token = (start + at_L).to(tl.int64)
        inside_L = token < stop
        q_LN, k_LN, q_factor, k_factor = _load_qk(
            mixed_ptr, token, inside_L, head, NUM_HEADS, HEADS_PER_GROUP, HEAD_DIM, STATE_DIM, BLOCK_N
        )
        source = mixed_ptr + token[:, None] * (2 * WIDTH + INNER) + (2 * WIDTH + head * HEAD_DIM + channel)[None, :]
        v_LP = tl.load(source, mask=inside_L[:, None] & inside_P[None, :], other=0.0)
        line = head.to(tl.int64) * num_tokens + token
        high = tl.load(sums_ptr + line, mask=inside_L, other=0.0)
        rest = tl.load(sums_ptr + plane + line, mask=inside_L, other=0.0)
        from_start = tl.exp2(high) * tl.exp2(rest)
        products = products_ptr + line[:, None] * CHUNK + at_L[None, :]
        solved_LL = tl.load(products, mask=inside_L[:, None], other=0.0)
        within_LL = tl.load(products + plane * CHUNK, mask=inside_L[:, None], other=0.0)
        h = h_NP.to(k_LN.dtype)
        erased_LP = tl.dot(k_LN, h, input_precision=PRECISION) * (k_factor * from_start)[:, None]
        error_LP = (v_LP.to(tl.float32) - erased_LP).to(k_LN.dtype)
        added_LP = tl.dot(solved_LL, error_LP, input_precision=PRECISION)
        y_LP = tl.dot(q_LN, h, input_precision=PRECISION) * (q_factor * from_start)[:, None]
        y_LP = tl.dot(within_LL, added_LP.to(k_LN.dtype), acc=y_LP, input_precision=PRECISION)
        target = y_ptr + token[:, None] * INNER
        tl.store(target, y_LP.to(y_ptr.dtype.element_ty), mask=inside_L[:, None] & inside_P[None, :])
        sums = sums_ptr + head.to(tl.int64) * num_tokens + start
        if CAPTURES:
            while kept <= start - first + CHUNK:
                count = kept - (start - first)
                kept_NP = _state_after(h_NP, k_LN, added_LP, k_factor, high, rest, sums, plane, count, CHUNK, PRECISION)
                to = tl.load(captures_ptr + 3 * capture + 2).to(tl.int64) * slot_stride
                tl.store(ssm_ptr + to + h_at, kept_NP.to(ssm_ptr.dtype.element_ty), mask=inside_NP)
                capture += 1
                kept = _capture_length(captures_ptr, capture, num_captures, row)
        count = tl.minimum(stop - start, CHUNK)
        h_NP = _state_after(h_NP, k_LN, added_LP, k_factor, high, rest, sums, plane, count, CHUNK, PRECISION)
    tl.store(ssm_ptr + slot + h_at, h_NP.to(ssm_ptr.dtype.element_ty), mask=inside_NP)


def _layer(spec: RecurrentSpec) -> dict[str, int]:
    return {
        "NUM_HEADS": spec.num_heads,
        "HEADS_PER_GROUP": spec.num_heads // spec.num_groups,
        "HEAD_DIM": spec.head_dim,
        "STATE_DIM": spec.state_dim,
    }


def _decode_constexprs(spec: RecurrentSpec) -> tuple[dict[str, int], int]:
    """(constexprs, warps) of delta_decode."""
    block_n = max(16, power_of_2(spec.state_dim))
    block_p = min(max(1, DECODE_TILE // block_n), power_of_2(spec.head_dim))
    return _layer(spec) | {"BLOCK_P": block_p, "BLOCK_N": block_n}, 4 if block_p * block_n >= 2048 else 1


def _slice_constexprs(spec: RecurrentSpec, dtype: torch.dtype, *, captures: bool) -> tuple[dict[str, Any], ...]:
    """Of (delta_chunks, delta_walk)."""
    fp32 = dtype is torch.float32
    both: dict[str, Any] = _layer(spec) | {
        "PRECISION": precision(dtype.itemsize),
        "CHUNK": scan_chunk(dtype.itemsize),
        "BLOCK_N": max(16, power_of_2(spec.state_dim)),
    }
    block_p = 16 if fp32 else min(32, max(16, power_of_2(spec.head_dim)))
    return both, both | {"CAPTURES": captures, "BLOCK_P": block_p}


WARPS = {"num_warps": 8, "num_stages": 1}
"""Launch of both kernels over slices: with 4 warps a chunk's products do not fit the registers."""


def delta_rule(
    step: StepMetadata,
    mixed_TC: Tensor,
    ba_TX: Tensor,
    y_TM: Tensor,
    ssm_SHPN: Tensor,
    weights: SsmWeights,
    spec: RecurrentSpec,
    captures_E3: Tensor | None,
) -> None:
    """The outputs of a step's convolved tokens; updates the slots (see `kernels.ssm.ScanBackend.run`)."""
    gates, slot = (weights.decay_H, weights.dt_bias_H), ssm_SHPN.stride(0)
    num_tokens, decode = mixed_TC.shape[0], step.num_decode
    if decode:
        constexprs, warps = _decode_constexprs(spec)
        launch(
            delta_decode, (decode, spec.num_heads, cdiv(spec.head_dim, constexprs["BLOCK_P"])),
            mixed_TC, ba_TX, y_TM, ssm_SHPN, *gates, step.kv_len_R, step.table_row_R,
            mixed_TC.stride(0), ba_TX.stride(0), y_TM.stride(0), slot, **constexprs, num_warps=warps,
        )  # fmt: skip
    if num_tokens == decode:
        return
    chunks, walk = _slice_constexprs(spec, mixed_TC.dtype, captures=captures_E3 is not None)
    sums, products = delta_shapes(num_tokens, num_heads=spec.num_heads, chunk=walk["CHUNK"])
    sums_2HT = torch.empty(sums, dtype=torch.float32, device=mixed_TC.device)
    products_2HTL = mixed_TC.new_empty(products)
    num_rows = step.num_rows - decode
    num_tiles = (num_tokens - decode) // walk["CHUNK"] + num_rows + 1
    lengths = decode, num_rows, num_tokens
    launch(
        delta_chunks, (num_tiles * spec.num_heads,),
        mixed_TC, ba_TX, sums_2HT, products_2HTL, *gates, step.cu_q_R1, ba_TX.stride(0), *lengths, **chunks, **WARPS,
    )  # fmt: skip
    kept, count = (step.cu_q_R1, 0) if captures_E3 is None else (captures_E3, len(captures_E3))
    launch(
        delta_walk, ((num_rows + 1) * spec.num_heads * cdiv(spec.head_dim, walk["BLOCK_P"]),),
        mixed_TC, sums_2HT, products_2HTL, y_TM, ssm_SHPN, kept, step.cu_q_R1, step.kv_len_R, step.table_row_R,
        slot, *lengths, count, **walk, **WARPS,
    )  # fmt: skip

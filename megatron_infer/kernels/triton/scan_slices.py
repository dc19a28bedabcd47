"""Slices in a Mamba-2 scan: segments in parallel, the chunks of a segment one after the other.

    row's tokens        |  segment 0   |  segment 1   |  segment 2   | rest |   SEGMENT tokens each, from the slice's
    1  first segments     y from the slot                                       first token of the step on
    2  from zeros         state          state          state
    3  carry        slot -----> h0 -----------> h1 -----------> h2              h <- decay of a segment * h + its own
    4  later segments                    y from h0      y from h1     y from h2, state to the slot

A row shorter than a segment needs only the first launch, which writes its state to the slot; the others are left out
where a step's shape has no longer row. Captures are written before the state that they start from is overwritten: in
first segments before 1, in later segments after 3. Inside a chunk the scan is a masked product of C and B on tensor
cores; one program keeps the state of a head's channels in registers from chunk to chunk:

    decay(s, l) = exp(step[s + 1] + ... + step[l]),   step = dt A <= 0,   l, s tokens of the chunk
    y[l] = sum over s <= l of (C[l] . B[s]) decay(s, l) dt[s] x[s] + exp(step[first] + ... + step[l]) C[l] . h + D x[l]
    h   <- exp(step[first] + ... + step[last]) h + sum over s of decay(s, last) dt[s] x[s] B[s]^T

Sums of steps reach hundreds: `scan_steps` computes them in float64, in base 2, and keeps a rounded part and the factor
of the rest, so that differences of neighbours keep their digits; only powers <= 1 are used. A row's bits depend on how
its tokens are chunked over steps, not on other rows, captures or padding; chunk ends at multiples of SEGMENT tokens
change none. Operands of products are rounded to the inputs' dtype, intermediate sums and states are fp32.

C . B is one product per group, `scan_scores`, for all its heads. Traffic: x and B are read twice, C twice, y is written
once, and a state is moved four times per segment; scratch holds one state per segment.
Shape legend: kernels/ssm.py, L tokens of a chunk. Source: Mamba-2, arXiv:2405.21060, section 6.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_infer.kernels.triton.ragged import find_row
from megatron_infer.kernels.triton.scan_decode import step_size

FORGOTTEN = tl.constexpr(-128.0)
"""Lower limit of a token's log decay: e^-128 is zero in fp32, and larger sums would lose the digits of small ones."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_segment(cu_q_ptr, tile, num_rows, num_tokens, SEGMENT: tl.constexpr):
    """(row, segment, its first token, the row's first and the one behind its last), rows counted from cu_q's first.

    For the tiles of a row see find_row. Row num_rows is that of the padding tokens.
    """
    row, first_tile = find_row(cu_q_ptr, tile, num_rows, SEGMENT)
    first = tl.load(cu_q_ptr + row)
    stop = tl.load(cu_q_ptr + row + 1, mask=row < num_rows, other=num_tokens)
    return row, tile - first_tile, first, stop


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tokens"])
def scan_steps(
    dt_ptr, sums_ptr, segment_decay_ptr, decay_ptr, dt_bias_ptr, cu_q_ptr,
    dt_stride, dt_min, dt_max, first_row, num_rows, num_tokens,
    NUM_HEADS: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Sums of steps within chunks, of all heads, and the decay over each whole segment.

    sums [3, H, T]: s rounded to fp32, where s = (step[first] + ... + step[l]) log2(e); 2^rest of it; dt / 2^rest.
    segment_decay [*, H] has one line for each SEGMENT tokens, in the order of `scan_carry`.
    """
    cu_q_ptr += first_row
    tile, head = tl.program_id(0), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    row, segment, first, stop = find_segment(cu_q_ptr, tile, num_rows, num_tokens, SEGMENT)
    begin = first + segment * SEGMENT
    if (row < num_rows) & (begin < stop):
        inside_H = head < NUM_HEADS
        decay_H = tl.load(decay_ptr + head, mask=inside_H, other=0.0)
        bias_H = tl.load(dt_bias_ptr + head, mask=inside_H, other=0.0)
        total_H = tl.zeros([BLOCK_H], tl.float64)
        for start in range(begin, tl.minimum(begin + SEGMENT, stop), CHUNK):
            token = start + tl.arange(0, CHUNK)
            inside = (token < stop)[:, None] & inside_H[None, :]
            token = token.to(tl.int64)
            dt_LH = tl.load(dt_ptr + token[:, None] * dt_stride + head[None, :], mask=inside, other=0.0)
            dt_LH = tl.where(inside, step_size(dt_LH, bias_H[None, :], dt_min, dt_max), 0.0)
            step_LH = tl.where(inside, tl.maximum(dt_LH * decay_H[None, :], FORGOTTEN), 0.0).to(tl.float64) * LOG2E
            sums_LH = tl.cumsum(step_LH, axis=0)
            total_H += tl.sum(step_LH, axis=0)
            rounded_LH = sums_LH.to(tl.float32)
            rest_LH = tl.exp2((sums_LH - rounded_LH.to(tl.float64)).to(tl.float32))
            at = head.to(tl.int64)[None, :] * num_tokens + token[:, None]
            plane = num_tokens.to(tl.int64) * NUM_HEADS
            tl.store(sums_ptr + at, rounded_LH, mask=inside)
            tl.store(sums_ptr + plane + at, rest_LH, mask=inside)
            tl.store(sums_ptr + 2 * plane + at, dt_LH / rest_LH, mask=inside)
        if begin + SEGMENT <= stop:
            line = (first - tl.load(cu_q_ptr)) // SEGMENT + segment
            decay = tl.exp2(total_H.to(tl.float32))
            tl.store(segment_decay_ptr + line * NUM_HEADS + head, decay, mask=inside_H)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tokens"])
def scan_scores(
    mixed_ptr, scores_ptr, cu_q_ptr, first_row, num_rows, num_tokens,
    NUM_HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """scores [G, T, L]: C of each token times B of each in its chunk, for all heads of a group; fp32."""
    CHUNKS: tl.constexpr = SEGMENT // CHUNK
    GROUPS: tl.constexpr = NUM_HEADS // HEADS_PER_GROUP
    INNER: tl.constexpr = NUM_HEADS * HEAD_DIM
    program = tl.program_id(0)
    chunk, group, tile = program % CHUNKS, program // CHUNKS % GROUPS, program // (CHUNKS * GROUPS)
    row, segment, first, stop = find_segment(cu_q_ptr + first_row, tile, num_rows, num_tokens, SEGMENT)
    start = first + segment * SEGMENT + chunk * CHUNK
    if (row == num_rows) | (start >= stop):
        return
    at_L = tl.arange(0, CHUNK)
    token, state = (start + at_L).to(tl.int64), tl.arange(0, BLOCK_N)
    inside = (token < stop)[:, None] & (state < STATE_DIM)[None, :]
    source = (
        mixed_ptr + token[:, None] * (INNER + 2 * GROUPS * STATE_DIM) + (INNER + group * STATE_DIM + state)[None, :]
    )
    b_LN = tl.load(source, mask=inside, other=0.0)
    c_LN = tl.load(source + GROUPS * STATE_DIM, mask=inside, other=0.0)
    score_LL = tl.dot(c_LN, tl.trans(b_LN), input_precision=PRECISION)
    target = scores_ptr + (group.to(tl.int64) * num_tokens + token)[:, None] * CHUNK + at_L[None, :]
    tl.store(target, score_LL, mask=(token < stop)[:, None])


@triton.jit
def _load_chunk(
    mixed_ptr, sums_ptr, start, stop, num_tokens, head, channel,
    NUM_HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tokens start .. stop - 1, CHUNK at most: (x, B, sums of steps, dt / 2^rest), zeros behind the end."""
    GROUPS_WIDTH: tl.constexpr = NUM_HEADS // HEADS_PER_GROUP * STATE_DIM
    token = (start + tl.arange(0, CHUNK)).to(tl.int64)
    state = tl.arange(0, BLOCK_N)
    inside_L = token < stop
    source = mixed_ptr + token[:, None] * (NUM_HEADS * HEAD_DIM + 2 * GROUPS_WIDTH)
    inside_LP = inside_L[:, None] & (channel < HEAD_DIM)[None, :]
    x_LP = tl.load(source + (head * HEAD_DIM + channel)[None, :], mask=inside_LP, other=0.0)
    b_at = NUM_HEADS * HEAD_DIM + head // HEADS_PER_GROUP * STATE_DIM + state
    b_LN = tl.load(source + b_at[None, :], mask=inside_L[:, None] & (state < STATE_DIM)[None, :], other=0.0)
    sums_ptr += head.to(tl.int64) * num_tokens + token
    sum_L = tl.load(sums_ptr, mask=inside_L, other=0.0)
    weight_L = tl.load(sums_ptr + 2 * num_tokens.to(tl.int64) * NUM_HEADS, mask=inside_L, other=0.0)
    return x_LP, b_LN, sum_L, weight_L


@triton.jit
def _state_behind(
    h_NP, x_LP, b_LN, sum_L, weight_L, sums_ptr, start, stop, num_tokens, head,
    NUM_HEADS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state behind a chunk, loaded by `_load_chunk`, that begins with state h."""
    sums_ptr += head.to(tl.int64) * num_tokens + tl.minimum(start + CHUNK, stop) - 1
    end = tl.load(sums_ptr)
    end_rest = tl.load(sums_ptr + num_tokens.to(tl.int64) * NUM_HEADS)
    to_end_L = tl.exp2(tl.minimum(end - sum_L, 0.0)) * end_rest
    weighted_LP = (x_LP.to(tl.float32) * (weight_L * to_end_L)[:, None]).to(x_LP.dtype)
    return tl.dot(tl.trans(b_LN), weighted_LP, acc=h_NP * (tl.exp2(end) * end_rest), input_precision=PRECISION)


@triton.jit
def _walk(
    h_NP, mixed_ptr, sums_ptr, begin, end, num_tokens, head, channel,
    NUM_HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The state behind tokens begin .. end - 1, which begin with state h."""
    for start in range(begin, end, CHUNK):
        x_LP, b_LN, sum_L, weight_L = _load_chunk(
            mixed_ptr, sums_ptr, start, end, num_tokens, head, channel,
            NUM_HEADS, HEADS_PER_GROUP, HEAD_DIM, STATE_DIM, CHUNK, BLOCK_N,
        )  # fmt: skip
        h_NP = _state_behind(
            h_NP, x_LP, b_LN, sum_L, weight_L, sums_ptr, start, end, num_tokens, head, NUM_HEADS, CHUNK, PRECISION
        )
    return h_NP


@triton.jit
def place(
    program, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(tile or capture of the program, head, channels [P], offsets in a slot's state [N, P], their mask)."""
    TILES_P: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    head = program // TILES_P % NUM_HEADS
    channel = program % TILES_P * BLOCK_P + tl.arange(0, BLOCK_P)
    state = tl.arange(0, BLOCK_N)
    h_at = (head * HEAD_DIM + channel)[None, :] * STATE_DIM + state[:, None]
    inside_NP = (state < STATE_DIM)[:, None] & (channel < HEAD_DIM)[None, :]
    return program // (TILES_P * NUM_HEADS), head, channel, h_at, inside_NP


@triton.jit(do_not_specialize=["later", "first_row", "num_rows", "num_tokens"])
def scan_segments(
    mixed_ptr, scores_ptr, sums_ptr, states_ptr, y_ptr, ssm_ptr, skip_ptr, cu_q_ptr, kv_len_ptr, table_row_ptr,
    slot_stride, later, first_row, num_rows, num_tokens,
    NUM_HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    CHANNEL_SKIP: tl.constexpr, PRECISION: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Outputs of rows' first segments, and zeros for padding tokens; or outputs of `later` segments.

    One program per segment, head and BLOCK_P channels. The state behind an incomplete segment is written to the row's
    slot. Later segments begin with the states that `scan_carry` computed.
    """
    INNER: tl.constexpr = NUM_HEADS * HEAD_DIM
    STATE: tl.constexpr = INNER * STATE_DIM
    C_AT: tl.constexpr = INNER + NUM_HEADS // HEADS_PER_GROUP * STATE_DIM
    CHANNELS: tl.constexpr = 2 * C_AT - INNER
    cu_q_ptr += first_row
    tile, head, channel, h_at, inside_NP = place(tl.program_id(0), NUM_HEADS, HEAD_DIM, STATE_DIM, BLOCK_P, BLOCK_N)
    row, segment, first, stop = find_segment(cu_q_ptr, tile, num_rows, num_tokens, SEGMENT)
    begin = first + segment * SEGMENT
    end = tl.minimum(begin + SEGMENT, stop)
    at_L = tl.arange(0, CHUNK)
    inside_P = channel < HEAD_DIM
    y_ptr += (head * HEAD_DIM + channel)[None, :]
    if row == num_rows:
        if later == 0:
            nothing = tl.zeros([CHUNK, BLOCK_P], y_ptr.dtype.element_ty)
            for start in range(begin, end, CHUNK):
                token = (start + at_L).to(tl.int64)
                tl.store(y_ptr + token[:, None] * INNER, nothing, mask=(token < end)[:, None] & inside_P[None, :])
        return
    if (begin >= stop) | ((segment > 0) != (later > 0)):
        return

    slot = tl.load(table_row_ptr + first_row + row).to(tl.int64) * slot_stride
    if segment == 0:
        goes_on = tl.load(kv_len_ptr + first_row + row) > stop - first
        h_NP = tl.load(ssm_ptr + slot + h_at, mask=inside_NP & goes_on, other=0.0).to(tl.float32)
    else:
        line = ((first - tl.load(cu_q_ptr)) // SEGMENT + segment - 1).to(tl.int64)
        h_NP = tl.load(states_ptr + line * STATE + h_at, mask=inside_NP, other=0.0)
    skip_at = head * HEAD_DIM + channel if CHANNEL_SKIP else head + 0 * channel
    skip_P = tl.load(skip_ptr + skip_at, mask=inside_P, other=0.0)
    state = tl.arange(0, BLOCK_N)
    c_ptr = mixed_ptr + (C_AT + head // HEADS_PER_GROUP * STATE_DIM + state)[None, :]
    rest_ptr = sums_ptr + (head.to(tl.int64) + NUM_HEADS) * num_tokens
    scores_ptr += (head // HEADS_PER_GROUP).to(tl.int64) * num_tokens * CHUNK + at_L[None, :]
    for start in range(begin, end, CHUNK):
        token = (start + at_L).to(tl.int64)
        inside_L = token < end
        x_LP, b_LN, sum_L, weight_L = _load_chunk(
            mixed_ptr, sums_ptr, start, end, num_tokens, head, channel,
            NUM_HEADS, HEADS_PER_GROUP, HEAD_DIM, STATE_DIM, CHUNK, BLOCK_N,
        )  # fmt: skip
        rest_L = tl.load(rest_ptr + token, mask=inside_L, other=0.0)
        inside_LN = inside_L[:, None] & (state < STATE_DIM)[None, :]
        c_LN = tl.load(c_ptr + token[:, None] * CHANNELS, mask=inside_LN, other=0.0)
        before_LL = (at_L[:, None] >= at_L[None, :]) & inside_L[:, None]
        # whole lines: a mask by entries would make copies of 4 bytes
        score_LL = tl.load(scores_ptr + token[:, None] * CHUNK, mask=inside_L[:, None], other=0.0)
        score_LL *= tl.exp2(sum_L[:, None] - sum_L[None, :]) * weight_L[None, :]
        score_LL = tl.where(before_LL, score_LL, 0.0)
        y_LP = tl.dot(c_LN, h_NP.to(c_LN.dtype), input_precision=PRECISION) * tl.exp2(sum_L)[:, None]
        y_LP = tl.dot(score_LL.to(x_LP.dtype), x_LP, acc=y_LP, input_precision=PRECISION)
        y_LP = y_LP * rest_L[:, None] + skip_P[None, :] * x_LP
        target = y_ptr + token[:, None] * INNER
        tl.store(target, y_LP.to(y_ptr.dtype.element_ty), mask=inside_L[:, None] & inside_P[None, :])
        h_NP = _state_behind(
            h_NP, x_LP, b_LN, sum_L, weight_L, sums_ptr, start, end, num_tokens, head, NUM_HEADS, CHUNK, PRECISION
        )
    if begin + SEGMENT > stop:
        tl.store(ssm_ptr + slot + h_at, h_NP.to(ssm_ptr.dtype.element_ty), mask=inside_NP)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tokens"])
def scan_states(
    mixed_ptr, sums_ptr, states_ptr, cu_q_ptr, first_row, num_rows, num_tokens,
    NUM_HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What each whole segment adds to the state; programs as in `scan_segments`.

    states [*, H, P, N] has one for each SEGMENT tokens: row r's from (cu_q[r] - cu_q[first_row]) // SEGMENT on.
    """
    cu_q_ptr += first_row
    tile, head, channel, h_at, inside_NP = place(tl.program_id(0), NUM_HEADS, HEAD_DIM, STATE_DIM, BLOCK_P, BLOCK_N)
    row, segment, first, stop = find_segment(cu_q_ptr, tile, num_rows, num_tokens, SEGMENT)
    begin = first + segment * SEGMENT
    if (row == num_rows) | (begin + SEGMENT > stop):
        return
    h_NP = _walk(
        tl.zeros([BLOCK_N, BLOCK_P], tl.float32),
        mixed_ptr, sums_ptr, begin, begin + SEGMENT, num_tokens, head, channel,
        NUM_HEADS, HEADS_PER_GROUP, HEAD_DIM, STATE_DIM, PRECISION, CHUNK, BLOCK_N,
    )  # fmt: skip
    line = ((first - tl.load(cu_q_ptr)) // SEGMENT + segment).to(tl.int64)
    tl.store(states_ptr + line * (NUM_HEADS * HEAD_DIM * STATE_DIM) + h_at, h_NP, mask=inside_NP)


@triton.jit(do_not_specialize=["first_row"])
def scan_carry(
    states_ptr, segment_decay_ptr, ssm_ptr, cu_q_ptr, kv_len_ptr, table_row_ptr, slot_stride, first_row,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """states[k] of a row, what segment k adds, becomes the state behind segment k, in order, starting with the slot's.

    Writes the slot of a row that ends with a whole segment. A program handles BLOCK entries of a head.
    """
    HEAD_STATE: tl.constexpr = HEAD_DIM * STATE_DIM
    TILES: tl.constexpr = (HEAD_STATE + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    head = program // TILES % NUM_HEADS
    row = first_row + program // (TILES * NUM_HEADS)
    entry = program % TILES * BLOCK + tl.arange(0, BLOCK)
    inside = entry < HEAD_STATE
    first = tl.load(cu_q_ptr + row)
    q_len = tl.load(cu_q_ptr + row + 1) - first
    count = q_len // SEGMENT
    if count == 0:
        return
    line = ((first - tl.load(cu_q_ptr + first_row)) // SEGMENT).to(tl.int64)
    segment_decay_ptr += line * NUM_HEADS + head
    states_ptr += (line * NUM_HEADS + head) * HEAD_STATE + entry
    slot_ptr = ssm_ptr + tl.load(table_row_ptr + row).to(tl.int64) * slot_stride + head * HEAD_STATE + entry
    goes_on = tl.load(kv_len_ptr + row) > q_len
    h = tl.load(slot_ptr, mask=inside & goes_on, other=0.0).to(tl.float32)
    added = tl.load(states_ptr, mask=inside, other=0.0)
    for segment in range(count):
        h = h * tl.load(segment_decay_ptr) + added
        # the next one is loaded before this one is stored
        added = tl.load(states_ptr + NUM_HEADS * HEAD_STATE, mask=inside & (segment + 1 < count), other=0.0)
        tl.store(states_ptr, h, mask=inside)
        states_ptr += NUM_HEADS * HEAD_STATE
        segment_decay_ptr += NUM_HEADS
    if q_len % SEGMENT == 0:
        tl.store(slot_ptr, h.to(ssm_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["later", "first_row", "num_tokens"])
def scan_captures(
    mixed_ptr, sums_ptr, states_ptr, ssm_ptr, captures_ptr, cu_q_ptr, kv_len_ptr, table_row_ptr,
    slot_stride, later, first_row, num_tokens,
    NUM_HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The states of captures [*, 3] = (row, num_tokens, slot): those inside first segments, which begin with the row's
    slot, or those of `later` segments, which begin with the states that `scan_carry` computed."""
    capture, head, channel, h_at, inside_NP = place(tl.program_id(0), NUM_HEADS, HEAD_DIM, STATE_DIM, BLOCK_P, BLOCK_N)
    captures_ptr += 3 * capture
    row, length = tl.load(captures_ptr), tl.load(captures_ptr + 1)
    segment = length // SEGMENT
    if (segment > 0) != (later > 0):
        return
    first = tl.load(cu_q_ptr + row)
    if segment == 0:
        goes_on = tl.load(kv_len_ptr + row) > tl.load(cu_q_ptr + row + 1) - first
        slot = tl.load(table_row_ptr + row).to(tl.int64) * slot_stride
        h_NP = tl.load(ssm_ptr + slot + h_at, mask=inside_NP & goes_on, other=0.0).to(tl.float32)
    else:
        line = ((first - tl.load(cu_q_ptr + first_row)) // SEGMENT + segment - 1).to(tl.int64)
        h_NP = tl.load(states_ptr + line * (NUM_HEADS * HEAD_DIM * STATE_DIM) + h_at, mask=inside_NP, other=0.0)
    h_NP = _walk(
        h_NP, mixed_ptr, sums_ptr, first + segment * SEGMENT, first + length, num_tokens, head, channel,
        NUM_HEADS, HEADS_PER_GROUP, HEAD_DIM, STATE_DIM, PRECISION, CHUNK, BLOCK_N,
    )  # fmt: skip
    target = tl.load(captures_ptr + 2).to(tl.int64) * slot_stride
    tl.store(ssm_ptr + target + h_at, h_NP.to(ssm_ptr.dtype.element_ty), mask=inside_NP)

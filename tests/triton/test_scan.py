"""The convolution, scan and delta rule in Triton against recurrences in float64: ragged, padded, captured, odd."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from launches import captured
from scan_case import DELTA, SPEC, Case, check_case, make_case
from step_rows import moved, padded_step, spread

from megatron_infer.kernels.ssm import LayerStates

pytestmark = pytest.mark.triton
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
SMALL = replace(SPEC, num_heads=2)
"""The interpreter takes milliseconds for each program: one head a group."""
ONE = replace(SPEC, num_heads=1, num_groups=1)
NET = replace(DELTA, num_heads=2, num_groups=1)
KINDS = pytest.mark.parametrize("spec", [SMALL, NET], ids=["mamba", "delta"])


@pytest.fixture(scope="module")
def scan(device):
    from megatron_infer.kernels.triton.scan import TritonScan

    return OnDevice(TritonScan(), device)


@pytest.fixture(scope="module")
def segmented(device):
    """A scan with segments of 32 tokens, two chunks of fp32: the interpreter takes long for those of 256."""
    from megatron_infer.kernels.triton.scan import TritonScan

    return OnDevice(TritonScan(segment=32), device)


class OnDevice:
    """A backend that is given a case on the CPU and runs it elsewhere; states come back into the tensors given."""

    def __init__(self, backend, device):
        self.backend, self.device = backend, device

    def plan(self, step):
        self.backend.plan(moved(step, self.device))

    def run(self, xBC, dt, states, weights, spec):
        pools = [part._base.to(self.device) for part in states]
        views = (  # as strided as they are
            part._base.to(self.device).as_strided(part.shape, part.stride(), part.storage_offset())
            for part in (xBC, dt)
        )
        own = LayerStates(*(pool[:, 1] for pool in pools))
        y = self.backend.run(*views, own, moved(weights, self.device), spec)
        for part, pool in zip(states, pools, strict=True):
            part._base.copy_(pool)
        return y.cpu()


def chunk_of(dtype):
    from megatron_infer.kernels.triton.scan import slice_tiles

    return slice_tiles(SMALL.head_dim, SMALL.state_dim, dtype).chunk


@KINDS
def test_ragged_mixed_step_with_captures_and_padding(scan, dtype, spec):
    rows = [(1, 5), (1, 1), (1, 9), (70, 70), (40, 200), (2, 2), (3, 10), (1, 1), (1, 30), (64, 64), (66, 70)]
    captures = [(3, 1), (3, 2), (3, 32), (3, 64), (3, 69), (4, 39), (5, 1), (9, 63), (10, 33), (10, 64)]
    case = make_case(rows, spec=spec, captures=captures, num_decode=3, num_padding=70, dtype=dtype, ssm_dtype=dtype)
    check_case(scan, case, TOLERANCE[dtype])
    y, _ = case.run(scan)
    assert (y[-70:] == 0).all(), "padding gives zeros"


@KINDS
def test_slices_that_end_around_a_chunk_fresh_and_going_on(scan, dtype, spec):
    chunk = chunk_of(dtype)
    lengths = [chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1]
    rows = [(n, n + past) for n, past in zip(lengths, (0, 7, 0, 3, 9), strict=True)]
    check_case(scan, make_case(rows, spec=spec, dtype=dtype), TOLERANCE[dtype])


def test_long_rows_go_segment_by_segment_and_are_captured_inside_and_between_them(device, dtype):
    """Rows around segments: within one, whole ones, with a rest, going on and fresh, empty."""
    from megatron_infer.kernels.triton.scan import TritonScan

    n = 32 if dtype is torch.float32 else chunk_of(dtype)
    rows = [(1, 5), (2 * n + 11, 170), (n, n), (0, 4), (1, 40), (2 * n, 2 * n + 2), (n - 1, n - 1), (2, 2)]
    captures = [(1, n - 1), (1, n), (1, n + 17), (1, 2 * n), (1, 2 * n + 10), (5, n), (5, 2 * n - 1)]
    settings = {"captures": captures, "num_decode": 1, "num_padding": n + 1, "dtype": dtype, "ssm_dtype": dtype}
    case, scan = make_case(rows, spec=ONE, **settings), OnDevice(TritonScan(segment=n), device)
    check_case(scan, case, TOLERANCE[dtype])
    y, _ = case.run(scan)
    assert (y[-n - 1 :] == 0).all(), "padding gives zeros"


@KINDS
@pytest.mark.parametrize("cut", [32, 64])
def test_a_cut_between_segments_and_a_capture_there_change_no_bit(segmented, cut, spec):
    """Of outputs, of what the slot holds in the end, and of the state behind the first part. A delta net has chunks."""
    whole = make_case([(80, 80)], spec=spec, captures=[(0, cut)])
    y, states = whole.run(segmented)
    slot, kept = int(whole.step.table_row[0]), int(whole.step.captures.state_slot[0])
    first = make_case([(cut, cut)], spec=spec)
    first = replace(first, fused=whole.fused[:cut], weights=whole.weights)
    got, left = first.run(segmented)
    assert torch.equal(got, y[:cut])
    second = make_case([(80 - cut, 80)], spec=spec)
    second = replace(second, fused=whole.fused[cut:], weights=whole.weights)
    for into, part, kept_state in zip(second.states, left, states, strict=True):
        part = part[int(first.step.table_row[0])]
        assert torch.equal(part, kept_state[kept])
        into[int(second.step.table_row[0])] = part
    got, end = second.run(segmented)
    assert torch.equal(got, y[cut:])
    for part, want in zip(end, states, strict=True):
        assert torch.equal(part[int(second.step.table_row[0])], want[slot])


@pytest.mark.parametrize("rows", [[(1, 7)], [(1, 1)], [(1, 3), (1, 1), (1, 90)], [(9, 9)], [(2, 40), (3, 40), (4, 5)]])
@KINDS
def test_steps_of_one_kind(scan, rows, spec):
    decode = sum(q == 1 for q, _ in rows)
    check_case(scan, make_case(rows, spec=spec, num_decode=decode))


SHAPES = {
    "two groups of three heads": {"num_heads": 6},
    "a group a head": {"num_heads": 3, "num_groups": 3},
    "one tap": {"conv_width": 1},
    "two taps": {"conv_width": 2},
    "six taps": {"conv_width": 6},
    "one of everything": {"num_heads": 1, "num_groups": 1, "head_dim": 1, "state_dim": 1, "conv_width": 1},
    "largest": {"num_heads": 1, "num_groups": 1, "head_dim": 128, "state_dim": 256},
    "odd": {"num_heads": 3, "num_groups": 3, "head_dim": 13, "state_dim": 37},
    "odd, wide": {"num_heads": 1, "num_groups": 1, "head_dim": 65, "state_dim": 200},
    "dt clamped": {"dt_min": 0.05, "dt_max": 0.2},
}
MAMBA_ALONE = ("dt clamped", "largest", "odd, wide")
"""What a delta net has not, and states of more than 128."""


@pytest.mark.parametrize(
    ("base", "shape"), [(SMALL, name) for name in SHAPES] + [(NET, name) for name in SHAPES if name not in MAMBA_ALONE]
)
def test_shapes_of_layers(scan, base, shape):
    spec = replace(base, **SHAPES[shape])
    rows = [(1, 4), (1, 1), (3, 3), (40, 71), (2, 40)]
    case = make_case(rows, spec=spec, captures=[(2, 2), (3, 2), (3, 35)], num_decode=2, num_padding=1)
    check_case(scan, case, tolerance=3e-5)


@pytest.mark.parametrize("conv_bias", [True, False])
@pytest.mark.parametrize("channel_skip", [True, False])
def test_a_skip_of_each_channel_and_no_convolution_bias(scan, conv_bias, channel_skip):
    rows = [(1, 4), (20, 30), (5, 5)]
    case = make_case(rows, spec=SMALL, num_decode=1, conv_bias=conv_bias, channel_skip=channel_skip)
    check_case(scan, case)


@KINDS
@pytest.mark.parametrize(("conv_dtype", "ssm_dtype"), [("float16", "float32"), ("float32", "float16")])
def test_states_of_another_dtype_than_the_inputs(scan, conv_dtype, ssm_dtype, spec):
    case = make_case(
        [(1, 4), (20, 30), (5, 5), (40, 40)],
        spec=spec,
        captures=[(3, 5)],
        num_decode=1,
        conv_dtype=getattr(torch, conv_dtype),
        ssm_dtype=getattr(torch, ssm_dtype),
    )
    check_case(scan, case, tolerance=2e-3)


def padded(case: Case, *, decode: int, rows: int, tokens: int) -> Case:
    """The same step in a graph's shape: dummy decode rows behind the real ones, then empty rows and padding tokens.

    Dummy rows write to the last slot, which no row of the step has.
    """
    dummy = len(case.states.conv_SCW) - 1
    assert dummy not in case.step.table_row.tolist()
    step, own = padded_step(case.step, padding_rows=(decode, rows), num_padding=tokens, dummy_row=dummy)
    fused = spread(case.fused, own, step.num_tokens, 1.0)
    fused[-tokens:] = math.nan
    return replace(case, step=step, fused=fused)


def without_last_slot(rows, spec, **settings) -> Case:
    """A case whose last slot no row has."""
    for seed in range(100):
        case = make_case(rows, spec=spec, seed=seed, **settings)
        if len(case.states.conv_SCW) - 1 not in case.step.table_row.tolist():
            return case
    raise AssertionError("every order of slots uses the last one")


@KINDS
@pytest.mark.parametrize("rows", [[(1, 5), (1, 1), (9, 9), (34, 50)], [(1, 5), (1, 1)]])
def test_padding_changes_no_bit_of_a_row_and_writes_to_the_dummy_slot_alone(scan, rows, spec):
    case = without_last_slot(rows, spec, num_decode=2)
    wide = padded(case, decode=3, rows=2, tokens=5)
    y, states = case.run(scan)
    got, got_states = wide.run(scan)
    assert torch.equal(torch.cat((got[:2], got[5:-5])), y)
    assert got.isfinite().all() and (got[-5:] == 0).all()
    for part, other in zip(states, got_states, strict=True):
        assert torch.equal(part[:-1].contiguous().view(torch.uint8), other[:-1].contiguous().view(torch.uint8))


@KINDS
def test_launches_of_a_padded_step_answer_the_next_steps_content_too(scan, device, spec):
    """What a captured graph repeats: the same launches, with other rows, lengths, slots and tokens in the mirrors."""
    one = padded(without_last_slot([(1, 5), (1, 1), (9, 9), (20, 20)], spec, num_decode=2), decode=1, rows=1, tokens=5)
    two = padded(without_last_slot([(1, 3), (30, 40), (0, 0), (0, 0)], spec, num_decode=1), decode=2, rows=0, tokens=4)
    two = replace(two, weights=one.weights)
    fixed, found = copy.deepcopy(one.on(device)), []

    def step() -> None:
        scan.backend.plan(fixed.step)
        found[:] = [scan.backend.run(*fixed.parts(fixed.fused), fixed.states, fixed.weights, spec)]

    replay = captured(step, device)
    for case in (one, two, one):
        fixed.fused.copy_(case.fused)
        for part, other in zip(fixed.states, case.states, strict=True):
            part.copy_(other)
        for name in ("q_len_R", "kv_len_R", "cu_q_R1", "table_row_R"):
            getattr(fixed.step, name).copy_(getattr(case.step, name))
        replay()
        want, want_states = case.run(scan)
        assert torch.equal(found[0].cpu(), want)
        for part, other in zip(fixed.states, want_states, strict=True):
            mine, theirs = (x[:-1].cpu().contiguous().view(torch.uint8) for x in (part, other))
            assert torch.equal(mine, theirs)


def same(got, want, *, exactly):
    """Exactly, or as two compilations of the same arithmetic are."""
    tolerance = 0.0 if exactly else 1e-6
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("backend", "length", "spec"),
    [("scan", 40, ONE), ("segmented", 20, ONE), ("segmented", 80, ONE), ("scan", 80, NET)],
)
def test_rows_beside_it_and_captures_change_no_bit_of_a_row(request, backend, length, spec, captured):
    """Also of one that goes segment by segment."""
    scan = request.getfixturevalue(backend)
    alone = make_case([(length, 200)], spec=spec, seed=1)
    captures = [(2, n) for n in (7, 32, 70) if captured and n < length]
    rows = [(1, 9), (50, 50), (length, 200)]
    together = make_case(rows, spec=spec, captures=captures, num_decode=1, seed=2)
    together.fused[51:] = alone.fused
    for part, other in zip(together.states, alone.states, strict=True):
        part[int(together.step.table_row[2])] = other[int(alone.step.table_row[0])]
    together = replace(together, weights=alone.weights)
    y, states = alone.run(scan)
    got, got_states = together.run(scan)
    assert torch.equal(got[51:], y)
    for part, other in zip(got_states, states, strict=True):
        assert torch.equal(part[int(together.step.table_row[2])], other[int(alone.step.table_row[0])])


@KINDS
def test_a_capture_holds_what_a_cut_there_would_have_left(scan, device, spec):
    whole = make_case([(60, 60)], spec=spec, captures=[(0, 20), (0, 32), (0, 33)])
    _, states = whole.run(scan)
    for n, slot in zip(whole.step.captures.num_tokens, whole.step.captures.state_slot, strict=True):
        cut = make_case([(int(n), int(n))], spec=spec)
        cut = replace(cut, fused=whole.fused[: int(n)], weights=whole.weights)
        _, left = cut.run(scan)
        for part, other in zip(states, left, strict=True):
            same(part[int(slot)], other[int(cut.step.table_row[0])], exactly=device.type == "cpu")


@KINDS
def test_long_prompt_with_violent_step_sizes(scan, spec):
    """Decays of hundreds a token beside tiny ones: sums of them must not cost the small ones their digits."""
    case = make_case([(200, 200)], spec=spec, captures=[(0, 133)])
    case.fused[::7, -2:] += 30.0
    check_case(scan, case, tolerance=3e-5)


def test_equal_keys_that_replace_each_other_keep_their_digits(scan, dtype):
    """The triangular system of a chunk at its worst: every token corrects all before it, and nothing decays."""
    case = make_case([(150, 150)], spec=NET, dtype=dtype, captures=[(0, 77)])
    case.fused[:, 3 : 3 + 2 * NET.state_dim] = torch.linspace(0.5, 2.0, 2 * NET.state_dim).to(dtype)
    case.fused[:, -4:-2], case.fused[:, -2:] = 9.0, -30.0
    check_case(scan, case, 3 * TOLERANCE[dtype])


@KINDS
@pytest.mark.parametrize("log_decay", [20.0, 80.0])
def test_a_head_that_forgets_everything_at_once_stays_finite(scan, log_decay, spec):
    case = make_case([(70, 70), (40, 100), (1, 1), (1, 9)], spec=spec, captures=[(0, 66)])
    case.weights.decay_H[1] = -math.exp(log_decay)
    case.fused[50, -1] = 1e9
    y, _ = case.run(scan)
    assert y.isfinite().all()
    check_case(scan, case, tolerance=3e-5)


def test_a_nan_in_b_of_a_token_does_not_reach_the_tokens_of_its_chunk_before_it(scan):
    case = make_case([(16, 16)], spec=ONE)
    want, _ = case.run(scan)
    case.fused[9, 3 + ONE.inner_width] = math.nan
    got, _ = case.run(scan)
    assert torch.equal(got[:9], want[:9]) and got[9:].isnan().all()


@KINDS
def test_what_one_row_holds_does_not_reach_another(scan, spec):
    case = make_case([(1, 4), (1, 5), (40, 40), (33, 80)], spec=spec, num_decode=2)
    want, want_states = case.run(scan)
    case.fused[1], case.fused[10] = math.nan, math.inf
    got, states = case.run(scan)
    for span in (slice(0, 1), slice(42, 75)):
        assert torch.equal(got[span], want[span])
    assert not got[1].isfinite().any() and not got[10:40].isfinite().all()
    for row in (0, 3):
        slot = int(case.step.table_row[row])
        for after, before in zip(states, want_states, strict=True):
            assert torch.equal(after[slot], before[slot])


def test_what_cannot_run_is_refused_with_the_limit(device):
    from megatron_infer.kernels.triton.scan import TritonScan, unavailable

    refuse = TritonScan().supports
    dtypes = {"dtype": torch.float32, "conv_dtype": torch.float32, "ssm_dtype": torch.float32}
    assert refuse(SPEC, **dtypes) is None
    assert "state_dim up to 256, got 257" in refuse(replace(SPEC, state_dim=257), **dtypes)
    assert refuse(DELTA, **dtypes) is None
    assert "state_dim up to 128, got 129" in refuse(replace(DELTA, state_dim=129), **dtypes)
    assert "conv_width up to 16, got 17" in refuse(replace(SPEC, conv_width=17), **dtypes)
    assert "SSM states" in refuse(SPEC, **dtypes | {"ssm_dtype": torch.float64})
    assert "float64" in unavailable(device, torch.float64)

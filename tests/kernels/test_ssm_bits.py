"""The native scan gives a position and its state the same bits however the sequence is cut, whatever runs beside it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cut_case import cut
from scan_case import DELTA, SPEC, make_states, make_weights
from step_rows import Row, step_of
from torch import Tensor

from megatron_infer.kernels.native.native_scan import NativeScan
from megatron_infer.kernels.ssm import DeltaSpec, LayerStates, RecurrentSpec, SsmSpec

TOTAL = 330
"""Tokens of the sequence: more than a stretch of the kernel (256)."""
OTHER_ROWS = [(1, 9), (40, 90), (1, 1), (300, 300)]
SPECS = {
    "two groups": SPEC,
    "130m": SsmSpec(num_heads=3, head_dim=64, state_dim=128, num_groups=1, conv_width=4),
    "wide state, two taps": SsmSpec(num_heads=2, head_dim=24, state_dim=256, num_groups=2, conv_width=2),
    "narrow": SsmSpec(num_heads=8, head_dim=8, state_dim=16, num_groups=8, conv_width=3),
    "odd": SsmSpec(num_heads=3, head_dim=21, state_dim=37, num_groups=3, conv_width=5, dt_min=0.01, dt_max=0.3),
    "delta net": DELTA,
    "qwen's delta net": DeltaSpec(num_heads=4, head_dim=128, state_dim=128, num_groups=2, conv_width=4),
    "odd delta net": DeltaSpec(num_heads=3, head_dim=21, state_dim=37, num_groups=3, conv_width=5),
}
SLOT, CAPTURED = 2, 7
"""The sequence's slot, and the first of those that captures go to."""


class Sequence:
    """One sequence with fixed inputs and the states of its layer; other rows have slots 3 .. 6."""

    def __init__(
        self, library, spec: RecurrentSpec, dtype: torch.dtype, conv_dtype: torch.dtype, threads: int = 1
    ) -> None:
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(3)
        self.spec, self.dtype, self.backend = spec, dtype, NativeScan(library, dtype)
        self.weights = make_weights(spec)
        width = spec.num_channels + spec.num_steps
        self.fused = torch.randn(TOTAL, width, generator=generator).to(dtype)
        self.other = torch.randn(sum(q for q, _ in OTHER_ROWS), width, generator=generator).to(dtype)
        self.states = make_states(spec, CAPTURED + 8, conv_dtype=conv_dtype, ssm_dtype=torch.float32)

    def step(self, start: int, stop: int, *, beside: int = 0, captures: tuple[int, ...] = ()) -> Tensor:
        """Tokens start .. stop in one slice, behind the first `beside` of OTHER_ROWS -> their y."""
        rows: list[Row] = [*OTHER_ROWS[:beside], (stop - start, stop)]
        step = step_of(
            rows,
            table_row=[*range(3, 3 + beside), SLOT],
            captures=[(beside, n - start, CAPTURED + i) for i, n in enumerate(captures)],
        )
        before = step.num_tokens - (stop - start)
        fused = torch.cat((self.other[:before], self.fused[start:stop]))
        xBC, dt = fused.split((self.spec.num_channels, self.spec.num_steps), dim=-1)
        self.backend.plan(step)
        return self.backend.run(xBC, dt, self.states, self.weights, self.spec)[before:]

    def state(self, slot: int = SLOT) -> LayerStates:
        return LayerStates(self.states.conv_SCW[slot].clone(), self.states.ssm_SHPN[slot].clone())


def same(got: LayerStates, want: LayerStates) -> bool:
    return torch.equal(got.conv_SCW, want.conv_SCW) and torch.equal(got.ssm_SHPN, want.ssm_SHPN)


KINDS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize(("dtype", "conv_dtype"), KINDS)
@pytest.mark.parametrize("name", SPECS)
def test_a_position_has_the_same_bits_however_its_sequence_is_cut(native_library, name, dtype, conv_dtype):
    plain = Sequence(native_library, SPECS[name], dtype, conv_dtype)
    want = plain.step(0, TOTAL)
    ways = {
        "whole again": cut(TOTAL, TOTAL),
        "token by token": cut(TOTAL, 1),
        "prompt, then decode": cut(TOTAL, 300, 1),
        "chunks of 64": cut(TOTAL, 64),
        "odd chunks": cut(TOTAL, 7, 1, 1, 131, 1, 53),
        "pairs": cut(TOTAL, 2),
        "cut at a stretch of the kernel": cut(TOTAL, 256),
        "one token, then all": cut(TOTAL, 1, TOTAL),
    }
    for threads, beside in ((1, 0), (2, 2), (3, 4)):
        for way, slices in ways.items():
            if beside and way in ("token by token", "pairs"):
                continue  # many steps; "odd chunks" has single tokens beside other rows
            again = Sequence(native_library, SPECS[name], dtype, conv_dtype, threads)
            got = torch.cat([again.step(start, stop, beside=beside) for start, stop in slices])
            differing = (got != want).any(1).nonzero().flatten().tolist()
            assert not differing, f"{way}, {beside} other rows: other bits at {differing[:8]}"
            assert same(again.state(), plain.state()), f"{way}, {beside} other rows: another state"


@pytest.mark.parametrize(("dtype", "conv_dtype"), KINDS)
@pytest.mark.parametrize("beside", [0, 4])
@pytest.mark.parametrize("spec", [SPEC, DELTA])
def test_a_capture_is_the_state_that_a_cut_there_leaves(native_library, spec, dtype, conv_dtype, beside):
    at = (1, 2, 31, 32, 33, 256, 257, TOTAL - 1)
    sequence = Sequence(native_library, spec, dtype, conv_dtype)
    plain = Sequence(native_library, spec, dtype, conv_dtype).step(0, TOTAL)
    assert torch.equal(sequence.step(0, TOTAL, captures=at, beside=beside), plain), "captures change the answer"
    late = Sequence(native_library, spec, dtype, conv_dtype, threads=2)
    late.step(0, 30)
    late.step(30, TOTAL, captures=at[2:], beside=beside)
    for i, n in enumerate(at):
        short = Sequence(native_library, spec, dtype, conv_dtype)
        short.step(0, n)
        assert same(sequence.state(CAPTURED + i), short.state()), f"capture behind {n} tokens"
        if i >= 2:
            assert same(late.state(CAPTURED + i - 2), short.state()), f"capture behind {n} tokens of a later slice"


@pytest.mark.parametrize(("dtype", "conv_dtype"), KINDS)
@pytest.mark.parametrize("name", SPECS)
def test_a_row_that_verifies_drafts_keeps_the_state_behind_each_of_them(native_library, name, dtype, conv_dtype):
    """A state behind each token but the last, or behind some, in rows of few tokens (16 for the kernel) and of more."""
    for count in (2, 5, 8, 16, 17, 20):
        places = (40 + count // 2,) if count == 5 else tuple(range(41, min(40 + count, 49)))
        plain = Sequence(native_library, SPECS[name], dtype, conv_dtype)
        plain.step(0, 40)
        wanted, states = [], []
        for place in range(40, 40 + count):
            wanted.append(plain.step(place, place + 1))
            states.append(plain.state())
        for threads, beside in ((1, 0), (2, 4)):
            once = Sequence(native_library, SPECS[name], dtype, conv_dtype, threads)
            once.step(0, 40, beside=beside)
            assert torch.equal(once.step(40, 40 + count, captures=places, beside=beside), torch.cat(wanted))
            assert same(once.state(), states[-1]), count
            for index, place in enumerate(places):
                assert same(once.state(CAPTURED + index), states[place - 41]), (count, place)


def test_going_on_from_a_captured_state_gives_the_same_bits(native_library):
    sequence = Sequence(native_library, SPEC, torch.float32, torch.float32)
    want = sequence.step(0, TOTAL, captures=(96,))
    for state in sequence.states:
        state[SLOT] = state[CAPTURED]
    assert torch.equal(sequence.step(96, TOTAL), want[96:])


@pytest.mark.parametrize("spec", [SPEC, dataclasses.replace(SPEC, num_heads=2, head_dim=128), DELTA])
def test_rounded_ssm_states_give_the_same_bits_with_the_same_cuts(native_library, spec):
    """A bf16 state is rounded at each cut, so cuts show; other rows and threads do not."""
    results = []
    for threads, beside in ((1, 0), (3, 4)):
        sequence = Sequence(native_library, spec, torch.float32, torch.float32, threads)
        states = make_states(spec, CAPTURED + 8, conv_dtype=torch.float32, ssm_dtype=torch.bfloat16)
        sequence.states = states
        got = torch.cat([sequence.step(start, stop, beside=beside) for start, stop in cut(TOTAL, 300, 1)])
        results.append((got, states.ssm_SHPN[SLOT].clone()))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])

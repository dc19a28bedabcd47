"""Random steps of a layer with a recurrent state, and the comparison of a scan backend with the reference on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from step_rows import CPU, Row, moved, step_of
from torch import Tensor

from megatron_infer.kernels.base import StepMetadata
from megatron_infer.kernels.ssm import DeltaSpec, LayerStates, RecurrentSpec, ScanBackend, SsmSpec, SsmWeights
from megatron_infer.kernels.torch.ssm_ref import ReferenceScan

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SPEC = SsmSpec(num_heads=6, head_dim=16, state_dim=32, num_groups=2, conv_width=4)
DELTA = DeltaSpec(num_heads=6, head_dim=16, state_dim=32, num_groups=2, conv_width=4)


def make_weights(
    spec: RecurrentSpec, *, conv_bias: bool = True, channel_skip: bool = False, seed: int = 0
) -> SsmWeights:
    """Decays and step sizes as a trained Mamba-2 has them."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return SsmWeights(
        conv_CW=randn(spec.num_channels, spec.conv_width) / math.sqrt(spec.conv_width),
        conv_bias_C=randn(spec.num_channels) * 0.1 if conv_bias else None,
        decay_H=-torch.empty(spec.num_heads).uniform_(0.5, 16.0, generator=generator),
        skip_H=None if spec.is_delta else randn(spec.inner_width if channel_skip else spec.num_heads),
        dt_bias_H=randn(spec.num_heads) - 2.5,
    )


def make_states(
    spec: RecurrentSpec, num_slots: int, *, conv_dtype: torch.dtype, ssm_dtype: torch.dtype, seed: int = 0
) -> LayerStates:
    """The views of one layer in a pool of two: a slot's states are contiguous, slots are not next to each other."""
    generator = torch.Generator().manual_seed(seed)
    conv = torch.randn(num_slots, 2, spec.num_channels, spec.conv_width, generator=generator).to(conv_dtype)
    shape = (num_slots, 2, spec.num_heads, spec.head_dim, spec.state_dim)
    return LayerStates(conv[:, 1], torch.randn(*shape, generator=generator).to(ssm_dtype)[:, 1])


@dataclass
class Case:
    """One step of one layer with its own states; xBC and dt are views of one fused projection, as in a model."""

    spec: RecurrentSpec
    weights: SsmWeights
    step: StepMetadata
    states: LayerStates
    fused: Tensor
    dummy_slot: int | None = None
    """Of padding rows."""

    def on(self, device: torch.device) -> Case:
        """The same there."""
        states = LayerStates(*(part._base.to(device)[:, 1] for part in self.states))
        own = {"weights": moved(self.weights, device), "step": moved(self.step, device)}
        return replace(self, **own, states=states, fused=self.fused.to(device))

    def parts(self, fused: Tensor) -> tuple[Tensor, Tensor]:
        """xBC and dt of such a projection."""
        xBC, dt = fused[:, 3:].split((self.spec.num_channels, self.spec.num_steps), dim=-1)
        return xBC, dt

    def run(self, backend: ScanBackend) -> tuple[Tensor, LayerStates]:
        """(y, states afterwards) on a private copy of the states."""
        conv, ssm = (part._base.clone()[:, 1] for part in self.states)
        backend.plan(self.step)
        states = LayerStates(conv, ssm)
        return backend.run(*self.parts(self.fused), states, self.weights, self.spec), states


def make_case(
    rows: Sequence[Row],
    *,
    spec: RecurrentSpec = SPEC,
    captures: Sequence[tuple[int, int]] = (),
    num_decode: int = 0,
    num_padding: int = 0,
    dtype: torch.dtype = torch.float32,
    conv_dtype: torch.dtype | None = None,
    ssm_dtype: torch.dtype = torch.float32,
    conv_bias: bool = True,
    channel_skip: bool = False,
    consecutive: bool = False,
    padding_rows: tuple[int, int] = (0, 0),
    seed: int = 0,
    device: torch.device = CPU,
) -> Case:
    """captures: (row, tokens). Slots are scattered unless `consecutive`; padding and fresh rows' slots are NaN.

    padding_rows: see `step_of`; all are on one slot.
    """
    generator = torch.Generator().manual_seed(seed)
    num_slots = len(rows) + len(captures) + 3
    order = list(range(num_slots)) if consecutive else torch.randperm(num_slots, generator=generator).tolist()
    slots, rest = order[: len(rows)], order[len(rows) :]
    step = step_of(
        rows,
        table_row=slots,
        dummy_row=rest[-1],
        captures=[(row, n, slot) for (row, n), slot in zip(captures, rest, strict=False)],
        num_decode=num_decode,
        num_padding=num_padding,
        padding_rows=padding_rows,
    )
    states = make_states(spec, num_slots, conv_dtype=conv_dtype or dtype, ssm_dtype=ssm_dtype, seed=seed + 1)
    for (q_len, kv_len), slot in zip(rows, slots, strict=True):
        if q_len == kv_len:
            states.conv_SCW[slot], states.ssm_SHPN[slot] = math.nan, math.nan
    fused = torch.randn(step.num_tokens, 3 + spec.num_channels + spec.num_steps, generator=generator).to(dtype)
    fused[step.num_tokens - num_padding :] = math.nan
    weights = make_weights(spec, conv_bias=conv_bias, channel_skip=channel_skip, seed=seed + 2)
    case = Case(spec, weights, step, states, fused, dummy_slot=rest[-1])
    return case if device == CPU else case.on(device)


def check_case(backend: ScanBackend, case: Case, tolerance: float | None = None) -> None:
    """y and every state agree with the reference; slots and layers outside the step are untouched byte for byte."""
    y, states = case.run(backend)
    want, want_states = case.run(ReferenceScan())
    assert y.is_contiguous() and y.dtype is case.fused.dtype and y.shape == want.shape
    close = tolerance or TOLERANCE[y.dtype]
    torch.testing.assert_close(y.float(), want.float(), rtol=close, atol=close)
    ours = {*case.step.table_row.tolist(), *case.step.captures.state_slot.tolist()}
    others = [slot for slot in range(len(states.conv_SCW)) if slot not in ours]
    for got, wanted, before in zip(states, want_states, case.states, strict=True):
        close = tolerance or TOLERANCE[got.dtype]
        mine = sorted(ours)
        torch.testing.assert_close(got[mine].float(), wanted[mine].float(), rtol=close, atol=close)
        assert got._base is not None and before._base is not None
        assert torch.equal(got[others].view(torch.uint8), before[others].view(torch.uint8)), "a foreign slot changed"
        same = got._base[:, 0].contiguous().view(torch.uint8), before._base[:, 0].contiguous().view(torch.uint8)
        assert torch.equal(*same), "another layer's state changed"

"""Convolution and selective scan of Mamba-2 on every accelerated backend against the recurrence in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gpu_checks.context import Context
from gpu_checks.registry import Comparison, Result, check
from gpu_checks.steps import NO_PADDING, Padding, Row, error_of, step_of
from megatron_infer.kernels import backend_candidates
from megatron_infer.kernels.ssm import LayerStates, ScanBackend, SsmSpec, SsmWeights
from megatron_infer.kernels.torch.ssm_ref import ReferenceScan
from megatron_infer.kernels.torch.ssm_torch import TorchScan

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SPECS = (
    SsmSpec(num_heads=8, head_dim=64, state_dim=128, num_groups=1, conv_width=4),
    SsmSpec(num_heads=4, head_dim=64, state_dim=64, num_groups=2, conv_width=4, dt_min=0.001, dt_max=0.1),
    SsmSpec(num_heads=6, head_dim=32, state_dim=16, num_groups=2, conv_width=3),
)
SMALL = (SsmSpec(num_heads=2, head_dim=16, state_dim=16, num_groups=1, conv_width=4),)
DECODE: list[Row] = [(1, 1), (1, 2), (1, 900), (1, 33), (1, 4)]
LONG: list[Row] = [(1, 40), (8192, 8192), (700, 900), (512, 512), (3, 3)]
"""Many whole segments, some with a rest, none."""
MIXED: list[Row] = [(1, 40), (1, 2), (3, 3), (64, 64), (130, 200), (1, 77)]


def _weights(spec: SsmSpec, device: torch.device, generator: torch.Generator) -> SsmWeights:
    """Decays and step sizes as a trained Mamba-2 has them."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return SsmWeights(
        conv_CW=(randn(spec.num_channels, spec.conv_width) / math.sqrt(spec.conv_width)).to(device),
        conv_bias_C=(randn(spec.num_channels) * 0.1).to(device),
        decay_H=-torch.empty(spec.num_heads).uniform_(0.5, 16.0, generator=generator).to(device),
        skip_H=randn(spec.num_heads).to(device),
        dt_bias_H=(randn(spec.num_heads) - 2.5).to(device),
    )


def _pools(spec: SsmSpec, num_slots: int, dtypes: tuple[torch.dtype, torch.dtype], seed: int) -> LayerStates:
    """One layer's view of a pool of two, as the store lays them out: slots are not next to each other."""
    generator = torch.Generator().manual_seed(seed)
    conv = torch.randn(num_slots, 2, spec.num_channels, spec.conv_width, generator=generator).to(dtypes[0])
    ssm = torch.randn(num_slots, 2, spec.num_heads, spec.head_dim, spec.state_dim, generator=generator).to(dtypes[1])
    return LayerStates(conv[:, 1], ssm[:, 1])


def _moved(states: LayerStates, device: torch.device) -> LayerStates:
    """A private copy with the same strides."""
    conv, ssm = (part._base.to(device, copy=True) for part in states)
    return LayerStates(conv[:, 1], ssm[:, 1])


def _hold(
    ctx: Context,
    compare: Comparison,
    spec: SsmSpec,
    rows: list[Row],
    num_decode: int,
    *,
    dtype: torch.dtype,
    state_dtype: torch.dtype = torch.float32,
    captures: list[tuple[int, int]] | None = None,
    padding: Padding = NO_PADDING,
    oracle: ScanBackend | None = None,
) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    num_slots = len(rows) + len(captures or ()) + 2
    slots = torch.randperm(num_slots - 1, generator=generator).tolist()
    kept = [(row, n, slots[len(rows) + i]) for i, (row, n) in enumerate(captures or ())]
    settings: dict[str, Any] = {
        "num_decode": num_decode,
        "slots": slots[: len(rows)],
        "num_slots": num_slots,
        "captures": kept,
        "padding": padding,
    }
    steps = {where: step_of(rows, where, **settings)[0] for where in {ctx.device, torch.device("cpu")}}
    dummy = num_slots - 1  # what padding does to it is nobody's business
    states = _pools(spec, num_slots, (dtype, state_dtype), seed=3)
    fused = torch.randn(steps[ctx.device].num_tokens, spec.num_channels + spec.num_heads + 3, generator=generator)
    fused = fused.to(dtype)
    weights = {where: _weights(spec, where, torch.Generator().manual_seed(5)) for where in steps}

    def run(backend: Any, where: torch.device) -> tuple[Tensor, LayerStates]:
        mine = _moved(states, where)
        backend.plan(steps[where])
        xBC, dt = fused.to(where)[:, 3:].split((spec.num_channels, spec.num_heads), dim=-1)
        return backend.run(xBC, dt, mine, weights[where], spec), mine

    wanted, wanted_states = run(ReferenceScan() if oracle is None else oracle, torch.device("cpu"))
    changed = sorted({*settings["slots"], *(slot for _, _, slot in kept)})
    others = [slot for slot in range(len(states.conv_SCW)) if slot not in (*changed, dummy)]
    for backend in ctx.backends(backend_candidates.SCAN, dtype):
        if backend.supports(spec, dtype=dtype, conv_dtype=dtype, ssm_dtype=state_dtype) is not None:
            continue
        got, got_states = run(backend, ctx.device)
        label = f"{backend.name} {dtype} states {state_dtype} {spec.head_dim}x{spec.state_dim} rows {len(rows)}"
        compare.add(label, error_of(got, wanted), TOLERANCE[dtype])
        for name, part, reference, before in zip(
            ("conv state", "SSM state"), got_states, wanted_states, states, strict=True
        ):
            limit = max(TOLERANCE[dtype], TOLERANCE[part.dtype])
            compare.add(f"{label}, {name}", error_of(part[changed], reference[changed]), limit)
            untouched = bool(torch.equal(part[others].cpu(), before[others]))
            compare.require(f"{label}: {name} of other slots changed", untouched)


@check(
    "scan_decode",
    group="scan",
    promise="one token of convolution and state update a row equals the recurrence; other slots keep their bits",
    budget_s=60,
)
def decode(ctx: Context) -> Result:
    compare = Comparison("error over the largest entry")
    for spec in ctx.pick(SPECS, SMALL):
        rows = ctx.pick(DECODE, DECODE[:2])
        for dtype in ctx.dtypes():
            _hold(ctx, compare, spec, rows, len(rows), dtype=dtype)
        _hold(ctx, compare, spec, rows, len(rows), dtype=ctx.dtypes()[-1], state_dtype=ctx.dtypes()[-1])
    return compare.result()


@check(
    "scan_mixed",
    group="scan",
    promise="ragged chunks, with states kept on the way, equal the recurrence; padding is harmless",
    budget_s=90,
)
def mixed(ctx: Context) -> Result:
    compare = Comparison("error over the largest entry")
    rows, captures = ctx.pick(MIXED, [(1, 9), (5, 7)]), ctx.pick([(3, 20), (4, 64), (4, 100)], [(1, 2)])
    num_decode = ctx.pick(2, 1)
    for spec in ctx.pick(SPECS, SMALL):
        for dtype in ctx.dtypes():
            _hold(ctx, compare, spec, rows, num_decode, dtype=dtype)
        _hold(ctx, compare, spec, rows, num_decode, dtype=torch.float32, captures=captures)
        _hold(ctx, compare, spec, rows, num_decode, dtype=torch.float32, padding=Padding(2, 1, 4))
    return compare.result()


@check(
    "scan_long",
    group="scan",
    promise="a prompt of 8k tokens, its segments side by side, equals torch's scan in fp32; so do states on the way",
    budget_s=60,
)
def long_prompts(ctx: Context) -> Result:
    compare = Comparison("error over the largest entry")
    rows, captures = ctx.pick(LONG, [(1, 9), (260, 270)]), ctx.pick([(1, 256), (1, 5000), (2, 699)], [(1, 256)])
    for spec in ctx.pick(SPECS[:1], SMALL):
        for dtype in ctx.dtypes():
            _hold(ctx, compare, spec, rows, 1, dtype=dtype, captures=captures, oracle=TorchScan())
    return compare.result()

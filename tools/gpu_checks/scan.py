"""Convolution and recurrence of Mamba-2 and delta nets on every accelerated backend against their definition."""

from __future__ import annotations

from typing import Any

import torch
from scan_case import make_case
from step_rows import CPU, Row

from gpu_checks.context import Context, error_of
from gpu_checks.registry import Comparison, check
from megatron_infer.kernels import backend_candidates
from megatron_infer.kernels.ssm import DeltaSpec, RecurrentSpec, SsmSpec
from megatron_infer.kernels.torch.ssm_ref import ReferenceScan
from megatron_infer.kernels.torch.ssm_torch import TorchScan

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SPECS = (
    SsmSpec(num_heads=8, head_dim=64, state_dim=128, num_groups=1, conv_width=4),
    SsmSpec(num_heads=4, head_dim=64, state_dim=64, num_groups=2, conv_width=4, dt_min=0.001, dt_max=0.1),
    SsmSpec(num_heads=6, head_dim=32, state_dim=16, num_groups=2, conv_width=3),
    DeltaSpec(num_heads=4, head_dim=128, state_dim=128, num_groups=2, conv_width=4),
    DeltaSpec(num_heads=3, head_dim=80, state_dim=96, num_groups=1, conv_width=3),
)
SMALL = (
    SsmSpec(num_heads=2, head_dim=16, state_dim=16, num_groups=1, conv_width=4),
    DeltaSpec(num_heads=2, head_dim=16, state_dim=16, num_groups=1, conv_width=4),
)
DECODE: list[Row] = [(1, 1), (1, 2), (1, 900), (1, 33), (1, 4)]
LONG: list[Row] = [(1, 40), (8192, 8192), (700, 900), (512, 512), (3, 3)]
"""Many whole segments, some with a rest, none."""
MIXED: list[Row] = [(1, 40), (1, 2), (3, 3), (64, 64), (130, 200), (1, 77)]
ERROR = "error over the largest entry"


def _hold(
    ctx: Context,
    compare: Comparison,
    spec: RecurrentSpec,
    rows: list[Row],
    num_decode: int,
    *,
    dtype: torch.dtype,
    oracle: Any = ReferenceScan,
    **more: Any,
) -> None:
    """Every backend on one step; more: of `make_case`."""
    settings = {"spec": spec, "num_decode": num_decode, "dtype": dtype, **more}
    there, here = (make_case(rows, device=where, **settings) for where in (ctx.device, CPU))
    wanted, wanted_states = here.run(oracle())
    step, states = here.step, here.states
    changed = sorted({*step.table_row.tolist(), *step.captures.state_slot.tolist()} - {here.dummy_slot})
    others = [slot for slot in range(len(states.conv_SCW)) if slot not in (*changed, here.dummy_slot)]
    for backend in ctx.backends(backend_candidates.SCAN, dtype):
        dtypes = {"conv_dtype": states.conv_SCW.dtype, "ssm_dtype": states.ssm_SHPN.dtype}
        if backend.supports(spec, dtype=dtype, **dtypes) is not None:
            continue
        got, got_states = there.run(backend)
        kind = f"{'delta net' if spec.is_delta else 'scan'} {spec.head_dim}x{spec.state_dim}"
        label = f"{backend.name} {kind} {dtype} states {dtypes['ssm_dtype']} rows {len(rows)}"
        compare.add(label, error_of(got, wanted), TOLERANCE[dtype])
        for name, part, reference, before in zip(
            ("conv state", "SSM state"), got_states, wanted_states, states, strict=True
        ):
            limit = max(TOLERANCE[dtype], TOLERANCE[part.dtype])
            compare.add(f"{label}, {name}", error_of(part[changed], reference[changed]), limit)
            untouched = bool(torch.equal(part[others].cpu(), before[others]))
            compare.require(f"{label}: {name} of other slots changed", untouched)


@check(budget_s=60, what=ERROR)
def scan_decode(ctx: Context, compare: Comparison) -> None:
    """One token of convolution and state update a row equals the recurrence; other slots keep their bits."""
    rows = ctx.pick(DECODE, DECODE[:2])
    for spec in ctx.pick(SPECS, SMALL):
        for dtype in ctx.dtypes():
            _hold(ctx, compare, spec, rows, len(rows), dtype=dtype)
        _hold(ctx, compare, spec, rows, len(rows), dtype=ctx.dtypes()[-1], ssm_dtype=ctx.dtypes()[-1])


@check(budget_s=90, what=ERROR)
def scan_mixed(ctx: Context, compare: Comparison) -> None:
    """Ragged chunks, with states kept on the way, equal the recurrence; padding is harmless."""
    rows, captures = ctx.pick(MIXED, [(1, 9), (5, 7)]), ctx.pick([(3, 20), (4, 64), (4, 100)], [(1, 2)])
    num_decode = ctx.pick(2, 1)
    for spec in ctx.pick(SPECS, SMALL):
        for dtype in ctx.dtypes():
            _hold(ctx, compare, spec, rows, num_decode, dtype=dtype)
        _hold(ctx, compare, spec, rows, num_decode, dtype=torch.float32, captures=captures)
        padding = {"padding_rows": (2, 1), "num_padding": 4}
        _hold(ctx, compare, spec, rows, num_decode, dtype=torch.float32, **padding)


@check(budget_s=60, what=ERROR)
def scan_long(ctx: Context, compare: Comparison) -> None:
    """A prompt of 8k tokens equals torch's scan or delta rule in fp32; so do states on the way."""
    rows, captures = ctx.pick(LONG, [(1, 9), (260, 270)]), ctx.pick([(1, 256), (1, 5000), (2, 699)], [(1, 256)])
    for spec in ctx.pick((SPECS[0], SPECS[3]), SMALL[:1]):
        for dtype in ctx.dtypes():
            _hold(ctx, compare, spec, rows, 1, dtype=dtype, captures=captures, oracle=TorchScan)

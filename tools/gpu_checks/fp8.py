"""Keys and values in eight bits: codes, attention over them, whole engines."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from paged_case import Case, make_case

from gpu_checks.attention import ERROR, MIXED, SMALL_MIXED, TOLERANCE, oracle
from gpu_checks.context import Context, error_of
from gpu_checks.models import greedy
from gpu_checks.registry import Comparison, Unavailable, check
from megatron_infer.kernels import backend_candidates
from megatron_infer.kernels.kv_rounding import FP8, as_kept

MIN_CAPABILITY = (8, 9)
CODES_APART = 1e-3
"""Share of codes that may be a neighbour's: a key that turns to a half-way point in fp32 lies beside it in fp64."""


def _reads_fp8(ctx: Context) -> None:
    if not ctx.rehearse and ctx.cuda.get_device_capability() < MIN_CAPABILITY:
        raise Unavailable("FP8 needs compute capability 8.9")


def _in_fp8(case: Case) -> Case:
    return dataclasses.replace(case, kv_cache=as_kept(case.kv_cache, FP8))


@check(budget_s=90, what=ERROR)
def fp8_attention(ctx: Context, compare: Comparison) -> None:
    """Attention over keys and values of eight bits equals its definition on the same codes; codes are torch's."""
    _reads_fp8(ctx)
    rows, num_decode = ctx.pick(MIXED, SMALL_MIXED), ctx.pick(2, 1)
    shapes: list[dict[str, Any]] = ctx.pick(
        [{"head_dim": 128, "rotary_dim": 128}, {"head_dim": 64, "window": 37, "sinks": True}, {"head_dim": 80}],
        [{"head_dim": 16, "group_size": 2, "num_kv_heads": 1, "rotary_dim": 8}],
    )
    for dtype in ctx.dtypes():
        for settings in shapes:
            case = _in_fp8(make_case(rows, num_decode=num_decode, dtype=dtype, device=ctx.device, **settings))
            for backend in ctx.backends(backend_candidates.ATTENTION, dtype):
                if backend.supports(case.spec, dtype=dtype, block_size=16, kv_dtype=FP8) is not None:
                    continue
                label = f"{backend.name} {dtype} {settings}"
                out, cache = case.run(backend)
                compare.add(label, error_of(out, oracle(case, cache)[0]), TOLERANCE[dtype])
                codes = as_kept(oracle(case)[1].to(dtype), FP8).view(torch.uint8)[:, :, :-1]
                apart = (codes != cache.cpu().view(torch.uint8)[:, :, :-1]).double().mean()
                compare.add(f"{label}, share of other codes", float(apart), CODES_APART)
                again, _ = case.run(backend)
                compare.require(f"{label}: a second run has other bits", bool(torch.equal(out, again)))


@check(budget_s=60)
def fp8_engine(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """An engine on Triton's kernels with a cache of eight bits gives the CPU's greedy tokens in fp32."""
    _reads_fp8(ctx)
    kinds = ctx.pick(("attention", "windows", "hybrid"), ("attention",))
    return greedy(ctx, compare, kinds, kv_cache_dtype="fp8_e4m3")

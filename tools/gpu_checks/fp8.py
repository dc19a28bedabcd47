"""Keys and values in eight bits: codes, attention over them, whole engines, and what decoding gains."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from light.machine import measure

from gpu_checks.attention import MIXED, SMALL_MIXED, TOLERANCE
from gpu_checks.context import Context
from gpu_checks.engines import CPU, answers, make_engine, make_model, workload
from gpu_checks.graphs import BACKEND_VARIABLE, environment
from gpu_checks.models import CHOICES, compare_tokens
from gpu_checks.registry import OK, Comparison, Result, Target, Unavailable, check
from gpu_checks.steps import AttentionCase, attention_case, attention_oracle, error_of
from megatron_infer.kernels import backend_candidates
from megatron_infer.kernels.kv_rounding import FP8, as_kept

MIN_CAPABILITY = (8, 9)
CODES_APART = 1e-3
"""Share of codes that may be a neighbour's: a key that turns to a half-way point in fp32 lies beside it in fp64."""
DECODE_GAIN = 1.6
"""Wanted of the time of decode attention over that of bfloat16, of which half the bytes would give 2."""
ROWS, LENGTH = 64, 2048


def _reads_fp8(ctx: Context) -> None:
    if not ctx.rehearse and ctx.cuda.get_device_capability() < MIN_CAPABILITY:
        raise Unavailable("FP8 needs compute capability 8.9")


def _in_fp8(case: AttentionCase) -> AttentionCase:
    return dataclasses.replace(case, kv_cache=as_kept(case.kv_cache, FP8))


@check(
    "fp8_attention",
    group="fp8",
    promise="attention over keys and values of eight bits equals its definition on the same codes; codes are torch's",
    budget_s=90,
)
def attention(ctx: Context) -> Result:
    _reads_fp8(ctx)
    compare = Comparison("error over the largest entry")
    rows, num_decode = ctx.pick(MIXED, SMALL_MIXED), ctx.pick(2, 1)
    shapes: list[dict[str, Any]] = ctx.pick(
        [{"head_dim": 128, "rotary_dim": 128}, {"head_dim": 64, "window": 37, "sinks": True}, {"head_dim": 80}],
        [{"head_dim": 16, "group_size": 2, "num_kv_heads": 1, "rotary_dim": 8}],
    )
    for dtype in ctx.dtypes():
        for settings in shapes:
            case = _in_fp8(attention_case(rows, ctx.device, dtype, num_decode=num_decode, **settings))
            for backend in ctx.backends(backend_candidates.ATTENTION, dtype):
                if backend.supports(case.spec, dtype=dtype, block_size=16, kv_dtype=FP8) is not None:
                    continue
                label = f"{backend.name} {dtype} {settings}"
                out, cache = case.run(backend)
                wanted, exact = attention_oracle(case, cache)
                compare.add(label, error_of(out, wanted), TOLERANCE[dtype])
                codes = as_kept(exact.to(dtype), FP8).view(torch.uint8)[:, :, :-1]
                apart = (codes != cache.cpu().view(torch.uint8)[:, :, :-1]).double().mean()
                compare.add(f"{label}, share of other codes", float(apart), CODES_APART)
                again, _ = case.run(backend)
                compare.require(f"{label}: a second run has other bits", bool(torch.equal(out, again)))
    return compare.result()


@check(
    "fp8_engine",
    group="fp8",
    promise="an engine on Triton's kernels with a cache of eight bits gives the CPU's greedy tokens in fp32",
    budget_s=60,
)
def engine(ctx: Context) -> Result:
    _reads_fp8(ctx)
    compare, ties = Comparison("difference"), 0
    for kind in ctx.pick(("attention", "windows", "hybrid"), ("attention",)):
        work = workload(ctx, logprobs=CHOICES, count=ctx.pick(None, 1))
        options = {"kv_cache_dtype": "fp8_e4m3"}
        wanted = answers(make_engine(make_model(kind, torch.float32, CPU), CPU, **options), work)
        with environment(BACKEND_VARIABLE, "triton"):
            on_device = make_engine(make_model(kind, torch.float32, ctx.device), ctx.device, **options)
        compare.require(
            f"{kind}: the cache is {on_device.config.kv_dtype_of(on_device.shape)}",
            on_device.config.kv_dtype_of(on_device.shape) == "float8_e4m3fn",
        )
        ties += compare_tokens(compare, kind, answers(on_device, work), wanted)
    return compare.result(near_ties=ties)


@check(
    "fp8_decode_rate",
    group="fp8",
    promise="decode attention over eight bits is faster than over bfloat16, and draws keys at the rate of a copy",
    budget_s=60,
)
def rate(ctx: Context) -> Result:
    _reads_fp8(ctx)
    dtype = ctx.pick(torch.bfloat16, torch.float32)
    rows = [(1, ctx.pick(LENGTH, 20))] * ctx.pick(ROWS, 2)
    shape = ctx.pick({"num_kv_heads": 8, "head_dim": 128, "block_size": 64}, {"num_kv_heads": 1, "head_dim": 16})
    plain = attention_case(rows, ctx.device, dtype, num_decode=len(rows), **shape)
    backend = next(one for one in ctx.backends(backend_candidates.ATTENTION, dtype) if one.name == "triton")
    ceiling = measure(ctx.device).copy_gb_s
    times, shares = [], []
    for case in (plain, _in_fp8(plain)):
        q, k, v = case.parts(case.fused)
        backend.plan(case.step)
        taken = ctx.milliseconds(
            lambda case=case, q=q, k=k, v=v: backend.run(q, k, v, case.kv_cache, layer=1, spec=case.spec),
            rounds=ctx.pick(20, 1),
            warm=ctx.pick(3, 0),
        )
        keys = sum(kv_len for _, kv_len in rows) * case.spec.num_kv_heads * case.spec.head_dim
        times.append(taken)
        shares.append(2 * keys * case.kv_cache.element_size() / taken / 1e6 / ceiling)
    gain = times[0] / times[1]
    figure = f"{times[0]:.3f} ms in {dtype}, {times[1]:.3f} ms in FP8; {shares[0]:.0%} and {shares[1]:.0%} of a copy"
    targets = [Target("FP8 decode attention, times as fast as bfloat16", gain, DECODE_GAIN)]
    return Result(OK, figure, targets=targets, details={"ms": times, "share": shares, "copy_gb_s": ceiling})

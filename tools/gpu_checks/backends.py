"""Backends that need packages of others: what is here, and that an engine on each gives the same greedy tokens."""

from __future__ import annotations

from typing import Any

import torch

from gpu_checks.context import Context
from gpu_checks.engines import CPU, answers, make_engine, make_model, workload
from gpu_checks.graphs import BACKEND_VARIABLE, environment
from gpu_checks.models import CHOICES, compare_tokens
from gpu_checks.registry import Comparison, Result, Unavailable, check
from megatron_infer.kernels import accelerated


def _engine_on(ctx: Context, name: str, kind: str, dtype: torch.dtype) -> Any:
    """An engine that is forced onto one backend for the operations that it has."""
    # flash-attn 2 takes blocks of 256 tokens only.
    options = {"block_size_tokens": 256, "buffer_size_gb": 0.2} if name == "flash_attn" else {}
    with environment(BACKEND_VARIABLE, name):
        return make_engine(make_model(kind, dtype, ctx.device), ctx.device, **options)


def _hold(ctx: Context, name: str, candidates: Any, kinds: tuple[str, ...]) -> Result:
    dtype = ctx.pick(torch.bfloat16, torch.float32)
    if not any(candidate.name == name for candidate in candidates):
        raise Unavailable(f"this version has no backend {name}")
    found, reasons = accelerated.available(candidates, ctx.device, dtype, forced=name)
    if not found:
        raise Unavailable(reasons[name])
    compare, parted = Comparison("share of answers that part from fp32"), 0
    for kind in kinds:
        work = workload(ctx, logprobs=CHOICES, count=ctx.pick(8, 1))
        plain = Comparison("difference")
        wanted = answers(make_engine(make_model(kind, dtype, ctx.device), ctx.device), work)
        got = answers(_engine_on(ctx, name, kind, dtype), work)
        compare_tokens(plain, kind, got, wanted)
        parted = sum(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(got, wanted, strict=True))
        # In 16 bits two backends round differently, and a near tie turns now and then.
        compare.add(f"{name} {kind}", parted / len(work), ctx.pick(0.5, 0.0))
    return compare.result(versions=reasons)


@check(
    "triton_engine",
    group="backends",
    promise="an engine forced onto Triton's kernels gives the CPU's greedy tokens in fp32",
    budget_s=40,
)
def triton(ctx: Context) -> Result:
    ctx.backends(accelerated.ATTENTION, torch.float32)
    compare, ties = Comparison("difference"), 0
    for kind in ctx.pick(("attention", "windows", "experts", "hybrid", "mamba"), ("windows", "experts")):
        work = workload(ctx, logprobs=CHOICES, count=ctx.pick(None, 1))
        wanted = answers(make_engine(make_model(kind, torch.float32, CPU), CPU), work)
        ties += compare_tokens(compare, kind, answers(_engine_on(ctx, "triton", kind, torch.float32), work), wanted)
    return compare.result(near_ties=ties)


@check(
    "flashinfer_engine",
    group="backends",
    promise="an engine on FlashInfer, where it is installed, answers like one on the default kernels in bf16",
    budget_s=120,
)
def flashinfer(ctx: Context) -> Result:
    return _hold(ctx, "flashinfer", accelerated.ATTENTION, ctx.pick(("attention", "windows"), ("attention",)))


@check(
    "flash_attn_engine",
    group="backends",
    promise="an engine on flash-attn, where it is installed, answers like one on the default kernels in bf16",
    budget_s=40,
)
def flash_attn(ctx: Context) -> Result:
    return _hold(ctx, "flash_attn", accelerated.ATTENTION, ctx.pick(("attention", "windows"), ("attention",)))


@check(
    "mamba_ssm_engine",
    group="backends",
    promise="an engine on mamba-ssm's scan, where it is installed, answers like one on the default kernels in bf16",
    budget_s=60,
)
def mamba_ssm(ctx: Context) -> Result:
    return _hold(ctx, "mamba_ssm", accelerated.SCAN, ctx.pick(("hybrid", "mamba"), ("mamba",)))

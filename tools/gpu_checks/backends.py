"""Backends that need packages of others: what is here, and that an engine on each gives the same greedy tokens."""

from __future__ import annotations

from typing import Any

import torch

from gpu_checks.context import Context
from gpu_checks.engines import CPU, answers, make_engine, make_model, workload
from gpu_checks.graphs import BACKEND_VARIABLE, environment, graphed, same
from gpu_checks.models import CHOICES, compare_tokens
from gpu_checks.registry import Comparison, Result, Unavailable, check
from megatron_infer.kernels import backend_candidates, flashinfer_rope
from megatron_infer.testing.inspect import inspect

# flash-attn 2 takes blocks of 256 tokens only.
OPTIONS: dict[str, dict[str, Any]] = {"flash_attn": {"block_size_tokens": 256, "buffer_size_gb": 0.2}}


def _engine_on(ctx: Context, name: str, kind: str, dtype: torch.dtype) -> Any:
    """An engine that is forced onto one backend for the operations that it has."""
    with environment(BACKEND_VARIABLE, name):
        return make_engine(make_model(kind, dtype, ctx.device), ctx.device, **OPTIONS.get(name, {}))


def _hold(ctx: Context, name: str, candidates: Any, kinds: tuple[str, ...]) -> Result:
    dtype = ctx.pick(torch.bfloat16, torch.float32)
    if not any(candidate.name == name for candidate in candidates):
        raise Unavailable(f"this version has no backend {name}")
    found, reasons = backend_candidates.available(candidates, ctx.device, dtype, forced=name)
    if not found:
        raise Unavailable(reasons[name])
    compare = Comparison("share of answers that part")
    for kind in kinds:
        work = workload(ctx, logprobs=CHOICES, count=ctx.pick(8, 1))
        wanted = answers(make_engine(make_model(kind, dtype, ctx.device), ctx.device), work)
        _add_alike(ctx, compare, f"{name} {kind}", answers(_engine_on(ctx, name, kind, dtype), work), wanted)
    return compare.result(versions=reasons)


def _add_alike(ctx: Context, compare: Comparison, label: str, got: list[Any], wanted: list[Any]) -> None:
    """In 16 bits two backends round differently, and a near tie turns now and then."""
    compare_tokens(Comparison("difference"), label, got, wanted)
    parted = sum(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(got, wanted, strict=True))
    compare.add(label, parted / len(got), ctx.pick(0.5, 0.0))


def _hold_replayed(ctx: Context, compare: Comparison, label: str, kind: str, **options: Any) -> Any:
    """Bits of replayed steps against those of the same padded steps run as they are -> the engine that replayed."""
    work = workload(ctx, logprobs=1, count=8)
    model = make_model(kind, torch.bfloat16, ctx.device)
    engine = graphed(ctx, model, **options)
    got = answers(engine, work)
    same(compare, f"{label} {kind}", got, answers(graphed(ctx, model, captures=False, **options), work))
    pool = inspect(engine).runner.graphs.pool
    compare.require(f"{label} {kind}: no step was replayed", pool.counts.replays > 0)
    compare.require(f"{label} {kind}: refused {pool.refused}", not pool.refused)
    return engine


@check(
    "triton_engine",
    group="backends",
    promise="an engine forced onto Triton's kernels gives the CPU's greedy tokens in fp32",
    budget_s=40,
)
def triton(ctx: Context) -> Result:
    ctx.backends(backend_candidates.ATTENTION, torch.float32)
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
    return _hold(ctx, "flashinfer", backend_candidates.ATTENTION, ctx.pick(("attention", "windows"), ("attention",)))


@check(
    "flash_attn_engine",
    group="backends",
    promise="an engine on flash-attn, where it is installed, answers like one on the default kernels in bf16",
    budget_s=40,
)
def flash_attn(ctx: Context) -> Result:
    return _hold(ctx, "flash_attn", backend_candidates.ATTENTION, ctx.pick(("attention", "windows"), ("attention",)))


@check(
    "flash_attn_graphs",
    group="backends",
    promise="steps on flash-attn, where it is installed, have the same bits replayed from graphs and run as they are",
    budget_s=40,
)
def flash_attn_graphs(ctx: Context) -> Result:
    found, reasons = backend_candidates.available(
        backend_candidates.ATTENTION, ctx.device, torch.bfloat16, forced="flash_attn"
    )
    if not found:
        raise Unavailable(reasons["flash_attn"])
    compare = Comparison("difference")
    for kind in ("attention", "windows"):
        options = {"kernels": None, "attention_backend": "flash_attn", **OPTIONS["flash_attn"]}
        engine = _hold_replayed(ctx, compare, "flash_attn", kind, **options)
        chosen = {row.operation: row.chosen for row in engine.kernels.rows}["attention"]
        compare.require(f"{kind}: attention is {chosen}'s", chosen == "flash_attn")
    return compare.result()


@check(
    "flashinfer_rope",
    group="backends",
    promise="FlashInfer's rotation (use_flashinfer_fused_rope), where it is installed, before the default attention: "
    "answers like the default's in bf16, the same bits replayed from graphs and run as they are",
    budget_s=60,
)
def rope(ctx: Context) -> Result:
    dtype = torch.bfloat16
    if (reason := flashinfer_rope.unavailable(ctx.device, dtype)) is not None:
        raise Unavailable(reason)
    compare = Comparison("share of answers that part")
    for kind in ("attention", "windows"):
        work = workload(ctx, logprobs=CHOICES, count=8)
        model = make_model(kind, dtype, ctx.device)
        wanted = answers(make_engine(model, ctx.device), work)
        engine = make_engine(model, ctx.device, use_flashinfer_fused_rope=True)
        _add_alike(ctx, compare, f"rotation {kind}", answers(engine, work), wanted)
        chosen = {row.operation: row.chosen for row in engine.kernels.rows}["rotation"]
        compare.require(f"{kind}: the rotation is {chosen}'s", chosen == "flashinfer")
        _hold_replayed(ctx, compare, "rotation", kind, use_flashinfer_fused_rope=True)
    return compare.result()


@check(
    "mamba_ssm_engine",
    group="backends",
    promise="an engine on mamba-ssm's scan, where it is installed, answers like one on the default kernels in bf16",
    budget_s=60,
)
def mamba_ssm(ctx: Context) -> Result:
    return _hold(ctx, "mamba_ssm", backend_candidates.SCAN, ctx.pick(("hybrid", "mamba"), ("mamba",)))

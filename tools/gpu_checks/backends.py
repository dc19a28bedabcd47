"""Backends that need packages of others: what is here, and that an engine on each gives the same greedy tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gpu_checks.context import Context
from gpu_checks.engines import CPU, answers, make_engine, make_model, workload
from gpu_checks.graphs import BACKEND_VARIABLE, environment, graphed, same
from gpu_checks.models import CHOICES, compare_tokens
from gpu_checks.registry import OK, Comparison, Result, Target, Unavailable, check
from gpu_checks.steps import AttentionCase, Row, attention_case, error_of
from megatron_infer.kernels import backend_candidates
from megatron_infer.kernels.packages import flash_attn_prompts, flashinfer_attention, flashinfer_rope
from megatron_infer.testing.inspect import inspect

# flash-attn 2 takes blocks of 256 tokens only.
BLOCKS_OF_256: dict[str, Any] = {"block_size_tokens": 256, "buffer_size_gb": 0.2}
OPTIONS: dict[str, dict[str, Any]] = {"flash_attn": BLOCKS_OF_256}


def _dtype(ctx: Context) -> torch.dtype:
    return ctx.pick(torch.bfloat16, torch.float32)


def _engine_on(ctx: Context, name: str, kind: str, dtype: torch.dtype) -> Any:
    """An engine that is forced onto one backend for the operations that it has."""
    with environment(BACKEND_VARIABLE, name):
        return make_engine(make_model(kind, dtype, ctx.device), ctx.device, **OPTIONS.get(name, {}))


def _hold(ctx: Context, name: str, candidates: Any, kinds: tuple[str, ...]) -> Result:
    dtype = _dtype(ctx)
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
    work = workload(ctx, logprobs=1, count=ctx.pick(8, 2))
    model = make_model(kind, _dtype(ctx), ctx.device)
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
    return _hold_graphs(ctx, "flash_attn")


@check(
    "flashinfer_graphs",
    group="backends",
    promise="decode steps on FlashInfer, where it is installed, have the same bits replayed and run as they are",
    budget_s=90,
)
def flashinfer_graphs(ctx: Context) -> Result:
    return _hold_graphs(ctx, "flashinfer")


@check(
    "flashinfer_workspace",
    group="backends",
    promise="plans of large steps fit FlashInfer's workspace, where it is installed; results agree with Triton's",
    budget_s=60,
)
def workspace(ctx: Context) -> Result:
    """64 query heads of 128: many decode rows, and slices whose keys it cuts, take the most partial sums."""
    dtype = ctx.pick(torch.bfloat16, torch.float16)
    if (reason := flashinfer_attention.unavailable(ctx.device, dtype)) is not None:
        raise Unavailable(reason)
    triton = next(one for one in ctx.backends(backend_candidates.ATTENTION, dtype) if one.name == "triton")
    compare = Comparison("difference over the largest entry")
    heads = ctx.pick({"head_dim": 128, "group_size": 8, "num_kv_heads": 8}, {"head_dim": 64, "num_kv_heads": 1})
    many, keys, queries = ctx.pick((256, 512, 256), (2, 30, 5))
    steps: dict[str, tuple[list[Row], int]] = {
        "decode": ([(1, keys + row) for row in range(many)], many),
        "slices": ([(queries, 4 * keys + row) for row in range(max(2, many // 16))], 0),
        "mixed": ([(1, keys)] * many + [(queries, 4 * keys)] * 2, many),
    }
    for name, (rows, num_decode) in steps.items():
        case = attention_case(rows, ctx.device, dtype, num_decode=num_decode, **heads)
        out = case.run(flashinfer_attention.make(ctx.device, dtype))[0]
        compare.add(name, error_of(out, case.run(triton)[0].cpu()), 2e-2)
    return compare.result(workspace_bytes=flashinfer_attention.WORKSPACE_BYTES)


def _hold_graphs(ctx: Context, name: str) -> Result:
    found, reasons = backend_candidates.available(backend_candidates.ATTENTION, ctx.device, _dtype(ctx), forced=name)
    if not found:
        raise Unavailable(reasons[name])
    compare = Comparison("difference")
    for kind in ("attention", "windows"):
        engine = _hold_replayed(ctx, compare, name, kind, kernels=None, attention_backend=name, **OPTIONS.get(name, {}))
        chosen = {row.operation: row.chosen for row in engine.kernels.rows}["attention"]
        compare.require(f"{kind}: attention is {chosen}'s", chosen == name)
    return compare.result()


@check(
    "flash_attn_3_prompts",
    group="backends",
    promise="on Hopper with flash-attn 3, prompts run on it and decode rows on Triton: answers as on Triton alone, the "
    "same bits replayed from graphs and run as they are",
    budget_s=60,
)
def prompts(ctx: Context) -> Result:
    if (reason := flash_attn_prompts.unavailable(ctx.device, _dtype(ctx))) is not None:
        raise Unavailable(reason)
    compare = Comparison("share of answers that part")
    for kind in ctx.pick(("attention", "windows"), ("windows",)):
        work = workload(ctx, logprobs=CHOICES, count=ctx.pick(8, 2))
        model = make_model(kind, _dtype(ctx), ctx.device)
        wanted = answers(make_engine(model, ctx.device, attention_backend="triton", **BLOCKS_OF_256), work)
        engine = make_engine(model, ctx.device, **BLOCKS_OF_256)
        _add_alike(ctx, compare, f"prompts {kind}", answers(engine, work), wanted)
        rows = {row.operation: row.chosen for row in engine.kernels.rows}
        chosen = rows.get("attention, decode"), rows.get("attention, prefill")
        compare.require(f"{kind}: decode and prefill run on {chosen}", chosen == ("triton", "flash_attn_3"))
        _hold_replayed(ctx, compare, "prompts", kind, **BLOCKS_OF_256 | ctx.pick({}, {"num_cuda_graphs": 2}))
    return compare.result()


@check(
    "speed_attention",
    group="backends",
    promise="one layer's attention of a prompt and of decode rows on every backend here: the order of `auto`",
    budget_s=60,
    long=True,
)
def speed(ctx: Context) -> Result:
    """8 kv heads of 128 with 4 query heads each, in bf16, blocks of 256."""
    dtype = _dtype(ctx)
    sizes: dict[str, Any] = {"head_dim": 128, "group_size": 4, "num_kv_heads": 8, "block_size": 256}
    sizes = ctx.pick(sizes, {"head_dim": 16, "group_size": 2, "num_kv_heads": 1})
    length, num_rows = ctx.pick((8192, 64), (20, 2))
    steps = {"prefill": ([(length, length)], 0), "decode": ([(1, length // 2)] * num_rows, num_rows)}
    backends = ctx.backends(backend_candidates.ATTENTION, dtype)
    if not ctx.rehearse:
        backends += backend_candidates.available(backend_candidates.PROMPTS, ctx.device, dtype, forced=None)[0]
    targets, table = [], []
    for name, (rows, num_decode) in steps.items():
        case = attention_case(rows, ctx.device, dtype, num_decode=num_decode, **sizes)
        block_size = case.kv_cache.shape[3]
        able = [one for one in backends if one.supports(case.spec, dtype=dtype, block_size=block_size) is None]
        able = [one for one in able if name == "prefill" or one.name != "flash_attn_3"]
        ms = {one.name: _milliseconds(ctx, one, case) for one in able}
        table += [f"{name:<8} {backend:<14} {found:8.3f} ms" for backend, found in ms.items()]
        first = "flash_attn_3" if "flash_attn_3" in ms else next(iter(ms))
        share = min(ms.values()) / ms[first]
        targets.append(Target(f"{name}: the fastest backend's time over that of {first}, as auto chooses", share, 0.95))
    return Result(OK, f"{len(table)} timings", targets=targets, details={"table": table})


def _milliseconds(ctx: Context, backend: Any, case: AttentionCase) -> float:
    q_TKGH, k_TKH, v_TKH = case.parts(case.fused)
    backend.plan(case.step)
    run = partial(backend.run, q_TKGH, k_TKH, v_TKH, case.kv_cache, layer=1, spec=case.spec)
    return ctx.milliseconds(run, rounds=ctx.pick(10, 1))


@check(
    "flashinfer_rope",
    group="backends",
    promise="FlashInfer's rotation (use_flashinfer_fused_rope), where it is installed, before the default attention: "
    "answers like the default's in bf16, the same bits replayed from graphs and run as they are",
    budget_s=60,
)
def rope(ctx: Context) -> Result:
    dtype = _dtype(ctx)
    if (reason := flashinfer_rope.unavailable(ctx.device, dtype)) is not None:
        raise Unavailable(reason)
    compare = Comparison("share of answers that part")
    for kind in ("attention", "windows"):
        work = workload(ctx, logprobs=CHOICES, count=ctx.pick(8, 2))
        model = make_model(kind, dtype, ctx.device)
        wanted = answers(make_engine(model, ctx.device), work)
        engine = make_engine(model, ctx.device, use_flashinfer_fused_rope=True)
        _add_alike(ctx, compare, f"rotation {kind}", answers(engine, work), wanted)
        chosen = {row.operation: row.chosen for row in engine.kernels.rows}["rotation"]
        compare.require(f"{kind}: the rotation is {chosen}'s", chosen == "flashinfer")
        _hold_replayed(ctx, compare, "rotation", kind, use_flashinfer_fused_rope=True)
    return compare.result()

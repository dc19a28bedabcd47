"""Backends that need packages of others: what is here, and that an engine on each gives the same greedy tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from paged_case import Case, make_case
from step_rows import Row

from gpu_checks.context import Context, error_of
from gpu_checks.engines import answers, make_engine, make_model, require_package, workload
from gpu_checks.graphs import hold_replayed
from gpu_checks.models import CHOICES, greedy
from gpu_checks.registry import Comparison, Target, check
from megatron_infer.kernels import backend_candidates
from megatron_infer.kernels.packages import flash_attn_attention, flash_attn_prompts, flashinfer_attention
from megatron_infer.kernels.packages import flashinfer_rope as flashinfer_rotation

TILES: dict[str, Any] = {"block_size_tokens": 256, "buffer_size_gb": 0.2}
"""Blocks that hold whole tiles of flash-attn 3."""
PART = "share of answers that part"


def _hold(
    ctx: Context,
    compare: Comparison,
    package: Any,
    rows: dict[str, str],
    *,
    wanted: dict[str, Any] | None = None,
    alike: bool = True,
    rehearsed: dict[str, Any] | None = None,
    replays: bool = True,
    **options: Any,
) -> None:
    """An engine with these options answers like one with `wanted` (alike); graphs change no bit of it (replays).

    package: the backend's module. rows: operation -> what the start-up table must show for it. rehearsed: more options
    of the engines with graphs in a rehearsal.
    """
    dtype = ctx.pick(torch.bfloat16, torch.float32)
    require_package(package, ctx)
    for kind in ctx.pick(("attention", "windows"), ("windows",)):
        work = workload(ctx, logprobs=CHOICES, count=ctx.pick(8, 2))
        model = make_model(kind, dtype, ctx.device)
        engine = make_engine(model, ctx.device, **options)
        chosen = {row.operation: row.chosen for row in engine.kernels.rows}
        found = {name: chosen.get(name) for name in rows}
        compare.require(f"{kind}: the table shows {found}", found == rows)
        if alike:
            got, like = answers(engine, work), answers(make_engine(model, ctx.device, **wanted or {}), work)
            # In 16 bits two backends round differently, and a near tie turns now and then.
            parted = sum(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(got, like, strict=True))
            compare.add(kind, parted / len(got), ctx.pick(0.5, 0.0))
        if replays:
            more = options | ctx.pick({}, rehearsed or {})
            hold_replayed(ctx, compare, kind, model, workload(ctx, logprobs=1, count=ctx.pick(8, 2)), **more)


@check(budget_s=40)
def triton_engine(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """An engine forced onto Triton's kernels gives the CPU's greedy tokens in fp32."""
    ctx.backends(backend_candidates.ATTENTION, torch.float32)
    kinds = ctx.pick(("attention", "windows", "experts", "hybrid", "mamba"), ("windows", "experts"))
    return greedy(ctx, compare, kinds=kinds, backend="triton", count=ctx.pick(None, 1))


@check(budget_s=120, what=PART)
def flashinfer_engine(ctx: Context, compare: Comparison) -> None:
    """An engine on FlashInfer, where it is installed, answers like one on the default kernels in bf16."""
    _hold(
        ctx, compare, flashinfer_attention, {"attention": "flashinfer"}, replays=False, attention_backend="flashinfer"
    )


@check(budget_s=90, what=PART)
def flashinfer_graphs(ctx: Context, compare: Comparison) -> None:
    """Decode steps on FlashInfer, where it is installed, have the same bits replayed and run as they are."""
    how = {"alike": False, "rehearsed": {"kernels": None}, "attention_backend": "flashinfer"}
    _hold(ctx, compare, flashinfer_attention, {"attention": "flashinfer"}, **how)


@check(budget_s=60, what=PART)
def flash_attn_engine(ctx: Context, compare: Comparison) -> None:
    """An engine on flash-attn 3, where it is installed, answers like one on the default kernels in bf16, with the same
    bits replayed from graphs and run as they are."""
    how = {"rehearsed": {"kernels": None}, "attention_backend": "flash_attn"}
    _hold(ctx, compare, flash_attn_attention, {"attention": "flash_attn"}, **how)


@check(budget_s=60, what=PART)
def flash_attn_3_prompts(ctx: Context, compare: Comparison) -> None:
    """On Hopper with flash-attn 3, prompts run on it and decode rows on Triton: answers as on Triton alone, the same
    bits replayed from graphs and run as they are."""
    rows = {"attention, decode": "triton", "attention, prefill": "flash_attn_3"}
    how = {"wanted": {"attention_backend": "triton", **TILES}, "rehearsed": {"num_cuda_graphs": 2}, **TILES}
    _hold(ctx, compare, flash_attn_prompts, rows, **how)


@check(budget_s=60, what=PART)
def flashinfer_rope(ctx: Context, compare: Comparison) -> None:
    """FlashInfer's rotation (use_flashinfer_fused_rope), where it is installed, before the default attention: answers
    like the default's in bf16, the same bits replayed from graphs and run as they are."""
    _hold(ctx, compare, flashinfer_rotation, {"rotation": "flashinfer"}, use_flashinfer_fused_rope=True)


@check(budget_s=60, what="difference over the largest entry")
def flashinfer_workspace(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """Plans of large steps fit FlashInfer's workspace, where it is installed; results agree with Triton's.

    64 query heads of 128: many decode rows, and slices whose keys it cuts, take the most partial sums.
    """
    dtype = ctx.pick(torch.bfloat16, torch.float16)
    require_package(flashinfer_attention, ctx, dtype)
    own = next(one for one in ctx.backends(backend_candidates.ATTENTION, dtype) if one.name == "triton")
    heads = ctx.pick({"head_dim": 128, "group_size": 8, "num_kv_heads": 8}, {"head_dim": 64, "num_kv_heads": 1})
    many, keys, queries = ctx.pick((256, 512, 256), (2, 30, 5))
    steps: dict[str, tuple[list[Row], int]] = {
        "decode": ([(1, keys + row) for row in range(many)], many),
        "slices": ([(queries, 4 * keys + row) for row in range(max(2, many // 16))], 0),
        "mixed": ([(1, keys)] * many + [(queries, 4 * keys)] * 2, many),
    }
    for name, (rows, num_decode) in steps.items():
        case = make_case(rows, num_decode=num_decode, dtype=dtype, device=ctx.device, **{"group_size": 4} | heads)
        out, _ = case.run(flashinfer_attention.make(ctx.device, dtype))
        compare.add(name, error_of(out, case.run(own)[0]), 2e-2)
    return {"workspace_bytes": flashinfer_attention.WORKSPACE_BYTES}


@check(budget_s=60, long=True)
def speed_attention(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """One layer's attention of a prompt and of decode rows on every backend here: the order of `auto`.

    8 kv heads of 128 with 4 query heads each, in bf16, blocks of 256.
    """
    dtype = ctx.pick(torch.bfloat16, torch.float32)
    sizes: dict[str, Any] = {"head_dim": 128, "group_size": 4, "num_kv_heads": 8, "block_size": 256}
    sizes = ctx.pick(sizes, {"head_dim": 16, "group_size": 2, "num_kv_heads": 1})
    length, num_rows = ctx.pick((8192, 64), (20, 2))
    steps = {"prefill": ([(length, length)], 0), "decode": ([(1, length // 2)] * num_rows, num_rows)}
    backends = ctx.backends(backend_candidates.ATTENTION, dtype)
    if not ctx.rehearse:
        backends += backend_candidates.available(backend_candidates.PROMPTS, ctx.device, dtype, forced=None)[0]
    table = []
    for name, (rows, num_decode) in steps.items():
        case = make_case(rows, num_decode=num_decode, dtype=dtype, device=ctx.device, **sizes)
        block_size = case.kv_cache.shape[3]
        able = [one for one in backends if one.supports(case.spec, dtype=dtype, block_size=block_size) is None]
        able = [one for one in able if name == "prefill" or one.name != "flash_attn_3"]
        ms = {one.name: layer_milliseconds(ctx, one, case, rounds=ctx.pick(10, 1)) for one in able}
        table += [f"{name:<8} {backend:<14} {found:8.3f} ms" for backend, found in ms.items()]
        first = "flash_attn_3" if "flash_attn_3" in ms else next(iter(ms))
        share = min(ms.values()) / ms[first]
        what = f"{name}: the fastest backend's time over that of {first}, as auto chooses"
        compare.targets.append(Target(what, share, 0.95))
    compare.figure = f"{len(table)} timings"
    return {"table": table}


def layer_milliseconds(ctx: Context, backend: Any, case: Case, *, rounds: int) -> float:
    """Of the case's attention."""
    q_TKGH, k_TKH, v_TKH = case.parts(case.fused)
    backend.plan(case.meta)
    run = partial(backend.run, q_TKGH, k_TKH, v_TKH, case.kv_cache, layer=case.layer, spec=case.spec)
    return ctx.milliseconds(run, rounds=rounds)

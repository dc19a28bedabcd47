"""Engines on the backends that are asked for by name give the greedy tokens of others."""

from __future__ import annotations

from typing import Any

import torch

from gpu_checks.context import Context
from gpu_checks.engines import answers, make_engine, make_model, require_package, workload
from gpu_checks.graphs import hold_replayed
from gpu_checks.models import CHOICES, greedy
from gpu_checks.registry import Comparison, check
from megatron_infer.kernels import backend_candidates
from megatron_infer.kernels import flashinfer_rope as flashinfer_rotation


@check(budget_s=40)
def triton_engine(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """An engine forced onto Triton's kernels gives the CPU's greedy tokens in fp32."""
    ctx.backends(backend_candidates.ATTENTION, torch.float32)
    kinds = ctx.pick(("attention", "windows", "experts", "hybrid", "mamba"), ("windows", "experts"))
    return greedy(ctx, compare, kinds=kinds, backend="triton", count=ctx.pick(None, 1))


@check(budget_s=60, what="share of answers that part")
def flashinfer_rope(ctx: Context, compare: Comparison) -> None:
    """FlashInfer's rotation (use_flashinfer_fused_rope), where it is installed, before the default attention: answers
    like the default's in bf16, the same bits replayed from graphs and run as they are."""
    require_package(flashinfer_rotation, ctx)
    for kind in ctx.pick(("attention", "windows"), ("windows",)):
        work = workload(ctx, logprobs=CHOICES, count=ctx.pick(8, 2))
        model = make_model(kind, ctx.pick(torch.bfloat16, torch.float32), ctx.device)
        engine = make_engine(model, ctx.device, use_flashinfer_fused_rope=True)
        found = {row.operation: row.chosen for row in engine.kernels.rows}.get("rotation")
        compare.require(f"{kind}: the table shows {found}", found == "flashinfer")
        got, like = answers(engine, work), answers(make_engine(model, ctx.device), work)
        # In 16 bits two backends round differently, and a near tie turns now and then.
        parted = sum(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(got, like, strict=True))
        compare.add(kind, parted / len(got), ctx.pick(0.5, 0.0))
        work = workload(ctx, logprobs=1, count=ctx.pick(8, 2))
        hold_replayed(ctx, compare, kind, model, work, use_flashinfer_fused_rope=True)

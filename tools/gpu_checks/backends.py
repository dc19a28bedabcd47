"""Engines on the backends that are asked for by name give the greedy tokens of others."""

from __future__ import annotations

import torch

from gpu_checks.context import Context
from gpu_checks.engines import answers, make_engine, make_model, workload
from gpu_checks.graphs import hold_replayed
from gpu_checks.models import CHOICES
from gpu_checks.registry import Comparison, Unavailable, check
from megatron_infer.kernels import flashinfer_rope as flashinfer_rotation


@check(budget_s=60, what="share of answers that part")
def flashinfer_rope(ctx: Context, compare: Comparison) -> None:
    """FlashInfer's rotation (use_flashinfer_fused_rope), where it is installed, before the default attention: answers
    like the default's in bf16, the same bits replayed from graphs and run as they are."""
    dtype = ctx.pick(torch.bfloat16, torch.float32)
    if (reason := flashinfer_rotation.unavailable(ctx.device, dtype)) is not None:
        raise Unavailable(reason)
    for kind in ctx.pick(("attention", "windows"), ("windows",)):
        work = workload(ctx, logprobs=CHOICES, count=ctx.pick(8, 2))
        model = make_model(kind, dtype, ctx.device)
        engine = make_engine(model, ctx.device, use_flashinfer_fused_rope=True)
        found = {row.operation: row.chosen for row in engine.kernels.rows}.get("rotation")
        compare.require(f"{kind}: the table shows {found}", found == "flashinfer")
        got, like = answers(engine, work), answers(make_engine(model, ctx.device), work)
        # In 16 bits two backends round differently, and a near tie turns now and then.
        parted = sum(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(got, like, strict=True))
        compare.add(kind, parted / len(got), ctx.pick(0.5, 0.0))
        work = workload(ctx, logprobs=1, count=ctx.pick(8, 2))
        hold_replayed(ctx, compare, kind, model, work, use_flashinfer_fused_rope=True)

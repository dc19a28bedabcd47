"""Whether the host waits for the device inside a step."""

from __future__ import annotations

from typing import Any

import torch

from gpu_checks.context import Context
from gpu_checks.engines import make_engine, make_model
from gpu_checks.graphs import graphed
from gpu_checks.registry import Comparison, Result, Unavailable, check
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.kernels import flashinfer_attention


def _decoding(engine: Any, count: int, steps: int) -> None:
    """`count` requests in the middle of their answers."""
    for seed in range(count):
        params = SamplingParams(max_tokens=steps + 40, temperature=0.0 if seed % 2 else 0.8, seed=seed, ignore_eos=True)
        engine.add_request([1 + seed, 2, 3], params, stream="final")
    for _ in range(8):
        engine.step()


def _hold(ctx: Context, engine: Any, steps: int) -> dict[str, float]:
    """Raise if a step makes the host wait other than for its tokens -> waits a step, by what for."""
    _decoding(engine, ctx.pick(8, 2), steps)
    before = dict(engine.device.syncs)
    with ctx.no_sync():
        for _ in range(steps):
            engine.step()
    after = dict(engine.device.syncs)
    return {
        name: (count - before.get(name, 0)) / steps for name, count in after.items() if count != before.get(name, 0)
    }


@check(
    "no_sync_eager",
    group="sync",
    promise="a decode step that is not captured never waits for the device but for its tokens",
    budget_s=25,
)
def eager(ctx: Context) -> Result:
    compare, waits = Comparison("difference"), {}
    for kind in ctx.pick(("attention", "experts", "hybrid", "mamba"), ("attention",)):
        engine = make_engine(
            make_model(kind, ctx.pick(torch.bfloat16, torch.float32), ctx.device), ctx.device, overlap=True
        )
        waits[kind] = _hold(ctx, engine, ctx.pick(20, 2))
        compare.require(f"{kind}: waits {waits[kind]}", sum(waits[kind].values()) <= 1.0)
    return compare.result(waits_per_step=waits)


@check(
    "no_sync_graphs",
    group="sync",
    promise="a replayed decode step never waits for the device but for its tokens, of the step before",
    budget_s=25,
)
def replayed(ctx: Context) -> Result:
    compare, waits = Comparison("difference"), {}
    for kind in ctx.pick(("attention", "hybrid"), ("attention",)):
        engine = graphed(ctx, make_model(kind, ctx.pick(torch.bfloat16, torch.float32), ctx.device), overlap=True)
        waits[kind] = _hold(ctx, engine, ctx.pick(20, 2))
        compare.require(f"{kind}: waits {waits[kind]}", sum(waits[kind].values()) <= 1.0)
    return compare.result(waits_per_step=waits)


@check(
    "no_sync_flashinfer",
    group="sync",
    promise="a decode step on FlashInfer's attention, where it is installed, never waits but for its tokens",
    budget_s=60,
)
def flashinfer(ctx: Context) -> Result:
    if (reason := flashinfer_attention.unavailable(ctx.device, torch.bfloat16)) is not None:
        raise Unavailable(reason)
    model = make_model("attention", torch.bfloat16, ctx.device)
    waits = _hold(ctx, make_engine(model, ctx.device, overlap=True, attention_backend="flashinfer"), 20)
    compare = Comparison("difference")
    compare.require(f"waits {waits}", sum(waits.values()) <= 1.0)
    return compare.result(waits_per_step=waits)


@check(
    "sync_is_noticed",
    group="sync",
    promise="the check of waiting would have noticed one",
    budget_s=5,
)
def noticed(ctx: Context) -> Result:
    if ctx.rehearse:
        raise Unavailable("nothing on a CPU notices a wait")
    compare, tensor = Comparison("difference"), torch.ones(4, device=ctx.device)
    raised = False
    try:
        with ctx.no_sync():
            tensor.sum().item()
    except RuntimeError:
        raised = True
    compare.require("item() passed unnoticed", raised)
    return compare.result()

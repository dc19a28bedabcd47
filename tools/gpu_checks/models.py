"""Whole models on the device against the same weights on a CPU in fp32, and against megatron-core's own forward."""

from __future__ import annotations

from typing import Any

import torch

from gpu_checks.context import Context
from gpu_checks.engines import CPU, KINDS, answers, make_engine, make_model, workload
from gpu_checks.registry import Comparison, check

NEAR_TIE = 2e-5
"""Two fp32 log probabilities closer than this may change places between devices."""
CHOICES = 2


def _margin(sample: Any, at: int) -> float:
    """How far the most likely token is before the next one at output token `at`."""
    ranked = sorted((entry.logprob for entry in sample.logprobs[at].values()), reverse=True)
    return float(ranked[0] - ranked[1])


def compare_tokens(compare: Comparison, label: str, got: list[Any], wanted: list[Any]) -> int:
    """Token for token; where they part, `wanted` must have had a near tie -> how often that was so."""
    ties = 0
    for mine, reference in zip(got, wanted, strict=True):
        for one, other in zip(mine.outputs, reference.outputs, strict=True):
            pairs = zip(one.token_ids, other.token_ids, strict=True)
            parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            is_tie = parted is not None and _margin(other, parted) < NEAR_TIE
            ties += is_tie
            compare.require(f"{label}: tokens part at {parted}", parted is None or is_tie)
    return ties


def greedy(ctx: Context, compare: Comparison, kinds: tuple[str, ...], **options: Any) -> dict[str, Any]:
    """Greedy tokens in fp32 are those of a CPU. options: of both engines."""
    ties, tables = 0, {}
    work = workload(ctx, logprobs=CHOICES)
    for kind in kinds:
        wanted = answers(make_engine(make_model(kind, torch.float32, CPU), CPU, **options), work)
        engine = make_engine(make_model(kind, torch.float32, ctx.device), ctx.device, **options)
        ties += compare_tokens(compare, kind, answers(engine, work), wanted)
        tables[kind] = {row.operation: row.chosen for row in engine.kernels.rows}
        if not ctx.rehearse and "attention" in tables[kind]:
            compare.require(f"{kind}: attention is {tables[kind]}", tables[kind]["attention"].startswith("triton"))
        kept = engine.config.kv_dtype_of(engine.shape)
        compare.require(f"{kind}: the cache is {kept}", ("kv_cache_dtype" in options) == (kept == "float8_e4m3fn"))
    return {"near_ties": ties, "backends": tables}


@check(budget_s=90)
def greedy_tokens(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """Greedy tokens of models of every kind in fp32 equal those of a CPU: windows, MoE, hybrid, latents, delta nets."""
    return greedy(ctx, compare, ctx.pick(KINDS, ("attention", "hybrid")))


def _prompt_logprobs(engine: Any, ctx: Context) -> list[torch.Tensor]:
    """Of every prompt position but the first, by the engine."""
    work = workload(ctx, prompt_logprobs=0)
    outputs = answers(engine, work)
    return [
        torch.tensor([entry[token].logprob for entry, token in zip(o.prompt_logprobs[1:], prompt[1:], strict=True)])
        for o, (prompt, _) in zip(outputs, work, strict=True)
    ]


@check(budget_s=90, what="mean difference in nats")
def bf16_logprobs(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """Log probabilities of given tokens in bf16 are near those of fp32 on a CPU."""
    means = {}
    for kind in ctx.pick(KINDS, ("attention", "hybrid")):
        wanted = torch.cat(_prompt_logprobs(make_engine(make_model(kind, torch.float32, CPU), CPU), ctx))
        got = torch.cat(_prompt_logprobs(make_engine(make_model(kind, torch.bfloat16, ctx.device), ctx.device), ctx))
        difference = (got - wanted).abs()
        means[kind] = {"mean": float(difference.mean()), "largest": float(difference.max())}
        # Routers and indexers choose otherwise near a tie: single tokens of such models may differ by much.
        compare.add(kind, means[kind]["mean"], 0.15 if kind in ("experts", "hybrid", "sparse") else 0.06)
    return {"differences": means}


@check(budget_s=90, what="difference in nats")
def trainers_forward(ctx: Context, compare: Comparison) -> None:
    """Log probabilities equal those of megatron-core's own forward on the same device, in fp32."""
    for kind in ctx.pick(KINDS, ("attention", "hybrid")):
        model = make_model(kind, torch.float32, ctx.device)
        scored = _prompt_logprobs(make_engine(model, ctx.device), ctx)
        for (prompt, _), got in list(zip(workload(ctx, prompt_logprobs=0), scored, strict=True))[:4]:
            ids = torch.tensor([prompt], device=ctx.device)
            positions = torch.arange(len(prompt), device=ctx.device)[None]
            with torch.no_grad():
                logits = model(ids, positions, None)
            logprobs = logits[0, :-1].float().log_softmax(-1).cpu()
            wanted = logprobs.gather(1, ids[0, 1:, None].cpu())[:, 0]
            if len(wanted):
                compare.add(kind, float((got - wanted).abs().max()), 2e-4)


@check(budget_s=60)
def scheduling(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """Chunks, overlap, prefix cache, pauses and evictions change no greedy token on the device."""
    ties = 0
    ways: dict[str, dict[str, Any]] = {
        "overlap": {"overlap": True},
        "small chunks": {"max_tokens": 48},
        "few rows": {"max_requests": 4},
        "prefix cache": {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru"},
    }
    for kind in ctx.pick(("attention", "hybrid"), ("attention",)):
        model = make_model(kind, torch.float32, ctx.device)
        work = workload(ctx, logprobs=CHOICES)
        wanted = answers(make_engine(model, ctx.device), work)
        for name, options in ways.items():
            cached = {"prefix_caching_mamba_gb": 0.004} if name == "prefix cache" and kind == "hybrid" else {}
            got = answers(make_engine(model, ctx.device, **options, **cached), work)
            ties += compare_tokens(compare, f"{kind}, {name}", got, wanted)
    return {"near_ties": ties}

"""LoRA adapters: their product against its definition, and engines that serve several, captured and not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from lora_cases import random_adapter
from lora_products import case, reference_product

from gpu_checks.context import Context, error_of
from gpu_checks.engines import answers, make_model, tokens_of, workload
from gpu_checks.graphs import graphed, same
from gpu_checks.registry import Comparison, check
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.kernels import backend_candidates
from megatron_infer.testing.inspect import inspect

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
SHAPES = ((4096, 6144, 48), (14336, 4096, 16), (576, 192, 64), (4096, 28672, 32))
"""(inputs, outputs, largest rank)"""


@check(budget_s=30, what="error over the largest entry")
def adapters_product(ctx: Context, compare: Comparison) -> None:
    """Y + scale B (A x) of each token's own adapter, and the same bits for a token alone and among others."""
    for dtype in ctx.dtypes():
        for backend in ctx.backends(backend_candidates.LORA, dtype):
            for shape in ctx.pick(SHAPES, ((576, 70, 20),)):
                for num_tokens in ctx.pick((1, 19, 256, 3000), (5,)):
                    weights, x, y, slots = case(*shape, dtype, num_tokens, seed=num_tokens, device=ctx.device)
                    wanted = reference_product(y, x, slots, weights)
                    backend.plan(slots)
                    got = backend.run(y.clone(), x, weights)
                    label = f"{backend.name} {dtype} {shape} {num_tokens} tokens"
                    compare.add(label, error_of(got, wanted), TOLERANCE[dtype])
                    backend.plan(slots[-1:])
                    alone = backend.run(y[-1:].clone(), x[-1:], weights)
                    compare.require(f"{label}: other bits alone", torch.equal(alone, got[-1:]))


@check(budget_s=60)
def adapters_captured(ctx: Context, compare: Comparison) -> None:
    """Tokens and log probabilities of requests of several adapters and none have the same bits with graphs and without
    (padded), also of adapters that are loaded or replaced after the capture.
    """
    for kind in ctx.pick(("attention", "hybrid"), ("attention",)):
        for dtype in ctx.pick((torch.float32, torch.bfloat16), (torch.float32,)):
            model = make_model(kind, dtype, ctx.device)
            lora = LoRAConfig(max_loras=2, max_rank=20)
            engines = [graphed(ctx, model, lora=lora, captures=captures) for captures in (True, False)]
            work = workload(ctx, count=ctx.pick(12, 3))  # of the first adapter, the base model, the second
            seen: list[Any] = []
            for first in (3, 7):
                for engine in engines:
                    for name, rank in (("first", first), ("second", 20)):
                        adapter = random_adapter(model, name, rank=rank, seed=rank, scale=0.5)
                        engine.load_adapter(name, adapter, replace=name == "first")
                names = ("first", None, "second")
                asked = [(prompt, replace(how, adapter=names[i % 3])) for i, (prompt, how) in enumerate(work)]
                got, wanted = (answers(engine, asked) for engine in engines)
                same(compare, f"{kind} {dtype} rank {first}", got, wanted)
                seen.append(tokens_of(got))
            compare.require(f"{kind} {dtype}: the adapter that replaced another one draws as it", seen[0] != seen[1])
            pool = inspect(engines[0]).runner.graphs.pool
            compare.require(f"{kind} {dtype}: refused {pool.refused}", not pool.refused)
            with_adapters = any(shape.has_adapters for shape in pool.captured)
            compare.require(f"{kind} {dtype}: steps with adapters were not replayed", with_adapters)

"""LoRA adapters: their product against its definition, and engines that serve several, captured and not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gpu_checks.context import Context
from gpu_checks.engines import answers, make_model, tokens_of, workload
from gpu_checks.graphs import graphed, same
from gpu_checks.registry import Comparison, Result, check
from gpu_checks.steps import error_of
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.kernels import backend_candidates
from megatron_infer.kernels.lora import LoRAWeights
from megatron_infer.models.lora.adapter import Adapter, LoRAPair
from megatron_infer.testing.inspect import inspect

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj")


def _weights(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> LoRAWeights:
    """Slots of the largest rank, rank 1, half of it, and one without a pair."""
    width_in, width_out, max_rank = sizes
    generator = torch.Generator().manual_seed(max_rank)
    weights = LoRAWeights.empty(4, max_rank, width_in, width_out, dtype=dtype, device=device)
    for slot, rank in enumerate((max_rank, 1, max(1, max_rank // 2))):
        a = torch.randn(rank, width_in, generator=generator) / width_in**0.5
        b = torch.randn(width_out, rank, generator=generator) / rank**0.5
        packed = weights.pack([(a, b, None)])
        assert packed is not None
        weights.put(slot, packed, 2.0 / (slot + 1))
    return weights


@check(
    "adapters_product",
    group="adapters",
    promise="y + scale B (A x) of each token's own adapter, and the same bits for a token alone and among others",
    budget_s=30,
)
def product(ctx: Context) -> Result:
    compare = Comparison("error over the largest entry")
    sizes = ctx.pick(((4096, 6144, 48), (14336, 4096, 16), (576, 192, 64), (4096, 28672, 32)), ((576, 70, 20),))
    for dtype in ctx.dtypes():
        for backend in ctx.backends(backend_candidates.LORA, dtype):
            for one in sizes:
                weights = _weights(one, dtype, ctx.device)
                for num_tokens in ctx.pick((1, 19, 256, 3000), (5,)):
                    generator = torch.Generator().manual_seed(num_tokens)
                    x, y = (torch.randn(num_tokens, width, generator=generator).to(dtype) for width in one[:2])
                    slots = torch.randint(-1, 4, (num_tokens,), dtype=torch.int32, generator=generator)
                    wanted = y.double()
                    for slot in range(3):
                        a, b = (part[slot].double().cpu() for part in (weights.a_SRX, weights.b_SRW))
                        added = float(weights.scale_S[slot]) * (x.double() @ a.T @ b)
                        wanted += torch.where((slots == slot)[:, None], added, 0.0)
                    x, y, slots = x.to(ctx.device), y.to(ctx.device), slots.to(ctx.device)
                    backend.plan(slots)
                    got = backend.run(y.clone(), x, weights)
                    label = f"{backend.name} {dtype} {one} {num_tokens} tokens"
                    compare.add(label, error_of(got, wanted), TOLERANCE[dtype])
                    backend.plan(slots[-1:])
                    alone = backend.run(y[-1:].clone(), x[-1:], weights)
                    compare.require(f"{label}: other bits alone", torch.equal(alone, got[-1:]))
    return compare.result()


def _adapter(model: Any, name: str, rank: int) -> Adapter:
    generator = torch.Generator().manual_seed(rank)
    pairs = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in TARGETS and ".experts." not in path:
            out, width = module.weight.shape
            a = torch.randn(rank, width, generator=generator) / width**0.5
            pairs[path] = LoRAPair(a, torch.randn(out, rank, generator=generator) / rank**0.5, 0.5)
    return Adapter(name, pairs)


@check(
    "adapters_captured",
    group="adapters",
    promise="tokens and log probabilities of requests of several adapters and none have the same bits with graphs and "
    "without (padded), also of adapters that are loaded or replaced after the capture",
    budget_s=60,
)
def captured(ctx: Context) -> Result:
    compare = Comparison("difference")
    for kind in ctx.pick(("attention", "hybrid"), ("attention",)):
        for dtype in ctx.pick((torch.float32, torch.bfloat16), (torch.float32,)):
            model = make_model(kind, dtype, ctx.device)
            lora = LoRAConfig(max_loras=2, max_rank=20)
            engines = [graphed(ctx, model, lora=lora, captures=captures) for captures in (True, False)]
            work = workload(ctx, count=ctx.pick(12, 3))  # of the first adapter, the base model, the second
            seen: list[Any] = []
            for first, second in ((3, 20), (7, 20)):
                for engine in engines:
                    engine.load_adapter("first", _adapter(model, "first", first), replace=True)
                    engine.load_adapter("second", _adapter(model, "second", second))
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
    return compare.result()

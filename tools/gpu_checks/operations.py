"""Norms and activations of every accelerated backend against their definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_checks.context import Context
from gpu_checks.registry import Comparison, Result, Unavailable, check
from gpu_checks.steps import error_of
from megatron_infer.kernels import accelerated
from megatron_infer.kernels.torch_ref import ReferenceOps

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
WIDTHS = (64, 576, 4096, 8192, 5120, 1000)
Calls = dict[str, Callable[[Any], Any]]


def _calls(num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Calls:
    """Name -> the operation on given inputs, to be called with a backend."""
    generator = torch.Generator().manual_seed(width)

    def randn(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kind).to(device)

    first, second, weight, bias = randn(num_tokens, width), randn(num_tokens, width), randn(width), randn(width)
    residual = randn(num_tokens, width, kind=torch.float32)
    both, gate, group = randn(num_tokens, 2 * width), randn(num_tokens, width + 8)[:, 8:], width // 2
    return {
        "rms_norm": lambda ops: ops.rms_norm(first, weight, 1e-5),
        "add_rms_norm": lambda ops: ops.add_rms_norm(first, second.clone(), weight, 1e-5),
        "add_rms_norm fp32 residual": lambda ops: ops.add_rms_norm(first, residual.clone(), weight, 1e-5),
        "layer_norm": lambda ops: ops.layer_norm(first, weight, bias, 1e-5),
        "layer_norm without bias": lambda ops: ops.layer_norm(first, weight, None, 1e-5),
        "silu_mul": lambda ops: ops.silu_mul(both),
        "gated_rms_norm": lambda ops: ops.gated_rms_norm(first, gate, weight, 1e-5, group_size=group),
        "gate alone": lambda ops: ops.gated_rms_norm(first, gate, None, 1e-5, group_size=group),
    }


@check(
    "elementwise",
    group="operations",
    promise="norms, gated norms and SwiGLU equal their definition at widths that are powers of two and at others",
    budget_s=15,
)
def elementwise(ctx: Context) -> Result:
    compare = Comparison("error over the largest entry")
    cpu = torch.device("cpu")
    for dtype in ctx.dtypes():
        for backend in ctx.backends(accelerated.OPS, dtype):
            for width in ctx.pick(WIDTHS, (48,)):
                for num_tokens in ctx.pick((1, 7, 300), (2,)):
                    there, here = (_calls(num_tokens, width, dtype, where) for where in (ctx.device, cpu))
                    for name, call in there.items():
                        got, wanted = call(backend), here[name](ReferenceOps())
                        pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
                        for part, reference in pairs:
                            label = f"{backend.name} {name} {dtype} [{num_tokens}, {width}]"
                            compare.require(f"{label}: gives {part.dtype}", part.dtype == reference.dtype)
                            compare.add(label, error_of(part, reference), TOLERANCE[dtype])
    return compare.result()


def _experts_case(
    num_tokens: int, experts: int, top_k: int, sizes: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Any, tuple[Tensor, ...], Tensor]:
    """(the layer's weights, (x, chosen, probs, out), what the experts must give in float64)."""
    from megatron_infer.kernels.experts import ExpertWeights

    width, inner = sizes
    generator = torch.Generator().manual_seed(num_tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).div_(shape[-1] ** 0.5).to(dtype)

    fc1, fc2 = ([randn(*shape) for _ in range(experts)] for shape in ((2 * inner, width), (width, inner)))
    x, before = torch.randn(num_tokens, width, generator=generator).to(dtype), randn(num_tokens, width)
    scores = torch.randn(num_tokens, experts, generator=generator)
    scores[:, 0] += 3.0  # one expert that nearly all choose, and some that nobody does
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(top_k).indices, True)
    probs = scores.softmax(-1) * chosen
    wanted = before.double()
    for expert in range(experts):
        gate, up = (x.double() @ fc1[expert].double().T).chunk(2, dim=-1)
        inner_TF = gate * torch.sigmoid(gate) * up
        wanted += (inner_TF @ fc2[expert].double().T) * probs[:, expert, None].double()
    weights = ExpertWeights(
        fc1=[{"weight": weight.to(device), "bias": None} for weight in fc1],
        fc2=[{"weight": weight.to(device), "bias": None} for weight in fc2],
        first=0,
        top_k=top_k,
        activate=lambda ops, middle: ops.silu_mul(middle),
    )
    return weights, tuple(part.to(device) for part in (x, chosen, probs, before)), wanted


@check(
    "experts",
    group="operations",
    promise="grouped products of mixture-of-experts layers equal each expert's own, however uneven the choice",
    budget_s=20,
)
def experts(ctx: Context) -> Result:
    compare = Comparison("error over the largest entry")
    for dtype in ctx.dtypes():
        for backend in ctx.backends(accelerated.OPS, dtype):
            grouped = getattr(backend, "experts", None)
            if grouped is None:
                continue
            for num_tokens in ctx.pick((1, 5, 64, 777), (3,)):
                for shape in ctx.pick(((8, 2, (256, 512)), (60, 4, (512, 352))), ((3, 2, (16, 32)),)):
                    weights, inputs, wanted = _experts_case(num_tokens, *shape, dtype, ctx.device)
                    reason = grouped.supports(weights, dtype)
                    label = f"{backend.name} {dtype} {num_tokens} tokens, {shape[0]} experts"
                    compare.require(f"{label}: refused, {reason}", reason is None)
                    x, chosen, probs, out = inputs
                    grouped.add(backend, x, chosen, probs, weights, out)
                    compare.add(label, error_of(out, wanted), 2 * TOLERANCE[dtype])
    if not compare.num_cases:
        raise Unavailable("no backend here has grouped products of experts")
    return compare.result()

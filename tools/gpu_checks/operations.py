"""Norms, activations, experts, adapters of every accelerated backend against their definition in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from experts_case import Layer, choose, distinct, routers_choice
from lora_products import case, reference_product
from torch import Tensor

from gpu_checks.context import Context, error_of
from gpu_checks.registry import Comparison, Unavailable, check
from megatron_infer.kernels import backend_candidates
from megatron_infer.kernels.activations import KINDS, GatedActivation
from megatron_infer.kernels.experts import RoutingRules
from megatron_infer.kernels.torch.torch_ref import ReferenceOps

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
ROUTING_TOLERANCE = TOLERANCE | {torch.float64: 5e-6}
"""A router in fp64 has its softmax or sigmoid in fp32."""
SIZES = ((64, 64), (576, 96), (4096, 128), (8192, 256), (5120, 80), (1000, 64))
"""(width of a layer, of a head): powers of two and others."""
LORA_SHAPES = ((4096, 6144, 48), (14336, 4096, 16), (576, 192, 64), (4096, 28672, 32))
"""(inputs, outputs, largest rank)"""
ERROR = "error over the largest entry"


class Definition(ReferenceOps):
    """The reference in float64, with norms of every kind."""

    @property
    def norms(self) -> Definition:
        return self

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        centered: bool,
        zero_centered: bool,
        residual: Tensor | None = None,
    ) -> Tensor:
        total, factor = x.double() + (0 if residual is None else residual.double()), weight.double() + zero_centered
        out = self.layer_norm(total, factor, None, eps) if centered else self.rms_norm(total, factor, eps)
        return (out if bias is None else out + bias.double()).to(x.dtype)

    def rowwise(self, function: Callable[[Tensor], Any], x_TX: Tensor) -> Tensor:
        return function(x_TX.double()).to(x_TX.dtype)


def _calls(
    num_tokens: int, width: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[Any], Any]]:
    """Name -> the operation on given inputs, to be called with a backend."""
    generator = torch.Generator().manual_seed(width)

    def randn(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kind).to(device)

    first, second, weight, bias = randn(num_tokens, width), randn(num_tokens, width), randn(width), randn(width)
    residual = randn(num_tokens, width, kind=torch.float32)
    both, gate, group = randn(num_tokens, 2 * width), randn(num_tokens, width + 8)[:, 8:], width // 2
    heads, of_heads = randn(num_tokens, 2, 6, head_dim)[:, :, :4], randn(head_dim)  # where the projection left them
    calls: dict[str, Callable[[Any], Any]] = {
        "rms_norm": lambda ops: ops.rms_norm(first, weight, 1e-5),
        "add_rms_norm": lambda ops: ops.add_rms_norm(first, second.clone(), weight, 1e-5),
        "add_rms_norm fp32 residual": lambda ops: ops.add_rms_norm(first, residual.clone(), weight, 1e-5),
        "layer_norm": lambda ops: ops.layer_norm(first, weight, bias, 1e-5),
        "layer_norm without bias": lambda ops: ops.layer_norm(first, weight, None, 1e-5),
        "silu_mul": lambda ops: ops.silu_mul(both),
        "gated_rms_norm": lambda ops: ops.gated_rms_norm(first, gate, weight, 1e-5, group_size=group),
        "gate alone": lambda ops: ops.gated_rms_norm(first, gate, None, 1e-5, group_size=group),
    }
    for centered in (False, True):
        form = {"centered": centered, "zero_centered": True}
        calls |= {
            f"norm of heads {form}": lambda ops, form=form: ops.norms.norm(heads, of_heads, None, 1e-5, **form),
            f"norm of a sum {form}": lambda ops, form=form: ops.norms.norm(
                first, weight, bias, 1e-5, **form, residual=residual.clone()
            ),
        }
    for function in KINDS:
        for act in (function, GatedActivation(function, None, 0.0), GatedActivation(function, 1.5, 1.0)):
            gated = "" if act is function else f" gated {act.clamp}"
            calls[f"{function.__name__}{gated}"] = lambda ops, act=act: ops.rowwise(act, both)
    return calls


@check(budget_s=40, what=ERROR)
def elementwise(ctx: Context, compare: Comparison) -> None:
    """Norms of every kind, gates and activations equal their definition at widths that are powers of two and others."""
    cpu = torch.device("cpu")
    for dtype in ctx.dtypes():
        for width, head_dim in ctx.pick(SIZES, ((48, 20),)):
            for num_tokens in ctx.pick((1, 300), (2,)):
                there, here = (_calls(num_tokens, width, head_dim, dtype, where) for where in (ctx.device, cpu))
                for backend, name in itertools.product(ctx.backends(backend_candidates.OPS, dtype), there):
                    got, wanted = there[name](backend), here[name](Definition())
                    pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
                    label = f"{backend.name} {name} {dtype} [{num_tokens}, {width}]"
                    for part, reference in pairs:
                        compare.require(f"{label}: gives {part.dtype}", part.dtype == reference.dtype)
                        compare.add(label, error_of(part, reference), TOLERANCE[dtype])


@check(budget_s=20, what=ERROR)
def experts(ctx: Context, compare: Comparison) -> None:
    """Grouped products of mixture-of-experts layers equal each expert's own, however uneven the choice."""
    for dtype in ctx.dtypes():
        for backend in ctx.backends(backend_candidates.OPS, dtype):
            grouped = getattr(backend, "experts", None)
            if grouped is None:
                continue
            for shape in ctx.pick(((8, 2, 256, 512), (60, 4, 512, 352)), ((3, 2, 16, 32),)):
                count, top_k, width, ffn = shape
                layer = Layer(ctx.device, dtype, width=width, ffn=ffn, count=count, top_k=top_k)
                for num_tokens in ctx.pick((1, 5, 64, 777), (3,)):
                    # one expert that all choose, and some that nobody does
                    sizes = {"width": width, "count": count, "top_k": top_k, "favourite": 0}
                    x, chosen, probs = choose(ctx.device, dtype, num_tokens, **sizes, seed=num_tokens)
                    out, reason = torch.ones_like(x), grouped.supports(layer.weights, dtype)
                    wanted = layer.want(x, chosen, probs, out)
                    label = f"{backend.name} {dtype} {num_tokens} tokens, {count} experts"
                    compare.require(f"{label}: refused, {reason}", reason is None)
                    grouped.add(x, grouped.listed(chosen, probs, top_k), layer.weights, out)
                    compare.add(label, error_of(out, wanted), 2 * TOLERANCE[dtype])
    if not compare.num_cases:
        raise Unavailable("no backend here has grouped products of experts")


def _routers(ctx: Context) -> list[tuple[Any, int, bool]]:
    """(rules, number of experts, whether they have a bias) of routers as models have them."""
    grouped = {"score_function": "sigmoid", "num_groups": 8, "group_topk": 4, "scaling_factor": 2.5}
    real = [
        (RoutingRules(top_k=8, score_function="softmax"), 128, False),
        (RoutingRules(top_k=4, score_function="softmax", pre_softmax=True), 60, False),
        (RoutingRules(top_k=8, **grouped), 256, True),
        (RoutingRules(top_k=1, score_function="sigmoid"), 16, False),
    ]
    return ctx.pick(real, [(RoutingRules(top_k=2, score_function="softmax"), 6, False)])


@check(budget_s=20, what="error over the largest weight")
def routing(ctx: Context, compare: Comparison) -> None:
    """The choice of experts in one launch is that of megatron-core's router, in each of its dtypes."""
    for backend in ctx.backends(backend_candidates.OPS, torch.float32):
        if (grouped := getattr(backend, "experts", None)) is None:
            continue
        for rules, num_experts, has_bias in _routers(ctx):
            # Scores rounded to 16 bits are equal now and then, and torch says not which of them it takes.
            few = has_bias or rules.pre_softmax
            for dtype in dict.fromkeys((*((torch.float32,) if few else ctx.dtypes()), torch.float64)):
                logits = distinct(ctx.pick(64, 3), num_experts, dtype, apart=1 / 16).to(ctx.device)
                bias = torch.arange(num_experts, device=ctx.device) % 2 * 2.0 if has_bias else None
                choice = grouped.choose(logits, bias, rules)
                probs, chosen = routers_choice(logits, bias, rules)
                label, ids = f"{dtype} {rules.top_k} of {num_experts} {rules.score_function}", choice.ids_TK.long()
                compare.require(f"{label}: other experts", bool(chosen.gather(1, ids).all()))
                compare.add(label, error_of(choice.weight_TK, probs.gather(1, ids).cpu()), ROUTING_TOLERANCE[dtype])
    if not compare.num_cases:
        raise Unavailable("no backend here chooses experts")


@check(budget_s=30, what=ERROR)
def adapters_product(ctx: Context, compare: Comparison) -> None:
    """Y + scale B (A x) of each token's own adapter, and the same bits for a token alone and among others."""
    for dtype in ctx.dtypes():
        for backend in ctx.backends(backend_candidates.LORA, dtype):
            for shape in ctx.pick(LORA_SHAPES, ((576, 70, 20),)):
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

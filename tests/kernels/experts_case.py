"""Experts of a rank with the sum as it is defined, and routers with the choice of megatron-core's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_infer.kernels.activations import Activation
from megatron_infer.kernels.experts import ExpertWeights, RoutingRules
from megatron_infer.kernels.torch.torch_ref import ReferenceOps
from megatron_infer.models.mcore_compat import topk_routing

WIDTH, FFN, NUM_EXPERTS, TOP_K = 40, 24, 6, 2
RULES = {
    "softmax": (RoutingRules(top_k=3, score_function="softmax"), 12, False),
    "pre-softmax, scaled": (
        RoutingRules(top_k=2, score_function="softmax", pre_softmax=True, scaling_factor=2.5),
        7,
        False,
    ),
    "sigmoid, bias, groups": (
        RoutingRules(top_k=4, score_function="sigmoid", num_groups=3, group_topk=2, scaling_factor=1.7),
        18,
        True,
    ),
    "softmax, groups": (
        RoutingRules(top_k=2, score_function="softmax", pre_softmax=True, num_groups=4, group_topk=2),
        16,
        False,
    ),
    "sigmoid, one": (RoutingRules(top_k=1, score_function="sigmoid"), 5, False),
    "sigmoid, all": (RoutingRules(top_k=4, score_function="sigmoid"), 4, True),
}
"""Router -> (rules, number of experts, whether they have a bias)."""


class Layer:
    """Weights of a rank's experts."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        width: int = WIDTH,
        ffn: int = FFN,
        first: int = 0,
        count: int = NUM_EXPERTS,
        bias: bool = False,
        activation: Activation | None = None,
        top_k: int = TOP_K,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def linear(*shape: int) -> dict[str, Tensor | None]:
            weight, bias_Y = (torch.randn(*size, generator=generator) / size[-1] ** 0.5 for size in (shape, shape[:1]))
            return {"weight": weight.to(device, dtype), "bias": bias_Y.to(device, dtype) if bias else None}

        self.fc1 = [linear(ffn if activation else 2 * ffn, width) for _ in range(count)]
        self.fc2 = [linear(width, ffn) for _ in range(count)]
        self.weights = ExpertWeights(fc1=self.fc1, fc2=self.fc2, first=first, top_k=top_k, activation=activation)

    def want(self, x: Tensor, chosen: Tensor, probs: Tensor, out: Tensor) -> Tensor:
        """out and what the experts add to it, one after the other, in float64."""
        ops, total = ReferenceOps(), out.double()
        for i, (fc1, fc2) in enumerate(zip(self.fc1, self.fc2, strict=True), self.weights.first):
            parts = [None if part is None else part.double() for p in (fc1, fc2) for part in (p["weight"], p["bias"])]
            inner = (self.weights.activation or ops.silu_mul)(ops.linear(x.double(), *parts[:2]))
            total += ops.linear(inner, *parts[2:]) * (probs[:, i].double() * chosen[:, i])[:, None]
        return total


def choose(
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    *,
    width: int = WIDTH,
    count: int = NUM_EXPERTS,
    top_k: int = TOP_K,
    favourite: int | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(x, chosen, probs); with a favourite every token chooses that expert too."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, count, generator=generator)
    if favourite is not None:
        scores[:, favourite] += 1
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(top_k).indices, True)
    x = torch.randn(num_tokens, width, generator=generator)
    return x.to(device, dtype), chosen.to(device), (scores * chosen).to(device, dtype)


def routers_choice(logits_TE: Tensor, bias_E: Tensor | None, rules: RoutingRules) -> Any:
    """(probs [T, E], chosen [T, E]) of megatron-core's own routing."""
    return topk_routing()(
        logits_TE,
        rules.top_k,
        use_pre_softmax=rules.pre_softmax,
        num_groups=rules.num_groups,
        group_topk=rules.group_topk or None,
        scaling_factor=rules.scaling_factor or None,
        score_function=rules.score_function,
        expert_bias=bias_E,
    )


def distinct(num_tokens: int, num_experts: int, dtype: torch.dtype = torch.float32, *, apart: float = 0.25) -> Tensor:
    """Scores that no rounding makes equal."""
    generator = torch.Generator().manual_seed(num_experts)
    order = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)])
    return ((order - num_experts / 2) * apart).to(dtype)

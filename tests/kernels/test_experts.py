"""The native choice of experts: megatron-core's experts and weights, by the same rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experts_case import RULES as TINY_RULES
from experts_case import distinct, routers_choice

from megatron_infer.kernels.experts import RoutingRules
from megatron_infer.kernels.native.cpu_native import NativeOps
from megatron_infer.models.mcore_compat import rounds_router_scores

TOLERANCE = 2e-6
"""Rounding of exp and of the order of sums."""
RULES = TINY_RULES | {
    "softmax of logits, groups": (
        RoutingRules(top_k=4, score_function="softmax", num_groups=8, group_topk=4),
        128,
        False,
    ),
}


def rules_of(name: str) -> tuple[RoutingRules, int, torch.Tensor | None]:
    rules, num_experts, has_bias = RULES[name]
    bias = torch.linspace(-0.3, 0.3, num_experts) if has_bias else None
    return rules._replace(rounds_scores=rounds_router_scores()), num_experts, bias


def no_formula(logits: torch.Tensor) -> Any:
    raise AssertionError("the kernel did not run")


@pytest.mark.parametrize("name", RULES)
def test_experts_and_weights_are_those_of_the_router(native_library, name):
    rules, num_experts, bias = rules_of(name)
    ops, logits = NativeOps(native_library, torch.float32), distinct(4096 // num_experts + 5, num_experts)
    got, chosen = ops.route(logits, bias, rules, no_formula)
    want, torchs = routers_choice(logits, bias, rules)
    assert torch.equal(chosen, torchs) and got.dtype is torch.float32
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=0)


def test_of_equal_scores_the_lower_id_is_chosen_and_no_number_is_the_largest(native_library):
    rules = RoutingRules(top_k=2, score_function="softmax", num_groups=2, group_topk=1)
    nan, inf = float("nan"), float("inf")
    rows = [[1, 1, 1, 1, 1, 1], [0, 2, 2, 2, 2, 0], [0, 0, 0, 0, nan, 0], [-inf] * 6]
    _, chosen = NativeOps(native_library, torch.float32).route(torch.tensor(rows), None, rules, no_formula)
    assert chosen.nonzero()[:, 1].view(4, 2).tolist() == [[0, 1], [1, 2], [3, 4], [0, 1]]


@pytest.mark.parametrize("name", ["softmax", "sigmoid, bias, groups"])
def test_a_token_has_the_same_choice_alone_and_in_company(native_library, name):
    rules, num_experts, bias = rules_of(name)
    ops = NativeOps(native_library, torch.float32)
    logits = torch.randn(700, num_experts, generator=torch.Generator().manual_seed(0))
    whole = ops.route(logits, bias, rules, no_formula)
    alone = ops.route(logits[33:34], bias, rules, no_formula)
    assert all(torch.equal(one[33:34], other) for one, other in zip(whole, alone, strict=True))


@pytest.mark.parametrize(
    ("rules", "of_logits"),
    [
        (RoutingRules(top_k=2, score_function="sqrtsoftplus"), torch.float32),
        (RoutingRules(top_k=4, score_function="softmax", num_groups=4, group_topk=1), torch.float32),
        (RoutingRules(top_k=2, score_function="softmax"), torch.float64),
        (RoutingRules(top_k=2, score_function="softmax"), torch.bfloat16),
    ],
    ids=["score function", "too few experts", "float64", "many equal scores"],
)
def test_what_no_kernel_follows_is_left_to_torch(native_library, rules, of_logits):
    want = (torch.zeros(3, 8), torch.zeros(3, 8, dtype=torch.bool))
    got = NativeOps(native_library, torch.float32).route(
        torch.zeros(3, 8, dtype=of_logits), None, rules, lambda _: want
    )
    assert got is want

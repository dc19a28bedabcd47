"""The choice of experts in one launch: megatron-core's experts and weights, by the same rules."""

from __future__ import annotations

import pytest
import torch
from experts_case import RULES, distinct, routers_choice
from launches import kernels_launched

from megatron_infer.kernels.experts import RoutingRules

pytestmark = pytest.mark.triton

TOLERANCE = {torch.float64: 2e-6, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Rounding of exp and of the order of sums; in fp64 that of fp32, as the scores are."""


@pytest.fixture(scope="module")
def experts(device):
    from megatron_infer.kernels.triton.experts import TritonExperts

    return TritonExperts()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("router_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_experts_and_weights_are_those_of_the_router(experts, device, name, router_dtype):
    rules, num_experts, has_bias = RULES[name]
    num_tokens = 2048 // num_experts + 5 if router_dtype is torch.float32 else 9  # several programs
    logits = distinct(num_tokens, num_experts, router_dtype).to(device)
    bias = torch.linspace(-0.3, 0.3, num_experts, device=device) if has_bias else None
    choice = experts.choose(logits, bias, rules)
    probs, chosen = routers_choice(logits, bias, rules)
    ids = chosen.nonzero()[:, 1].view(-1, rules.top_k)
    assert torch.equal(choice.ids_TK.long(), ids)
    assert torch.equal(choice.weight_TK, choice.weight_TK.to(router_dtype).float())
    torch.testing.assert_close(
        choice.weight_TK.to(router_dtype), probs.gather(1, ids), rtol=TOLERANCE[router_dtype], atol=0
    )
    assert torch.equal(choice.count_CE.sum(0).long(), torch.bincount(ids.flatten(), minlength=num_experts))


@pytest.mark.parametrize("name", RULES)
def test_scores_that_are_not_rounded_choose_as_those_in_single_precision(experts, device, name):
    """Some differ by less than half precision has between two numbers."""
    rules, num_experts, has_bias = RULES[name]
    logits = (1 + distinct(9, num_experts) * 2**-10).half().to(device)
    bias = torch.linspace(-1e-4, 1e-4, num_experts, device=device) if has_bias else None
    want = experts.choose(logits.float(), bias, rules)
    got = experts.choose(logits, bias, rules._replace(rounds_scores=False))
    assert torch.equal(got.ids_TK, want.ids_TK)
    assert torch.equal(got.weight_TK, want.weight_TK.half().float())
    if has_bias and rules.top_k < num_experts:
        assert not torch.equal(experts.choose(logits, bias, rules).numbers, got.numbers)


def test_of_equal_scores_the_lower_id_is_chosen_and_no_number_is_the_largest(experts, device):
    rules = RoutingRules(top_k=2, score_function="softmax", num_groups=2, group_topk=1)
    nan, inf = float("nan"), float("inf")
    rows = [[1, 1, 1, 1, 1, 1], [0, 2, 2, 2, 2, 0], [0, 0, 0, 0, nan, 0], [-inf] * 6]
    logits = torch.tensor(rows, dtype=torch.float32, device=device)
    assert experts.choose(logits, None, rules).ids_TK.tolist() == [[0, 1], [1, 2], [3, 4], [0, 1]]


def test_a_token_has_the_same_choice_alone_and_in_company(experts, device):
    rules, num_experts, _ = RULES["softmax"]
    logits = torch.randn(40, num_experts, generator=torch.Generator().manual_seed(0)).to(device)
    whole, alone = experts.choose(logits, None, rules), experts.choose(logits[33:34], None, rules)
    assert torch.equal(whole.ids_TK[33:34], alone.ids_TK) and torch.equal(whole.weight_TK[33:34], alone.weight_TK)


def test_a_choice_is_one_launch_and_what_it_cannot_be_is_left_to_torch(experts, device):
    logits = torch.zeros(3, 8, device=device)
    with kernels_launched() as seen:
        experts.choose(logits, None, RoutingRules(top_k=2, score_function="softmax"))
        assert len(seen) == 1
        for rules in (
            RoutingRules(top_k=2, score_function="sqrtsoftplus"),
            RoutingRules(top_k=9, score_function="softmax"),
            RoutingRules(top_k=4, score_function="softmax", num_groups=4, group_topk=1),
            RoutingRules(top_k=2, score_function="softmax", num_groups=3, group_topk=1),
        ):
            assert experts.choose(logits, None, rules) is None
    assert len(seen) == 1

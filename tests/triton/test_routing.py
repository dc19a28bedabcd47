"""The choice of experts in one launch: megatron-core's experts and weights, by the same rules."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from megatron_infer.kernels.experts import RoutingRules
from megatron_infer.kernels.triton.launch import listening

pytestmark = pytest.mark.triton

TOLERANCE = {torch.float64: 2e-6, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Rounding of exp and of the order of sums; in fp64 that of fp32, as the scores are."""
RULES = {
    "softmax": (RoutingRules(top_k=3, score_function="softmax"), 12, False),
    "pre-softmax-scaled": (
        RoutingRules(top_k=2, score_function="softmax", pre_softmax=True, scaling_factor=2.5),
        7,
        False,
    ),
    "sigmoid-bias-groups": (
        RoutingRules(top_k=4, score_function="sigmoid", num_groups=3, group_topk=2, scaling_factor=1.7),
        18,
        True,
    ),
    "softmax-groups": (
        RoutingRules(top_k=2, score_function="softmax", pre_softmax=True, num_groups=4, group_topk=2),
        16,
        False,
    ),
    "sigmoid-one": (RoutingRules(top_k=1, score_function="sigmoid"), 5, False),
    "sigmoid-all": (RoutingRules(top_k=4, score_function="sigmoid"), 4, True),
}


@pytest.fixture(scope="module")
def experts(device):
    from megatron_infer.kernels.triton.experts import TritonExperts

    return TritonExperts()


def torchs_choice(logits, bias, rules):
    """(ids ascending, weights) of megatron-core's own routing."""
    probs, chosen = topk_routing_with_score_function(
        logits,
        rules.top_k,
        use_pre_softmax=rules.pre_softmax,
        num_groups=rules.num_groups,
        group_topk=rules.group_topk or None,
        scaling_factor=rules.scaling_factor or None,
        score_function=rules.score_function,
        expert_bias=bias,
    )
    ids = chosen.nonzero()[:, 1].view(-1, rules.top_k)
    return ids, probs.gather(1, ids)


def distinct(num_tokens, num_experts, dtype):
    """Scores that no rounding makes equal."""
    generator = torch.Generator().manual_seed(num_experts)
    order = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)])
    return ((order - num_experts / 2) / 4).to(dtype)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("router_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_experts_and_weights_are_those_of_the_router(experts, device, name, router_dtype):
    rules, num_experts, has_bias = RULES[name]
    num_tokens = 2048 // num_experts + 5 if router_dtype is torch.float32 else 9  # several programs
    logits = distinct(num_tokens, num_experts, router_dtype).to(device)
    bias = torch.linspace(-0.3, 0.3, num_experts, device=device) if has_bias else None
    choice = experts.choose(logits, bias, rules)
    ids, weights = torchs_choice(logits, bias, rules)
    assert torch.equal(choice.ids_TK.long(), ids)
    assert torch.equal(choice.weight_TK, choice.weight_TK.to(router_dtype).float())
    torch.testing.assert_close(choice.weight_TK.to(router_dtype), weights, rtol=TOLERANCE[router_dtype], atol=0)
    assert torch.equal(choice.count_CE.sum(0).long(), torch.bincount(ids.flatten(), minlength=num_experts))


@pytest.mark.parametrize("name", RULES)
def test_scores_that_are_not_rounded_choose_as_those_in_single_precision(experts, device, name):
    """Some differ by less than half precision has between two numbers."""
    rules, num_experts, has_bias = RULES[name]
    logits = (1 + distinct(9, num_experts, torch.float32) * 2**-10).half().to(device)
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
    logits, seen = torch.zeros(3, 8, device=device), []
    with listening(lambda *call: seen.append(call)):
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

"""The choice of each token's experts in one launch: scores, groups, the choice, weights, and counts for the sort.

A program handles a run of tokens, with each token's experts along a row; groups of experts are padded to a power of two
each, so that they form an axis. Numbers are rounded to the router's dtype where torch rounds them, and are fp32 between
(fp64 for a router in fp64; its softmax and sigmoid are fp32, as in megatron-core). Not yet run on a GPU.

Shape legend: T tokens, E all ranks' experts, K experts that a token chooses, C runs of tokens, G groups of S experts.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.experts import ExpertChoice, RoutingRules
from megatron_infer.kernels.triton.launch import DTYPES as COMPUTED
from megatron_infer.kernels.triton.launch import Launcher, cdiv, launch, power_of_2

DTYPES = COMPUTED | {torch.float64: "fp64"}
ENTRIES = 2048
"""Experts times tokens of one program."""
MAX_RUN = 32


@triton.jit
def _best(key, free, column, AXIS: tl.constexpr):
    """True at the first of the largest free keys, nowhere if none is free; column: the index along AXIS."""
    top = tl.max(tl.where(free, key, float("-inf")), axis=AXIS, keep_dims=True)
    return column == tl.min(tl.where(free & (key == top), column, 2147483647), axis=AXIS, keep_dims=True)


@triton.jit
def _as_keys(x):
    """Keys for comparison: NaN is the largest, as in torch.topk."""
    return tl.where(x != x, float("inf"), x)


@triton.jit
def _of_best_groups(
    key, real, ROUNDED: tl.constexpr, GROUP_TOPK: tl.constexpr, GROUP_BEST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Entries of the GROUP_TOPK groups with the largest sums of their GROUP_BEST largest keys."""
    key_TGS = tl.reshape(key, [BLOCK_T, BLOCK_G, BLOCK_S])
    free_TGS = tl.reshape(real, [BLOCK_T, BLOCK_G, BLOCK_S])
    exists_TG1 = tl.max(free_TGS.to(tl.int32), axis=2, keep_dims=True) > 0
    member = tl.arange(0, BLOCK_S)[None, None, :]
    score_TG1 = tl.zeros([BLOCK_T, BLOCK_G, 1], key.dtype)
    for _ in tl.static_range(GROUP_BEST):
        best_TGS = _best(key_TGS, free_TGS, member, 2)
        score_TG1 += tl.max(tl.where(best_TGS & free_TGS, key_TGS, float("-inf")), axis=2, keep_dims=True)
        free_TGS = free_TGS & (best_TGS == 0)
    score_TG1 = _as_keys(score_TG1.to(ROUNDED).to(key.dtype))
    group = tl.arange(0, BLOCK_G)[None, :, None]
    taken_TG1 = exists_TG1 & (exists_TG1 == 0)
    for _ in tl.static_range(GROUP_TOPK):
        free_TG1 = exists_TG1 & (taken_TG1 == 0)
        taken_TG1 = taken_TG1 | (_best(score_TG1, free_TG1, group, 1) & free_TG1)
    every = tl.broadcast_to(taken_TG1, [BLOCK_T, BLOCK_G, BLOCK_S])
    return tl.reshape(every, [BLOCK_T, BLOCK_G * BLOCK_S]) & real


@triton.jit(do_not_specialize=["num_tokens"])
def _choose(
    logits_ptr, bias_ptr, choice_ptr, num_tokens, logits_stride,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUP_TOPK: tl.constexpr,
    GROUP_BEST: tl.constexpr, SIGMOID: tl.constexpr, PRE_SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROUNDS_SCORES: tl.constexpr, SCALING: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """ids[t, k], ascending, weight[t, k], count[run, e]: see ExpertChoice.numbers."""
    dtype = logits_ptr.dtype.element_ty
    num_pairs = num_tokens * TOP_K
    exact = tl.float64 if dtype == tl.float64 else tl.float32
    kept = dtype if ROUNDS_SCORES else exact
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None].to(tl.int64)
    column = tl.arange(0, BLOCK_G * BLOCK_S)[None, :]
    expert = column // BLOCK_S * GROUP_SIZE + column % BLOCK_S
    real = (column % BLOCK_S < GROUP_SIZE) & (expert < NUM_EXPERTS) & (token < num_tokens)
    logits = tl.load(logits_ptr + token * logits_stride + expert, mask=real, other=float("-inf"))
    score, raw = logits.to(exact), logits.to(tl.float32)
    if SIGMOID:
        score = (1.0 / (1.0 + tl.exp(-raw))).to(kept).to(exact)
    elif PRE_SOFTMAX:
        top = tl.where(token < num_tokens, tl.max(raw, axis=1, keep_dims=True), 0.0)
        raised = tl.where(real, tl.exp(raw - top), 0.0)
        score = (raised / tl.sum(raised, axis=1, keep_dims=True)).to(kept).to(exact)
    key = score
    if HAS_BIAS:
        key = score + tl.load(bias_ptr + expert, mask=real, other=0.0).to(exact)
    key = _as_keys(key)
    among = real
    if GROUP_TOPK > 0:
        rounded = tl.float32 if HAS_BIAS and exact == tl.float32 else kept
        among = _of_best_groups(key, real, rounded, GROUP_TOPK, GROUP_BEST, BLOCK_T, BLOCK_G, BLOCK_S)
    taken = real & (real == 0)
    for _ in tl.static_range(TOP_K):
        free = among & (taken == 0)
        taken = taken | (_best(key, free, column, 1) & free)

    weight = score
    if SIGMOID:
        if TOP_K > 1:
            total = tl.sum(tl.where(taken, score, 0.0), axis=1, keep_dims=True).to(kept).to(exact)
            weight = (score / (total + 1e-20).to(kept).to(exact)).to(kept).to(exact)
    elif not PRE_SOFTMAX:
        top = tl.max(tl.where(taken, raw, float("-inf")), axis=1, keep_dims=True)
        raised = tl.where(taken, tl.exp(raw - tl.where(token < num_tokens, top, 0.0)), 0.0)
        weight = (raised / tl.sum(raised, axis=1, keep_dims=True)).to(kept).to(exact)
    if SCALING != 0.0:
        weight = weight * SCALING
    place = token * TOP_K + tl.cumsum(taken.to(tl.int32), axis=1) - 1
    tl.store(choice_ptr + place, tl.broadcast_to(expert, [BLOCK_T, BLOCK_G * BLOCK_S]), mask=taken)
    bits = weight.to(dtype).to(tl.float32).to(tl.int32, bitcast=True)
    tl.store(choice_ptr + num_pairs + place, bits, mask=taken)
    here = column % BLOCK_S < GROUP_SIZE
    count = choice_ptr + 2 * num_pairs + tl.program_id(0) * NUM_EXPERTS + expert
    tl.store(count, tl.sum(taken.to(tl.int32), axis=0, keep_dims=True), mask=here & (expert < NUM_EXPERTS))


@triton.jit(do_not_specialize=["num_tokens"])
def _list(
    chosen_ptr, probs_ptr, choice_ptr, num_tokens, chosen_stride, probs_stride,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """ids, weights and counts of a choice made elsewhere, of up to TOP_K experts per token."""
    num_pairs = num_tokens * TOP_K
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None].to(tl.int64)
    expert = tl.arange(0, BLOCK_E)[None, :]
    real = (expert < NUM_EXPERTS) & (token < num_tokens)
    taken = tl.load(chosen_ptr + token * chosen_stride + expert, mask=real, other=0) != 0
    weight = tl.load(probs_ptr + token * probs_stride + expert, mask=taken, other=0.0)
    place = token * TOP_K + tl.cumsum(taken.to(tl.int32), axis=1) - 1
    tl.store(choice_ptr + place, tl.broadcast_to(expert, [BLOCK_T, BLOCK_E]), mask=taken)
    tl.store(choice_ptr + num_pairs + place, weight.to(tl.float32).to(tl.int32, bitcast=True), mask=taken)
    choice = tl.arange(0, BLOCK_K)[None, :]
    behind = (choice >= tl.sum(taken.to(tl.int32), axis=1, keep_dims=True)) & (choice < TOP_K) & (token < num_tokens)
    tl.store(choice_ptr + token * TOP_K + choice, tl.full([BLOCK_T, BLOCK_K], -1, tl.int32), mask=behind)
    count = choice_ptr + 2 * num_pairs + tl.program_id(0) * NUM_EXPERTS + expert
    tl.store(count, tl.sum(taken.to(tl.int32), axis=0, keep_dims=True), mask=expert < NUM_EXPERTS)


def _run_of(width: int) -> int:
    """Tokens of a program whose tokens have `width` entries each."""
    return min(MAX_RUN, max(1, ENTRIES // width))


@functools.cache
def _choosing(rules: RoutingRules, num_experts: int, has_bias: bool) -> tuple[int, Launcher]:
    """(tokens of a program, the kernel)."""
    groups = rules.num_groups if rules.group_topk else 1
    block_g, block_s = power_of_2(groups), power_of_2(num_experts // groups)
    run = _run_of(block_g * block_s)
    constexprs = {
        "NUM_EXPERTS": num_experts,
        "TOP_K": rules.top_k,
        "GROUP_SIZE": num_experts // groups,
        "GROUP_TOPK": rules.group_topk,
        "GROUP_BEST": rules.top_k // rules.group_topk if rules.group_topk else 0,
        "SIGMOID": rules.score_function == "sigmoid",
        "PRE_SOFTMAX": rules.pre_softmax,
        "HAS_BIAS": has_bias,
        "ROUNDS_SCORES": rules.rounds_scores,
        "SCALING": rules.scaling_factor,
        "BLOCK_T": run,
        "BLOCK_G": block_g,
        "BLOCK_S": block_s,
    }
    return run, Launcher(_choose, **constexprs, num_warps=4)


def _empty(num_tokens: int, num_experts: int, top_k: int, run: int, like: Tensor) -> ExpertChoice:
    num_runs = cdiv(num_tokens, run)
    numbers = like.new_empty((2 * num_tokens * top_k + num_runs * num_experts,), dtype=torch.int32)
    return ExpertChoice(numbers, num_tokens, top_k, num_runs, num_experts)


def choose(logits_TE: Tensor, bias_E: Tensor | None, rules: RoutingRules) -> ExpertChoice | None:
    """See ExpertsBackend.choose."""
    num_tokens, num_experts = logits_TE.shape
    if logits_TE.dtype not in DTYPES or rules.unroutable(num_experts) is not None:
        return None
    if logits_TE.stride(1) != 1:
        logits_TE = logits_TE.contiguous()
    has_bias = bias_E is not None and rules.score_function == "sigmoid"
    run, kernel = _choosing(rules, num_experts, has_bias)
    choice = _empty(num_tokens, num_experts, rules.top_k, run, logits_TE)
    kernel(
        (choice.num_runs,),
        logits_TE,
        bias_E if has_bias else logits_TE,
        choice.numbers,
        num_tokens,
        logits_TE.stride(0),
    )
    return choice


def listed(chosen_TE: Tensor, probs_TE: Tensor, top_k: int) -> ExpertChoice:
    """See ExpertsBackend.listed."""
    num_tokens, num_experts = chosen_TE.shape
    chosen_TE, probs_TE = chosen_TE.bool().contiguous().view(torch.uint8), probs_TE.contiguous()
    block_e = power_of_2(num_experts)
    run = _run_of(block_e)
    choice = _empty(num_tokens, num_experts, top_k, run, probs_TE)
    launch(
        _list,
        (choice.num_runs,),
        chosen_TE,
        probs_TE,
        choice.numbers,
        num_tokens,
        chosen_TE.stride(0),
        probs_TE.stride(0),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        BLOCK_T=run,
        BLOCK_E=block_e,
        BLOCK_K=power_of_2(top_k),
        num_warps=4,
    )
    return choice

"""Mixture-of-experts layers in Triton without the host: sort the choices, two grouped products, one sum.

    logits --> `routing`: ids, weights, counts --> pairs (token, expert) by expert, then by token --> tiles of BLOCK_M
    x, tiles --> fc1 --> activation --> weight, fc2 --> one product per pair --> sum of each token's, by expert

The device computes and uses the number of tokens of each expert: grids are large enough for the most possible tiles,
and programs behind the last tile return. A token's products are added in fp32 in the order of its experts, without
atomics. The height of tiles depends on the step's shape, like cuBLAS's choice of kernel; for one height a pair's bits
do not depend on the other pairs. Weights are read in place, through a table of addresses. Not yet run on a GPU.

Shape legend: T tokens, E experts of all ranks, K experts that a token chooses, P = T*K pairs, C runs of tokens counted
together, X inputs and Y outputs of a product.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.base import Ops
from megatron_infer.kernels.experts import ExpertChoice, ExpertWeights, RoutingRules
from megatron_infer.kernels.triton import routing
from megatron_infer.kernels.triton.launch import DTYPES, AotVariant, Launcher, cdiv, power_of_2

MIN_HEIGHT, MAX_HEIGHT = 16, 128
"""Pairs of a tile; powers of two."""
SORT_TOKENS = 256
COUNT_RUNS = 64
"""Runs of tokens whose counts are summed at once."""


@triton.jit(do_not_specialize=["num_tokens", "num_runs", "max_tiles"])
def _sort_pairs(
    ids_ptr, weight_ptr, count_ptr, token_ptr, pair_weight_ptr, place_ptr, tile_ptr,
    num_tokens, num_runs, count_stride, first_expert, num_experts, max_tiles,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, RUNS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Pairs of this rank's experts by expert, then by token: token[p], weight[p]; place[t, k] = p for this rank's
    experts; tile[i] = (expert, first, stop)."""
    expert = tl.program_id(0)
    each = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_runs, RUNS):
        run = start + tl.arange(0, RUNS)[:, None]
        at = count_ptr + run * count_stride + first_expert + each[None, :]
        counts += tl.sum(tl.load(at, mask=(run < num_runs) & (each[None, :] < num_experts), other=0), axis=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    place = tl.sum(tl.where(each < expert, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(each < expert, tiles, 0), axis=0)
    count = tl.sum(tl.where(each == expert, counts, 0), axis=0)
    for start in range(0, count, BLOCK_M):
        tile = tile_ptr + 3 * (first_tile + start // BLOCK_M)
        tl.store(tile, expert)
        tl.store(tile + 1, place + start)
        tl.store(tile + 2, place + tl.minimum(start + BLOCK_M, count))
    if expert == num_experts - 1:
        for tile in range(tl.sum(tiles, axis=0), max_tiles):
            tl.store(tile_ptr + 3 * tile, -1)
    choice = tl.arange(0, BLOCK_K)[None, :]
    for start in range(0, num_tokens, BLOCK):
        token = (start + tl.arange(0, BLOCK)).to(tl.int64)
        at = token[:, None] * TOP_K + choice
        ids = tl.load(ids_ptr + at, mask=(token < num_tokens)[:, None] & (choice < TOP_K), other=-1)
        here = (ids == first_expert + expert).to(tl.int32)
        chosen = tl.sum(here, axis=1)
        one = token * TOP_K + tl.sum(here * choice, axis=1)
        pair = place + tl.cumsum(chosen, axis=0) - 1
        weight = tl.load(weight_ptr + one, mask=chosen != 0, other=0.0)
        tl.store(token_ptr + pair, token.to(tl.int32), mask=chosen != 0)
        tl.store(pair_weight_ptr + pair, weight.to(tl.float32), mask=chosen != 0)
        tl.store(place_ptr + one, pair, mask=chosen != 0)
        place += tl.sum(chosen, axis=0)


@triton.jit
def _grouped_linear(
    x_ptr, out_ptr, address_ptr, bias_address_ptr, tile_ptr, token_ptr, weight_ptr, x_stride, w_stride, out_stride,
    GATHER: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[p] = x W^T + b of the pair's expert; W is [out_stride, w_stride].

    GATHER: rows of x are tokens; else they are pairs, which are multiplied by their weights.
    """
    expert = tl.load(tile_ptr + 3 * tl.program_id(0))
    if expert < 0:
        return
    pair = tl.load(tile_ptr + 3 * tl.program_id(0) + 1) + tl.arange(0, BLOCK_M)
    inside_M = pair < tl.load(tile_ptr + 3 * tl.program_id(0) + 2)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = column < out_stride
    entry = tl.arange(0, BLOCK_K)
    row = tl.load(token_ptr + pair, mask=inside_M, other=0) if GATHER else pair
    scale = tl.load(weight_ptr + pair, mask=inside_M, other=0.0)
    dtype = x_ptr.dtype.element_ty
    matrix = tl.load(address_ptr + expert).to(tl.pointer_type(dtype))
    if ALIGNED:
        matrix = tl.multiple_of(matrix, 16)
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + entry[None, :]
    w_at = matrix + column.to(tl.int64)[:, None] * w_stride + entry[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, w_stride, BLOCK_K):
        inside_K = start + entry < w_stride
        x = tl.load(x_at + start, mask=inside_M[:, None] & inside_K[None, :], other=0.0)
        if not GATHER:
            x = (x.to(tl.float32) * scale[:, None]).to(dtype)
        w = tl.load(w_at + start, mask=inside_N[:, None] & inside_K[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc=acc, input_precision=PRECISION)
    if HAS_BIAS:
        bias = tl.load(bias_address_ptr + expert).to(tl.pointer_type(dtype))
        bias = tl.load(bias + column, mask=inside_N, other=0.0).to(tl.float32)[None, :]
        acc += bias if GATHER else bias * scale[:, None]
    target = out_ptr + pair.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(target, acc.to(dtype), mask=inside_M[:, None] & inside_N[None, :])


@triton.jit
def _add_up(
    product_ptr, ids_ptr, place_ptr, out_ptr, first_expert, num_experts, width,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] += the token's products, in the order of its experts."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = out_ptr + token * width + column
    acc = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + choice)
        here = (expert >= first_expert) & (expert < first_expert + num_experts)
        pair = tl.load(place_ptr + token * TOP_K + choice, mask=here, other=0)
        product = product_ptr + pair.to(tl.int64) * width + column
        acc += tl.load(product, mask=inside & here, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def tile_sizes(num_pairs: int, num_experts: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages) for `num_pairs` pairs of all ranks' experts."""
    if dtype is torch.float32:
        return 16, 32, 32, 4, 2
    block_m = min(MAX_HEIGHT, max(MIN_HEIGHT, power_of_2(-(-num_pairs // num_experts))))
    return block_m, 128 if block_m > 16 else 64, 64, 8 if block_m > 64 else 4, 3


class TritonExperts:
    """Grouped products of the chosen experts; nothing waits, and no launch depends on the tokens of an expert."""

    name = "triton"

    def supports(self, weights: ExpertWeights, dtype: torch.dtype) -> str | None:
        if dtype not in DTYPES:
            return f"needs float32, bfloat16 or float16, got {dtype}"
        return weights.uneven(dtype)

    def choose(self, logits_TE: Tensor, bias_E: Tensor | None, rules: RoutingRules) -> ExpertChoice | None:
        return routing.choose(logits_TE, bias_E, rules)

    def listed(self, chosen_TE: Tensor, probs_TE: Tensor, top_k: int) -> ExpertChoice:
        return routing.listed(chosen_TE, probs_TE, top_k)

    def token_counts(self, num_experts: int, top_k: int, dtype: torch.dtype) -> list[int]:
        counts, known = [], tile_sizes(1, num_experts, dtype)
        height = MIN_HEIGHT
        while height < MAX_HEIGHT:
            num_tokens = height * num_experts // top_k + 1  # more than `height` pairs an expert
            if (sizes := tile_sizes(num_tokens * top_k, num_experts, dtype)) != known:
                counts.append(num_tokens)
            height, known = 2 * height, sizes
        return counts

    def add(self, ops: Ops, x_TD: Tensor, choice: ExpertChoice, weights: ExpertWeights, out_TD: Tensor) -> None:
        (num_tokens, width), experts = x_TD.shape, weights.num_experts
        if not num_tokens:
            return
        assert out_TD.is_contiguous() and x_TD.stride(-1) == 1
        (num_runs, num_all), top_k = choice.count_CE.shape, choice.ids_TK.shape[1]
        num_pairs = num_tokens * top_k
        block_m, *rest = tile_sizes(num_pairs, num_all, x_TD.dtype)
        max_tiles = min(num_pairs, num_pairs // block_m + experts)
        token_P, place_P, tile_I3 = (
            x_TD.new_empty(count, dtype=torch.int32) for count in (num_pairs, num_pairs, 3 * max_tiles)
        )
        weight_P = x_TD.new_empty(num_pairs, dtype=torch.float32)
        sort_pairs, add_up, parts = _around(top_k, experts, block_m, width)
        sort_pairs(
            (experts,), choice.ids_TK, choice.weight_TK, choice.count_CE, token_P, weight_P, place_P,
            tile_I3, num_tokens, num_runs, num_all, weights.first, experts, max_tiles,
        )  # fmt: skip

        def linear(x: Tensor, part: str, *, gather: bool) -> Tensor:
            where, biases = weights.addresses(part, "weight"), weights.addresses(part, "bias")
            assert where is not None
            num_outputs, num_inputs = weights.shape(part)
            out = x.new_empty((num_pairs, num_outputs))
            programs, product = _product(
                x.dtype, (block_m, *rest), num_outputs, gather, biases is not None, where.aligned
            )
            product(
                (max_tiles, programs),
                x, out, where.table, where.table if biases is None else biases.table, tile_I3, token_P, weight_P,
                x.stride(0), num_inputs, num_outputs,
            )  # fmt: skip
            return out

        middle_PF = weights.activate(ops, linear(x_TD, "fc1", gather=True))
        product_PD = linear(middle_PF, "fc2", gather=False)
        add_up((num_tokens, parts), product_PD, choice.ids_TK, place_P, out_TD, weights.first, experts, width)


@functools.cache
def _around(top_k: int, experts: int, block_m: int, width: int) -> tuple[Launcher, Launcher, int]:
    """(the sort before the products, the sum behind them, programs of a token's sum)."""
    sort = {"BLOCK_K": power_of_2(top_k), "BLOCK": SORT_TOKENS, "RUNS": COUNT_RUNS}
    sort |= {"BLOCK_E": max(16, power_of_2(experts)), "BLOCK_M": block_m}
    block = min(1024, max(16, power_of_2(width)))
    add_up = Launcher(_add_up, TOP_K=top_k, BLOCK=block, num_warps=4)
    return Launcher(_sort_pairs, TOP_K=top_k, **sort, num_warps=4), add_up, cdiv(width, block)


@functools.cache
def _product(
    dtype: torch.dtype, sizes: tuple[int, ...], num_outputs: int, gather: bool, has_bias: bool, aligned: bool
) -> tuple[int, Launcher]:
    """(programs of a tile of pairs, the kernel). sizes: `tile_sizes`."""
    block_m, block_n, block_k, num_warps, num_stages = sizes
    branch = {"GATHER": gather, "HAS_BIAS": has_bias, "ALIGNED": aligned, "PRECISION": precision(dtype)}
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return cdiv(num_outputs, block_n), Launcher(_grouped_linear, **branch, **blocks, **options)


def precision(dtype: torch.dtype) -> str:
    """`input_precision` of tl.dot: fp32 operands are multiplied as fp32, not as TF32."""
    return "ieee" if dtype is torch.float32 else "tf32"


def aot_variants() -> list[AotVariant]:
    """The sort and the sum, and the product in each dtype, tile and branch."""
    variants = []

    def add(name: str, kernel: Any, types: dict[str, str], options: dict[str, int], **constexprs: Any) -> None:
        known = dict.fromkeys(("ids_ptr", "count_ptr", "token_ptr", "place_ptr", "tile_ptr"), "*i32")
        known |= {"weight_ptr": "*fp32", "pair_weight_ptr": "*fp32"}
        known |= {"address_ptr": "*i64", "bias_address_ptr": "*i64"} | types
        known |= dict.fromkeys(constexprs, "constexpr")
        signature = {argument: known.get(argument, "i32") for argument in kernel.arg_names}
        variants.append(
            AotVariant(name=name, kernel=kernel, signature=signature, constexprs=constexprs, options=options)
        )

    warps, top_8 = {"num_warps": 4}, {"TOP_K": 8, "BLOCK_K": 8, "BLOCK": SORT_TOKENS, "RUNS": COUNT_RUNS}
    for kind in (*DTYPES.values(), "fp64"):
        add(f"sort_pairs-{kind}", _sort_pairs, {"weight_ptr": f"*{kind}"}, warps, **top_8, BLOCK_E=128, BLOCK_M=16)
    for dtype, kind in DTYPES.items():
        products = {"product_ptr": f"*{kind}", "out_ptr": f"*{kind}"}
        add(f"add_up-{kind}", _add_up, products, warps, TOP_K=8, BLOCK=1024)
        for pairs in (64,) if dtype is torch.float32 else (64, 32 * 64, 64 * 64, 128 * 64):
            m, n, k, num_warps, num_stages = tile_sizes(pairs, 64, dtype)
            for gather in (True, False):
                types = {"x_ptr": f"*{kind}", "out_ptr": f"*{kind}"}
                options = {"num_warps": num_warps, "num_stages": num_stages}
                branch = {"GATHER": gather, "HAS_BIAS": gather, "ALIGNED": True, "PRECISION": precision(dtype)}
                blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
                name = f"grouped_linear-{'fc1' if gather else 'fc2'}-{kind}-{m}"
                add(name, _grouped_linear, types, options, **branch, **blocks)
    return variants

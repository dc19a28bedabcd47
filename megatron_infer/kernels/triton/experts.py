"""Mixture-of-experts layers in Triton without the host: sort the choices, two grouped products, one sum.

    logits --> `routing`: ids, weights, counts --> pairs (token, expert) by expert, then by token --> tiles of BLOCK_M
    x, tiles --> fc1 --> activation, weight --> fc2 --> one product per pair --> sum of each token's, by expert

The device computes and uses the number of tokens of each expert: grids are large enough for the most possible tiles,
and programs behind the last tile return. A token's products are added in fp32 in the order of its experts, without
atomics. The height of tiles depends on the step's shape, like cuBLAS's choice of kernel; for one height a pair's bits
do not depend on the other pairs. Weights are read in place, through a table of addresses. What one launch says to
the next about pairs and tiles is one tensor of records. Not yet run on a GPU.

Shape legend: T tokens, E experts of all ranks, K experts that a token chooses, P = T*K pairs, C runs of tokens counted
together, X inputs and Y outputs of a product.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.experts import ExpertChoice, ExpertWeights, RoutingRules
from megatron_infer.kernels.triton import routing
from megatron_infer.kernels.triton.activations import Activations
from megatron_infer.kernels.triton.launch import APART, DTYPES, Launcher, cdiv, power_of_2, precision

MIN_HEIGHT, MAX_HEIGHT = 16, 128
"""Pairs of a tile; powers of two."""
SORT_TOKENS = 256
COUNT_RUNS = 64
"""Runs of tokens whose counts are summed at once."""
RECORD = 6
"""Numbers of a record. Record p has the weight's bits, the token and, as a choice, the place of pair p; and of tile p,
as there are no more tiles than pairs, its expert (-1: no tile), its first pair and the pair behind its last."""
TILE_GROUP = 8
"""Neighbouring tiles, often of one expert, that are multiplied by all its outputs before the next: their inputs and its
weight are then in the L2 cache."""
_RECORD = tl.constexpr(RECORD)


@triton.jit(do_not_specialize=["num_tokens", "num_runs", "max_tiles"])
def _sort_pairs(
    choice_ptr, record_ptr, num_tokens, num_runs, count_stride, first_expert, num_experts, max_tiles,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, RUNS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Records of this rank's pairs, by expert, then by token, and of tiles; a choice t * TOP_K + k is a place."""
    weight_ptr = choice_ptr + num_tokens * TOP_K
    count_ptr = weight_ptr + num_tokens * TOP_K
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
        tile = record_ptr + (first_tile + start // BLOCK_M) * _RECORD
        tl.store(tile + 3, expert)
        tl.store(tile + 4, place + start)
        tl.store(tile + 5, place + tl.minimum(start + BLOCK_M, count))
    if expert == num_experts - 1:
        for tile in range(tl.sum(tiles, axis=0), max_tiles):
            tl.store(record_ptr + tile * _RECORD + 3, -1)
    choice = tl.arange(0, BLOCK_K)[None, :]
    for start in range(0, num_tokens, BLOCK):
        token = (start + tl.arange(0, BLOCK)).to(tl.int64)
        at = token[:, None] * TOP_K + choice
        ids = tl.load(choice_ptr + at, mask=(token < num_tokens)[:, None] & (choice < TOP_K), other=-1)
        here = (ids == first_expert + expert).to(tl.int32)
        chosen = tl.sum(here, axis=1)
        one = token * TOP_K + tl.sum(here * choice, axis=1)
        pair = place + tl.cumsum(chosen, axis=0) - 1
        weight = tl.load(weight_ptr + one, mask=chosen != 0, other=0)
        record = record_ptr + pair * _RECORD
        tl.store(record, weight, mask=chosen != 0)
        tl.store(record + 1, token.to(tl.int32), mask=chosen != 0)
        tl.store(record_ptr + one * _RECORD + 2, pair, mask=chosen != 0)
        place += tl.sum(chosen, axis=0)


@triton.jit(do_not_specialize=["max_tiles"])
def _grouped_linear(
    x_ptr, out_ptr, address_ptr, bias_address_ptr, record_ptr, max_tiles, x_stride, w_stride, out_stride,
    GATHER: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[p] = x W^T + b of the pair's expert; W is [out_stride, w_stride].

    GATHER: rows of x are tokens; else they are pairs, scaled by their weights already, by which b is scaled here.
    Programs: of GROUP tiles those of all outputs, then of the next GROUP tiles.
    """
    whole = GROUP * tl.cdiv(out_stride, BLOCK_N)
    inner = tl.program_id(0) % whole
    tile = tl.program_id(0) // whole * GROUP + inner % GROUP
    if tile >= max_tiles:
        return
    record = record_ptr + tile * _RECORD
    expert = tl.load(record + 3)
    if expert < 0:
        return
    pair = tl.load(record + 4) + tl.arange(0, BLOCK_M)
    inside_M = pair < tl.load(record + 5)
    column = inner // GROUP * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = column < out_stride
    entry = tl.arange(0, BLOCK_K)
    row = tl.load(record_ptr + pair * _RECORD + 1, mask=inside_M, other=0) if GATHER else pair
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
        w = tl.load(w_at + start, mask=inside_N[:, None] & inside_K[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc=acc, input_precision=PRECISION)
    if HAS_BIAS:
        bias = tl.load(bias_address_ptr + expert).to(tl.pointer_type(dtype))
        bias = tl.load(bias + column, mask=inside_N, other=0.0).to(tl.float32)[None, :]
        if not GATHER:
            scale = tl.load(record_ptr + pair * _RECORD, mask=inside_M, other=0).to(tl.float32, bitcast=True)
            bias = bias * scale[:, None]
        acc += bias
    target = out_ptr + pair.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(target, acc.to(dtype), mask=inside_M[:, None] & inside_N[None, :])


@triton.jit
def _add_up(
    product_ptr, choice_ptr, record_ptr, out_ptr, first_expert, num_experts, width,
    TOP_K: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = the token's products, in the order of its experts; STARTS: out[t] + them."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = out_ptr + token * width + column
    acc = tl.zeros([BLOCK], tl.float32)
    if STARTS:
        acc = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(TOP_K):
        expert = tl.load(choice_ptr + token * TOP_K + choice)
        here = (expert >= first_expert) & (expert < first_expert + num_experts)
        pair = tl.load(record_ptr + (token * TOP_K + choice) * _RECORD + 2, mask=here, other=0)
        product = product_ptr + pair.to(tl.int64) * width + column
        acc += tl.load(product, mask=inside & here, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def tile_sizes(num_pairs: int, num_experts: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages) for `num_pairs` pairs of all ranks' experts."""
    if dtype is torch.float32:
        return 16, 32, 32, 4, 2
    block_m = min(MAX_HEIGHT, max(MIN_HEIGHT, power_of_2(-(-num_pairs // num_experts))))
    if block_m == MIN_HEIGHT:  # few programs: each has 40 KiB under way, or the memory idles
        return block_m, 64, 64, 4, 5
    return block_m, 128, 64, 8 if block_m > 64 else 4, 3


class TritonExperts:
    """Grouped products of the chosen experts; nothing waits, and no launch depends on the tokens of an expert."""

    name = "triton"

    def __init__(self, overlap: Mapping[str, bool] = APART) -> None:
        """overlap: see `launch.overlapping`; the activation's alone."""
        self._activations = Activations(overlap)

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

    def add(self, x_TD: Tensor, choice: ExpertChoice, weights: ExpertWeights, out_TD: Tensor | None) -> Tensor:
        num_tokens, width = x_TD.shape
        has_start = out_TD is not None
        if out_TD is None:
            out_TD = torch.empty_like(x_TD)
        if not num_tokens:
            return out_TD
        assert out_TD.is_contiguous() and x_TD.stride(-1) == 1
        numbers, num_tokens, top_k, num_runs, num_all = choice
        kind = num_tokens, top_k, num_all, has_start, x_TD.dtype
        if (plan := weights.remembered.get(kind)) is None:
            plan = _plan(weights, *kind)
            weights.remember(kind, plan)
        num_pairs, max_tiles, sort_pairs, fc1, fc2, add_up, parts = plan
        first, experts = weights.first, weights.num_experts
        record_P6 = x_TD.new_empty((num_pairs, RECORD), dtype=torch.int32)
        sort_pairs((experts,), numbers, record_P6, num_tokens, num_runs, num_all, first, experts, max_tiles)
        middle_PX = fc1.run(x_TD, num_pairs, max_tiles, record_P6)
        if (form := weights.form) is not None:
            middle_PX = self._activations.run(form, middle_PX, record_P6)
        else:
            assert weights.activation is not None
            middle_PX = (weights.activation(middle_PX) * record_P6[:, :1].view(torch.float32)).to(x_TD.dtype)
        product_PD = fc2.run(middle_PX, num_pairs, max_tiles, record_P6)
        add_up((num_tokens, parts), product_PD, numbers, record_P6, out_TD, first, experts, width)
        return out_TD


class _Product(NamedTuple):
    """fc1 or fc2 of all experts, for steps of one height of tiles."""

    kernel: Launcher
    programs: int
    weights: Tensor
    biases: Tensor
    """Tables of addresses; that of the weights where there are no biases."""
    num_outputs: int
    num_inputs: int

    def run(self, x: Tensor, num_pairs: int, max_tiles: int, record_P6: Tensor) -> Tensor:
        kernel, programs, weights, biases, num_outputs, num_inputs = self
        out = x.new_empty((num_pairs, num_outputs))
        kernel((programs,), x, out, weights, biases, record_P6, max_tiles, x.stride(0), num_inputs, num_outputs)
        return out


def _plan(
    weights: ExpertWeights, num_tokens: int, top_k: int, num_all: int, has_start: bool, dtype: torch.dtype
) -> tuple[int, int, Launcher, _Product, _Product, Launcher, int]:
    """(pairs, most tiles, the sort, both products, the sum, programs of a token's sum) of a step."""
    num_pairs = num_tokens * top_k
    sizes = tile_sizes(num_pairs, num_all, dtype)
    max_tiles = min(num_pairs, num_pairs // sizes[0] + weights.num_experts)
    products = []
    for part in ("fc1", "fc2"):
        where, biases = weights.addresses(part, "weight"), weights.addresses(part, "bias")
        assert where is not None
        num_outputs, num_inputs = weights.shape(part)
        kernel = _product(dtype, sizes, part == "fc1", biases is not None, where.aligned)
        programs = cdiv(max_tiles, TILE_GROUP) * TILE_GROUP * cdiv(num_outputs, sizes[1])
        bias_table = where.table if biases is None else biases.table
        products.append(_Product(kernel, programs, where.table, bias_table, num_outputs, num_inputs))
    sort_pairs, add_up, parts = _around(top_k, weights.num_experts, sizes[0], weights.shape("fc2")[0], has_start)
    return num_pairs, max_tiles, sort_pairs, products[0], products[1], add_up, parts


@functools.cache
def _around(top_k: int, experts: int, block_m: int, width: int, has_start: bool) -> tuple[Launcher, Launcher, int]:
    """(the sort before the products, the sum behind them, programs of a token's sum)."""
    sort = {"BLOCK_K": power_of_2(top_k), "BLOCK": SORT_TOKENS, "RUNS": COUNT_RUNS}
    sort |= {"BLOCK_E": max(16, power_of_2(experts)), "BLOCK_M": block_m}
    block = min(1024, max(16, power_of_2(width)))
    add_up = Launcher(_add_up, TOP_K=top_k, STARTS=has_start, BLOCK=block, num_warps=4)
    return Launcher(_sort_pairs, TOP_K=top_k, **sort, num_warps=4), add_up, cdiv(width, block)


@functools.cache
def _product(dtype: torch.dtype, sizes: tuple[int, ...], gather: bool, has_bias: bool, aligned: bool) -> Launcher:
    """sizes: `tile_sizes`."""
    block_m, block_n, block_k, num_warps, num_stages = sizes
    branch = {"GATHER": gather, "HAS_BIAS": has_bias, "ALIGNED": aligned, "PRECISION": precision(dtype.itemsize)}
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": TILE_GROUP}
    return Launcher(_grouped_linear, **branch, **blocks, num_warps=num_warps, num_stages=num_stages)

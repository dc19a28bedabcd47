"""Mixture-of-experts layers in Triton without a word to the host: sort the choices, two grouped products, one sum.

    chosen_TE --> pairs (token, expert) by expert, then by token --> tiles of BLOCK_M pairs of one expert
    x, tiles --> fc1 --> activation --> weight, fc2 --> one product a pair --> each token's, added up by expert

Which expert gets how many tokens is found and used on the device: grids have room for the most tiles there can be, and
programs behind the last return. A token's products are added in fp32 in its experts' order: there are no atomics. The
tile's height follows from the step's shape, as cuBLAS's choice of kernel does; inside of it a pair's bits do not depend
on which pairs come along. Weights are read where they are, through a table of addresses. Not yet run on a GPU.

Shape legend: T tokens, E this rank's experts, K experts a token chooses, P = T*K pairs, X inputs and Y outputs of a
product.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_infer.kernels.base import Ops
from megatron_infer.kernels.experts import ExpertWeights
from megatron_infer.kernels.triton.launch import DTYPES, AotVariant, launch

COUNT_TOKENS = 256


@triton.jit(do_not_specialize=["num_tokens"])
def _count_pairs(chosen_ptr, count_ptr, num_tokens, stride, first_expert, BLOCK: tl.constexpr):
    """count[e]: tokens that chose this rank's expert e."""
    expert = tl.program_id(0)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_tokens, BLOCK):
        token = (start + tl.arange(0, BLOCK)).to(tl.int64)
        chosen = tl.load(chosen_ptr + token * stride + first_expert + expert, mask=token < num_tokens, other=0)
        count += (chosen != 0).to(tl.int32)
    tl.store(count_ptr + expert, tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["num_tokens", "max_tiles"])
def _sort_pairs(
    chosen_ptr, probs_ptr, count_ptr, token_ptr, weight_ptr, place_ptr, tile_ptr,
    num_tokens, stride, probs_stride, first_expert, num_experts, max_tiles,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Pairs by expert, then by token: token[p], weight[p]; place[t, e] = p or -1; tile[i] = (expert, first, stop)."""
    expert = tl.program_id(0)
    each = tl.arange(0, BLOCK_E)
    counts = tl.load(count_ptr + each, mask=each < num_experts, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    place = tl.sum(tl.where(each < expert, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(each < expert, tiles, 0), axis=0)
    count = tl.load(count_ptr + expert)
    for start in range(0, count, BLOCK_M):
        tile = tile_ptr + 3 * (first_tile + start // BLOCK_M)
        tl.store(tile, expert)
        tl.store(tile + 1, place + start)
        tl.store(tile + 2, place + tl.minimum(start + BLOCK_M, count))
    if expert == num_experts - 1:
        for tile in range(tl.sum(tiles, axis=0), max_tiles):
            tl.store(tile_ptr + 3 * tile, -1)
    for start in range(0, num_tokens, BLOCK):
        token = (start + tl.arange(0, BLOCK)).to(tl.int64)
        inside = token < num_tokens
        chosen = tl.load(chosen_ptr + token * stride + first_expert + expert, mask=inside, other=0) != 0
        pair = place + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        weight = tl.load(probs_ptr + token * probs_stride + first_expert + expert, mask=chosen, other=0.0)
        tl.store(token_ptr + pair, token.to(tl.int32), mask=chosen)
        tl.store(weight_ptr + pair, weight.to(tl.float32), mask=chosen)
        tl.store(place_ptr + token * num_experts + expert, tl.where(chosen, pair, -1), mask=inside)
        place += tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit
def _grouped_linear(
    x_ptr, out_ptr, address_ptr, bias_address_ptr, tile_ptr, token_ptr, weight_ptr, x_stride, w_stride, out_stride,
    GATHER: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[p] = x W^T + b of the pair's expert; W is [out_stride, w_stride].

    GATHER: x are tokens; else they are pairs, which are weighted.
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
    product_ptr, place_ptr, out_ptr, num_experts, width,
    TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] += the token's products, in the order of its experts."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    each = tl.arange(0, BLOCK_E)
    nowhere = 2147483647
    place = tl.load(place_ptr + token * num_experts + each, mask=each < num_experts, other=-1)
    place = tl.where(place < 0, nowhere, place)
    at = out_ptr + token * width + column
    acc = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(TOP_K):
        pair = tl.min(place, axis=0)
        here = pair < nowhere
        product = product_ptr + pair.to(tl.int64) * width + column
        acc += tl.load(product, mask=inside & here, other=0.0).to(tl.float32)
        place = tl.where(place == pair, nowhere, place)
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def tile_sizes(num_pairs: int, num_experts: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages) for so many pairs of all ranks' experts."""
    if dtype is torch.float32:
        return 16, 32, 32, 4, 2
    block_m = min(128, max(16, triton.next_power_of_2(-(-num_pairs // num_experts))))
    return block_m, 128 if block_m > 16 else 64, 64, 8 if block_m > 64 else 4, 3


class TritonExperts:
    """Grouped products of the experts that a step's tokens chose; nobody waits and nothing depends on how many."""

    name = "triton"

    def supports(self, weights: ExpertWeights, dtype: torch.dtype) -> str | None:
        if dtype not in DTYPES:
            return f"needs float32, bfloat16 or float16, got {dtype}"
        return weights.uneven(dtype)

    def add(
        self, ops: Ops, x_TD: Tensor, chosen_TE: Tensor, probs_TE: Tensor, weights: ExpertWeights, out_TD: Tensor
    ) -> None:
        (num_tokens, width), experts = x_TD.shape, weights.num_experts
        if not num_tokens:
            return
        assert out_TD.is_contiguous() and x_TD.stride(-1) == 1 and probs_TE.stride(-1) == 1
        num_pairs, device = num_tokens * weights.top_k, x_TD.device
        block_m, *rest = tile_sizes(num_pairs, chosen_TE.shape[1], x_TD.dtype)
        max_tiles = min(num_pairs, num_pairs // block_m + experts)
        chosen_TE = chosen_TE.bool().contiguous().view(torch.uint8)

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        count_E, token_P, place_TE, tile_I3 = (
            ints(experts),
            ints(num_pairs),
            ints(num_tokens, experts),
            ints(max_tiles, 3),
        )
        weight_P = torch.empty(num_pairs, dtype=torch.float32, device=device)
        block_e = max(16, triton.next_power_of_2(experts))
        at = chosen_TE.stride(0), weights.first
        launch(_count_pairs, (experts,), chosen_TE, count_E, num_tokens, *at, BLOCK=COUNT_TOKENS, num_warps=4)
        launch(
            _sort_pairs, (experts,), chosen_TE, probs_TE, count_E, token_P, weight_P, place_TE, tile_I3,
            num_tokens, at[0], probs_TE.stride(0), at[1], experts, max_tiles,
            BLOCK=COUNT_TOKENS, BLOCK_E=block_e, BLOCK_M=block_m, num_warps=4,
        )  # fmt: skip

        def linear(x: Tensor, part: str, *, gather: bool) -> Tensor:
            table, biases = weights.addresses(part, "weight"), weights.addresses(part, "bias")
            num_outputs, num_inputs = weights.shape(part)
            block_n, block_k, num_warps, num_stages = rest
            out = x.new_empty(num_pairs, num_outputs)
            launch(
                _grouped_linear, (max_tiles, triton.cdiv(num_outputs, block_n)),
                x, out, table, table if biases is None else biases, tile_I3, token_P, weight_P,
                x.stride(0), num_inputs, num_outputs,
                GATHER=gather, HAS_BIAS=biases is not None, ALIGNED=weights.aligned(part), PRECISION=precision(x.dtype),
                BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps, num_stages=num_stages,
            )  # fmt: skip
            return out

        middle_PF = weights.activate(ops, linear(x_TD, "fc1", gather=True))
        product_PD = linear(middle_PF, "fc2", gather=False)
        block = min(1024, max(16, triton.next_power_of_2(width)))
        launch(
            _add_up, (num_tokens, triton.cdiv(width, block)), product_PD, place_TE, out_TD, experts, width,
            TOP_K=min(weights.top_k, experts), BLOCK_E=block_e, BLOCK=block, num_warps=4,
        )  # fmt: skip


def precision(dtype: torch.dtype) -> str:
    """Of tl.dot: fp32 operands are multiplied as such, which tensor cores would not do."""
    return "ieee" if dtype is torch.float32 else "tf32"


def aot_variants() -> list[AotVariant]:
    """The sort and the sum, and the product in each dtype, tile and branch."""
    variants = []

    def add(name: str, kernel: Any, types: dict[str, str], options: dict[str, int], **constexprs: Any) -> None:
        known = {"chosen_ptr": "*u8", "count_ptr": "*i32", "token_ptr": "*i32", "place_ptr": "*i32", "tile_ptr": "*i32"}
        known |= {"weight_ptr": "*fp32", "address_ptr": "*i64", "bias_address_ptr": "*i64"} | types
        known |= dict.fromkeys(constexprs, "constexpr")
        signature = {argument: known.get(argument, "i32") for argument in kernel.arg_names}
        variants.append(
            AotVariant(name=name, kernel=kernel, signature=signature, constexprs=constexprs, options=options)
        )

    warps = {"num_warps": 4}
    add("count_pairs", _count_pairs, {}, warps, BLOCK=COUNT_TOKENS)
    for dtype, kind in DTYPES.items():
        blocks = {"BLOCK": COUNT_TOKENS, "BLOCK_E": 128, "BLOCK_M": 16}
        add(f"sort_pairs-{kind}", _sort_pairs, {"probs_ptr": f"*{kind}"}, warps, **blocks)
        products = {"product_ptr": f"*{kind}", "out_ptr": f"*{kind}"}
        add(f"add_up-{kind}", _add_up, products, warps, TOP_K=8, BLOCK_E=128, BLOCK=1024)
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

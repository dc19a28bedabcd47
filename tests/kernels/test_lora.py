"""Products of adapters on each backend against the definition, and their independence of other tokens."""

from __future__ import annotations

import pytest
import torch
from lora_products import CPU, SHAPES, case, reference_product

from megatron_infer.kernels.lora import AdapterPairs, LoRABackend, LoRAWeights, TorchLoRA
from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.native_lora import NativeLoRA


def backend(name, dtype):
    return TorchLoRA() if name == "torch" else NativeLoRA(native_build.load(), dtype)


def packed(kernel, pairs, a, b):
    [found] = kernel.pack([(pairs, [(a, b, None)])])
    return found


def pairs_of(kernel: LoRABackend, weights: LoRAWeights) -> AdapterPairs:
    """The same pairs for a backend."""
    (num_slots, max_rank, width_in), width_out = weights.a_SRX.shape, weights.b_SRW.shape[2]
    pairs = kernel.pairs(num_slots, max_rank, width_in, width_out, dtype=weights.a_SRX.dtype, device=CPU)
    for slot, rank in enumerate(weights.rank_S.tolist()):
        if rank:
            a, b = weights.a_SRX[slot, :rank], weights.b_SRW[slot, :rank].T
            pairs.put(slot, packed(kernel, pairs, a, b), weights.scale_S[slot].item())
    return pairs


@pytest.mark.parametrize("name", ("torch", "native"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", SHAPES)
def test_product_is_that_of_the_definition_and_others_are_untouched(name, dtype, shape):
    weights, x, y, slots = case(*shape, dtype)
    kernel = backend(name, dtype)
    kernel.plan(slots)
    got = kernel.run(y.clone(), x, pairs_of(kernel, weights))
    want = reference_product(y, x, slots, weights)
    assert torch.allclose(got.float(), want.float(), **({"atol": 2e-6} if dtype is torch.float32 else {"rtol": 8e-3}))
    bare = (slots < 0) | (slots == 3)
    assert bare.any() and torch.equal(got[bare], y[bare]) and not torch.equal(got[~bare], y[~bare])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_alone_and_among_others(dtype, shape):
    weights, x, y, slots = case(*shape, dtype, num_tokens=150)
    kernel = backend("native", dtype)
    pairs = pairs_of(kernel, weights)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        kernel.plan(slots)
        together = kernel.run(y.clone(), x, pairs)
        torch.set_num_threads(1)
        for token in range(0, 150, 7):
            one = slice(token, token + 1)
            kernel.plan(slots[one])
            assert torch.equal(kernel.run(y[one].clone(), x[one], pairs), together[one])
        order = torch.randperm(150, generator=torch.Generator().manual_seed(1))
        kernel.plan(slots[order])
        assert torch.equal(kernel.run(y[order].clone(), x[order], pairs), together[order])
    finally:
        torch.set_num_threads(threads)


def test_a_slot_that_is_written_again_has_nothing_of_what_was_there():
    weights, x, y, _ = case(64, 96, 16, torch.float32)
    slots = torch.zeros(len(x), dtype=torch.int32)
    for name in ("torch", "native"):
        kernel = backend(name, torch.float32)
        pairs = pairs_of(kernel, weights)
        pairs.put(0, packed(kernel, pairs, torch.ones(16, 64), torch.ones(96, 16)), 1.0)
        pairs.put(0, packed(kernel, pairs, torch.zeros(2, 64), torch.ones(96, 2)), 1.0)
        kernel.plan(slots)
        assert torch.equal(kernel.run(y.clone(), x, pairs), y)
        pairs.put(0, packed(kernel, pairs, torch.ones(2, 64), torch.ones(96, 2)), 1.0)
        assert pairs.num_pairs == 3 and not torch.equal(kernel.run(y.clone(), x, pairs), y)
        pairs.clear(0)
        assert pairs.num_pairs == 2 and torch.equal(kernel.run(y.clone(), x, pairs), y)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", ("torch", "native"))
@pytest.mark.parametrize("rank", (1, 2, 16))
@pytest.mark.parametrize("width", (64, 65))
def test_a_packed_pair_is_a_copy_also_where_nothing_has_to_be_converted(rank, width, name, dtype):
    """Of rank 1, a transposed B is contiguous as it is, and of 64 outputs it needs no padding."""
    a, b = torch.ones(rank, 48, dtype=dtype), torch.ones(width, rank, dtype=dtype)
    kernel = backend(name, dtype)
    found = packed(kernel, kernel.pairs(2, 16, 48, width, dtype=dtype, device=CPU), a, b)
    before = [tensor.clone() for tensor in found]
    a.fill_(7), b.fill_(7)
    assert all(map(torch.equal, found, before))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_columns_of_b_without_entries_take_no_memory(dtype):
    b = torch.zeros(150, 12)
    b[:64, :4], b[64:100, 4:8], b[100:140, 8:] = 1, 2, 3
    kernel = backend("native", dtype)
    pairs = kernel.pairs(1, 12, 64, 150, dtype=dtype, device=CPU)
    _, blocks, ranges = packed(kernel, pairs, torch.ones(12, 64), b)
    assert ranges.tolist() == [[0, 4], [0, 4], [4, 8], [4, 12], [8, 12]]
    assert blocks.shape == (4 + 4 + 4 + 8 + 4, 32) and blocks.float().sum() == b.sum()
    empty = packed(kernel, pairs, torch.ones(12, 64), torch.zeros(150, 12))
    assert empty[1].numel() == 0 and not empty[2].any()


@pytest.mark.parametrize("name", ("torch", "native"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kind", (torch.float32, torch.bfloat16, torch.float16))
def test_blocks_of_a_pair_are_packed_as_the_whole_pair_is(kind, dtype, name):
    """Each block has its own rows of the linear, in its own order; some rows are in none."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(150, generator=generator).int()[:140]
    rows, ranks = order.split([64, 36, 40]), (4, 1, 3)
    blocks = [
        (torch.randn(rank, 48, generator=generator), torch.randn(len(own), rank, generator=generator).to(kind), own)
        for rank, own in zip(ranks, rows, strict=True)
    ]
    a, b = torch.cat([a for a, _, _ in blocks]), torch.zeros(150, sum(ranks))
    for first, (_, part, own) in zip((0, 4, 5), blocks, strict=True):
        b[own.long(), first : first + part.shape[1]] = part.float()
    kernel = backend(name, dtype)
    pairs = kernel.pairs(1, 8, 48, 150, dtype=dtype, device=CPU)
    other = kernel.pairs(1, 8, 30, 33, dtype=dtype, device=CPU)
    beside = [(torch.ones(2, 30), torch.ones(33, 2), None)]
    _, found, _ = kernel.pack([(other, beside), (pairs, blocks), (other, beside)])
    assert all(map(torch.equal, found, packed(kernel, pairs, a, b)))
    wild = [(a, b.index_fill(0, torch.tensor([7]), float("inf")), None)]
    assert [one is None for one in kernel.pack([(pairs, wild), (pairs, blocks)])] == [True, False]
    assert packed(kernel, pairs, a * float("nan"), b) is None

"""Products of adapters on each backend against the definition, and their independence of other tokens."""

from __future__ import annotations

import pytest
import torch
from lora_products import SHAPES, case, reference_product

from megatron_infer.kernels import native_build
from megatron_infer.kernels.lora import TorchLoRA
from megatron_infer.kernels.native_lora import NativeLoRA


def backend(name, dtype):
    return TorchLoRA() if name == "torch" else NativeLoRA(native_build.load(), dtype)


@pytest.mark.parametrize("name", ("torch", "native"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", SHAPES)
def test_product_is_that_of_the_definition_and_others_are_untouched(name, dtype, shape):
    weights, x, y, slots = case(*shape, dtype)
    kernel = backend(name, dtype)
    kernel.plan(slots)
    got = kernel.run(y.clone(), x, weights)
    want = reference_product(y, x, slots, weights)
    assert torch.allclose(got.float(), want.float(), **({"atol": 2e-6} if dtype is torch.float32 else {"rtol": 8e-3}))
    bare = (slots < 0) | (slots == 3)
    assert bare.any() and torch.equal(got[bare], y[bare]) and not torch.equal(got[~bare], y[~bare])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_alone_and_among_others(dtype, shape):
    weights, x, y, slots = case(*shape, dtype, num_tokens=150)
    kernel = backend("native", dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        kernel.plan(slots)
        together = kernel.run(y.clone(), x, weights)
        torch.set_num_threads(1)
        for token in range(0, 150, 7):
            one = slice(token, token + 1)
            kernel.plan(slots[one])
            assert torch.equal(kernel.run(y[one].clone(), x[one], weights), together[one])
        order = torch.randperm(150, generator=torch.Generator().manual_seed(1))
        kernel.plan(slots[order])
        assert torch.equal(kernel.run(y[order].clone(), x[order], weights), together[order])
    finally:
        torch.set_num_threads(threads)


def test_a_slot_that_is_written_again_has_nothing_of_what_was_there():
    weights, x, y, _ = case(64, 96, 16, torch.float32)
    slots = torch.zeros(len(x), dtype=torch.int32)
    for name in ("torch", "native"):
        kernel = backend(name, torch.float32)
        weights.put(0, torch.ones(16, 64), torch.ones(16, 96), 1.0)
        weights.put(0, torch.zeros(2, 64), torch.zeros(2, 96), 1.0)
        kernel.plan(slots)
        assert torch.equal(kernel.run(y.clone(), x, weights), y)
    weights.clear(0)
    assert weights.num_pairs == 2 and not weights.rank_S[0]

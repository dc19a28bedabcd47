"""Adapters' products in Triton: those of the definition, with bits that do not depend on other tokens."""

from __future__ import annotations

import pytest
import torch
from lora_products import SHAPES, case, reference_product

pytestmark = pytest.mark.triton
TOLERANCE = {
    torch.float32: {"rtol": 1e-6, "atol": 2e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-4},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-4},
}


@pytest.fixture(scope="module")
def kernel(device):
    from megatron_infer.kernels.triton.lora import make, unavailable

    assert unavailable(device, torch.float32) is None
    return make(device, torch.float32)


def run(kernel, y, x, slots, weights):
    kernel.plan(slots)
    return kernel.run(y.clone(), x, weights)


@pytest.mark.parametrize("shape", [*SHAPES, (1100, 70, 48)])
def test_product_is_that_of_the_definition_and_others_are_untouched(kernel, device, dtype, shape):
    weights, x, y, slots = case(*shape, dtype, device=device)
    got, want = run(kernel, y, x, slots, weights), reference_product(y, x, slots, weights)
    torch.testing.assert_close(got, want, **TOLERANCE[dtype])
    bare = (slots < 0) | (slots == 3)
    assert bare.any() and torch.equal(got[bare], y[bare]) and not torch.equal(got[~bare], y[~bare])


def test_a_token_has_the_same_bits_alone_and_among_others(kernel, device, dtype):
    weights, x, y, slots = case(600, 70, 40, dtype, num_tokens=20, device=device)
    together = run(kernel, y, x, slots, weights)
    for token in range(0, 20, 6):
        one = slice(token, token + 1)
        assert torch.equal(run(kernel, y[one], x[one], slots[one], weights), together[one])
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(run(kernel, y[order], x[order], slots[order], weights), together[order])


def test_inputs_and_outputs_may_be_columns_of_wider_tensors(kernel, device):
    weights, x, y, slots = case(64, 96, 16, torch.float32, device=device)
    wide_x, wide_y = torch.cat([x, x], dim=1)[:, : x.shape[1]], torch.cat([y, y], dim=1)
    kernel.plan(slots)
    kernel.run(wide_y[:, : y.shape[1]], wide_x, weights)
    assert torch.equal(wide_y[:, : y.shape[1]], run(kernel, y, x, slots, weights))
    assert torch.equal(wide_y[:, y.shape[1] :], y)


def test_scratch_is_at_most_what_is_estimated_and_parts_cover_the_inputs():
    from megatron_infer.kernels.triton_scratch import LORA_PARTS, lora_parts

    for width in (1, 31, 512, 513, 576, 1536, 4096, 14336, 53248):
        parts, part_width = lora_parts(width)
        assert parts <= LORA_PARTS and (parts - 1) * part_width < width <= parts * part_width and part_width % 64 == 0

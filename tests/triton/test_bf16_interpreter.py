"""What holds the kernels' bfloat16 to account is itself held to torch's, on bit patterns."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.triton


@triton.jit
def _operations(
    x_ptr, y_ptr, wide_ptr, sum_ptr, product_ptr, quotient_ptr, root_ptr, more_ptr, cast_ptr, N: tl.constexpr
):
    place = tl.arange(0, N)
    x, y = tl.load(x_ptr + place), tl.load(y_ptr + place)
    tl.store(sum_ptr + place, x + y)
    tl.store(product_ptr + place, x * y)
    tl.store(quotient_ptr + place, (x / y).to(tl.bfloat16))
    tl.store(root_ptr + place, tl.sqrt(tl.abs(x.to(tl.float32))).to(tl.bfloat16))
    tl.store(more_ptr + place, x > y)
    tl.store(cast_ptr + place, tl.load(wide_ptr + place).to(tl.bfloat16))


@triton.jit
def _product(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


def test_sums_products_roots_comparisons_and_casts_have_torchs_bits(device):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 15), 1 << 15, (2, 1 << 14), generator=generator).to(torch.int16)
    x, y = bits.view(torch.bfloat16).to(device)
    wide = torch.randint(-(1 << 31), 1 << 31, (1 << 14,), generator=generator).to(torch.int32).view(torch.float32)
    wide = torch.cat([wide[:-4], torch.tensor([1.00390625, 1.01171875, float("inf"), 3.4e38])]).to(device)
    wanted = x + y, x * y, x / y, x.float().abs().sqrt().bfloat16(), x > y, wide.bfloat16()
    found = [torch.empty_like(one) for one in wanted]
    _operations[(1,)](x, y, wide, *found, 1 << 14)
    for one, other in zip(found, wanted, strict=True):
        if one.dtype is torch.bfloat16:
            assert torch.equal(one.isnan(), other.isnan())
            one, other = one.nan_to_num(7.0), other.nan_to_num(7.0)
        assert torch.equal(one, other)


def test_a_product_of_matrices_sums_exact_products_in_fp32(device):
    x, y = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    out = torch.empty(32, 32, device=device)
    _product[(1,)](x, y, out, 32)
    torch.testing.assert_close(out.double(), x.double() @ y.double(), rtol=1e-5, atol=1e-5)

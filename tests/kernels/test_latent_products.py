"""The products of latent attention: queries into the latent space and sums out of it, head by head."""

from __future__ import annotations

import pytest
import torch

from megatron_infer.kernels.exact import ExactOps
from megatron_infer.kernels.native.cpu_native import NativeOps
from megatron_infer.kernels.torch.cpu_torch import TorchOps

SHAPES = [(4, 16, 8, 32), (3, 24, 16, 48), (2, 128, 64, 512)]
"""Heads, widths of a head's key (without its rotary part), rotary part and latent."""


def given(tokens, shape, dtype):
    heads, width, rotary, latent = shape
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(heads, width + 24, latent, generator=generator).div(8).to(dtype)
    q = torch.randn(tokens, heads, width + rotary, generator=generator).to(dtype)
    x = torch.randn(tokens, heads, latent, generator=generator).to(dtype)
    return q, x, weight[:, :width], weight[:, width:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ops_class", [NativeOps, ExactOps, TorchOps])
def test_products_are_those_of_the_definition(native_library, ops_class, shape, dtype):
    ops = TorchOps() if ops_class is TorchOps else ops_class(native_library, dtype)
    q, x, w_key, w_value = given(103, shape, dtype)
    width, tolerance = shape[1], 1e-5 if dtype is torch.float32 else 2e-2
    product = torch.einsum("tnh,nhl->tnl", q[..., :width].double(), w_key.double())
    want = torch.cat((q[..., width:].double(), product), -1)
    torch.testing.assert_close(ops.into_latent(q, w_key).double(), want, rtol=tolerance, atol=tolerance)
    want = torch.einsum("tnl,nvl->tnv", x.double(), w_value.double()).flatten(1)
    torch.testing.assert_close(ops.out_of_latent(x, w_value).double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_in_any_step(native_library, shape, dtype):
    ops = NativeOps(native_library, dtype)
    q, x, w_key, w_value = given(103, shape, dtype)
    into, out = ops.into_latent(q, w_key), ops.out_of_latent(x, w_value)
    for first, last in ((0, 1), (5, 7), (10, 13), (20, 24), (30, 41), (50, 103)):
        assert torch.equal(ops.into_latent(q[first:last].contiguous(), w_key), into[first:last])
        assert torch.equal(ops.out_of_latent(x[first:last].contiguous(), w_value), out[first:last])

"""The products of latent attention: queries into the latent space and sums out of it, head by head."""

from __future__ import annotations

import pytest
import torch
from step_rows import step_of

from megatron_infer.kernels.base import AttendSpec
from megatron_infer.kernels.exact import ExactOps
from megatron_infer.kernels.native import native_latent
from megatron_infer.kernels.native.cpu_native import NativeOps, NativePagedAttention
from megatron_infer.kernels.torch.cpu_torch import TorchOps

SHAPES = [(4, 16, 16, 32), (3, 24, 16, 48), (2, 128, 64, 512)]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_full_keys_and_values_give_what_latents_give(monkeypatch, native_library, shape, dtype):
    """A step of decode rows, a short chunk, one that ends with outputs and one after cached positions; two heads at a
    time."""
    heads, width, rotary, latent = shape
    value, size, rows = 32, 16, [(1, 40), (3, 20), (150, 150), (70, 300)]
    prompts = torch.tensor([0, 3, 130, 70], dtype=torch.int32).numpy()
    generator = torch.Generator().manual_seed(4)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    table = torch.randperm(80, generator=generator).int().view(4, 20)
    meta = step_of(
        rows, num_decode=1, table_row=range(4), block_table=table, block_size=size, num_prompt_queries=prompts
    )
    angle = torch.rand(meta.num_tokens, rotary, generator=generator)
    meta.cos_TR, meta.sin_TR = angle.cos().to(dtype), angle.sin().to(dtype)
    spec = AttendSpec(
        num_kv_heads=1,
        group_size=heads,
        head_dim=rotary + latent,
        scale=(width + rotary) ** -0.5,
        rotary_dim=rotary,
        rotary_interleaved=True,
        value_start=rotary,
    )
    weight = randn(heads, width + value, latent).div(latent**0.5).to(dtype)
    q, key = randn(meta.num_tokens, heads, width + rotary), randn(meta.num_tokens, 1, rotary + latent)
    ops, cache = NativeOps(native_library, dtype), randn(1, 1, 80, size, 1, rotary + latent)
    monkeypatch.setattr(native_latent, "CHUNK_BYTES", 2 * 300 * (rotary + width + value) * dtype.itemsize)

    def attend(backend, kept, some):
        """Queries of other tokens are NaN, and so are their outputs."""
        q_latent = torch.full((meta.num_tokens, 1, heads, rotary + latent), float("nan"), dtype=dtype)
        q_latent[some, 0] = ops.into_latent(q[some], weight[:, :width])
        mixed = backend.run(q_latent, key.clone(), key[..., rotary:], kept, layer=0, spec=spec)
        out = torch.full((meta.num_tokens, heads * value), float("nan"), dtype=dtype)
        out[some] = ops.out_of_latent(mixed[some].unflatten(1, (heads, -1)), weight[:, width:])
        return out

    absorbed = NativePagedAttention(native_library, dtype)
    absorbed.plan(meta)
    wanted = attend(absorbed, cache.clone(), torch.arange(meta.num_tokens))
    backend = native_latent.NativeLatentAttention(native_library, dtype, expands_from=70)
    backend.plan(meta)
    some = backend.absorbed_S
    assert some.tolist() == [0, 1, 2, 3, *range(134, 154)]
    found = attend(backend, cache, some)
    assert torch.equal(found[some], wanted[some]), "absorbed tokens have the bits of a step without others"
    backend.run_expanded(q, weight.flatten(0, 1), found, cache, layer=0, spec=spec)
    tolerance = 2e-5 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)

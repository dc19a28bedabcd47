"""Weights in 8 and 4 bits: codes of files are kept, products have all digits, a token's bits are its own."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from linear_case import BLOCK, Linear, columns, in_blocks, make_linear, rounded_values, rounded_weight
from torch import Tensor

from megatron_infer.kernels.native.cpu_native import NativeOps, native_checksum, quantised_layout
from megatron_infer.kernels.packing import PackedLinears
from megatron_infer.kernels.weight_dtypes import WEIGHT_DTYPE_BYTES

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[(name, dtype) for name in WEIGHT_DTYPE_BYTES for dtype in DTYPES], ids=str)
def packed(request, native_library) -> Linear:
    return make_linear(*request.param, native_library)


SHAPES = [(16, 32), (48, 96), (33, 70), (7, 2), (640, 1026), (9, 31)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_panels_of_int8_hold_the_nearest_codes(native_library, dtype, shape):
    layout, weight = quantised_layout(native_library, dtype, "int8"), torch.randn(shape).to(dtype)
    panels, _ = layout.pack(weight, None)
    codes, scales, _ = columns(native_library, "int8", panels, shape)
    want, want_scales = rounded_weight(weight)
    assert torch.equal(scales, want_scales) and torch.equal(codes, want)
    assert (codes * scales[..., None] - in_blocks(weight)).abs().le(0.5001 * scales[..., None]).all()
    layout.pack(weight.mul_(-1), panels)
    assert torch.equal(columns(native_library, "int8", panels, shape)[0], -want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_panels_of_int4_hold_the_nearest_codes(native_library, dtype, shape):
    weight = torch.randn(shape).to(dtype)
    panels, _ = quantised_layout(native_library, dtype, "int4").pack(weight, None)
    codes, scales, minima = (part.double() for part in columns(native_library, "int4", panels, shape))
    values = in_blocks(weight).double()
    exact = torch.where(scales[..., None] > 0, (values - minima[..., None]) / scales[..., None], 0)
    exact = exact.clamp(0, 15).flatten(1)[:, : shape[1]]
    assert ((exact - codes.flatten(1)[:, : shape[1]]).abs() < 0.50001).all()
    span = values.flatten(1)[:, : shape[1]].amax() - values.amin()
    assert (scales * 7.5 < span).all()


def test_the_minimum_of_a_block_of_int4_with_few_inputs_is_fitted_to_these(native_library):
    """A fit leaves no error in the mean; what is left comes from codes that change with the fit."""
    weight = torch.randn(400, BLOCK + 5)
    panels, _ = quantised_layout(native_library, torch.float32, "int4").pack(weight, None)
    rounded = rounded_values(native_library, "int4", panels, tuple(weight.shape)).flatten(1)[:, : BLOCK + 5]
    _, scales, _ = columns(native_library, "int4", panels, tuple(weight.shape))
    means = (rounded - weight)[:, BLOCK:].mean(1) / scales[:, 1]
    assert means.abs().mean() < 0.01


def test_panels_of_int4_err_less_than_the_blocks_of_a_q4_1_file(native_library):
    weight = torch.randn(640, 1024)
    panels, _ = quantised_layout(native_library, torch.float32, "int4").pack(weight, None)
    ours = rounded_values(native_library, "int4", panels, (640, 1024)).flatten(1)
    kind = gguf.GGMLQuantizationType.Q4_1
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
    errors = [(rounded - weight).square().mean() for rounded in (ours, theirs)]
    assert 0.5 * errors[1] < errors[0] < 0.95 * errors[1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_tells_the_checksum_and_uses_given_memory(native_library, packed, shape):
    layout, weight = packed.copies.layout, torch.randn(shape).to(packed.dtype)
    panels, checksum = layout.pack(weight, None)
    assert checksum == native_checksum(native_library, weight) and len(panels) == layout.num_elements(weight)
    before = panels.clone()
    whole = torch.empty(64, 256, dtype=packed.dtype)
    assert layout.num_elements(whole) == whole.numel() * WEIGHT_DTYPE_BYTES[packed.kind]
    again, checksum = layout.pack(weight.mul_(-1), panels)
    assert again.data_ptr() == panels.data_ptr() and not torch.equal(before, panels)
    assert checksum == native_checksum(native_library, weight)


def test_the_output_layer_has_a_layout_of_its_own(native_library, packed):
    ops, dtype = packed.ops, packed.dtype
    layer, output, x = (torch.randn(shape).to(dtype) for shape in ((40, 96), (70, 96), (5, 96)))
    packed.copies.pack([layer, output])
    layouts = {name: quantised_layout(native_library, dtype, name) for name in WEIGHT_DTYPE_BYTES}
    both = PackedLinears(layout=layouts["int4"], output_layout=layouts[packed.kind])
    mixed = NativeOps(native_library, dtype, both)
    for _ in range(2):
        both.pack([layer, output], output=output)
        assert torch.equal(mixed.linear(x, output), ops.linear(x, output))
        assert torch.equal(mixed.fp32_linear(x, output, None, 33).to(dtype), ops.linear(x, output)[:, :33])
        assert torch.equal(mixed.linear(x, layer), ops.linear(x, layer)) == (packed.kind == "int4")
        assert both.differs([layer, output]) is None
    both.pack([layer, output])  # none is the output layer's
    assert torch.equal(mixed.linear(x, output), ops.linear(x, output)) == (packed.kind == "int4")


def test_the_weights_of_a_q8_0_file_keep_their_codes(native_library):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (48, 6, BLOCK), generator=generator).float()
    codes[..., 5] = 127  # q8_0 gives the largest of a block this code
    scales = (torch.rand(48, 6, generator=generator) * 0.01).half().float()
    weight = (codes * scales[..., None]).flatten(1)
    panels, _ = quantised_layout(native_library, torch.float32, "int8").pack(weight, None)
    got, got_scales, _ = columns(native_library, "int8", panels, (48, 6 * BLOCK))
    assert torch.equal(got, codes) and torch.equal(got_scales, scales)


def of_file(kind: gguf.GGMLQuantizationType) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales and minima of blocks as a file of `kind` has them, and the weight that is read from it."""
    rows, blocks = 160, 12
    plain = np.random.default_rng(1).normal(0, 0.05, (rows, blocks * BLOCK)).astype(np.float32)
    raw = gguf.quants.quantize(plain, kind)
    weight = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    num_halves = 1 if kind is gguf.GGMLQuantizationType.Q4_0 else 2
    parts = torch.from_numpy(raw).view(rows, blocks, -1)
    halves = parts[..., : 2 * num_halves].contiguous().view(torch.float16).float()
    codes = torch.cat([parts[..., 2 * num_halves :] & 15, parts[..., 2 * num_halves :] >> 4], -1).float()
    scales = halves[..., 0]
    minima = -8 * scales if num_halves == 1 else halves[..., 1]
    # a negative scale runs from the other end, and the least code that a block has becomes 0
    codes, minima = (
        torch.where(scales[..., None] < 0, 15 - codes, codes),
        torch.where(scales < 0, minima + 15 * scales, minima),
    )
    least = codes.amin(-1)
    return codes - least[..., None], scales.abs(), minima + least * scales.abs(), weight


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_weights_of_a_4_bit_file_keep_their_codes(native_library, dtype, kind):
    codes, scales, minima, weight = of_file(gguf.GGMLQuantizationType[kind])
    panels, _ = quantised_layout(native_library, dtype, "int4").pack(weight.to(dtype), None)
    got, got_scales, got_minima = columns(native_library, "int4", panels, tuple(weight.shape))
    assert codes.max() == 15 and (codes.amax(-1) < 15).any() == (kind == "Q4_0")
    assert torch.equal(got, codes)
    if dtype is torch.float32:
        assert torch.equal(got_scales, scales)
        if kind == "Q4_1":
            assert torch.equal(got_minima, minima)
    rounding = 2.0**-11 if dtype is torch.float32 else 2.0**-8  # to fp16, or of the weights to bf16
    torch.testing.assert_close(got_scales, scales, rtol=rounding, atol=0)
    torch.testing.assert_close(got_minima, minima, rtol=rounding, atol=0)


def test_blocks_that_4_bits_hardly_tell_apart(native_library):
    layout = quantised_layout(native_library, torch.float32, "int4")
    weight = torch.zeros(9, BLOCK)
    weight[1], weight[2], weight[3] = 0.1, -3.0, 60000.0
    weight[4] = 0.5 + 1e-6 * torch.arange(BLOCK)  # a range below the digits of the minimum
    weight[5] = 1e-6 * torch.arange(BLOCK)  # scales that are denormals in fp16
    weight[6] = torch.arange(BLOCK) % 2 * 1e5  # the minimum fits into fp16
    weight[7], weight[8] = 1e5, torch.arange(BLOCK) * 1e37  # and these do not
    panels, _ = layout.pack(weight, None)
    got = rounded_values(native_library, "int4", panels, (9, BLOCK))[:, 0]
    assert not got[0].any() and got[7:].isnan().all()
    limit = torch.tensor([0, 0.1, 3, 6e4, 0.5, 0, 1e5]).double() * 2.0**-11 + torch.tensor([0, 0, 0, 0, 0, 1.2e-6, 0])
    assert ((got[:7] - weight[:7]).abs() <= limit[:, None]).all()
    assert got[5].unique().numel() > 12 and got[1:4].unique(dim=1).shape[1] == 1


def test_zeros_and_tiny_values_are_rounded_and_what_is_not_finite_shows(packed):
    copies, ops, dtype = packed.copies, packed.ops, packed.dtype
    weight, x = torch.randn(40, 96).to(dtype), torch.randn(7, 96).to(dtype)
    weight[3], weight[4, :BLOCK] = 0, 1e-12
    x[0], x[1], x[2, 5], x[3, 70] = 0, 1e-33, float("nan"), float("inf")
    copies.pack([weight])
    out = ops.linear(x, weight)
    assert not out[:, 3][torch.tensor([0, 1, 4, 5, 6])].any() and not out[:2].any()
    assert out[2:4].isnan().all() and out[4:].isfinite().all()
    weight[7, 1], weight[8, 40] = float("inf"), float("nan")
    copies.pack([weight])
    out = ops.linear(x[4:], weight)
    assert out[:, 7:9].isnan().all() and out[:, 9:].isfinite().all()


def test_flushed_denormals_leave_small_weights_alone(packed):
    """Weights below 0.0078 have scales that are denormals in fp16."""
    copies, ops, dtype = packed.copies, packed.ops, packed.dtype
    weight, x = (torch.randn(40, 96) * 1e-3).to(dtype), torch.randn(3, 96).to(dtype)
    copies.pack([weight])
    panels, out = copies.get(id(weight)).clone(), ops.linear(x, weight)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush denormals")
    try:
        copies.pack([weight])
        assert torch.equal(copies.get(id(weight)), panels) and torch.equal(ops.linear(x, weight), out)
    finally:
        torch.set_flush_denormal(False)
    assert out.count_nonzero() > 100

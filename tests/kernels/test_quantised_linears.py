"""Weights in 8 bits: the codes of q8_0, products of rounded inputs to the last digit, and a token's bits by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_infer.kernels.cpu_native import NativeOps, int8_layout, native_checksum
from megatron_infer.kernels.packing import PackedLinears

DTYPES = [torch.float32, torch.bfloat16]
BLOCK = 32


def fp16_up(x: Tensor) -> Tensor:
    """To the next fp16 that is not smaller."""
    values = x.numpy()
    half = values.astype(np.float16)
    up = np.nextafter(half, np.float16(np.inf))
    return torch.from_numpy(np.where(half.astype(np.float32) < values, up, half).astype(np.float32))


def in_blocks(values: Tensor) -> Tensor:
    """[rows, inner] -> fp32 [rows, blocks, 32], zero behind the last entry."""
    values = values.float()
    return torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def rounded_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [rows, blocks, 32], scales [rows, blocks])."""
    blocks = in_blocks(weight)
    scale = fp16_up(blocks.abs().amax(-1) / 127)
    factor = torch.where(scale > 0, 1 / scale, 0)
    return (blocks.double() * factor[..., None].double()).round().float(), scale


def rounded_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = in_blocks(x)
    most = blocks.abs().amax(-1)
    factor = torch.where(most > 1e-30, torch.full_like(most, 127) / most, 0)  # 127 / most is rounded twice
    return (blocks.double() * factor[..., None].double()).round().float(), most / 127


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of the rounded values, in float64."""
    (a, at), (b, bt) = rounded_inputs(x), rounded_weight(weight)
    out = ((a * at[..., None]).flatten(1).double()) @ ((b * bt[..., None]).flatten(1).double()).T
    return out if bias is None else out + bias.double()


@pytest.fixture(params=DTYPES, ids=str)
def packed(request, native_library) -> tuple[PackedLinears, NativeOps, torch.dtype]:
    packed = PackedLinears(layout=int8_layout(native_library, request.param))
    return packed, NativeOps(native_library, request.param, packed), request.param


@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (33, 70), (7, 2), (640, 1026), (9, 31)], ids=str)
def test_panels_hold_the_nearest_codes_and_packing_tells_the_checksum(native_library, packed, shape):
    layout, dtype = packed[0].layout, packed[2]
    weight = torch.randn(shape).to(dtype)
    panels, checksum = layout.pack(weight, None)
    assert checksum == native_checksum(native_library, weight) and len(panels) == layout.num_elements(weight)
    codes, scales = unpacked(native_library, panels, shape)
    want, want_scales = rounded_weight(weight)
    assert torch.equal(scales, want_scales) and torch.equal(codes, want)
    assert (codes * scales[..., None] - in_blocks(weight)).abs().le(0.5001 * scales[..., None]).all()
    weight.mul_(-1)
    again, checksum = layout.pack(weight, panels)
    assert again.data_ptr() == panels.data_ptr() and torch.equal(unpacked(native_library, panels, shape)[0], -want)
    assert checksum == native_checksum(native_library, weight)


def unpacked(library, panels: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes and scales in the order of the weight."""
    (rows, inner), width = shape, library.mi_panel_rows()
    blocks, count = -(-inner // BLOCK), -(-rows // width)
    offset = int(int8_layout(library, torch.float32).pack(torch.ones(1, BLOCK), None)[0][0]) - 127
    own = panels.view(count, -1)[:, : blocks * (BLOCK + 2) * width].reshape(count, blocks, -1)
    codes = own[..., : BLOCK * width].reshape(count, blocks, BLOCK // 4, width, 4)
    codes = codes.permute(0, 3, 1, 2, 4).reshape(count * width, blocks, BLOCK)[:rows]
    signed = codes.float() - offset if offset else codes.view(torch.int8).float()
    scales = own[..., BLOCK * width :].contiguous().view(torch.float16)
    return signed, scales.view(count, blocks, width).transpose(1, 2).reshape(count * width, blocks)[:rows].float()


@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 17, 40, 300])
@pytest.mark.parametrize("shape", [(80, 96), (33, 50), (1, 2), (16, 1536), (9, 31)], ids=str)
def test_the_product_is_that_of_the_rounded_values(packed, tokens, shape):
    packed, ops, dtype = packed
    rows, inner = shape
    weight, bias = torch.randn(shape).to(dtype), torch.randn(rows).to(dtype)
    x = (torch.randn(tokens, inner) * 10.0 ** torch.randint(-3, 3, (tokens, 1))).to(dtype)
    packed.pack([weight])
    for added in (None, bias):
        got, want = ops.linear(x, weight, added), reference(x, weight, added)
        size = reference(x.abs(), weight.abs(), None if added is None else added.abs())
        assert got.dtype is dtype and got.shape == want.shape
        assert ((got.double() - want).abs() / size).max() < (1e-6 if dtype is torch.float32 else 4e-3)


def test_a_token_has_the_same_bits_alone_and_in_any_company(packed):
    packed, ops, dtype = packed
    weight, x = torch.randn(100, 578).to(dtype), torch.randn(600, 578).to(dtype)
    packed.pack([weight])
    alone = torch.cat([ops.linear(x[i : i + 1], weight) for i in range(600)])
    for tokens in (2, 11, 16, 17, 31, 257, 600):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(ops.linear(x[:tokens], weight), alone[:tokens])


def test_the_first_rows_are_the_first_outputs(packed):
    copies, ops, dtype = packed
    weight, x, wide = (torch.randn(shape).to(dtype) for shape in ((100, 96), (7, 96), (7, 192)))
    copies.pack([weight])
    for rows in (16, 37):
        assert torch.equal(ops.linear_rows(x, weight, None, rows), ops.linear(x, weight)[:, :rows])
        strided = wide[:, ::2]
        assert torch.equal(ops.linear_rows(strided, weight, None, rows), ops.linear(strided, weight)[:, :rows])


def test_strided_and_bent_inputs_are_rounded_like_plain_ones(packed):
    packed, ops, dtype = packed
    weight, wide = torch.randn(10, 64).to(dtype), torch.randn(6, 128).to(dtype)
    packed.pack([weight])
    want = ops.linear(wide[:, ::2].contiguous(), weight)
    assert torch.equal(ops.linear(wide[:, ::2], weight), want)
    assert torch.equal(ops.linear(wide[:, ::2].reshape(2, 3, 64), weight), want.view(2, 3, 10))


def test_weights_with_strides_are_rounded_like_plain_ones(packed):
    packed, ops, dtype = packed
    weight, x = torch.randn(40, 96).to(dtype), torch.randn(5, 96).to(dtype)
    strided = weight.T.contiguous().T
    packed.pack([weight, strided])
    assert torch.equal(ops.linear(x, strided), ops.linear(x, weight))


def test_the_weights_of_a_q8_0_file_keep_their_codes(native_library):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (48, 6, BLOCK), generator=generator).float()
    codes[..., 5] = 127  # q8_0 gives the largest of a block this code
    scales = (torch.rand(48, 6, generator=generator) * 0.01).half().float()
    weight = (codes * scales[..., None]).flatten(1)
    panels, _ = int8_layout(native_library, torch.float32).pack(weight, None)
    got, got_scales = unpacked(native_library, panels, (48, 6 * BLOCK))
    assert torch.equal(got, codes) and torch.equal(got_scales, scales)


def test_zeros_and_tiny_values_are_rounded_and_what_is_not_finite_shows(packed):
    packed, ops, dtype = packed
    weight, x = torch.randn(40, 96).to(dtype), torch.randn(7, 96).to(dtype)
    weight[3], weight[4, :BLOCK] = 0, 1e-12
    x[0], x[1], x[2, 5], x[3, 70] = 0, 1e-33, float("nan"), float("inf")
    packed.pack([weight])
    out = ops.linear(x, weight)
    assert not out[:, 3][torch.tensor([0, 1, 4, 5, 6])].any() and not out[:2].any()
    assert out[2:4].isnan().all() and out[4:].isfinite().all()
    weight[7, 1], weight[8, 40] = float("inf"), float("nan")
    packed.pack([weight])
    out = ops.linear(x[4:], weight)
    assert out[:, 7:9].isnan().all() and out[:, 9:].isfinite().all()


def test_flushed_denormals_leave_small_weights_alone(packed):
    """Weights below 0.0078 have scales that are denormals in fp16."""
    packed, ops, dtype = packed
    weight, x = (torch.randn(40, 96) * 1e-3).to(dtype), torch.randn(3, 96).to(dtype)
    packed.pack([weight])
    panels, out = packed.get(id(weight)).clone(), ops.linear(x, weight)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush denormals")
    try:
        packed.pack([weight])
        assert torch.equal(packed.get(id(weight)), panels) and torch.equal(ops.linear(x, weight), out)
    finally:
        torch.set_flush_denormal(False)
    assert out.count_nonzero() > 100


def test_packing_again_follows_an_update_in_the_same_memory(packed):
    packed, ops, dtype = packed
    weights = [torch.randn(48, 64).to(dtype), torch.randn(9, 31).to(dtype)]
    packed.pack(weights)
    at = [packed.get(id(weight)).data_ptr() for weight in weights]
    assert packed.differs(weights) is None and packed.num_weights == 2
    x, before = torch.randn(4, 64).to(dtype), packed.num_bytes
    weights[0].mul_(2)
    assert "weight 0 of 2" in packed.differs(weights)
    packed.pack(weights)
    assert [packed.get(id(weight)).data_ptr() for weight in weights] == at and packed.num_bytes == before
    torch.testing.assert_close(ops.linear(x, weights[0]).float(), x.float() @ weights[0].float().T, atol=0.4, rtol=0.03)
    assert packed.differs(weights) is None

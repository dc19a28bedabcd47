"""Every kind of linear: the product as it is defined, of any inputs, and the bits of a token on its own."""

from __future__ import annotations

import pytest
import torch
from linear_case import KINDS, ONE_ORDER, QUANTISED, Linear, make_linear

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
"""Of the sum of the sizes of what is added. Codes of 4 bits and their minimum are multiplied apart, and may cancel."""


@pytest.fixture(params=[(kind, dtype) for kind in KINDS for dtype in DTYPES], ids=str)
def linear(request, native_library) -> Linear:
    return make_linear(*request.param, native_library)


@pytest.fixture(params=[(kind, dtype) for kind in ONE_ORDER for dtype in DTYPES], ids=str)
def in_one_order(request, native_library) -> Linear:
    return make_linear(*request.param, native_library)


@pytest.mark.parametrize("shape", [(80, 96), (100, 576), (33, 50), (1, 2), (16, 1536), (9, 31), (5, 8192)], ids=str)
def test_the_product_is_that_of_the_definition(linear, shape):
    rows, inner = shape
    weight, bias = torch.randn(shape).to(linear.dtype), torch.randn(rows).to(linear.dtype)
    linear.pack(weight)
    for tokens in (1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 17, 32, 33, 40, 100, 300):
        x = (torch.randn(tokens, inner) * 10.0 ** torch.randint(-3, 3, (tokens, 1))).to(linear.dtype)
        for added in (None, bias):
            got, (want, size) = linear.ops.linear(x, weight, added), linear.want(x, weight, added)
            assert got.dtype is linear.dtype and got.shape == want.shape
            assert ((got.double() - want).abs() / size).max() < TOLERANCE[linear.dtype], tokens


def test_a_token_has_the_same_bits_alone_and_in_any_company(in_one_order):
    most = 32 if in_one_order.kind == "live" else 600  # more tokens are multiplied by torch
    weight, x = torch.randn(100, 578).to(in_one_order.dtype), torch.randn(most, 578).to(in_one_order.dtype)
    in_one_order.pack(weight)
    alone = torch.cat([in_one_order.ops.linear(x[i : i + 1], weight) for i in range(most)])
    for tokens in (2, 3, 4, 5, 7, 8, 11, 12, 13, 16, 17, 31, 257, 600):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(in_one_order.ops.linear(x[:tokens], weight), alone[:tokens])


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_the_first_rows_are_the_first_outputs(in_one_order, tokens):
    weight, bias, x, wide = (
        torch.randn(shape).to(in_one_order.dtype) for shape in ((200, 96), (200,), (tokens, 96), (tokens, 192))
    )
    in_one_order.pack(weight)
    exact = {"rtol": 0, "atol": 0} if in_one_order.kind != "live" else {"rtol": 1e-5, "atol": 1e-5}
    for added in (None, bias):
        for given in (x, wide[:, ::2]):
            whole = in_one_order.ops.fp32_linear(given, weight, added, 200)
            for rows in (16, 37, 50):
                got = in_one_order.ops.fp32_linear(given, weight, added, rows)
                torch.testing.assert_close(got, whole[:, :rows], **exact)
            if in_one_order.kind in QUANTISED and added is None:
                assert torch.equal(whole.to(in_one_order.dtype), in_one_order.ops.linear(given, weight))


def test_strided_and_bent_inputs_of_any_dtype_and_strided_weights_are_taken(linear):
    weight, wide = torch.randn(10, 64).to(linear.dtype), torch.randn(6, 128).to(linear.dtype)
    strided = weight.T.contiguous().T
    linear.pack(weight, strided)
    x, close = wide[:, ::2], {"rtol": 2e-2, "atol": 2e-2} if linear.dtype is torch.bfloat16 else {}
    want = linear.ops.linear(x.contiguous(), weight)
    torch.testing.assert_close(linear.ops.linear(x, weight), want, **close)
    torch.testing.assert_close(linear.ops.linear(x, strided), want, **close)
    torch.testing.assert_close(linear.ops.linear(x.reshape(2, 3, 64), weight), want.view(2, 3, 10), **close)
    if linear.kind == "live":
        double = linear.ops.linear(x.double(), weight.double())
        torch.testing.assert_close(double.to(linear.dtype), want, **close)


def test_packing_again_follows_an_update_in_the_same_memory(linear):
    if linear.kind in ("torch", "live"):
        return
    weights = [torch.randn(48, 64).to(linear.dtype), torch.randn(80, 96).to(linear.dtype)]
    linear.pack(*weights)
    copies, x = linear.copies, torch.randn(4, 64).to(linear.dtype)
    at, before = [copies.get(id(weight)) for weight in weights], copies.num_bytes
    assert copies.differs(weights) is None and copies.num_weights == 2
    weights[0].mul_(2)
    assert "weight 0 of 2" in copies.differs(weights)
    linear.pack(*weights)
    again = [copies.get(id(weight)) for weight in weights]
    assert linear.kind == "oneDNN" or [one.data_ptr() for one in again] == [one.data_ptr() for one in at]
    want, size = linear.want(x, weights[0], None)
    assert ((linear.ops.linear(x, weights[0]).double() - want).abs() / size).max() < TOLERANCE[linear.dtype]
    assert copies.num_bytes == before and copies.differs(weights) is None

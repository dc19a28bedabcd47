"""Norms of every kind and activations in Triton against torch, one launch each."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from launches import kernels_launched

from megatron_infer.kernels.activations import KINDS, GatedActivation, form_of

pytestmark = pytest.mark.triton
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(got, want, dtype):
    assert got.dtype is dtype and got.is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def wanted(x, weight, bias, *, centered, zero_centered):
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if centered else x
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    if weight is not None:
        x = x * (weight.double() + zero_centered)
    return x if bias is None else x + bias.double()


@pytest.mark.parametrize(("centered", "zero_centered"), [(False, False), (False, True), (True, False), (True, True)])
def test_norms_of_views_and_behind_a_sum_match_their_definition_in_one_launch(
    ops, randn, dtype, centered, zero_centered
):
    fused = randn(3, 2 * (3 + 2) * 20 + 7, dtype=dtype)[:, 7:].unflatten(1, (2, 5, 20))
    views = [fused[:, :, :3], fused[:, :, 3], randn(5, 70, dtype=dtype), randn(2, 40, dtype=dtype)[:, 3:36]]
    views += [randn(2, 20490, dtype=dtype)[:, 3:20486], randn(2, 24576, dtype=dtype)]  # more than a program holds
    form = {"centered": centered, "zero_centered": zero_centered}
    for x in views:
        weight, bias = randn(x.shape[-1], dtype=dtype), randn(x.shape[-1], dtype=dtype) if centered else None
        with kernels_launched() as seen:
            got = ops.norms.norm(x, weight, bias, 1e-5, **form)
        assert len(seen) == 1 and got.shape == x.shape
        close(got, wanted(x, weight, bias, **form), dtype)
        close(ops.norms.norm(x, None, None, 1e-5, **form), wanted(x, None, None, **form), dtype)
    for x, kind in itertools.product((views[2], *views[-2:]), {dtype, torch.float32}):
        weight, residual = randn(x.shape[-1], dtype=dtype), randn(*x.shape, dtype=kind)
        total = (residual.float() + x.float()).to(kind)
        close(
            ops.norms.norm(x, weight, None, 1e-5, **form, residual=residual), wanted(total, weight, None, **form), dtype
        )
        assert torch.equal(residual, total)


@pytest.mark.parametrize("function", KINDS, ids=lambda function: function.__name__)
def test_activations_match_torch_alone_and_gated_in_one_launch(ops, randn, dtype, function):
    x = randn(3, 2 * 37, dtype=dtype) * 3
    x[0, 0], x[1, 1], x[2, 2], x[2, 3] = -80.0, 80.0, 0.0, -6.0
    cases = [function, GatedActivation(function, None, 0.0), GatedActivation(function, 1.5, 1.0)]
    for case in cases:
        with kernels_launched() as seen:
            got = ops.rowwise(case, x)
        assert len(seen) == 1
        close(got, case(x.double()), dtype)
    wide = randn(2, 100, dtype=dtype)[:, 5:59]
    close(ops.rowwise(function, wide), function(wide.double()), dtype)
    assert ops.rowwise(function, x[:0]).shape == (0, 74)


def test_nan_stays_nan_through_every_activation(ops, randn):
    x = randn(1, 4)
    x[0, 1] = x[0, 3] = float("nan")
    for function in KINDS:
        assert ops.rowwise(function, x)[0].isnan().tolist() == [False, True, False, True]
        assert ops.rowwise(GatedActivation(function, 1.0, 0.0), x)[0].isnan().tolist() == [False, True]


def test_functions_that_are_no_known_activation_run_as_they_are(ops, randn):
    assert form_of(F.mish) is None and form_of(GatedActivation(F.mish, None, 0.0)) is None
    x = randn(2, 8)
    assert torch.equal(ops.rowwise(F.mish, x), F.mish(x))

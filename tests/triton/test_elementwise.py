"""Norms and activations in Triton against the reference, one launch each."""

from __future__ import annotations

import pytest
import torch
from launches import kernels_launched

from megatron_infer.kernels.torch.torch_ref import ReferenceOps

pytestmark = pytest.mark.triton
REFERENCE = ReferenceOps()
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SHAPES = [(1, 576), (3, 1), (33, 50), (5, 4097)]


def close(got, want):
    assert got.dtype is want.dtype and got.is_contiguous()
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norms_match_reference_and_the_sum_is_written_in_place(ops, randn, dtype, shape):
    x, weight = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    close(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    for kind in {dtype, torch.float32}:
        residual = randn(*shape, dtype=kind)
        want, want_sum = REFERENCE.add_rms_norm(x, residual.clone(), weight, 1e-5)
        got, got_sum = ops.add_rms_norm(x, residual, weight, 1e-5)
        close(got, want)
        assert torch.equal(got_sum, want_sum) and got_sum is residual


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] > 1])
def test_layer_norm_matches_reference_far_from_zero_too(ops, randn, dtype, shape):
    x, weight, bias = randn(*shape, dtype=dtype) + 3, randn(shape[1], dtype=dtype), randn(shape[1], dtype=dtype)
    for optional in (bias, None):
        close(ops.layer_norm(x, weight, optional, 1e-5), REFERENCE.layer_norm(x, weight, optional, 1e-5))


def test_silu_mul_matches_reference_for_large_inputs_and_views(ops, randn, dtype):
    for width in (1, 50, 2049):
        x = randn(3, 2 * width, dtype=dtype)
        x[0, 0], x[-1, 0] = -200.0, 200.0
        close(ops.silu_mul(x), REFERENCE.silu_mul(x))
    wide = randn(5, 128, dtype=dtype)
    close(ops.silu_mul(wide[:, 3:103]), REFERENCE.silu_mul(wide[:, 3:103]))
    close(ops.silu_mul(wide[:, ::2]), REFERENCE.silu_mul(wide[:, ::2]))


@pytest.mark.parametrize(("width", "group"), [(96, 96), (96, 32), (78, 13), (34, 1), (6000, 3000), (32770, 16385)])
def test_gated_norm_and_output_gate_of_a_strided_gate_match_reference(ops, randn, dtype, width, group):
    y, gate = randn(5, width, dtype=dtype), randn(5, width + 7, dtype=dtype)[:, 3:-4]
    gate[0, 0], gate[1, 0] = -200.0, 200.0
    for weight in (randn(width, dtype=dtype), randn(width, dtype=torch.float32), None):
        want = REFERENCE.gated_rms_norm(y, gate, weight, 1e-5, group_size=group)
        close(ops.gated_rms_norm(y, gate, weight, 1e-5, group_size=group), want)
    close(ops.sigmoid_mul(y, gate), REFERENCE.sigmoid_mul(y, gate))


def test_a_row_has_the_same_bits_alone_and_among_others_and_keeps_its_nan(ops, randn, dtype):
    x, weight = randn(40, 100, dtype=dtype), randn(100, dtype=dtype)
    x[7, 5] = float("nan")
    together = ops.rms_norm(x, weight, 1e-5)
    for row in (0, 6, 39):
        assert torch.equal(ops.rms_norm(x[row : row + 1].clone(), weight, 1e-5)[0], together[row])
    assert together[7].isnan().all() and together.isnan().sum() == 100


def test_each_is_one_launch_and_none_where_there_are_no_rows(ops, randn):
    x, weight = randn(3, 64, dtype=torch.float32), randn(64, dtype=torch.float32)
    for count, rows in ((1, 3), (0, 0)):
        part = x[:rows]
        for call in (
            lambda part: ops.rms_norm(part, weight, 1e-5),
            lambda part: ops.add_rms_norm(part, part.clone(), weight, 1e-5)[0],
            lambda part: ops.layer_norm(part, weight, None, 1e-5),
            lambda part: ops.gated_rms_norm(part, part, weight, 1e-5, group_size=32),
            lambda part: ops.sigmoid_mul(part, part),
            lambda part: ops.silu_mul(part.repeat(1, 2)),
        ):
            with kernels_launched() as seen:
                assert call(part).shape == (rows, 64)
            assert len(seen) == count


@pytest.mark.parametrize("width", [16384, 16385, 131073])
def test_a_row_that_a_program_just_holds_or_does_not_has_its_bits_and_keeps_its_nan(ops, randn, dtype, width):
    x, weight = randn(3, width, dtype=dtype), randn(width, dtype=dtype)
    x[1, -1] = float("nan")
    together = ops.rms_norm(x, weight, 1e-5)
    assert torch.equal(ops.rms_norm(x[2:].clone(), weight, 1e-5)[0], together[2])
    assert together[1].isnan().all() and not together[::2].isnan().any()
    close(together[::2].contiguous(), REFERENCE.rms_norm(x[::2], weight, 1e-5))

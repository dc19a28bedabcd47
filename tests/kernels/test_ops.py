"""Norms, activation, linear and checksum of each backend against the reference."""

from __future__ import annotations

import pytest
import torch

from megatron_infer.kernels import checksum as checksums
from megatron_infer.kernels.activations import GatedActivation, tanh_gelu
from megatron_infer.kernels.checksum import content_sums
from megatron_infer.kernels.native.cpu_native import NativeOps, native_checksum
from megatron_infer.kernels.torch.torch_ref import ReferenceOps

REFERENCE = ReferenceOps()
SHAPES = [(1, 576), (3, 1), (7, 50), (33, 577), (128, 1536)]
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_match_reference(make_ops, dtype, shape, zero_centered):
    ops, tolerance = make_ops(dtype), DTYPES[dtype]
    x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1)
    weight, bias = randn(shape[1], dtype=dtype, seed=2), randn(shape[1], dtype=dtype, seed=3)
    form = {"zero_centered": zero_centered}
    got, want = ops.rms_norm(x, weight, 1e-5, **form), REFERENCE.rms_norm(x, weight, 1e-5, **form)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    want, want_sum = REFERENCE.add_rms_norm(x, residual.clone(), weight, 1e-5, **form)
    got, got_sum = ops.add_rms_norm(x, residual.clone(), weight, 1e-5, **form)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got_sum, want_sum, rtol=tolerance, atol=tolerance)
    for optional in (bias, None):
        torch.testing.assert_close(
            ops.layer_norm(x, weight, optional, 1e-5),
            REFERENCE.layer_norm(x, weight, optional, 1e-5),
            rtol=tolerance,
            atol=tolerance if shape[1] > 1 else 0.1,  # one entry: its own mean, nothing but rounding is left
        )


def test_a_zero_centred_weight_is_not_rounded_with_its_one(make_ops):
    """1.0029 is 1 in bfloat16."""
    x = torch.linspace(0.5, 1.5, 64, dtype=torch.bfloat16)[None]
    weight = torch.full((64,), 0.0029, dtype=torch.bfloat16)
    got = make_ops(torch.bfloat16).rms_norm(x, weight, 1e-6, zero_centered=True)
    assert torch.equal(got, REFERENCE.rms_norm(x, weight, 1e-6, zero_centered=True))
    assert not torch.equal(got, REFERENCE.rms_norm(x, torch.ones_like(weight), 1e-6))


@pytest.mark.parametrize("shape", [(1, 5), (3, 131), (7, 40000)])
def test_softcap_matches_reference_and_treats_each_entry_alone(make_ops, shape):
    x = 50 * randn(*shape, dtype=torch.float32)
    x[0, :3] = torch.tensor([1e-6, float("inf"), -2000.0])
    ops = make_ops(torch.float32)
    got = ops.softcap(x.clone(), 30.0)
    torch.testing.assert_close(got, REFERENCE.softcap(x, 30.0), rtol=1e-6, atol=1e-12)
    if isinstance(ops, NativeOps):
        assert torch.equal(ops.softcap(x[:, 1:].contiguous(), 30.0), got[:, 1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul_matches_reference_for_small_and_large_inputs(make_ops, dtype, shape):
    x = randn(shape[0], 2 * shape[1], dtype=dtype)
    x[0, :3] = torch.tensor([-200.0, 200.0, 0.0])[: x.shape[1]][:3].to(dtype) if x.shape[1] >= 3 else 0.0
    tolerance = DTYPES[dtype]
    got, want = make_ops(dtype).silu_mul(x), REFERENCE.silu_mul(x)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_geglu_is_that_of_torch_and_treats_each_entry_alone(make_ops, dtype, shape):
    x = 3 * randn(shape[0], 2 * shape[1], dtype=dtype)
    x[0, 0] = -30.0
    function, ops = GatedActivation(tanh_gelu, None, 0.0), make_ops(dtype)
    got = ops.rowwise(function, x)
    torch.testing.assert_close(got.double(), function(x.double()), rtol=DTYPES[dtype], atol=DTYPES[dtype])
    if isinstance(ops, NativeOps):
        assert torch.equal(torch.cat([ops.rowwise(function, row[None]) for row in x]), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_dtypes_and_strided_inputs_are_computed_too(make_ops, dtype):
    ops = make_ops(dtype)
    x, weight = randn(5, 64, dtype=dtype), randn(64, dtype=torch.float32, seed=1)
    want = REFERENCE.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), want, rtol=2e-2, atol=2e-2)
    wide = randn(5, 128, dtype=dtype)
    torch.testing.assert_close(ops.silu_mul(wide[:, ::2]), REFERENCE.silu_mul(wide[:, ::2]), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_row_with_nan_is_nan_there_only(make_ops, dtype):
    x, weight = randn(4, 64, dtype=dtype), torch.ones(64, dtype=dtype)
    x[2, 5] = float("nan")
    out = make_ops(dtype).rms_norm(x, weight, 1e-5)
    assert out[2].isnan().all() and not out[[0, 1, 3]].isnan().any()
    gated = make_ops(dtype).silu_mul(x)
    assert gated[2, 5].isnan() and not gated[[0, 1, 3]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "group"), [(96, 96), (96, 32), (78, 13), (34, 1), (1536, 1536), (40960, 20480)])
@pytest.mark.parametrize("weighted", [True, False])
def test_gated_norm_matches_reference(make_ops, dtype, width, group, weighted):
    """gate is a view of a wider projection, as in a Mamba layer."""
    y, weight = randn(5, width, dtype=dtype), randn(width, dtype=dtype, seed=1) if weighted else None
    gate = randn(5, width + 7, dtype=dtype, seed=2)[:, 3:-4]
    gate[0, :3] = torch.tensor([-200.0, 200.0, 0.0]).to(dtype)
    want = REFERENCE.gated_rms_norm(y, gate, weight, 1e-5, group_size=group)
    got = make_ops(dtype).gated_rms_norm(y, gate, weight, 1e-5, group_size=group)
    assert got.dtype is dtype and got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=DTYPES[dtype], atol=DTYPES[dtype])


def test_gated_norm_takes_a_weight_of_another_dtype(make_ops):
    y, gate, weight = (randn(5, 64, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    want = REFERENCE.gated_rms_norm(y, gate, weight.float(), 1e-5, group_size=32)
    got = make_ops(torch.bfloat16).gated_rms_norm(y, gate, weight.float(), 1e-5, group_size=32)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_gated_norm_gives_a_token_the_same_bits_alone_and_among_others(native_library, dtype):
    ops = NativeOps(native_library, dtype)
    y, gate, weight = randn(70, 1536, dtype=dtype), randn(70, 1600, dtype=dtype, seed=1), randn(1536, dtype=dtype)
    gate = gate[:, :1536]

    def norm(tokens: slice) -> torch.Tensor:
        return ops.gated_rms_norm(y[tokens], gate[tokens], weight, 1e-5, group_size=768)

    alone = torch.cat([norm(slice(i, i + 1)) for i in range(70)])
    for tokens in (2, 3, 16, 70):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(norm(slice(tokens)), alone[:tokens])


def content_sum(tensor: torch.Tensor) -> int:
    return content_sums([tensor])[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_checksum_takes_a_slice_of_a_flat_buffer_wherever_it_begins(dtype):
    buffer = torch.arange(64).to(dtype)
    for begin in range(5):
        part = buffer[begin : begin + 24]
        before = content_sum(part)
        assert content_sum(part.view(4, 6)) == before
        part[7] += 1
        assert content_sum(part) != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_checksums_of_neighbours_are_those_of_each_alone(dtype, monkeypatch):
    """Whatever their order, sizes, gaps and where the first begins: content in two layouts has one checksum."""
    buffer = randn(4096, dtype=dtype)
    for begin in range(5):
        for size in (1, 6, 7, 64):
            dense = [buffer[at : at + size] for at in range(begin, begin + 5 * size, size)]
            gap = [buffer[1000 + begin + 2 * size :][:size], buffer[1000 + begin + 3 * size :][: 2 * size]]
            others = [buffer[2000:2064].view(8, 8).t(), buffer[2000:2064].view(8, 8)[:, 1:3], buffer[:0], dense[1]]
            tensors = [dense[4], *gap, dense[1], *others, dense[0], dense[3], dense[2], torch.ones(size, dtype=dtype)]
            assert content_sums(tensors) == list(map(content_sum, tensors))
    launches, row_sums = [], checksums._row_sums
    monkeypatch.setattr(checksums, "_row_sums", lambda one, rows: launches.append(rows) or row_sums(one, rows))
    content_sums([torch.zeros(3), *reversed(buffer.view(32, 128).unbind())])
    assert sorted(launches) == [1, 32]
    assert content_sums([]) == []


@pytest.mark.parametrize("checksum", ["native", "sum"])
def test_checksum_sees_any_bit_and_the_native_one_any_exchange(native_library, checksum):
    function = content_sum if checksum == "sum" else lambda t: native_checksum(native_library, t)
    weight = randn(700, 1031, dtype=torch.float32)
    before = function(weight)
    assert function(weight.clone()) == before
    bits = weight.view(torch.int32)
    for at in [(0, 0), (350, 17), (699, 1030)]:
        for bit in (0, 15, 31):
            flipped = weight.clone()
            flipped.view(torch.int32)[at] = bits[at] ^ (1 << bit if bit < 31 else -(2**31))
            assert function(flipped) != before
    assert function(weight[:, :-1].contiguous()) != before
    if checksum == "sum":
        return
    assert function(weight.flip(0)) != before
    swapped = weight.clone()
    swapped[0, 0], swapped[5, 5] = weight[5, 5], weight[0, 0]
    assert function(swapped) != before

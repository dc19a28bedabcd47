"""Logits are sums in fp32 on every backend: a product of half precision does not round them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_infer.kernels import packing
from megatron_infer.kernels.base import Ops
from megatron_infer.kernels.exact import ExactOps
from megatron_infer.kernels.native.cpu_native import NativeOps, panel_layout
from megatron_infer.kernels.packing import PackedLinears
from megatron_infer.kernels.torch.cpu_torch import TorchOps
from megatron_infer.kernels.torch.fp32_linear import fp32_linear
from megatron_infer.kernels.torch.torch_ref import ReferenceOps
from megatron_infer.models.exact_step import DifferentiableOps

TOLERANCE = 2e-6
"""Of fp32 sums of up to 1,000 products, relative to the sum of their sizes; bf16's rounding is 2e-3 and more of it."""
ROWS, INNER = 4100, 258


def _triton() -> Ops:
    pytest.importorskip("triton")
    from megatron_infer.kernels.triton.elementwise import TritonOps

    return TritonOps()


@pytest.fixture(
    params=["panels", "few live rows", "many live rows", "oneDNN", "exact", "trainer", "torch", "reference", "triton"]
)
def make(request, native_library) -> Callable[[Tensor], Ops]:
    """(the output layer's weight) -> operations that multiply by it."""
    kind = request.param

    def ops_of(weight: Tensor) -> Ops:
        dtype = weight.dtype
        if kind == "oneDNN" and (reason := packing.unavailable(dtype)):
            pytest.skip(reason)
        layouts = {"panels": panel_layout(native_library, dtype), "oneDNN": packing.ONEDNN}
        packed = PackedLinears(layout=layouts.get(kind))
        packed.pack([weight] if kind in layouts else [], output=weight)
        match kind:
            case "exact":
                return ExactOps(native_library, dtype)
            case "trainer":
                return DifferentiableOps(ExactOps(native_library, dtype))
            case "torch" | "oneDNN":
                return TorchOps(packed)
            case "reference":
                return ReferenceOps()
            case "triton":
                return _triton()
        return NativeOps(native_library, dtype, packed)

    ops_of.tokens = {"few live rows": 3, "many live rows": 70}.get(kind, 20)  # type: ignore[attr-defined]
    return ops_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_are_sums_that_are_not_rounded(make, dtype, has_bias):
    weight, bias, x = (torch.randn(shape).to(dtype) for shape in ((ROWS, INNER), (ROWS,), (make.tokens, INNER)))
    added = bias if has_bias else None
    got = make(weight).fp32_linear(x, weight, added, ROWS)
    bias = bias if has_bias else torch.zeros(ROWS)
    want = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert got.dtype is torch.float32 and got.shape == want.shape
    assert ((got.double() - want).abs() / size).max() < TOLERANCE


def test_a_logit_of_a_near_tie_is_the_larger_one(make):
    """Where bf16 has one number for both."""
    weight = torch.full((ROWS, INNER), 0.5, dtype=torch.bfloat16)
    weight[3000, 7] = 0.5 + 2**-8  # the sum is 129 + 2**-8
    x = torch.ones(make.tokens, INNER, dtype=torch.bfloat16)
    logits = make(weight).fp32_linear(x, weight, None, ROWS)
    assert logits.argmax(-1).tolist() == [3000] * make.tokens
    assert logits.to(torch.bfloat16).argmax(-1).tolist() == [0] * make.tokens


def test_on_a_gpu_it_is_one_product_without_a_copy_of_the_weight(monkeypatch):
    """As a router in fp32 over weights in bf16 has it."""
    products = []

    class OnGpu(Tensor):
        is_cuda = True

    def mm(a, b, out_dtype):
        products.append((a.dtype, b.dtype, b.data_ptr(), out_dtype))
        return torch.zeros(len(a), b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "mm", mm)
    x, weight = torch.ones(3, 64, dtype=torch.bfloat16), torch.ones(128, 64, dtype=torch.bfloat16)
    assert fp32_linear(x.as_subclass(OnGpu), weight, None, 128).shape == (3, 128)
    assert products == [(torch.bfloat16, torch.bfloat16, weight.data_ptr(), torch.float32)]

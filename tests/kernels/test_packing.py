"""Packed weights give the same numbers as plain ones and never outlive an update unnoticed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_infer.kernels import packing
from megatron_infer.kernels.cpu_native import NativeOps
from megatron_infer.kernels.cpu_torch import TorchOps
from megatron_infer.kernels.packing import PackedLinears

pytestmark = pytest.mark.skipif(packing.unavailable(torch.float32) is not None, reason="no oneDNN prepacking here")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 32, bias=False), nn.LayerNorm(32))


def packed_for(model: nn.Module) -> PackedLinears:
    packed = PackedLinears()
    packed.pack(model.parameters())
    return packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 16, 100])
def test_packed_linear_equals_plain_linear(dtype, tokens):
    if packing.unavailable(dtype):
        pytest.skip(packing.unavailable(dtype))
    weight = nn.Parameter(torch.randn(80, 96).to(dtype))
    bias, x = torch.randn(80).to(dtype), torch.randn(tokens, 96).to(dtype)
    packed = PackedLinears()
    packed.pack([weight])
    ops = TorchOps(packed)
    assert packed.get(id(weight)) is not None and packed.num_bytes == weight.numel() * weight.element_size()
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for b in (None, bias):
        torch.testing.assert_close(ops.linear(x, weight, b), F.linear(x, weight, b), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_linear_with_packed_weights_agrees_on_both_sides_of_the_switch(native_library, dtype):
    weight = nn.Parameter(torch.randn(80, 96).to(dtype))
    packed = PackedLinears()
    packed.pack([weight])
    ops = NativeOps(native_library, dtype, packed)
    x = torch.randn(40, 96).to(dtype)
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    for tokens in (1, 3, 4, 8, 9, 40):
        want = F.linear(x[:tokens], weight)
        torch.testing.assert_close(ops.linear(x[:tokens], weight), want, rtol=tolerance, atol=tolerance)


def test_only_matrices_are_packed_and_each_once(model):
    packed = PackedLinears()
    packed.pack([*model.parameters(), model[0].weight])
    assert packed.num_weights == 2
    other = torch.randn(8, 48)
    x = torch.randn(3, 48)
    torch.testing.assert_close(TorchOps(packed).linear(x, other), F.linear(x, other))


def test_optimizer_step_is_seen_and_refresh_follows_it(model):
    packed = packed_for(model)
    assert not packed.stale()
    with torch.enable_grad():
        model(torch.randn(4, 48)).square().sum().backward()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    assert packed.stale() and packed.content_changed()
    packed.refresh()
    assert not packed.stale() and not packed.content_changed()
    x = torch.randn(4, 64)
    torch.testing.assert_close(TorchOps(packed).linear(x, model[1].weight), F.linear(x, model[1].weight))


def test_write_through_data_is_seen_by_content_only(model):
    packed = packed_for(model)
    model[1].weight.data.copy_(torch.randn(32, 64))
    assert not packed.stale(), "version counters now see .data writes: content_changed may be dropped"
    assert packed.content_changed()
    packed.refresh()
    assert not packed.content_changed()
    x = torch.randn(4, 64)
    torch.testing.assert_close(TorchOps(packed).linear(x, model[1].weight), F.linear(x, model[1].weight))


def test_repointed_data_is_seen(model):
    packed = packed_for(model)
    model[0].weight.data = model[0].weight.data.clone()
    assert packed.stale()
    packed.refresh()
    assert not packed.stale()


def test_weights_made_in_inference_mode_are_packed_and_content_tells():
    with torch.inference_mode():
        weight = torch.randn(16, 32)
    packed = PackedLinears()
    packed.pack([weight])
    assert not packed.stale()
    with torch.inference_mode():
        weight.add_(1)
    assert packed.content_changed()


def test_packed_copies_never_show_in_the_state_dict(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    packed_for(model)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


def test_where_packing_fails_nothing_is_packed_and_linears_run_plain(model):
    packed = PackedLinears(reason="no oneDNN")
    packed.pack(model.parameters())
    assert packed.num_weights == 0 and packed.num_bytes == 0 and not packed.stale() and not packed.content_changed()
    x = torch.randn(3, 48)
    assert torch.equal(TorchOps(packed).linear(x, model[0].weight), F.linear(x, model[0].weight))


def test_missing_operator_is_a_reason_not_a_crash(monkeypatch):
    def broken(weight):
        raise RuntimeError("no such operator\nmore lines")

    monkeypatch.setattr(packing, "pack_weight", broken)
    assert "no such operator" in packing.unavailable(torch.float32)
    assert "float16" in packing.unavailable(torch.float16)

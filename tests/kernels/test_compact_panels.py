"""bf16 weights in 12 bits: the bits of plain panels, whatever is in them, and plain ones where they do not fit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_infer.kernels.native.cpu_native import NativeOps, PackedLayout, panel_layout
from megatron_infer.kernels.packing import PackedLinears

BF16 = torch.bfloat16
HEADER = 32
"""Elements before the panels of a packed weight."""


@pytest.fixture
def layout(native_library) -> PackedLayout:
    layout = panel_layout(native_library, BF16)
    if layout.num_elements(torch.randn(16, 64).to(BF16)) == HEADER + 16 * 64:
        pytest.skip("no compact panels on this CPU")
    return layout


def plain_elements(weight: Tensor) -> int:
    rows, inner = weight.shape
    return HEADER + -(-rows // 16) * 16 * inner


def is_compact(layout: PackedLayout, weight: Tensor) -> bool:
    return layout.num_elements(weight) < plain_elements(weight)


class Both:
    """A weight packed as it is, and plain."""

    def __init__(self, library, layout: PackedLayout, weight: Tensor) -> None:
        self.weight, self.ops = weight, []
        for one in (layout, panel_layout(library, BF16, may_compact=False)):
            packed = PackedLinears(layout=one)
            packed.pack([weight])
            self.ops.append(NativeOps(library, BF16, packed))

    def check(self, tokens: int) -> None:
        x = torch.randn(tokens, self.weight.shape[1]).to(BF16)
        bias = torch.randn(len(self.weight)).to(BF16)
        got, want = (ops.linear(x, self.weight, bias).view(torch.int16) for ops in self.ops)
        assert torch.equal(got, want), tokens


@pytest.fixture
def make(native_library, layout):
    return lambda weight: Both(native_library, layout, weight)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(100, 576), (33, 1032), (16, 24), (1, 64), (49, 520), (96, 2048)], ids=str)
def test_outputs_have_the_bits_of_plain_panels(make, layout, shape, threads):
    torch.set_num_threads(threads)
    weight = (torch.randn(shape) * 0.03).to(BF16)
    assert is_compact(layout, weight)
    both = make(weight)
    for tokens in (*range(1, 19), 20, 24, 25, 40, 257, 300):
        both.check(tokens)


def test_a_trained_weight_takes_three_quarters_of_its_memory(layout):
    weight = (torch.randn(512, 4096) * 0.02).to(BF16)
    assert layout.num_elements(weight) < 0.77 * weight.numel()


@pytest.mark.parametrize("count", [0, 1, 5, 31])
@pytest.mark.parametrize("zeros", [False, True])
def test_values_without_a_code_are_kept(make, layout, count, zeros):
    weight = (torch.rand(48, 520) + 0.5).to(BF16)
    weight[::2] *= -1
    weight[5, 40:300] = 0.0 if zeros else weight[5, 40:300]
    weight[6, 3:14] = -(2.0**-15)  # the least values of segment 0 that have a code, where zero does not take it
    places = torch.randperm(16 * 512)[:count]
    small = torch.tensor([1e-30, -1e-38, 3e-40, -0.0, -1e-6, 2.0**-17]).to(BF16)
    for number, place in enumerate(places.tolist()):
        weight[16 + place // 512, place % 512] = small[number % len(small)]
    assert is_compact(layout, weight)
    both = make(weight)
    for tokens in (1, 2, 16, 17, 33):
        both.check(tokens)


@pytest.mark.parametrize("strange", [0.0, -0.0, 1.0, 3e38, 1e-39, math.inf, -math.inf, math.nan], ids=str)
def test_any_value_may_stand_in_a_weight(make, layout, strange):
    weight = torch.randn(40, 128).to(BF16)
    weight[3, 7] = strange
    both = make(weight)
    assert is_compact(layout, weight) == (abs(strange) < 1e38)
    both.check(3)
    weight[16:32] = strange
    both = make(weight)
    both.check(3)
    weight[:] = strange
    assert is_compact(layout, weight)
    make(weight).check(20)


def test_a_weight_of_too_many_magnitudes_or_an_odd_width_stays_plain(make, layout):
    wide = (torch.randn(64, 128) * 10.0 ** torch.randint(-9, 9, (64, 128))).to(BF16)
    odd = torch.randn(64, 130).to(BF16)
    for weight in (wide, odd):
        assert not is_compact(layout, weight)
        make(weight).check(5)


def test_packing_again_follows_a_weight_into_the_other_form_and_back(native_library, layout):
    packed = PackedLinears(layout=layout)
    ops = NativeOps(native_library, BF16, packed)
    weight, x = torch.randn(64, 256).to(BF16), torch.randn(4, 256).to(BF16)
    kept = weight.clone()
    sizes = []
    for scale in (1.0, None, 2.0, None, 1.0):
        weight.copy_(kept * (10.0 ** torch.randint(-9, 9, weight.shape) if scale is None else scale))
        packed.pack([weight])
        sizes.append(packed.num_bytes)
        want = PackedLinears(layout=panel_layout(native_library, BF16, may_compact=False))
        want.pack([weight])
        assert torch.equal(ops.linear(x, weight), NativeOps(native_library, BF16, want).linear(x, weight))
        assert packed.differs([weight]) is None
        weight[9, 9] *= -1
        assert packed.differs([weight]) is not None
    assert sizes[0] == sizes[2] == sizes[4] < sizes[1] == sizes[3]


def test_the_largest_output_is_found_in_compact_panels(native_library, layout, monkeypatch):
    from megatron_infer.kernels import argmax_linear

    monkeypatch.setattr(argmax_linear, "LEAST_BYTES", 0)
    packed = PackedLinears(layout=layout)
    ops = NativeOps(native_library, BF16, packed)
    weight = torch.randn(3003, 128).to(BF16)
    weight[7, :40] = 0
    packed.pack([weight])
    assert is_compact(layout, weight)
    x = (3 * weight[torch.tensor([5, 7, 2999, 3002])].float() + torch.randn(4, 128)).to(BF16)
    found = ops.argmax_linear(x, weight, 3003)
    assert found is not None and found[0].tolist() == ops.linear(x, weight).argmax(-1).tolist()


def test_a_weight_that_changed_since_its_size_was_asked_for_is_packed_plain(native_library, layout):
    weight = torch.randn(64, 256).to(BF16)
    memory = torch.empty(layout.num_elements(weight), dtype=BF16)
    weight.mul_(10.0 ** torch.randint(-9, 9, weight.shape))
    panels, _ = layout.pack(weight, memory)
    want, _ = panel_layout(native_library, BF16, may_compact=False).pack(weight, None)
    assert torch.equal(panels.view(torch.int16), want.view(torch.int16))

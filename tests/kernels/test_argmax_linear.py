"""The largest logit found by an 8-bit copy of the weight: that of all logits, whatever is in weights and inputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_infer.kernels import argmax_linear
from megatron_infer.kernels.native.cpu_native import NativeOps, panel_layout
from megatron_infer.kernels.native.native_sampling import NativeSampling
from megatron_infer.kernels.packing import PackedLinears

NAN, INF = math.nan, math.inf


class Case:
    """A weight in panels, and both ways to its largest outputs."""

    def __init__(self, library, dtype: torch.dtype, rows: int, inner: int) -> None:
        self.packed, self.dtype = PackedLinears(layout=panel_layout(library, dtype)), dtype
        self.ops, self.argmax = NativeOps(library, dtype, self.packed), NativeSampling(library).argmax
        self.weight = torch.randn(rows, inner).to(dtype)
        self.pack()

    def pack(self) -> None:
        self.packed.pack([self.weight])

    def near(self, tokens: int, share: float) -> Tensor:
        """Inputs that resemble a row of the weight each, as hidden states of a trained model do."""
        rows = self.weight[torch.randint(len(self.weight), (tokens,))].float()
        return (share * rows + torch.randn_like(rows)).to(self.dtype)

    def whole(self, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        return self.argmax(self.ops.fp32_linear(x, self.weight, None, rows))

    def check(self, x: Tensor, rows: int) -> None:
        found = self.ops.argmax_linear(x, self.weight, rows)
        assert found is not None
        token, top = self.whole(x, rows)
        bad = ~top.isfinite()
        assert torch.equal(found[0], token.masked_fill(bad, 0)) and torch.equal(found[1], bad)


def panel_rows_of(case: Case) -> int:
    return case.ops.argmax_linear._panel_rows


@pytest.fixture(autouse=True)
def for_any_weight(monkeypatch):
    monkeypatch.setattr(argmax_linear, "LEAST_BYTES", 0)


@pytest.fixture
def for_any_logits(monkeypatch):
    monkeypatch.setattr(argmax_linear, "LEAST_SAVED", -1.0)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def make(request, native_library):
    return lambda rows, inner: Case(native_library, request.param, rows, inner)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(2000, 96), (4099, 34), (16, 32), (1009, 1026)], ids=str)
def test_the_largest_logit_is_that_of_all_logits(make, shape, threads, for_any_logits):
    torch.set_num_threads(threads)
    case = make(*shape)
    for tokens in (1, 2, 5, 16, 17, 40, 300):
        for share in (0.0, 0.3, 1.0):
            x = case.near(tokens, share)
            for rows in {shape[0], shape[0] - 3, shape[0] // 2 + 1, 1}:
                case.check(x, rows)


def test_most_of_the_weight_is_left_out_where_one_logit_stands_out(make, monkeypatch):
    case = make(6000, 256)
    monkeypatch.setattr(argmax_linear, "LEAST_SAVED", 0.9)
    case.check(case.near(8, 1.0), 6000)


def test_many_tokens_need_few_panels_each_where_all_of_them_together_need_many(make, monkeypatch):
    case = make(6000, 256)
    panels = -(-6000 // panel_rows_of(case))
    x = case.near(panels, 2.0)
    token, _ = case.whole(x, 6000)
    needed = len(set((token // panel_rows_of(case)).tolist()))
    assert needed > 0.5 * panels
    monkeypatch.setattr(argmax_linear, "LEAST_SAVED", 0.9)
    case.check(x, 6000)


def test_more_threads_than_ranges_of_panels(make, for_any_logits):
    torch.set_num_threads(70)
    case = make(3000, 64)
    for tokens in (1, 33):
        case.check(case.near(tokens, 0.3), 3000)


def test_flat_logits_are_multiplied_whole_and_the_next_ones_too(make):
    case = make(2000, 64)
    flat, steep = torch.zeros(1, 64, dtype=case.dtype), case.near(1, 3.0)
    case.check(steep, 2000)
    assert case.ops.argmax_linear(flat, case.weight, 2000) is None
    waits = [case.ops.argmax_linear(steep, case.weight, 2000) is None for _ in range(argmax_linear.PAUSE + 1)]
    assert waits == [True] * argmax_linear.PAUSE + [False]


def test_of_equal_logits_the_lowest_id_wins(make, for_any_logits):
    case = make(512, 64)
    case.weight[100:400:7] = case.weight[50]
    case.weight[300] = case.weight[50] * (1 + 2**-7)  # a neighbour that rounding may make equal
    case.pack()
    for scale in (1e-20, 1e-3, 1.0, 1e3):
        case.check((case.weight[50:51].float() * scale).to(case.dtype), 512)


def test_all_logits_may_be_negative_and_rows_behind_the_vocabulary_do_not_count(make, for_any_logits):
    case = make(500, 64)
    case.weight.copy_(case.weight.abs())
    case.weight[480:] = -100.0  # would win
    case.pack()
    x = -torch.rand(3, 64).to(case.dtype)
    case.check(x, 480)
    case.check(x, 479)
    assert int(case.whole(x, 500)[0].min()) >= 480


@pytest.mark.parametrize("strange", [NAN, INF, -INF, 3e38, 1e-40])
def test_strange_weights_and_inputs_give_what_all_logits_give(make, strange, for_any_logits):
    case = make(300, 64)
    case.weight[7, 3] = strange
    case.pack()
    x = case.near(4, 1.0)
    case.check(x, 300)
    case.check(x * 0, 300)
    x[1, 5] = strange
    case.check(x, 300)
    case.weight[:] = strange
    case.pack()
    case.check(x, 300)


def test_a_weight_with_outliers_and_empty_blocks(make, for_any_logits):
    case = make(1000, 160)
    case.weight[:, 32:64] = 0
    case.weight[::3, 70] *= 1000
    case.weight[5] = 0
    case.weight[::11] *= 1e-30
    case.pack()
    case.check(case.near(20, 0.5), 1000)


def test_what_was_derived_follows_the_weight_and_goes_with_its_copies(make):
    case = make(3000, 128)
    x = case.near(4, 3.0)
    case.check(x, 3000)
    before, size = case.whole(x, 3000)[0], case.packed.num_bytes
    assert size > case.weight.nbytes * 1.2
    case.weight.copy_(case.weight.roll(1, dims=0))
    case.pack()
    case.check(x, 3000)
    assert torch.equal(case.whole(x, 3000)[0], (before + 1) % 3000)
    assert case.packed.num_bytes == size
    case.packed.clear()
    assert case.packed.num_bytes == 0
    assert case.ops.argmax_linear(x, case.weight, 3000) is None
    case.weight = case.weight[:2000].clone()
    case.pack()
    case.check(case.near(4, 3.0), 2000)


def test_a_weight_that_stays_in_the_caches_is_multiplied_whole(make, monkeypatch):
    monkeypatch.setattr(argmax_linear, "LEAST_BYTES", 1 << 20)
    case = make(1000, 64)
    assert case.ops.argmax_linear(case.near(1, 3.0), case.weight, 1000) is None


@pytest.mark.parametrize("scale", [1e-15, 1e-18, 1e-24, 1e-36])
def test_inputs_whose_squares_vanish_leave_nothing_out(make, scale, for_any_logits):
    case = make(2000, 96)
    x = torch.randn(4, 96)
    x[:, ::32] *= 50
    case.check((x * scale).to(case.dtype), 2000)


def test_inputs_of_another_dtype_or_layout_are_left_to_the_linear(make):
    case = make(2000, 96)
    other = torch.bfloat16 if case.dtype is torch.float32 else torch.float32
    for x in (case.near(4, 3.0).to(other), case.near(4, 3.0).T.contiguous().T):
        assert case.ops.argmax_linear(x, case.weight, 2000) is None

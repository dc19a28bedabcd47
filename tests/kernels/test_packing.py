"""Packed weights give the same numbers as plain ones and never outlive an update unnoticed."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from linear_case import Linear, make_linear
from torch import nn

from megatron_infer.kernels import packing
from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.cpu_native import NativeOps, native_checksum, panel_layout
from megatron_infer.kernels.packing import PackedLinears
from megatron_infer.kernels.torch.cpu_torch import TorchOps


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 32, bias=False), nn.LayerNorm(32))


@pytest.fixture(params=["oneDNN", "panels"])
def linear(request, native_library) -> Linear:
    return make_linear(request.param, torch.float32, native_library)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [(torch.inf, -0.0), (1e-30, -1e-30)], ids=["plain", "compact"])
@pytest.mark.parametrize("shape", [(100, 576), (33, 1032), (1, 64), (49, 520), (100, 578), (33, 50), (1, 2)], ids=str)
def test_a_freed_weight_comes_back_to_the_bit_and_so_do_its_rows(native_library, dtype, shape, first):
    """bf16 of some shapes takes 12 bits a value, where none is as large as inf."""
    packed, moved = PackedLinears(layout=panel_layout(native_library, dtype)), []
    packed.on_new_address = lambda weights: moved.extend(map(id, weights))
    ops = NativeOps(native_library, dtype, packed)
    weight = nn.Parameter(torch.randn(*shape).to(dtype))
    weight.data[0, :2] = torch.tensor(first)
    kept, x = weight.detach().clone(), torch.randn(3, shape[1]).to(dtype)
    sums = packed.pack([weight], freeable={id(weight)})
    want, ids = ops.linear(x, weight), torch.randint(0, shape[0], (40, 3))
    assert weight in packed.freed and moved == [id(weight)] and weight.untyped_storage().nbytes() == dtype.itemsize
    assert torch.equal(ops.embedding(ids, weight).view(torch.uint8), kept[ids].view(torch.uint8))
    assert packed.pack([weight], freeable={id(weight)}) == sums == {id(weight): native_checksum(native_library, kept)}
    assert packed.differs([weight]) is None
    for form in (x.t().contiguous().t(), x.double()):
        assert torch.equal(ops.linear(form, weight), want)
    packed.unpack()
    assert weight not in packed.freed and moved == [id(weight)] * 2
    assert torch.equal(weight.detach().view(torch.uint8), kept.view(torch.uint8))
    assert torch.equal(ops.linear(x, weight), want)
    packed.keeps_weights = True
    packed.pack([weight], freeable={id(weight)})
    assert weight not in packed.freed


def test_freed_weights_keep_their_copies_when_others_come_go_and_change_places(native_library):
    packed = PackedLinears(layout=panel_layout(native_library, torch.float32))
    weights = [nn.Parameter(torch.randn(32, 64)) for _ in range(5)]
    kept = [weight.detach().clone() for weight in weights]
    for order in ([0, 1, 2], [2, 1, 0], [4, 2, 3, 0], [1], [0, 1, 2, 3, 4]):
        chosen = [weights[i] for i in order]
        packed.pack(chosen, freeable=set(map(id, chosen[:2])))
        assert packed.differs(chosen) is None and all(one in packed.freed for one in chosen[:2])
        left = [weight for weight in weights if not any(weight is one for one in chosen)]
        assert not any(one in packed.freed for one in left)
        assert all(torch.equal(weight, kept[i]) for i, weight in enumerate(weights) if weight not in packed.freed)
    packed.clear()
    assert packed.num_weights == 5, "some have nothing else"
    packed.unpack()
    assert all(torch.equal(weight, content) for weight, content in zip(weights, kept, strict=True))
    packed.clear()
    assert packed.num_weights == 0


def test_a_weight_that_does_not_fit_panels_runs_from_the_live_weight(native_library):
    layout = panel_layout(native_library, torch.float32)
    packed = PackedLinears(layout=layout)
    ops = NativeOps(native_library, torch.float32, packed)
    odd, x = torch.randn(9, 31), torch.randn(50, 31)
    packed.pack([odd])
    assert packed.num_weights == 0
    for tokens in (1, 50):
        torch.testing.assert_close(ops.linear(x[:tokens], odd), x[:tokens] @ odd.T, rtol=1e-5, atol=1e-5)


def test_only_matrices_are_packed_and_each_once(linear, model):
    linear.pack(*model.parameters(), model[0].weight)
    assert linear.copies.num_weights == 2
    other = torch.randn(8, 48)
    x = torch.randn(3, 48)
    torch.testing.assert_close(linear.ops.linear(x, other), F.linear(x, other))


def test_packed_copies_never_show_in_the_state_dict(linear, model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    linear.pack(*model.parameters())
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


def test_where_packing_fails_nothing_is_packed_and_linears_run_plain(model):
    packed = PackedLinears(reason="no oneDNN")
    packed.pack(model.parameters())
    assert packed.num_weights == 0 and packed.num_bytes == 0
    x = torch.randn(3, 48)
    assert torch.equal(TorchOps(packed).linear(x, model[0].weight), F.linear(x, model[0].weight))


def test_missing_operator_is_a_reason_not_a_crash(monkeypatch):
    def broken(weight):
        raise RuntimeError("no such operator\nmore lines")

    monkeypatch.setattr(packing, "pack_weight", broken)
    assert "no such operator" in packing.unavailable(torch.float32)
    assert "float16" in packing.unavailable(torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (33, 70), (7, 2), (640, 1026), (2000, 576)], ids=str)
def test_panels_hold_every_entry_and_packing_tells_the_checksum(native_library, dtype, shape):
    layout = panel_layout(native_library, dtype)
    weight = torch.randn(shape).to(dtype)
    rows, inner = shape
    width, pair, header = native_library.mi_panel_rows(), 4 // dtype.itemsize, 64 // dtype.itemsize
    padded = torch.zeros(-(-rows // width) * width, inner, dtype=dtype)
    panels, checksum = layout.pack(weight, torch.empty(header + padded.numel(), dtype=dtype))
    assert checksum == native_checksum(native_library, weight) == layout.pack(weight, None)[1]
    padded[:rows] = weight
    want = padded.view(-1, width, inner // pair, pair).transpose(1, 2)
    assert torch.equal(panels[header:].view(want.shape), want)
    weight.mul_(-1)
    again, checksum = layout.pack(weight, panels)
    assert again.data_ptr() == panels.data_ptr() and torch.equal(panels[header:].view(want.shape), -want)
    assert checksum == native_checksum(native_library, weight)
    other, _ = layout.pack(torch.zeros(rows + 16, inner, dtype=dtype), panels)
    assert other.data_ptr() != panels.data_ptr()


SHAPES = """
#include "tiles.h"
#if MI_TILES
extern "C" int shapes(unsigned char* out) {
    if (!mi::tiles_allowed()) return 0;
    mi::shape_tiles(16, 16);
    _tile_storeconfig(out);
    mi::release_tiles();
    return 1;
}
#else
extern "C" int shapes(unsigned char*) { return 0; }
#endif
"""


def test_all_shapes_of_tiles_are_in_memory_before_they_are_loaded(tmp_path):
    """gcc 12 knows of 8 of the 64 bytes that are loaded, and drops the others where nothing else reads memory."""
    source, library = tmp_path / "shapes.cpp", tmp_path / "shapes.so"
    source.write_text(SHAPES)
    try:
        compiler = native_build.find_compiler()
        flags = [*native_build.FLAGS, "-march=native", f"-I{native_build.FOLDER}"]
        native_build._run([compiler, *flags, "-shared", str(source), "-o", str(library)], 60.0)
    except native_build.NativeUnavailable as error:
        pytest.skip(str(error))
    found = ctypes.create_string_buffer(64)
    if not ctypes.CDLL(str(library)).shapes(found):
        pytest.skip("this CPU has no matrix registers, or the kernel does not let us use them")
    assert found.raw[:16] == bytes([1]) + bytes(15)
    assert found.raw[16:32] == bytes([64, 0]) * 8 and found.raw[48:56] == bytes([16]) * 8

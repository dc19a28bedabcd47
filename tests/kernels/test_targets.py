"""The native kernels as other CPUs would compile them, AVX2 and AVX-512 without bf16 products, on this one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from cut_case import PROMPT, TOTAL, Sequences
from paged_case import check_case, make_case

from megatron_infer.kernels.base import AttendSpec
from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.cpu_native import (
    SUFFIXES,
    NativePagedAttention,
    panel_layout,
    panel_linear,
    quantised_layout,
)
from megatron_infer.kernels.native.native_sampling import NativeSampling
from megatron_infer.kernels.packing import PackedLinears
from megatron_infer.kernels.weight_dtypes import WEIGHT_DTYPE_BYTES

pytestmark = pytest.mark.long
TARGETS = {
    "haswell": {"avx2", "fma", "bmi2"},
    "skylake-avx512": {"avx512f", "avx512dq", "avx512bw", "avx512vl"},
    "x86-64": {"sse2"},
    "icelake-server": {"avx512_vnni", "avx512vbmi"},
    "alderlake": {"avx_vnni", "vaes"},
}
"""Compiler's name of a CPU -> the flags that this one must have to run its code."""
BASE = ("packed_weight.cpp", "team.cpp")
PLAIN = (*BASE, "elementwise.cpp", "decode.cpp", "prefill.cpp", "panels.cpp", "int8.cpp", "linear.cpp", "sampling.cpp")
"""Without the scan, whose code takes most of the time. Panels choose tokens by what is in int8.cpp."""
QUANTISED = (*BASE, "int8.cpp", "int4.cpp")
BOTH = (*PLAIN, "int4.cpp")
"""Of the target whose kernels of both kinds are tested."""
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Callable[..., ctypes.CDLL]:
    """(compiler's name of a CPU, sources) -> the library, compiled once."""

    @cache
    def make(target: str, sources: tuple[str, ...]) -> ctypes.CDLL:
        flags = set(Path("/proc/cpuinfo").read_text().split()) if Path("/proc/cpuinfo").exists() else set()
        if missing := TARGETS[target] - flags:
            pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native_build, "SOURCES", sources)
            work = tmp_path_factory.mktemp(target)
            try:
                path = native_build._compile(native_build.find_compiler(), f"-march={target}", work)
            except native_build.NativeUnavailable as error:
                pytest.skip(str(error))
        return ctypes.CDLL(str(path))

    return make


@pytest.fixture(scope="module", params=["haswell", "skylake-avx512"])
def library(request, compiled) -> ctypes.CDLL:
    return compiled(request.param, BOTH if request.param == "haswell" else PLAIN)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_matches_the_reference(library, dtype):
    rows = [(1, 1), (1, 300), (1, 31), (1, 257), (9, 9), (20, 310), (130, 130)]
    for head_dim, group in ((64, 3), (80, 1), (128, 8)):
        case = make_case(
            rows, num_decode=4, dtype=dtype, head_dim=head_dim, group_size=group, window=200, rotary_dim=16
        )
        check_case(NativePagedAttention(library, dtype), case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_position_has_the_same_bits_however_its_sequence_is_cut(library, dtype):
    spec = AttendSpec(num_kv_heads=2, group_size=3, head_dim=64, scale=0.125, window=150, rotary_dim=32)
    whole, cut = Sequences(dtype, spec), Sequences(dtype, spec)
    backend = NativePagedAttention(library, dtype)
    want = [whole.attend(backend, decode=[], slices=[(0, 0, PROMPT)])[:PROMPT]]
    want += [whole.attend(backend, decode=[position], slices=[])[:1] for position in range(PROMPT, TOTAL)]
    got = [cut.attend(backend, decode=[], slices=[(0, at, min(97, TOTAL - at))]) for at in range(0, TOTAL, 97)]
    assert torch.equal(torch.cat(got)[:TOTAL], torch.cat(want))


def test_draws_are_those_of_this_cpus_own_kernels(library, native_library):
    torch.manual_seed(0)
    columns = torch.ones(5, 40, dtype=torch.float64)
    columns[0, ::2], columns[1], columns[3] = 1.7, 5003, 0.0
    columns[2, ::3], columns[4] = 0.9, torch.rand(40, dtype=torch.float64)
    logits = 3 * torch.randn(40, 5003)
    there, here = NativeSampling(library), NativeSampling(native_library)
    assert torch.equal(there.draw(logits, columns)[0], here.draw(logits, columns)[0])
    assert torch.equal(there.argmax(logits)[0], here.argmax(logits)[0])
    token = logits.argmax(-1)
    torch.testing.assert_close(there.score(logits, token, 3)[0], here.score(logits, token, 3)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_weight_is_unpacked_to_the_bit(library, dtype):
    torch.manual_seed(0)
    for rows, inner in ((100, 578), (16, 24), (1, 2)):
        weight = torch.randn(rows, inner).to(dtype)
        layout = panel_layout(library, dtype)
        found = torch.empty_like(weight)
        layout.unpack(layout.pack(weight, None)[0], found)
        assert torch.equal(found, weight), (rows, inner)


@pytest.mark.parametrize("dtype", DTYPES)
def test_panels_give_the_products_and_a_token_its_bits_in_any_step(library, dtype):
    torch.manual_seed(0)
    packed = PackedLinears(layout=panel_layout(library, dtype))
    weight, bias, x = (torch.randn(*shape).to(dtype) for shape in ((100, 578), (100,), (300, 578)))
    packed.pack([weight])
    linear = panel_linear(library, SUFFIXES[dtype], packed.layout)

    def outputs(x: torch.Tensor, threads: int) -> torch.Tensor:
        out = torch.empty(len(x), 100, dtype=dtype)
        panels = packed.get(id(weight))
        linear(x.data_ptr(), 578, panels.data_ptr(), bias.data_ptr(), out.data_ptr(), len(x), 578, 100, threads)
        return out

    alone = torch.cat([outputs(x[i : i + 1], 1) for i in range(300)])
    want = x.double() @ weight.double().T + bias.double()
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(alone.double() / 578**0.5, want / 578**0.5, rtol=tolerance, atol=tolerance)
    for tokens in (2, 3, 5, 6, 7, 12, 13, 19, 20, 21, 40, 257, 300):
        for threads in (1, 2):
            assert torch.equal(outputs(x[:tokens], threads), alone[:tokens]), (tokens, threads)


WIDER = [pytest.param(name, marks=pytest.mark.slow) for name in ("skylake-avx512", "icelake-server", "alderlake")]


@pytest.fixture(scope="module", params=["x86-64", "haswell", *WIDER])
def quantised_library(request, compiled) -> ctypes.CDLL:
    """The linears in 8 and 4 bits for a CPU without AVX2, with it, with AVX-512, with VNNI and with AVX-VNNI."""
    library = compiled(request.param, BOTH if request.param == "haswell" else QUANTISED)
    library.has_fma = request.param != "x86-64"
    return library


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPE_BYTES)
def test_quantised_linears_have_the_bits_of_this_cpus_own(quantised_library, native_library, weight_dtype, dtype):
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(*shape).to(dtype) for shape in ((77, 578), (77,), (37, 578)))
    weight[3], weight[5, :32], x[4] = 0, 1e-5, 1e3 * x[4]
    x[6, :64] = 127  # the largest sums of products that there are
    weight[9, :64], weight[10, :64] = 127, torch.tensor([0] + [127] * 63)
    found = []
    for library in (quantised_library, native_library):
        packed = quantised_layout(library, dtype, weight_dtype)
        signature = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 3]
        linear = library[f"mi_{weight_dtype}_linear_{SUFFIXES[dtype]}"]
        linear.argtypes = [*signature, *[ctypes.c_int64] * 3, ctypes.c_int]
        panels, _ = packed.pack(weight, None)
        out = torch.empty(37, 77, dtype=dtype)
        linear(x.data_ptr(), 578, panels.data_ptr(), bias.data_ptr(), out.data_ptr(), 37, 578, 77, 2)
        found.append(out)
    there, here = (out.double() for out in found)
    if quantised_library.has_fma:
        assert torch.equal(there, here)
    else:  # some codes are those of a neighbour, up to 1.3% of an output beside weights of 127; rounding is 4%
        assert ((there - here).norm(dim=1) < 2e-2 * here.norm(dim=1)).all()

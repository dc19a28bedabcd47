"""Triton's attention over keys and values of eight bits: codes exact in every case, answers as the reference's."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attention_case import check, make_backend, padded, run
from paged_case import Case, make_case

from megatron_infer.kernels.kv_rounding import FP8, as_kept
from megatron_infer.kernels.triton.launch import launch

pytestmark = pytest.mark.triton

SIZE = 1024
MIXED = [(1, 1), (1, 100), (1, 31), (1, 33), (9, 9), (20, 90), (1, 60)]


@pytest.fixture(scope="module")
def reads_fp8(device):
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")


def fp8_case(rows, **settings) -> Case:
    case = make_case(rows, **settings)
    case.kv_cache = as_kept(case.kv_cache, FP8)
    return case


def every_code() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(FP8)


def test_every_number_gets_the_code_torch_gives_it(device):
    """All codes, all points half-way between two, what is next to these, and what is too large or too small."""
    from probe_kernels import to_e4m3_kernel

    codes = every_code().float()
    finite = codes[~codes.isnan()].unique()
    half = (finite[1:] + finite[:-1]) / 2
    edges = [448.0, 449, 464, 1e9, math.inf, -449, -math.inf, math.nan, 2**-10, 2**-11, 1e-38, -1e-42, 0.0, -0.0]
    x = torch.cat([codes, half, half.nextafter(finite[1:]), half.nextafter(finite[:-1]), torch.tensor(edges)])
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([x, *(torch.randn(2000, generator=generator) * scale for scale in (1e-3, 1.0, 200.0))])
    out = torch.zeros(len(x), dtype=torch.uint8, device=device)
    launch(to_e4m3_kernel, (-(-len(x) // SIZE),), x.to(device), out, len(x), SIZE=SIZE)
    assert torch.equal(out.cpu(), as_kept(x, FP8).view(torch.uint8))


def test_every_code_is_widened_to_its_number(device, dtype, reads_fp8):
    from probe_kernels import widen_kernel

    codes = every_code()
    finite = ~codes.float().isnan()  # the interpreter makes 480 of NaN's two codes
    out = torch.zeros(256, dtype=dtype, device=device)
    launch(widen_kernel, (1,), codes.to(device), out, 256, SIZE=SIZE)
    assert torch.equal(out.cpu()[finite], codes.to(dtype)[finite])


@pytest.mark.parametrize("settings", [{}, {"window": 24, "sinks": True}, {"rotary_dim": 20, "interleaved": True}])
def test_mixed_steps_match_reference(device, dtype, reads_fp8, settings):
    settings = {"num_decode": 4, "dtype": dtype, "head_dim": 32, "rotary_dim": 32, **settings}
    check(make_backend(), fp8_case(MIXED, **settings), device=device)


def test_latents_match_reference(device, dtype, reads_fp8):
    sizes = {"num_kv_heads": 1, "head_dim": 48, "rotary_dim": 16, "value_start": 16, "interleaved": True}
    check(make_backend(), fp8_case(MIXED, num_decode=4, dtype=dtype, **sizes), device=device)


@pytest.mark.parametrize("head_dim", [16, 80])
def test_head_dims_and_long_rows_match_reference(device, dtype, reads_fp8, head_dim):
    rows = [(1, 130), (1, 5), (17, 70)]
    check(make_backend(), fp8_case(rows, num_decode=2, dtype=dtype, head_dim=head_dim, num_kv_heads=1), device=device)


def test_padding_changes_no_bit(device, dtype, reads_fp8):
    case = fp8_case([(1, 70), (1, 12), (9, 50)], num_decode=2, dtype=dtype, rotary_dim=32, head_dim=32, num_kv_heads=1)
    plain = run(make_backend(), case, device)
    wide = padded(case, num_decode=4, num_prefill=2, num_tokens=30, max_kv_len=300)
    out = run(make_backend(num_cores=64), wide, device)
    assert torch.equal(torch.cat([out[:2], out[4 : 4 + 9]]), plain) and not out[13:].any()


def test_keys_beyond_the_range_become_the_largest(device, reads_fp8):
    case = fp8_case([(5, 5)], num_decode=0, dtype=torch.float32, head_dim=32, rotary_dim=16)
    case.fused *= 1e3
    _, cache = case.on(device).run(make_backend())
    largest = cache[1, 1].cpu().float().abs().max()
    assert largest == 448.0 and not cache.cpu().float().isnan().any()


def test_what_cannot_read_it_says_so():
    spec = make_case([(1, 1)], num_decode=1, dtype=torch.float32).spec
    asked = {"dtype": torch.bfloat16, "block_size": 16, "kv_dtype": FP8}
    assert make_backend(arch=90).supports(spec, **asked) is None
    assert make_backend(arch=80).supports(spec, **asked | {"kv_dtype": torch.bfloat16}) is None
    assert "reads FP8 from compute capability 8.9 on, this is 8.0" in make_backend(arch=80).supports(spec, **asked)
    wide = dataclasses.replace(spec, head_dim=256)
    assert make_backend().supports(wide, **asked) is None
    assert "head_dim up to 128 for FP8" in make_backend().supports(wide, **asked | {"dtype": torch.float32})

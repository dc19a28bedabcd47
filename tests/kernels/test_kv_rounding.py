"""Eight-bit keys and values: what a number becomes, and attention over a cache of them against the reference."""

from __future__ import annotations

import pytest
import torch
from paged_case import TOLERANCE, Case, check_case, make_case

from megatron_infer.errors import ConfigError
from megatron_infer.kernels import select
from megatron_infer.kernels.exact import ExactAttention
from megatron_infer.kernels.kv_rounding import FP8, FP8_MAX, append, as_kept
from megatron_infer.kernels.torch.cpu_torch import TorchPagedAttention
from megatron_infer.kernels.torch.torch_ref import ReferenceAttention

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [(1, 1), (1, 300), (1, 31), (1, 33), (9, 9), (20, 310), (1, 60), (70, 70)]
BACKENDS = {"torch": TorchPagedAttention, "reference": ReferenceAttention}


def finite_codes() -> torch.Tensor:
    """The 253 numbers that e4m3 has, ascending."""
    every = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    return every[~every.isnan()].unique()


def fp8_case(rows, **settings) -> Case:
    """As make_case, with a cache of eight bits; some keys and values beyond its range, some among its finest steps."""
    case = make_case(rows, **settings)
    case.kv_cache = as_kept(case.kv_cache, FP8)
    case.fused[::7] *= 1e-2
    return case


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_every_number_it_has_is_kept_as_it_is(dtype):
    codes = finite_codes()
    assert len(codes) == 253 and codes[-1] == FP8_MAX
    assert torch.equal(as_kept(codes.to(dtype), FP8).to(dtype), codes.to(dtype))


def test_halves_go_to_the_even_neighbour_and_others_to_the_nearest():
    codes = finite_codes()
    low, high = codes[:-1], codes[1:]
    half = (low + high) / 2
    is_even = low.to(FP8).view(torch.uint8) % 2 == 0
    assert torch.equal(as_kept(half, FP8).float(), torch.where(is_even, low, high))
    assert torch.equal(as_kept(half.nextafter(high), FP8).float(), high)
    assert torch.equal(as_kept(half.nextafter(low), FP8).float(), low)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_of_a_number_is_bounded(dtype):
    x = torch.cat([torch.logspace(-14, 2, 20_000), -torch.logspace(-9, 2, 20_000)]).to(dtype)
    kept = as_kept(x, FP8).double()
    bound = (x.double().abs() * 2**-4).clamp(min=2**-10)
    assert ((kept - x.double()).abs() <= bound).all()
    assert ((kept - x.double()).abs() > bound / 2).any(), "the bound is loose"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_what_is_too_large_becomes_the_largest_and_nan_stays(dtype):
    x = torch.tensor([449.0, 464, 6e4, float("inf"), -465, -float("inf"), float("nan")]).to(dtype)
    kept = as_kept(x, FP8).float()
    assert kept[:-1].tolist() == [448.0, 448, 448, 448, -448, -448] and kept[-1].isnan()


def test_a_cache_of_the_activations_dtype_is_not_touched():
    x, pages = torch.randn(3, 2, 8) * 1e4, torch.zeros(4, 4, 2, 8)
    assert as_kept(x, torch.float32) is x and append(pages, torch.tensor([5, 0, 15]), x) is x
    assert torch.equal(pages.view(16, 2, 8)[[5, 0, 15]], x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", [{"rotary_dim": 64}, {"window": 24, "sinks": True}, {"head_dim": 80}])
def test_attention_over_eight_bits_matches_reference(dtype, settings):
    check_case(TorchPagedAttention(), fp8_case(ROWS, num_decode=4, dtype=dtype, **settings))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_attends_to_rounded_keys_and_values_and_no_others(dtype):
    case = fp8_case(ROWS, num_decode=4, dtype=dtype)
    out, cache = case.run(ReferenceAttention())
    wide = fp8_case(ROWS, num_decode=4, dtype=dtype)
    wide.kv_cache = case.kv_cache.to(dtype)
    heads = wide.fused.view(-1, wide.spec.num_kv_heads, wide.spec.group_size + 2, wide.spec.head_dim)
    heads[:, :, -2:] = as_kept(heads[:, :, -2:], FP8).to(dtype)
    want, want_cache = wide.run(ReferenceAttention())
    assert torch.equal(out, want) and torch.equal(cache.to(dtype), want_cache)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_prompt_sees_the_same_keys_whole_and_cut(name):
    """Attention over keys and values before rounding would see others than a later step reads from the cache."""
    case = fp8_case([(60, 60)], num_decode=0, dtype=torch.float32)
    whole, cache = case.run(BACKENDS[name]())
    later = fp8_case([(30, 60)], num_decode=0, dtype=torch.float32)
    later.fused, later.kv_cache = case.fused[30:], cache
    later.meta.block_table, later.meta.kv_pos_T = case.meta.block_table, case.meta.kv_pos_T[30:]
    later.meta.table_row, later.meta.table_row_R = case.meta.table_row, case.meta.table_row_R
    out, _ = later.run(BACKENDS[name]())
    tolerance = TOLERANCE[torch.float32]
    torch.testing.assert_close(out, whole[30:], rtol=tolerance, atol=tolerance)


def test_backends_that_read_their_own_dtype_refuse_by_name(native_library):
    spec = fp8_case([(1, 1)], num_decode=1, dtype=torch.float32).spec
    asked = {"specs": [spec], "block_size": 16}
    assert select.choose("cpu", torch.float32, **asked, kv_dtype=torch.float32).attention.name == "native"
    chosen = select.choose("cpu", torch.float32, **asked, kv_dtype=FP8)
    assert chosen.attention.name == "torch" and chosen.ops.name == "native"
    assert "the cache keeps them in torch.float8_e4m3fn" in chosen.table()
    with pytest.raises(ConfigError, match="attention_backend=native, but attention reads keys and values in"):
        select.choose("cpu", torch.float32, **asked, kv_dtype=FP8, attention="native")
    exact = ExactAttention(native_library, torch.float32)
    assert "float8" in exact.supports(spec, dtype=torch.float32, block_size=16, kv_dtype=FP8)

"""Exact kernels: a row's bits depend on the row alone: not on other rows, its place or the threads."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from cut_case import PROMPT, Sequences

from megatron_infer.errors import ConfigError
from megatron_infer.kernels.base import AttendSpec
from megatron_infer.kernels.exact import ExactAttention, ExactOps
from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.cpu_native import NativePagedAttention, panel_layout
from megatron_infer.kernels.packing import PackedLinears
from megatron_infer.kernels.select import BACKEND_VARIABLE, choose_exact, exact_library
from megatron_infer.kernels.ssm import SsmSpec
from megatron_infer.kernels.torch.torch_ref import ReferenceOps

DTYPES = [torch.float32, torch.bfloat16]
SPEC = AttendSpec(num_kv_heads=2, group_size=3, head_dim=32, scale=0.2, rotary_dim=32)
SSM = SsmSpec(num_heads=4, head_dim=8, state_dim=16, num_groups=1, conv_width=4)
ROWS = 77


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16"])
def ops(request, native_library) -> ExactOps:
    return ExactOps(native_library, request.param)


def rows(ops: ExactOps, width: int, seed: int = 0, count: int = ROWS) -> torch.Tensor:
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3).to(ops._dtype)


def check_rows(function, x) -> torch.Tensor:
    """function(x) gives each row the same bits in parts of x, alone, shuffled and on two threads -> function(x)."""
    whole = function(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    assert torch.equal(function(x[order].contiguous()), whole[order])
    for begin, end in ((0, 1), (5, 6), (len(x) - 1, len(x)), (3, 20), (1, len(x))):
        assert torch.equal(function(x[begin:end].contiguous()), whole[begin:end]), (begin, end)
    torch.set_num_threads(2)  # the fixture sets it back
    assert torch.equal(function(x), whole)
    torch.set_num_threads(1)
    return whole


@pytest.mark.parametrize("inner", [64, 70, 33], ids=["whole", "even", "odd"])
@pytest.mark.parametrize("outer", [48, 7])
def test_a_row_of_a_linear_has_the_same_bits_among_any_rows(ops, inner, outer):
    generator = torch.Generator().manual_seed(1)
    weight, bias = (torch.randn(*shape, generator=generator).to(ops._dtype) for shape in ((outer, inner), (outer,)))
    x = rows(ops, inner)
    whole = check_rows(lambda part: ops.linear(part, weight, bias), x)
    wide = torch.float64 if ops._dtype is torch.float32 else torch.float32
    torch.testing.assert_close(
        whole.to(wide), F.linear(x.to(wide), weight.to(wide), bias.to(wide)), atol=0.2, rtol=0.02
    )
    strided = torch.empty(ROWS, 2 * inner, dtype=x.dtype)[:, :inner]
    strided.copy_(x)
    assert torch.equal(ops.linear(strided, weight, bias), whole)
    sums = check_rows(lambda part: ops.fp32_linear(part, weight, bias, outer), x)
    assert torch.equal(sums.to(ops._dtype), whole)


def test_packing_beforehand_or_for_the_call_changes_no_bit(ops, native_library):
    chosen = choose_exact("cpu", ops._dtype, specs=[SPEC], block_size=16)
    weight = rows(ops, 64, count=40)
    empty = PackedLinears(layout=panel_layout(native_library, ops._dtype), reason="nothing is packed")
    chosen.packed.pack([weight])
    x = rows(ops, 64, 1)
    for other in (chosen.ops, ExactOps(native_library, ops._dtype, empty)):
        assert torch.equal(other.linear(x, weight), ops.linear(x, weight))
        assert torch.equal(other.fp32_linear(x, weight, None, 40), ops.fp32_linear(x, weight, None, 40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_router_in_another_dtype_is_multiplied_in_its_own(ops, dtype):
    weight, x = rows(ops, 50, 1, count=6).to(dtype), rows(ops, 50).to(dtype)
    whole = check_rows(lambda part: ops.linear(part, weight), x)
    assert whole.dtype is dtype
    torch.testing.assert_close(whole, F.linear(x, weight), atol=1e-4 if dtype is torch.float32 else 1e-12, rtol=1e-5)


@pytest.mark.parametrize("width", [64, 50])
def test_norms_and_gates_treat_each_row_alone(ops, width):
    weight, x = rows(ops, width, 1, count=1)[0], rows(ops, width)
    reference = ReferenceOps()
    close = functools.partial(torch.testing.assert_close, atol=0.05, rtol=0.02)
    close(check_rows(lambda part: ops.rms_norm(part, weight, 1e-5), x), reference.rms_norm(x, weight, 1e-5))
    close(check_rows(lambda part: ops.layer_norm(part, weight, weight, 1e-5), x),
          reference.layer_norm(x, weight, weight, 1e-5))  # fmt: skip
    close(check_rows(ops.silu_mul, rows(ops, 2 * width)), reference.silu_mul(rows(ops, 2 * width)))
    residual = torch.linspace(-1, 1, width).expand(ROWS, width).float()
    close(check_rows(lambda part: ops.add_rms_norm(part, residual[: len(part)].clone(), weight, 1e-5)[0], x),
          reference.add_rms_norm(x, residual.clone(), weight, 1e-5)[0])  # fmt: skip
    close(check_rows(lambda part: ops.rms_norm(part, weight, 1e-5, zero_centered=True), x),
          reference.rms_norm(x, weight, 1e-5, zero_centered=True))  # fmt: skip
    gated = lambda part: ops.gated_rms_norm(part, part.flip(-1).contiguous(), weight, 1e-5, group_size=width // 2)  # noqa: E731
    close(check_rows(gated, x), reference.gated_rms_norm(x, x.flip(-1), weight, 1e-5, group_size=width // 2))


@pytest.mark.parametrize("width", [96, 50, 1003])
@pytest.mark.parametrize("function", [F.gelu, torch.sigmoid, F.softplus, F.silu, lambda x: x.float().softmax(-1)])
def test_torch_functions_treat_each_row_alone(ops, function, width):
    x = rows(ops, width)
    torch.testing.assert_close(
        check_rows(lambda part: ops.rowwise(function, part), x), function(x), atol=1e-2, rtol=1e-2
    )


def test_plain_torch_does_depend_on_the_other_rows():
    """The reason for `rowwise`; should this fail, torch has become exact by itself."""
    x = torch.randn(ROWS, 50, generator=torch.Generator().manual_seed(0)) * 3
    for function in (torch.sigmoid, F.silu, F.softplus):
        whole = function(x)
        if any(not torch.equal(function(x[i : i + 1].clone()), whole[i : i + 1]) for i in range(ROWS)):
            return
    pytest.fail("torch gives a row the same bits among any rows")


def test_rowwise_hands_on_several_results_and_no_rows(ops):
    def best(x):
        return x.softmax(-1), x.topk(2, dim=-1).indices

    x = rows(ops, 12)
    values, indices = ops.rowwise(best, x)
    assert values.shape == (ROWS, 12) and torch.equal(indices, x.topk(2, dim=-1).indices)
    assert [part.shape for part in ops.rowwise(best, x[:0])] == [(0, 12), (0, 2)]


def test_a_position_attends_the_same_in_prompt_and_output(ops, native_library):
    sequences = Sequences(ops._dtype, SPEC)
    exact = ExactAttention(native_library, ops._dtype)
    whole = sequences.attend(exact, decode=[], slices=[(0, 0, PROMPT + 20), (1, 0, 40)])[: PROMPT + 20].clone()
    for start in (0, 1, 127, PROMPT - 1, PROMPT, PROMPT + 19):
        assert torch.equal(sequences.attend(exact, decode=[], slices=[(0, start, 1), (1, 40, 30)])[0], whole[start])
    assert torch.equal(sequences.attend(exact, decode=[PROMPT + 5], slices=[(1, 70, 9)])[0], whole[PROMPT + 5])
    ordinary = NativePagedAttention(native_library, ops._dtype)
    assert not torch.equal(sequences.attend(ordinary, decode=[], slices=[(0, 0, PROMPT + 20)]), whole)


def test_what_cannot_be_exact_is_refused_with_the_reason(monkeypatch):
    with pytest.raises(ConfigError, match="for a CPU only, the model is on cuda"):
        choose_exact("cuda", torch.float32, specs=[SPEC], block_size=16)
    with pytest.raises(ConfigError, match=r"needs float32 or bfloat16, got torch\.float16"):
        exact_library(torch.device("cpu"), torch.float16)
    odd = AttendSpec(num_kv_heads=2, group_size=1, head_dim=24, scale=1.0)
    with pytest.raises(ConfigError, match="head_dim a multiple of 16"):
        choose_exact("cpu", torch.float32, specs=[odd], block_size=16)
    with pytest.raises(ConfigError, match="rounded wherever a step ends"):
        choose_exact("cpu", torch.bfloat16, specs=[], ssm_specs=[SSM], block_size=16, ssm_dtype=torch.bfloat16)
    monkeypatch.setattr(native_build, "load", lambda: (_ for _ in ()).throw(native_build.NativeUnavailable("no c++")))
    with pytest.raises(ConfigError, match=r"needs the native kernels: no c\+\+"):
        choose_exact("cpu", torch.float32, specs=[SPEC], block_size=16)
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    with pytest.raises(ConfigError, match=f"{BACKEND_VARIABLE}=torch"):
        choose_exact("cpu", torch.float32, specs=[SPEC], block_size=16)

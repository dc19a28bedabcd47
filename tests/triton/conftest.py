"""Kernels on a GPU where there is one; else in the interpreter, which must be asked for before they are imported."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from load_file import load_file

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from megatron_infer.kernels.triton.launch import unavailable


@pytest.fixture(scope="session", autouse=True)
def exact_interpreter():
    """The interpreter's products summed in double, as some CPUs' sums depend on a row's place; its bfloat16 rounded."""
    if os.environ.get("TRITON_INTERPRET") != "1" or unavailable(torch.device("cpu")) is not None:
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, *precision):
        if any(x.data.dtype not in (np.float16, np.float32) for x in (a, b, d)):
            return plain(self, a, b, d, *precision)
        with np.errstate(over="ignore"):
            product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    from bf16_interpreter import exact_bf16

    load_file("tools/gpu_checks/interpreter.py").quicken()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        with exact_bf16():
            yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (reason := unavailable(where)) is not None:
        pytest.skip(f"Triton: {reason}")
    return where


@pytest.fixture(params=["float32", pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def dtype(request, device) -> torch.dtype:
    return getattr(torch, request.param)


@pytest.fixture(scope="session")
def ops(device):
    from megatron_infer.kernels.triton.elementwise import TritonOps

    return TritonOps()


@pytest.fixture
def randn(device):
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.float32: torch.randn(*shape, generator=generator).to(device, dtype)

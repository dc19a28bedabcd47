from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.cpu_native import NativeOps, NativePagedAttention
from megatron_infer.kernels.native.native_scan import NativeScan
from megatron_infer.kernels.torch.cpu_torch import TorchOps, TorchPagedAttention
from megatron_infer.kernels.torch.ssm_torch import TorchScan


@pytest.fixture(autouse=True)
def quiet_torch():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def _native_library():
    try:
        return native_build.load()
    except native_build.NativeUnavailable as error:
        pytest.skip(f"native kernels: {error}")


def _maker(of_torch: Callable[[], Any], of_native: Callable[[Any, torch.dtype], Any]) -> Any:
    """A fixture that gives, in turn, functions of a dtype that make one and the other."""

    def make(request) -> Callable[[torch.dtype], Any]:
        if request.param == "torch":
            return lambda dtype: of_torch()
        return partial(of_native, _native_library())

    return pytest.fixture(make, params=["torch", "native"])


make_attention = _maker(TorchPagedAttention, NativePagedAttention)
make_ops = _maker(TorchOps, NativeOps)
make_scan = _maker(TorchScan, NativeScan)


@pytest.fixture
def native_library():
    return _native_library()

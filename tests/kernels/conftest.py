from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_infer.kernels.base import AttentionBackend, Ops
from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.cpu_native import NativeOps, NativePagedAttention
from megatron_infer.kernels.native.native_scan import NativeScan
from megatron_infer.kernels.ssm import ScanBackend
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


@pytest.fixture(params=["torch", "native"])
def make_attention(request) -> Callable[[torch.dtype], AttentionBackend]:
    if request.param == "torch":
        return lambda dtype: TorchPagedAttention()
    library = _native_library()
    return lambda dtype: NativePagedAttention(library, dtype)


@pytest.fixture(params=["torch", "native"])
def make_ops(request) -> Callable[[torch.dtype], Ops]:
    if request.param == "torch":
        return lambda dtype: TorchOps()
    library = _native_library()
    return lambda dtype: NativeOps(library, dtype)


@pytest.fixture(params=["torch", "native"])
def make_scan(request) -> Callable[[torch.dtype], ScanBackend]:
    if request.param == "torch":
        return lambda dtype: TorchScan()
    library = _native_library()
    return lambda dtype: NativeScan(library, dtype)


@pytest.fixture
def native_library():
    return _native_library()

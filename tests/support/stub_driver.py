"""A CUDA driver that does nothing, so that the host's part of a launch runs where there is no GPU.

Kernels are compiled for an H100 by Triton's own compiler, and launched by the launchers that Triton builds, on a
`libcuda.so.1` of its own whose functions return at once. Tensors of the host stand for those of a device: what a kernel
would have written is whatever was there.

    with stubbed(Path("build")):
        ...                        # launches of tensors of the CPU are compiled ones

For one process that does nothing else: library and driver stay. Needs a C compiler; refuses to run where there is CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_infer.kernels.triton import launch
from megatron_infer.utils.child_process import run

CAPABILITY = (9, 0)
SHARED_BYTES = 227 << 10
MAX_THREADS = 1024
SOURCE = """
typedef unsigned long long Address;
static const char *nothing = "the stub driver failed";
int cuGetErrorString(int error, const char **text) { *text = nothing; return 0; }
int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) { return 0; }
int cuPointerGetAttribute(void *out, int attribute, Address pointer) { *(Address *)out = pointer; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)&nothing; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)&nothing; return 0; }
"""


class _Utils:
    """triton's `CudaUtils`: every kernel fits, and is loaded at once."""

    @staticmethod
    def load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, MAX_THREADS

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": 132, "warpSize": 32}


def _driver() -> Any:
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher

    class StubDriver(CudaDriver):
        """One device, number 0, with the stream 0."""

        def __init__(self) -> None:
            self.utils, self.launcher_cls = _Utils(), CudaLauncher
            self.get_device_capability = lambda device: CAPABILITY
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device: 0

    return StubDriver()


def _library(folder: Path) -> Path:
    """libcuda.so.1 in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "stub_driver.c", folder / "libcuda.so.1"
    source.write_text(SOURCE)
    compiler = os.environ.get("CC", "cc")
    shared = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
    run([compiler, *shared, "-o", str(library), str(source)]).check_returncode()
    return library


@contextlib.contextmanager
def stubbed(folder: Path) -> Iterator[None]:
    """Within the block kernels of tensors on the CPU are compiled and launched on the stub. folder: for the library."""
    if torch.cuda.is_available():
        raise RuntimeError("the stub driver stands for a GPU where there is none; here is one")
    if launch.interpreted():
        raise RuntimeError(f"unset {launch.INTERPRET_VARIABLE}: kernels that are interpreted are not launched")
    library = _library(folder)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # found by its name from now on
    from triton.runtime import driver

    driver.set_active(_driver())
    before = launch.unavailable, launch.current_device_of
    launch.unavailable, launch.current_device_of = lambda device: None, lambda where: 0
    try:
        yield
    finally:
        launch.unavailable, launch.current_device_of = before

"""The only place that knows how a device copies, waits and times; on a CPU every call is a plain copy or a no-op."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from typing import Any

import torch
from torch import Tensor

from megatron_infer.errors import ConfigError

_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
"""glibc's; freed tensors below its mmap threshold stay with the process without it."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Device:
    """A torch device with the few operations a step needs, the same on CPU and CUDA."""

    def __init__(self, name: str | torch.device = "auto") -> None:
        if str(name) == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        self.torch = torch.device(name)
        self.is_cuda = self.torch.type == "cuda"

    def take_thread(self) -> None:
        """Make it the calling thread's device: a new thread has the first one."""
        if self.is_cuda and self.torch.index is not None:
            torch.cuda.set_device(self.torch)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Host memory a step is written into: pinned where the device can copy from it without waiting."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self.is_cuda)

    def device_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch)

    def upload(self, host: Tensor, target: Tensor) -> None:
        """Copy host -> device on the current stream; does not wait."""
        target.copy_(host, non_blocking=self.is_cuda)

    def begin_read(self, tensor: Tensor) -> HostRead:
        """Start copying `tensor` to the host; `HostRead.wait` gives it."""
        return HostRead(self, tensor)

    def used_bytes(self) -> int:
        """What is taken: of the device's memory by everyone (CUDA), or by this process (its resident set)."""
        if self.is_cuda:
            free, total = torch.cuda.mem_get_info(self.torch)
            return int(total - free)
        try:
            with open("/proc/self/statm", encoding="ascii") as line:
                return int(line.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # not Linux: the peak is the only figure there
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024

    def trim(self) -> None:
        """Hand memory that was freed, but is kept for reuse, back to the system."""
        if self.is_cuda:
            torch.cuda.empty_cache()
        elif _MALLOC_TRIM is not None:
            _MALLOC_TRIM(0)

    def available_bytes(self) -> int:
        """Memory that can still be taken, by the system's own account."""
        if self.is_cuda:
            return int(torch.cuda.mem_get_info(self.torch)[0])
        try:
            with open("/proc/meminfo", encoding="ascii") as lines:
                for line in lines:
                    if line.startswith("MemAvailable:"):
                        return int(line.split()[1]) * 1024
        except OSError:
            pass  # not Linux: the portable figure below
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


class HostRead:
    """A device-to-host copy under way."""

    def __init__(self, device: Device, tensor: Tensor) -> None:
        self._event: Any = None
        if device.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor

    def is_done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> Tensor:
        """The host tensor, once the device is done with it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def choose_dtype(name: str, device: Device) -> torch.dtype:
    """The compute dtype for "auto" or a name."""
    if name == "auto":
        if device.is_cuda:
            return torch.bfloat16
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() and cpu_has_bf16() else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def cpu_has_bf16() -> bool:
    """True where the CPU multiplies bfloat16 itself (AVX-512 BF16 or AMX); elsewhere bf16 is slower than fp32."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return False
    return any(flag in flags.split() for flag in ("avx512_bf16", "amx_bf16", "bf16"))

"""CUDA unified memory: pages migrate between device and host by themselves, guided by advice.

    in use        preferred location: the device, so that no page leaves without need; one that left comes when it is
                  used
    may migrate   no preference: pages leave one by one, with their content, when the trainer needs room. Only what has
                  to go is copied; copying everything out at suspend would cost time that the trainer may never need

With too little device memory every access is a page fault, and some machines hang then: see `check_room`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_infer.errors import ConfigError
from megatron_infer.memory.regions.cuda import ForeignMemory, current, drop_cached, free_bytes, wait

log = logging.getLogger("megatron_infer")

MANAGED_MEMORY, CONCURRENT_ACCESS = 83, 89
ATTACH_GLOBAL = 1
SET_PREFERRED, UNSET_PREFERRED, SET_ACCESSED_BY = 3, 4, 5
LOCATION_DEVICE = 1


class MemLocation(ctypes.Structure):
    """cudaMemLocation, passed by value since CUDA 13 where a device number was."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Runtime:
    """The calls of the CUDA runtime that unified memory needs, with the arguments of the runtime's version."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        version = ctypes.c_int(0)
        library.cudaRuntimeGetVersion(ctypes.byref(version))
        self.version = version.value
        """13000 for 13.0."""

    def attribute(self, number: int, device: int) -> int:
        value = ctypes.c_int(0)
        return (
            0
            if self._failed(self._library.cudaDeviceGetAttribute(ctypes.byref(value), number, device))
            else value.value
        )

    def allocate(self, num_bytes: int) -> int:
        """Address of fresh unified memory. Raises torch.OutOfMemoryError."""
        address = ctypes.c_void_p()
        code = self._library.cudaMallocManaged(
            ctypes.byref(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(ATTACH_GLOBAL)
        )
        if self._failed(code) or not address.value:
            raise torch.OutOfMemoryError(f"no {num_bytes:,} bytes of unified memory (CUDA error {code})")
        return address.value

    def free(self, address: int) -> None:
        self._failed(self._library.cudaFree(ctypes.c_void_p(address)))

    def advise(self, address: int, num_bytes: int, advice: int, device: int) -> int:
        """-> error code."""
        return self._failed(
            self._library.cudaMemAdvise(
                ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice), self._place(device)
            )
        )

    def _place(self, device: int) -> ctypes.c_int | MemLocation:
        return ctypes.c_int(device) if self.version < 13000 else MemLocation(LOCATION_DEVICE, device)

    def _failed(self, code: int) -> int:
        if code:
            self._library.cudaGetLastError()  # clears the error, which torch's next call would report
        return int(code)


def load_runtime() -> Runtime:
    """The CUDA runtime that torch has loaded; another copy would not share its state. Raises ConfigError."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            path = line.rstrip("\n").split(maxsplit=5)[5:]
            if path and os.path.basename(path[0]).startswith("libcudart.so"):
                return Runtime(ctypes.CDLL(path[0]))
    raise ConfigError("this torch has no shared CUDA runtime to allocate unified memory with")


def unavailable(device: torch.device, runtime: Runtime | None = None) -> str | None:
    """Why unified memory cannot be used on `device`; None: it can."""
    try:
        runtime = load_runtime() if runtime is None else runtime
    except ConfigError as error:
        return str(error)
    with current(device) as number:
        if not runtime.attribute(MANAGED_MEMORY, number):
            return f"{device} has no unified memory (cudaDevAttrManagedMemory is 0)"
        if not runtime.attribute(CONCURRENT_ACCESS, number):
            return (
                f"{device} cannot move pages of unified memory on demand (cudaDevAttrConcurrentManagedAccess is 0, as "
                "in virtual machines and on Windows)"
            )
    return None


def check_room(num_bytes: int, *, free: int, spill_bytes: int, host_free: int) -> None:
    """Raise torch.OutOfMemoryError unless all but `spill_bytes` of the cache fits the device and the rest the host.

    Unified memory would accept any size and then run at the speed of page faults.
    """
    beyond = num_bytes - free
    if beyond > spill_bytes:
        raise torch.OutOfMemoryError(
            f"unified_memory_level=1: the cache has {num_bytes:,} bytes, {free:,} of the device are free and only "
            f"{spill_bytes:,} (paused_buffer_size_gb) may lie beyond; lower buffer_size_gb, or raise the other"
        )
    if beyond > host_free:
        raise torch.OutOfMemoryError(
            f"unified_memory_level=1: {beyond:,} bytes of the cache lie beyond the device's memory, the host has "
            f"{host_free:,} to spare; lower paused_buffer_size_gb"
        )


def host_free_bytes() -> int:
    """Memory that the system can still give to a process, as it reports."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


class ManagedRegion:
    """Unified memory; its addresses never change.

    `release` gives no memory back by itself: pages leave the device when others need room. The content counts as gone
    all the same. `resident_bytes` is what is allocated, wherever its pages are.
    """

    addresses_stable = True

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        spill_bytes: int = 0,
        runtime: Runtime | None = None,
    ) -> None:
        """spill_bytes: how much of it may lie beyond the device's free memory."""
        self._runtime = runtime = load_runtime() if runtime is None else runtime
        self._device, self._num_bytes = device, math.prod(shape) * dtype.itemsize
        drop_cached(device)
        with current(device) as self._number:
            if device.type == "cuda":
                check_room(
                    self._num_bytes, free=free_bytes(device), spill_bytes=spill_bytes, host_free=host_free_bytes()
                )
            self._address = address = runtime.allocate(self._num_bytes)
            memory = ForeignMemory(address, self._num_bytes, lambda: runtime.free(address))
            self._advise(SET_PREFERRED, SET_ACCESSED_BY)
            self.tensor: Tensor = memory.tensor(device).view(dtype).view(tuple(shape))

    def resident_bytes(self) -> int:
        return self._num_bytes

    def release(self) -> None:
        wait(self._device)
        self.allow_migration()

    def restore(self) -> None:
        self.end_migration()

    def allow_migration(self) -> None:
        self._advise(UNSET_PREFERRED)

    def end_migration(self) -> None:
        self._advise(SET_PREFERRED)

    def _advise(self, *hints: int) -> None:
        with current(self._device):
            for advice in hints:
                if code := self._runtime.advise(self._address, self._num_bytes, advice, self._number):
                    log.warning("unified memory: cudaMemAdvise(%d) gave CUDA error %d", advice, code)  # costs speed

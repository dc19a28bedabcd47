"""Device memory that is given back and taken again at the same addresses, by the CUDA driver's virtual memory calls.

    reserve ------------------------------------------------------------> free (with the last tensor)
       |   map: create, map and release a handle, chunk by chunk,            ^
       |        then set access for all                                      |
       +--> [ chunk | chunk | chunk ]  --unmap the whole: memory given back--+
                                       <-map: new memory, same addresses

Handles are released as soon as they are mapped: the mapping alone holds the memory, so that one call gives it back.
Source: cuMemMap and its neighbours, CUDA Driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_infer.errors import ConfigError
from megatron_infer.memory.regions.cuda import FixedPages, ForeignMemory, current, drop_cached, free_bytes, wait

log = logging.getLogger("megatron_infer")

CHUNK_BYTES = 256 << 20
"""Bytes of one allocation: running out of memory is found early, and a pool takes few calls."""
OUT_OF_MEMORY = 2
VIRTUAL_MEMORY_SUPPORTED = 102
PINNED, DEVICE, READ_WRITE, RECOMMENDED = 1, 1, 3, 1


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", AllocationFlags),
    ]


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


_PTR, _SIZE, _FLAGS = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_ulonglong
SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuMemGetAllocationGranularity": (ctypes.POINTER(_SIZE), ctypes.POINTER(AllocationProp), ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(_PTR), _SIZE, _SIZE, _PTR, _FLAGS),
    "cuMemAddressFree": (_PTR, _SIZE),
    "cuMemCreate": (ctypes.POINTER(_FLAGS), _SIZE, ctypes.POINTER(AllocationProp), _FLAGS),
    "cuMemRelease": (_FLAGS,),
    "cuMemMap": (_PTR, _SIZE, _SIZE, _FLAGS, _FLAGS),
    "cuMemUnmap": (_PTR, _SIZE),
    "cuMemSetAccess": (_PTR, _SIZE, ctypes.POINTER(AccessDesc), _SIZE),
}
"""Driver call -> types of its arguments; each returns a CUresult."""


class DriverError(RuntimeError):
    """A driver call that returned something other than success."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} gave CUDA driver error {code} ({text})")
        self.code = code


class Driver:
    """The calls of libcuda that virtual memory needs. Raises ConfigError where it lacks one."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._calls = {}
        for name, types in SIGNATURES.items():
            try:
                call = getattr(library, name)
            except AttributeError as error:
                raise ConfigError(f"the CUDA driver has no {name}: {error}; update the driver") from error
            call.argtypes, call.restype = types, ctypes.c_int
            self._calls[name] = call

    def call(self, name: str, *arguments: object) -> None:
        """Raises DriverError unless the driver returns success."""
        code = self._calls[name](*arguments)
        if code:
            text = ctypes.c_char_p()
            self._calls["cuGetErrorString"](code, ctypes.byref(text))
            raise DriverError(name, code, (text.value or b"unknown").decode())

    def attribute(self, number: int, device: int) -> int:
        value = ctypes.c_int(0)
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value


def load_driver() -> Driver:
    """The system's driver, initialised. Raises ConfigError with the reason where there is none."""
    try:
        driver = Driver(ctypes.CDLL("libcuda.so.1"))
        driver.call("cuInit", 0)
    except (OSError, DriverError) as error:
        raise ConfigError(f"no CUDA driver to call: {error}") from error
    return driver


def unavailable(device: torch.device, driver: Driver | None = None) -> str | None:
    """Why the driver's virtual memory cannot be used on `device`; None: it can."""
    try:
        driver = load_driver() if driver is None else driver
        with current(device) as number:
            supported = driver.attribute(VIRTUAL_MEMORY_SUPPORTED, number)
    except (ConfigError, DriverError) as error:
        return str(error)
    return None if supported else f"{device} has no virtual memory management (driver attribute 102)"


class AddressRange:
    """Reserved addresses; the first `mapped_bytes` of them have memory. A call that fails is undone."""

    def __init__(self, driver: Driver, device: torch.device, num_bytes: int, chunk_bytes: int) -> None:
        self._driver, self._device = driver, device
        with current(device) as self._number:
            where = Location(DEVICE, self._number)
            self._prop = AllocationProp(type=PINNED, location=where)
            self._access = AccessDesc(location=where, flags=READ_WRITE)
            granularity = ctypes.c_size_t(0)
            driver.call(
                "cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._prop), RECOMMENDED
            )
            grain = granularity.value
            self.num_bytes = -(-num_bytes // grain) * grain
            self._chunk_bytes = -(-chunk_bytes // grain) * grain
            address = ctypes.c_uint64(0)
            driver.call("cuMemAddressReserve", ctypes.byref(address), self.num_bytes, 0, 0, 0)
        self.address = address.value
        self.mapped_bytes = 0
        self._unreleased: list[int] = []
        """Handles whose release failed: they hold memory beside the mapping."""

    def map(self) -> None:
        """Map memory behind all addresses. Raises DriverError; then none of them has memory."""
        with current(self._device):
            try:
                while self.mapped_bytes < self.num_bytes:
                    self._map_chunk(min(self._chunk_bytes, self.num_bytes - self.mapped_bytes))
                self._driver.call("cuMemSetAccess", self.address, self.num_bytes, ctypes.byref(self._access), 1)
            except BaseException:
                self._unmap()
                self._release_handles()
                raise

    def unmap(self) -> None:
        """Give the memory back. Raises DriverError; then all of it is still there."""
        with current(self._device):
            wait(self._device)
            self._release_handles()
            self._unmap()

    def close(self) -> None:
        """Give memory and addresses back; failures are logged."""
        try:
            if self.mapped_bytes:
                self.unmap()
            with current(self._device):
                self._release_handles()
                self._driver.call("cuMemAddressFree", self.address, self.num_bytes)
        except DriverError as error:
            log.warning("%d bytes of KV cache at %#x were not given back: %s", self.num_bytes, self.address, error)

    def _map_chunk(self, size: int) -> None:
        handle = ctypes.c_ulonglong(0)
        self._driver.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._prop), 0)
        self._unreleased.append(handle.value)
        try:
            self._driver.call("cuMemMap", self.address + self.mapped_bytes, size, 0, handle.value, 0)
            self.mapped_bytes += size
        finally:
            self._release_handles()

    def _release_handles(self) -> None:
        while self._unreleased:
            self._driver.call("cuMemRelease", self._unreleased[-1])
            self._unreleased.pop()

    def _unmap(self) -> None:
        if self.mapped_bytes:
            self._driver.call("cuMemUnmap", self.address, self.mapped_bytes)
            self.mapped_bytes = 0


class VmmRegion(FixedPages):
    """Device memory whose addresses stay reserved while it is released; touching it then is an illegal access.

    Needs no package and no LD_PRELOAD. On a "cpu" device the tensor lies over the addresses that `driver` gives.
    """

    addresses_stable = True

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, driver: Driver | None = None
    ) -> None:
        """Raises torch.OutOfMemoryError, or ConfigError where the driver refuses."""
        self._device, self._num_bytes = device, math.prod(shape) * dtype.itemsize
        drop_cached(device)
        try:
            self._range = AddressRange(
                load_driver() if driver is None else driver, device, self._num_bytes, CHUNK_BYTES
            )
        except DriverError as error:
            raise ConfigError(
                f"static_kv_memory_pointers=True: {error}; set static_kv_memory_pointers=False"
            ) from error
        try:
            self._map()
            memory = ForeignMemory(self._range.address, self._num_bytes, self._range.close)
        except BaseException:
            self._range.close()
            raise
        self.tensor: Tensor = memory.tensor(device).view(dtype).view(tuple(shape))

    def resident_bytes(self) -> int:
        return min(self._range.mapped_bytes, self._num_bytes)

    def release(self) -> None:
        try:
            self._range.unmap()
        except DriverError as error:
            raise RuntimeError(f"the KV cache's {self._num_bytes:,} bytes stay where they are: {error}") from error

    def restore(self) -> None:
        drop_cached(self._device)
        self._map()

    def _map(self) -> None:
        try:
            self._range.map()
        except DriverError as error:
            free = f", {free_bytes(self._device):,} are free" if self._device.type == "cuda" else ""
            message = f"the KV cache needs {self._range.num_bytes:,} bytes of {self._device}{free}: {error}"
            if error.code == OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(f"{message}; free memory there and try again") from error
            raise RuntimeError(message) from error

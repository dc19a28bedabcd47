"""Memory of one large tensor that can be given back and taken again: which kind of it a machine has, and how it works.

    place   asked for                    implementation    release                         address after restore
    CPU     (unified memory is the same) `MappedRegion`    pages back to the system        may differ
    CPU     static pointers              `MappedRegion`    pages back, mapping kept        the same
    CUDA    nothing                      `CudaRegion`      torch's allocator emptied       may differ
    CUDA    static pointers              `SaverRegion`     torch_memory_saver pauses       the same
    CUDA    unified memory               `ManagedRegion`   nothing: pages leave on demand  the same

The only place beside forward/device.py that may touch torch.cuda for the engine's own tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import sys
import uuid
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_infer.errors import ConfigError

log = logging.getLogger("megatron_infer")

DISCARDS_PAGES = sys.platform == "linux" and hasattr(mmap, "MADV_DONTNEED")
"""Whether MADV_DONTNEED takes pages away at once, whoever looks at them; elsewhere only unmapping does."""
SAVER_MARGIN_BYTES = 64 << 20
"""Free device memory asked for beyond the tensor before torch_memory_saver maps it: it ends the process when short."""


class Region(Protocol):
    """One tensor's memory. `release` and `restore` alternate; the tensor exists only between restore and release."""

    addresses_stable: bool
    """`tensor` keeps its data pointer over release and restore."""

    @property
    def tensor(self) -> Tensor: ...

    def resident_bytes(self) -> int:
        """Bytes of memory the tensor takes now; pages never touched take none."""
        ...

    def release(self) -> None:
        """Drop the content; the memory is back with the system before this returns. On an error nothing happened."""
        ...

    def restore(self) -> None:
        """Memory for `tensor` again, content undefined. Raises MemoryError or torch.OutOfMemoryError, then it stays
        released and may be tried again."""
        ...


def make_region(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, static_pointers: bool, unified_memory: bool
) -> Region:
    """The region that does what is asked for on `device`. Raises ConfigError with the remedy where none does."""
    if device.type == "cpu":
        return MappedRegion(shape, dtype, keep_mapping=static_pointers)
    if unified_memory:
        return ManagedRegion(shape, dtype, device)
    return SaverRegion(shape, dtype, device) if static_pointers else CudaRegion(shape, dtype, device)


def make_host_region(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Region:
    """Host memory; pinned where a CUDA device copies from and to it without waiting."""
    return PinnedRegion(shape, dtype) if pinned else MappedRegion(shape, dtype, keep_mapping=False)


def wait(device: torch.device) -> None:
    """Return once everything launched on `device` is done; errors of it surface here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class MappedRegion:
    """An anonymous mapping of its own: pages cost nothing until touched and go back even while others see the tensor.

    With keep_mapping the address range stays reserved while released. Who reads a stale tensor then sees zeros.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, *, keep_mapping: bool) -> None:
        if keep_mapping and not DISCARDS_PAGES:
            raise ConfigError(
                f"static_kv_memory_pointers=True needs Linux on a CPU, this is {sys.platform}: pages of a mapping that "
                "stays cannot be given back here; set static_kv_memory_pointers=False"
            )
        self._shape, self._dtype = tuple(shape), dtype
        self.addresses_stable = keep_mapping
        self._num_bytes = math.prod(shape) * dtype.itemsize
        self._mapping: mmap.mmap | None = None
        self._tensor: Tensor | None = None
        self.restore()

    @property
    def tensor(self) -> Tensor:
        assert self._tensor is not None, "the region is released"
        return self._tensor

    def resident_bytes(self) -> int:
        return 0 if self._tensor is None else resident_bytes(self._tensor.data_ptr(), self._num_bytes)

    def release(self) -> None:
        assert self._mapping is not None, "the region is released already"
        if DISCARDS_PAGES:
            self._mapping.madvise(mmap.MADV_DONTNEED)
        if not self.addresses_stable:
            # Never close(): torch keeps no hold on the buffer, a tensor still alive would point nowhere. The mapping
            # goes with the last tensor that looks at it.
            self._mapping = self._tensor = None

    def restore(self) -> None:
        if self._mapping is not None:
            return
        try:
            mapping = mmap.mmap(-1, self._num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the system gives no {self._num_bytes:,} bytes: {error}") from error
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            self._tensor = torch.frombuffer(mapping, dtype=self._dtype).view(self._shape)
        self._mapping = mapping


class PinnedRegion:
    """Page-locked host memory. What is released stays with torch's own pool of it, since pinning is slow; torch waits
    for copies under way before it hands such memory out again, and rounds up to powers of two."""

    addresses_stable = False

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._shape, self._dtype = tuple(shape), dtype
        self._tensor: Tensor | None = None
        self.restore()

    @property
    def tensor(self) -> Tensor:
        assert self._tensor is not None, "the region is released"
        return self._tensor

    def resident_bytes(self) -> int:
        return 0 if self._tensor is None else self._tensor.nbytes

    def release(self) -> None:
        self._tensor = None

    def restore(self) -> None:
        with torch.inference_mode(False):
            self._tensor = torch.empty(self._shape, dtype=self._dtype, pin_memory=True)


class CudaRegion:
    """Device memory of torch's allocator: the tensor stays, its storage shrinks to nothing.

    The allocator's cache is emptied before memory is taken, too: a piece of a larger cached segment could not go back.
    """

    addresses_stable = False

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        torch.cuda.empty_cache()
        self.tensor = torch.empty(shape, dtype=dtype, device=device)
        self._num_bytes = self.tensor.nbytes

    def resident_bytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    def release(self) -> None:
        wait(self.tensor.device)
        self.tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()

    def restore(self) -> None:
        torch.cuda.empty_cache()
        self.tensor.untyped_storage().resize_(self._num_bytes)


class SaverRegion:
    """Device memory whose address range torch_memory_saver keeps while the memory is gone.

    A tag of its own for each region: the saver ends the process when it pauses or resumes anything twice, so two
    engines must not share one. Memory another process takes between the check in `restore` and the mapping ends the
    process too (torch_memory_saver 0.0.10).
    """

    addresses_stable = True

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._saver = _load_saver()
        self._tag = f"kv_cache-{uuid.uuid4().hex[:12]}"
        try:
            with torch.cuda.device(device), self._saver.region(tag=self._tag):
                self.tensor = torch.empty(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError, AssertionError) as error:
            raise ConfigError(
                f"static_kv_memory_pointers=True: torch_memory_saver does not work here ({error}); "
                "set static_kv_memory_pointers=False, or unified_memory_level=1, which keeps its addresses too"
            ) from error
        self._released = False
        self._pause_at_end()

    def resident_bytes(self) -> int:
        return 0 if self._released else self.tensor.nbytes

    def release(self) -> None:
        wait(self.tensor.device)
        self._at_end.detach()
        self._saver.pause(self._tag)
        self._released = True

    def restore(self) -> None:
        torch.cuda.empty_cache()
        free, needed = torch.cuda.mem_get_info(self.tensor.device)[0], self.tensor.nbytes + SAVER_MARGIN_BYTES
        if free < needed:
            raise torch.OutOfMemoryError(
                f"the KV cache needs {self.tensor.nbytes:,} bytes of {self.tensor.device} (and "
                f"{SAVER_MARGIN_BYTES:,} to spare), {free:,} are free; free memory there and resume again"
            )
        self._saver.resume(self._tag)
        self._released = False
        self._pause_at_end()

    def _pause_at_end(self) -> None:
        """The saver's pool keeps a dropped tensor's memory; pausing gives it back when the region goes."""
        self._at_end = weakref.finalize(self, _pause, self._saver, self._tag, self.tensor.device)
        self._at_end.atexit = False


def _pause(saver: Any, tag: str, device: torch.device) -> None:
    wait(device)
    saver.pause(tag)


def _load_saver() -> Any:
    """torch_memory_saver's process-wide object, in the mode that needs no LD_PRELOAD unless that is set up."""
    try:
        from torch_memory_saver import torch_memory_saver as saver
    except ImportError as error:
        raise ConfigError(
            f"static_kv_memory_pointers=True needs torch_memory_saver on a GPU, which is not there ({error}); "
            "pip install torch-memory-saver, or set static_kv_memory_pointers=False"
        ) from error
    if "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
        with contextlib.suppress(AttributeError, AssertionError):  # somebody used it before: its mode stands
            saver.hook_mode = "torch"
    return saver


class ManagedRegion:
    """CUDA unified memory: may exceed the device's, pages move between device and host on their own.

    `release` gives nothing back by itself: pages leave the device when others need room, and the addresses stay. Its
    content counts as gone all the same (kv_cache_management_mode="recompute"). `resident_bytes` is what is allocated,
    wherever its pages are.
    """

    addresses_stable = True

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = _ManagedMemory(num_bytes, device)  # the tensor keeps it alive
        self.tensor = torch.as_tensor(memory, device=device).view(dtype).view(tuple(shape))

    def resident_bytes(self) -> int:
        return self.tensor.nbytes

    def release(self) -> None:
        wait(self.tensor.device)

    def restore(self) -> None:
        return


class _ManagedMemory:
    """cudaMallocManaged behind `__cuda_array_interface__` (as bytes: it knows no bfloat16); freed with its tensor."""

    MANAGED_MEMORY, ATTACH_GLOBAL, PREFERRED_LOCATION, ACCESSED_BY, LOCATION_DEVICE = 83, 1, 3, 5, 1

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        runtime = _load_cudart()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the context exists from here on
            number, supported, address = torch.cuda.current_device(), ctypes.c_int(0), ctypes.c_void_p()
            code = runtime.cudaDeviceGetAttribute(ctypes.byref(supported), self.MANAGED_MEMORY, number)
            if code or not supported.value:
                raise ConfigError(f"unified_memory_level=1: {device} has no unified memory; set unified_memory_level=0")
            code = runtime.cudaMallocManaged(
                ctypes.byref(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(self.ATTACH_GLOBAL)
            )
            if code or not address.value:
                runtime.cudaGetLastError()  # or the next call of torch would report it
                raise torch.OutOfMemoryError(f"no {num_bytes:,} bytes of unified memory (CUDA error {code})")
            weakref.finalize(self, runtime.cudaFree, ctypes.c_void_p(address.value)).atexit = False
            self._advise(runtime, address.value, num_bytes, number)
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address.value, False),
            "strides": None,
            "version": 2,
        }

    def _advise(self, runtime: ctypes.CDLL, address: int, num_bytes: int, number: int) -> None:
        """Prefer the device; only a hint, so that refusing it costs speed and nothing else."""
        is_old = int(str(torch.version.cuda).partition(".")[0]) < 13
        where = ctypes.c_int(number) if is_old else _MemLocation(self.LOCATION_DEVICE, number)
        for advice in (self.PREFERRED_LOCATION, self.ACCESSED_BY):
            code = runtime.cudaMemAdvise(
                ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice), where
            )
            if code:
                runtime.cudaGetLastError()
                log.warning("unified memory: cudaMemAdvise(%d) gave CUDA error %d", advice, code)


class _MemLocation(ctypes.Structure):
    """cudaMemLocation, passed by value since CUDA 13 where a device number was."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


def _load_cudart() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded; another one would not share its state."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            path = line.rstrip("\n").split(maxsplit=5)[5:]
            if path and os.path.basename(path[0]).startswith("libcudart.so"):
                return ctypes.CDLL(path[0])
    raise ConfigError(
        "unified_memory_level=1: this torch has no shared CUDA runtime to allocate with; set unified_memory_level=0"
    )


def resident_bytes(address: int, num_bytes: int) -> int:
    """Bytes of the pages of a mapping that are in memory, by the system's own account (mincore).

    Pages that were only read count though they share one page of zeros. Where the system cannot tell: num_bytes.
    """
    page = mmap.PAGESIZE
    flags = np.zeros(-(-num_bytes // page), dtype=np.uint8)
    try:
        mincore = ctypes.CDLL(None).mincore
    except (OSError, AttributeError):
        return num_bytes
    code = mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_void_p(flags.ctypes.data))
    return num_bytes if code else min(num_bytes, int(np.count_nonzero(flags & 1)) * page)

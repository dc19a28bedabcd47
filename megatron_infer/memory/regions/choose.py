"""Memory of one large tensor that can be given back and taken again: which kinds a machine has, and how each works.

    place  asked for         implementation                         release                          addresses then
    CPU    (unified: same)   `MappedRegion`                         pages back to the system         may differ
    CPU    static pointers   `MappedRegion`                         pages back, mapping kept         the same
    CUDA   plain             `CudaRegion`                           torch's allocator emptied        may differ
    CUDA   static pointers   `SaverRegion`                          torch_memory_saver pauses        the same
             without that package: ConfigError
    CUDA   unified memory    `ManagedRegion`                        nothing: pages leave on demand   the same
             without unified memory: a warning, and as if it were not asked for

`table` says which of them this machine uses, and why. Only `memory.regions` and `memory.copy_pipeline` may touch
torch.cuda for the engine's large tensors.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import sys
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_infer.errors import ConfigError
from megatron_infer.memory.regions import managed, saver
from megatron_infer.memory.regions.cuda import FixedPages, drop_cached
from megatron_infer.memory.regions.cuda import wait as wait

log = logging.getLogger("megatron_infer")

DISCARDS_PAGES = sys.platform == "linux" and hasattr(mmap, "MADV_DONTNEED")
"""Whether MADV_DONTNEED takes pages away at once, even while tensors view them; elsewhere only unmapping does."""


class Region(Protocol):
    """One tensor's memory. `release` and `restore` alternate; the tensor exists only between restore and release."""

    addresses_stable: bool
    """`tensor` keeps its data pointer over release and restore, and nothing else gets its addresses in between."""

    @property
    def tensor(self) -> Tensor: ...

    def resident_bytes(self) -> int:
        """Bytes of memory the tensor takes now; pages that were never touched take none."""
        ...

    def release(self) -> None:
        """Drop the content; the system has the memory back before this returns. On an error nothing has changed."""
        ...

    def restore(self) -> None:
        """Take memory for `tensor` again, content undefined. Raises MemoryError or torch.OutOfMemoryError; then the
        region is still released, and the call may be repeated."""
        ...

    def allow_migration(self) -> None:
        """The tensor keeps its content and is not used for a while: pages that can leave the device alone may do so."""
        ...

    def end_migration(self) -> None:
        """End `allow_migration`: pages that left come back when they are used."""
        ...


def make_region(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    static_pointers: bool,
    unified_memory: bool,
    spill_bytes: int = 0,
) -> Region:
    """The region for these options on `device`. Raises ConfigError with the remedy where no kind serves them.

    spill_bytes: how much of unified memory may lie beyond the device's free memory.
    """
    if device.type == "cpu":
        return MappedRegion(shape, dtype, keep_mapping=static_pointers)
    if unified_memory:
        if (reason := managed.unavailable(device)) is None:
            return managed.ManagedRegion(shape, dtype, device, spill_bytes=spill_bytes)
        log.warning(
            "unified_memory_level=1: %s; the cache takes plain device memory, all %s bytes of it (with "
            "paused_buffer_size_gb), which a suspend in the mode persist keeps",
            reason,
            f"{math.prod(shape) * dtype.itemsize:,}",
        )
    if not static_pointers:
        return CudaRegion(shape, dtype, device)
    if (reason := saver.unavailable()) is not None:
        raise ConfigError(f"static_kv_memory_pointers=True: {reason}, or set static_kv_memory_pointers=False")
    return saver.SaverRegion(shape, dtype, device)


def devices() -> list[torch.device]:
    """The kinds of device this machine has."""
    return [torch.device(name) for name in ("cpu", "cuda") if name == "cpu" or torch.cuda.is_available()]


def table(device: torch.device) -> list[tuple[str, str, str]]:
    """The memory of a cache on `device`: (asked for, implementation, why not the preferred one)."""
    if device.type == "cpu":
        kept = "MappedRegion" if DISCARDS_PAGES else "not available"
        why = "" if DISCARDS_PAGES else f"pages of a mapping that stays cannot be given back on {sys.platform}"
        return [("plain", "MappedRegion", ""), ("static pointers", kept, why), ("unified memory", "MappedRegion", "")]
    no_managed, no_saver = managed.unavailable(device), saver.unavailable()
    return [
        ("plain", "CudaRegion", ""),
        ("static pointers", "not available" if no_saver else "SaverRegion", no_saver or ""),
        ("unified memory", "CudaRegion" if no_managed else "ManagedRegion", no_managed or ""),
    ]


class MappedRegion(FixedPages):
    """An anonymous mapping: pages cost nothing until touched, and go back to the system even while tensors view them.

    With keep_mapping the address range stays reserved while released; a stale tensor then reads zeros.
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
            # Never close(): torch keeps no reference to the buffer, and a tensor that is still alive would point to
            # unmapped memory. The mapping goes with the last tensor over it.
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


class CudaRegion(FixedPages):
    """Device memory of torch's allocator: the tensor stays, its storage shrinks to zero bytes.

    The allocator's cache is also emptied before memory is taken: a part of a larger cached segment could not be given
    back.
    """

    addresses_stable = False

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        drop_cached(device)
        self.tensor = torch.empty(shape, dtype=dtype, device=device)
        self._num_bytes = self.tensor.nbytes

    def resident_bytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    def release(self) -> None:
        wait(self.tensor.device)
        self.tensor.untyped_storage().resize_(0)
        drop_cached(self.tensor.device)

    def restore(self) -> None:
        drop_cached(self.tensor.device)
        self.tensor.untyped_storage().resize_(self._num_bytes)


def resident_bytes(address: int, num_bytes: int) -> int:
    """Bytes of a mapping's pages that are in memory, as the system counts them (mincore).

    Pages that were only read count, though they share one page of zeros. Where the system cannot tell: num_bytes.
    """
    page = mmap.PAGESIZE
    flags = np.zeros(-(-num_bytes // page), dtype=np.uint8)
    try:
        mincore = ctypes.CDLL(None).mincore
    except (OSError, AttributeError):
        return num_bytes
    code = mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_void_p(flags.ctypes.data))
    return num_bytes if code else min(num_bytes, int(np.count_nonzero(flags & 1)) * page)

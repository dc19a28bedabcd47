"""A stand-in of torch_memory_saver 0.0.10, with its signatures: host memory that faults while it is paused.

As strict as the package, which ends the process where something is refused: here that is `Ended`. Fresh memory is
dirty. One allocation in a region, as this package makes; `limit` bytes are all there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode

LIBC = ctypes.CDLL(None, use_errno=True)
NO_ACCESS, READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE


class Ended(BaseException):
    """The package would have ended the process."""


@dataclass
class Segment:
    memory: mmap.mmap
    address: int
    num_bytes: int
    is_active: bool = True


class Saver:
    """`torch_memory_saver.torch_memory_saver`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.segments = limit, {}
        self._kwargs = {}
        self._impl = None

    @property
    def free_bytes(self) -> int:
        return self.limit - sum(one.num_bytes for one in self.segments.values() if one.is_active)

    @property
    def hook_mode(self):
        raise AttributeError

    @hook_mode.setter
    def hook_mode(self, hook_mode):
        if self._impl is not None:
            raise AttributeError("_impl_ctor_kwargs")
        self._kwargs["hook_mode"] = hook_mode

    def _ensure_initialized(self):
        if self._impl is None:
            assert self._kwargs.get("hook_mode") == "torch", "TorchMemorySaver observes invalid LD_PRELOAD."
            self._impl = self._kwargs

    @contextlib.contextmanager
    def region(self, tag="default", enable_cpu_backup=False, enable_disk_backup=False, cpu_backup_backend=None):
        self._ensure_initialized()
        assert not (enable_cpu_backup or enable_disk_backup or cpu_backup_backend), "not what this package asks for"
        with _Allocations(self, tag):
            yield

    def pause(self, tag=None):
        self._ensure_initialized()
        segment = self._found(tag, is_active=True)
        segment.memory.madvise(mmap.MADV_DONTNEED)
        self._protect(segment, NO_ACCESS)
        segment.is_active = False

    def resume(self, tag=None):
        self._ensure_initialized()
        segment = self._found(tag, is_active=False)
        if segment.num_bytes > self.free_bytes:
            raise Ended("cudaError error: 2 (out of memory)")
        self._protect(segment, READ_WRITE)
        segment.is_active = True
        ctypes.memset(segment.address, 0xA5, segment.num_bytes)

    def _found(self, tag, *, is_active):
        if tag not in self.segments or self.segments[tag].is_active is not is_active:
            raise Ended(f"Cannot {'pause' if is_active else 'resume'} {tag}")
        return self.segments[tag]

    def _protect(self, segment, how):
        size = -(-segment.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        assert LIBC.mprotect(ctypes.c_void_p(segment.address), ctypes.c_size_t(size), how) == 0

    def allocate(self, tag, num_bytes):
        if tag in self.segments:
            raise Ended("another allocation of the same tag is paused and resumed with it")
        if num_bytes > self.free_bytes:
            raise Ended("cudaError error: 2 (out of memory)")
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.segments[tag] = Segment(memory, tensor.data_ptr(), num_bytes)
        return tensor.fill_(0xA5)


class _Allocations(TorchFunctionMode):
    """`torch.empty` within a region takes its memory."""

    def __init__(self, saver, tag):
        super().__init__()
        self.saver, self.tag = saver, tag

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.empty:
            return func(*args, **(kwargs or {}))
        (shape,), dtype = args, kwargs["dtype"]
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        return self.saver.allocate(self.tag, num_bytes).view(dtype).view(tuple(shape))

"""How a device copies, waits and times: the only place that knows. On a CPU every call is a plain copy or a no-op."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.profiler
from torch import Tensor

from megatron_infer.errors import ConfigError
from megatron_infer.kernels.native import native_build
from megatron_infer.memory.regions.pinned import PinnedBuffer, PinnedPool
from megatron_infer.utils.host import cpu_has_bf16, free_host_bytes

_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
"""glibc's: without it freed tensors below its mmap threshold stay with the process."""

POLL_S = 5e-5
"""Seconds between two queries of an event where a wait is watched (`Device.on_wait`), after the first QUICK_LOOKS."""
QUICK_LOOKS = 200
ALIGNMENT = 16
"""Bytes: tensors in one buffer begin at multiples of it."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Device:
    """A torch device with the few operations a step needs, the same on CPU and CUDA.

    Everything is enqueued on the thread's current stream and runs in that order. The host waits only in `Event.wait`,
    `HostRead.wait` and `synchronize`, which count it in `syncs`; an upload waits only when more than MAX_RETIRED_BYTES
    of uploads are unfinished.
    """

    def __init__(self, name: str | torch.device = "auto") -> None:
        if str(name) == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.torch = torch.device(name)
        except RuntimeError:
            raise ConfigError(f"device {str(name)!r} is not one: auto, cpu, cuda or cuda:N") from None
        self.is_cuda = self.torch.type == "cuda"
        if self.is_cuda and self.torch.index is None and torch.cuda.is_available():
            # "cuda" is the calling thread's device: the same one for all threads from here on
            self.torch = torch.device("cuda", torch.cuda.current_device())
        self.syncs: Counter[str] = Counter()
        """How often the host waited for the device, by reason; on a CPU, how often it would have."""
        self.on_wait: Callable[[], None] | None = None
        """Called repeatedly while the host waits for an event of work that other ranks take part in; may raise."""
        self.pinned = PinnedPool(lambda: self.event("upload"))
        """Page-locked memory for copies to and from a GPU."""

    def make_current(self) -> None:
        """Make it the calling thread's device: a new thread has the first one, and kernels run on the thread's."""
        if self.is_cuda:
            self.check_available()
            torch.cuda.set_device(self.torch)

    def check_available(self) -> None:
        """Raise ConfigError where this process has no such GPU."""
        if not torch.cuda.is_available():
            build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
            raise ConfigError(
                f"{self.torch}: torch {torch.__version__} ({build}) finds no GPU here; take the device cpu"
            )
        if self.torch.index >= (count := torch.cuda.device_count()):
            raise ConfigError(f"{self.torch}: there are {count} GPUs here, cuda:0 to cuda:{count - 1}")

    def device_buffer(self, num_bytes: int) -> Tensor:
        """Zeros on the device, [num_bytes] uint8."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch)

    def upload(self, host: np.ndarray, target: Tensor) -> None:
        """Copy bytes host -> device on the current stream; does not wait, and `host` may be overwritten at once.

        host and target are contiguous and have the same size; their dtypes may differ.
        """
        source = torch.from_numpy(host).view(torch.uint8)
        target = target.view(torch.uint8)
        if not self.is_cuda:
            target.copy_(source)
            return
        buffer = self.pinned.take(max(1, host.nbytes))
        pinned = buffer.bytes_B[: host.nbytes]
        pinned.copy_(source)
        self.copy(pinned, target)
        buffer.event.record()
        self.pinned.retire(buffer)

    def to_device(self, array: np.ndarray) -> Tensor:
        """`array` as a tensor on the device, without waiting. The caller gives it up: a CPU's tensor is its memory."""
        if not self.is_cuda:
            return torch.from_numpy(array)
        array = np.ascontiguousarray(array)
        target = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=self.torch)
        self.upload(array.reshape(-1), target.view(-1))
        return target

    def begin_read(self, *tensors: Tensor) -> HostRead:
        """Start copying `tensors` to the host; `HostRead.wait` returns the copies after a single wait."""
        return HostRead(self, tensors)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy between device and page-locked memory, or on the device, in order with the current stream."""
        target.copy_(source, non_blocking=True)

    def event(self, name: str) -> Event:
        """An event to record in the device's work; waits for it count as `name`."""
        return Event(self, name)

    def range(self, name: str) -> AbstractContextManager[Any]:
        """A range for profilers: NVTX on CUDA, torch.profiler's elsewhere."""
        return torch.cuda.nvtx.range(name) if self.is_cuda else torch.profiler.record_function(name)

    def synchronize(self, name: str) -> None:
        """Wait for everything launched on the device; counts as `name`."""
        self.syncs[name] += 1
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def used_bytes(self) -> int:
        """Memory in use: of the device, by all processes (CUDA), or of this process (its resident set)."""
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
        """Give memory that was freed, but is cached for reuse, back to the system."""
        if self.is_cuda:
            torch.cuda.empty_cache()
        elif _MALLOC_TRIM is not None:
            _MALLOC_TRIM(0)

    def available_bytes(self) -> int:
        """Free memory, as the system reports it. Raises ConfigError without such a GPU."""
        if self.is_cuda:
            self.check_available()
            return int(torch.cuda.mem_get_info(self.torch)[0])
        return free_host_bytes()


class Event:
    """A point in the work of the stream that is current when it is recorded; on a CPU all work is done at once."""

    def __init__(self, device: Device, name: str) -> None:
        self._device, self._name = device, name
        self._event: Any = torch.cuda.Event() if device.is_cuda else None

    def record(self) -> None:
        if self._event is not None:  # by default it would be a stream of the thread's device
            self._event.record(torch.cuda.current_stream(self._device.torch))

    def is_done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Return once the device is past the event. Raises what `Device.on_wait` raises."""
        self._device.syncs[self._name] += 1
        if self._event is None:
            return
        if self._device.on_wait is not None:
            looks = 0
            while not self._event.query():
                self._device.on_wait()
                looks += 1
                time.sleep(POLL_S if looks > QUICK_LOOKS else 0.0)
        self._event.synchronize()


class HostRead:
    """A running device-to-host copy of some tensors' present content: they may be overwritten at once."""

    def __init__(self, device: Device, tensors: Sequence[Tensor]) -> None:
        self._device = device
        self._buffer: PinnedBuffer | None = None
        self._event = device.event("read")
        self._is_read = not tensors
        self._tensors: tuple[Tensor, ...]
        if device.is_cuda and tensors:
            sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
            self._buffer = device.pinned.take(max(1, sum(sizes)))
            parts, offset = [], 0
            for tensor, size in zip(tensors, sizes, strict=True):
                part = self._buffer.bytes_B[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                device.copy(tensor, part)
                parts.append(part)
                offset += size
            self._tensors = tuple(parts)
            self._event.record()
        else:
            self._tensors = tuple(tensor.clone() for tensor in tensors)

    def is_done(self) -> bool:
        return self._is_read or self._event.is_done()

    def wait(self) -> tuple[Tensor, ...]:
        """The host tensors, once the copy is done; the caller may keep them. Waits only the first time."""
        if not self._is_read:
            self._event.wait()
            self._is_read = True
            if self._buffer is not None:
                self._tensors = tuple(tensor.clone() for tensor in self._tensors)
                self._device.pinned.give_back(self._buffer)
                self._buffer = None
        return self._tensors


def choose_dtype(name: str, device: Device, *, linear_backend: str = "auto", trains: bool = False) -> torch.dtype:
    """The compute dtype for "auto" or a name.

    linear_backend: the engine's option. On a CPU the native kernels are faster in bfloat16 than in float32 everywhere;
    torch is much slower on most, and so it is in training (trains: it multiplies, too).
    """
    if name == "auto":
        if device.is_cuda or (not trains and native_build.runs_linears(linear_backend)):
            return torch.bfloat16
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() and cpu_has_bf16() else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it was raised because there was no memory, on a device or the host."""
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return on_cpu or isinstance(error, (torch.OutOfMemoryError, MemoryError))

"""Copies between a pool on a GPU and pinned host memory, in pieces, so that the bus never waits for the kernels.

    offload   steps     gather 1 | gather 2 |          | gather 3 |           the caller's stream: in order with steps
              copy                | copy 1      | copy 2         | copy 3 |    all copies over the bus, in order

    reload    copy      copy 1   | copy 2   | copy 3   |
              scatter            | scatter 1 | scatter 2 | scatter 3 |         of a restore: steps need not wait for it

Two staging buffers on the device take turns. What is swapped in is scattered on the steps' stream, since the next step
reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_infer.memory.device import Device
from megatron_infer.memory.regions.cuda import wait
from megatron_infer.memory.regions.pinned import PinnedPool

NUM_STAGING = 2
WORD_BYTES = 8


class Stream(Enum):
    """Where work is enqueued."""

    STEPS = "steps"
    """The caller's current stream."""
    COPY = "copy"
    """Copies between host and staging buffers."""
    SCATTER = "scatter"
    """Copies from staging buffers into the pool, beside the steps."""


class DeviceStreams(Protocol):
    """The three streams of a device. An event marks a point in the work of one of them."""

    def upload(self, numbers: Sequence[int]) -> Tensor:
        """Numbers on the device, for work enqueued behind what STEPS has by now; nothing waits for the device.

        Where that work is on another stream, the caller keeps the tensor until the work is done.
        """
        ...

    def buffer(self, num_bytes: int) -> Tensor:
        """Device memory, [num_bytes] uint8, free for STEPS to use."""
        ...

    def run(self, work: Callable[[], object], on: Stream) -> None:
        """Enqueue `work`."""
        ...

    def record_event(self, on: Stream) -> Any:
        """An event behind everything enqueued there so far."""
        ...

    def wait_event(self, event: Any, on: Stream) -> None:
        """What is enqueued there from now on waits for `event`, on the device."""
        ...

    def is_done(self, event: Any) -> bool:
        """Whether the device is past it; does not wait."""
        ...

    def seconds(self, first: Any, last: Any) -> float:
        """Time between two events, by the device's clock; the host waits for the second."""
        ...


class CudaStreams:
    """The current stream and two of its own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._own = {on: torch.cuda.Stream(device.torch) for on in Stream if on is not Stream.STEPS}

    def upload(self, numbers: Sequence[int]) -> Tensor:
        return self._device.to_device(np.array(numbers, dtype=np.int64))

    def buffer(self, num_bytes: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch)

    def run(self, work: Callable[[], object], on: Stream) -> None:
        if on is Stream.STEPS:
            work()
            return
        with torch.cuda.stream(self._own[on]):
            work()

    def record_event(self, on: Stream) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream(on))
        return event

    def wait_event(self, event: Any, on: Stream) -> None:
        self._stream(on).wait_event(event)

    def is_done(self, event: Any) -> bool:
        return bool(event.query())

    def seconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def _stream(self, on: Stream) -> Any:
        return torch.cuda.current_stream(self._device.torch) if on is Stream.STEPS else self._own[on]


@dataclass(slots=True)
class _Staging:
    memory_X: Tensor
    last_use: Any
    """Event: the buffer is free once the device is past it."""


class CopyPipeline:
    """Copies places of a pool to host slots and back. Calls only enqueue.

    The current stream must be the same one for every call.
    """

    def __init__(self, streams: DeviceStreams, pinned: PinnedPool) -> None:
        self.streams, self.pinned = streams, pinned
        self._staging: list[_Staging] = []
        self._turn = 0

    def offload(self, pool_NX: Tensor, index_S: Tensor, slots_SX: Tensor) -> None:
        """Copy place index_S[i] of the pool to slots_SX[i], host memory; in order with the steps."""
        streams, (staging, staged_SX) = self.streams, self._next(slots_SX)
        source_NX = words(pool_NX)
        streams.wait_event(staging.last_use, Stream.STEPS)
        streams.run(lambda: torch.index_select(source_NX, 0, index_S, out=words(staged_SX)), Stream.STEPS)
        streams.wait_event(streams.record_event(Stream.STEPS), Stream.COPY)
        streams.run(lambda: slots_SX.copy_(staged_SX, non_blocking=True), Stream.COPY)
        staging.last_use = streams.record_event(Stream.COPY)

    def reload(self, slots_SX: Tensor, pool_NX: Tensor, index_S: Tensor, *, on: Stream = Stream.STEPS) -> None:
        """Copy slots_SX[i], host memory, to place index_S[i] of the pool; `on` scatters."""
        streams, (staging, staged_SX) = self.streams, self._next(slots_SX)
        target_NX = words(pool_NX)
        streams.wait_event(staging.last_use, Stream.COPY)
        streams.run(lambda: staged_SX.copy_(slots_SX, non_blocking=True), Stream.COPY)
        streams.wait_event(streams.record_event(Stream.COPY), on)
        streams.run(lambda: target_NX.index_copy_(0, index_S, words(staged_SX)), on)
        staging.last_use = streams.record_event(on)

    def make_room(self, num_bytes: int) -> None:
        """Staging buffers for pieces of so many bytes."""
        if self._staging and self._staging[0].memory_X.nbytes < num_bytes:
            self.drop_staging()
        while len(self._staging) < NUM_STAGING:
            memory_X = self.streams.buffer(1 << (num_bytes - 1).bit_length())  # few sizes: it seldom grows
            self._staging.append(_Staging(memory_X, self.streams.record_event(Stream.STEPS)))

    def drop_staging(self) -> None:
        """Give the staging buffers back to torch's allocator, in order with the steps."""
        if self._staging:  # behind all copies: an interrupt may have come between one and its event
            for on in (Stream.COPY, Stream.SCATTER):
                self.streams.wait_event(self.streams.record_event(on), Stream.STEPS)
        self._staging = []

    def _next(self, slots_SX: Tensor) -> tuple[_Staging, Tensor]:
        """The staging buffer whose turn it is, and a part of it with the shape and dtype of `slots_SX`."""
        self.make_room(slots_SX.nbytes)
        self._turn = (self._turn + 1) % NUM_STAGING
        staging = self._staging[self._turn]
        return staging, staging.memory_X[: slots_SX.nbytes].view(slots_SX.dtype).view(slots_SX.shape)


class Stopwatch:
    """Times the copies between its construction and `stop`: by the device's clock where there is a pipeline."""

    def __init__(self, pipeline: CopyPipeline | None) -> None:
        self._streams = None if pipeline is None else pipeline.streams
        self._start = time.perf_counter() if self._streams is None else self._streams.record_event(Stream.STEPS)

    def stop(self) -> float:
        """Seconds; waits for the copies."""
        if self._streams is None:
            return time.perf_counter() - self._start
        self._streams.wait_event(self._streams.record_event(Stream.STEPS), Stream.COPY)
        return self._streams.seconds(self._start, self._streams.record_event(Stream.COPY))


def make_pipeline(device: torch.device) -> CopyPipeline | None:
    """None on a CPU: there the pool is in host memory, too, and a copy is done when its call returns."""
    if device.type != "cuda":
        return None
    wait(device)  # the device has a context from here on
    where = Device(device)
    return CopyPipeline(CudaStreams(where), where.pinned)


def words(tensor_NX: Tensor) -> Tensor:
    """The same memory as elements of eight bytes where that divides it: fewer elements are copied faster."""
    row_bytes = tensor_NX.shape[-1] * tensor_NX.itemsize
    aligned = row_bytes % WORD_BYTES == 0 and tensor_NX.data_ptr() % WORD_BYTES == 0
    return tensor_NX.view(torch.int64) if aligned else tensor_NX

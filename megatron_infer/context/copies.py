"""Copies between a pool on a GPU and pinned host memory, in pieces, so that the bus never waits for the kernels.

    main stream   gather 1 | gather 2 |          | gather 3 |  ...              the caller's: in order with steps
                       \\         \\       free 1 /
    side stream         copy 1 ------| copy 2 ------| copy 3 ------|            all copies of a pool, in order

Two staging buffers take turns. Back it is the other way round: copy, then scatter. Pieces are whole blocks, every layer
of them, not layers of all blocks: a place is one run of bytes on the host, so that a swap and an offload share slots,
and a restore is complete or undone before a step begins. The first step after it could begin earlier by at most its own
length if layers came one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_infer.context.regions.cuda import wait
from megatron_infer.context.regions.pinned import PinnedPool, machine_share

MAX_INDEX = 8192
"""Places of a piece at most: their numbers go through pinned memory of this size."""
NUM_UPLOADS = 8
NUM_STAGING = 2
WORD_BYTES = 8


class Lane(Protocol):
    """Two streams of a device. Marks are points on either, to be waited for."""

    def upload(self, numbers: Sequence[int]) -> Tensor:
        """Numbers on the device, for work on the main stream; nothing waits for the device."""
        ...

    def buffer(self, num_bytes: int) -> Tensor:
        """Device memory, [num_bytes] uint8, free for the main stream to use."""
        ...

    def run(self, work: Callable[[], object], *, side: bool) -> None:
        """Enqueue `work` on the side stream or on the main one, the caller's."""
        ...

    def mark(self, *, side: bool) -> Any:
        """Everything enqueued there so far."""
        ...

    def hold(self, mark: Any, *, side: bool) -> None:
        """What is enqueued there from now on waits for `mark`."""
        ...

    def seconds(self, first: Any, last: Any) -> float:
        """Between two marks, by the device's clock; waits for the second."""
        ...


class CudaLane:
    """The current stream and one of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._ring = [torch.empty(MAX_INDEX, dtype=torch.int64, pin_memory=True) for _ in range(NUM_UPLOADS)]
        self._read: list[Any] = [None] * NUM_UPLOADS
        self._turn = 0

    def upload(self, numbers: Sequence[int]) -> Tensor:
        turn, self._turn = self._turn, (self._turn + 1) % NUM_UPLOADS
        if self._read[turn] is not None:
            self._read[turn].synchronize()  # eight uploads ago
        staged = self._ring[turn][: len(numbers)]
        staged.copy_(torch.tensor(numbers, dtype=torch.int64))
        index = staged.to(self._device, non_blocking=True)
        self._read[turn] = self.mark(side=False)
        return index

    def buffer(self, num_bytes: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def run(self, work: Callable[[], object], *, side: bool) -> None:
        if not side:
            work()
            return
        with torch.cuda.stream(self._side):
            work()

    def mark(self, *, side: bool) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream(side))
        return event

    def hold(self, mark: Any, *, side: bool) -> None:
        self._stream(side).wait_event(mark)

    def seconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def _stream(self, side: bool) -> Any:
        return self._side if side else torch.cuda.current_stream(self._device)


@dataclass(slots=True)
class _Staging:
    memory_X: Tensor
    free: Any
    """Mark: its last use is over."""


class CopyPipeline:
    """Moves places of a pool to host slots and back. Calls only enqueue; `finish` waits.

    The current stream must be the same one for every call.
    """

    def __init__(self, lane: Lane, host: PinnedPool) -> None:
        self.lane, self.host = lane, host
        self._staging: list[_Staging] = []
        self._turn = 0

    def save(self, pool_NX: Tensor, places: Sequence[int], slots_SX: Tensor) -> None:
        """Copy places[i] of the pool into slots_SX[i], host memory."""
        lane, index = self.lane, self.lane.upload(places)
        staging, staged_SX = self._next(slots_SX)
        source_NX = words(pool_NX)
        lane.hold(staging.free, side=False)
        lane.run(lambda: torch.index_select(source_NX, 0, index, out=words(staged_SX)), side=False)
        lane.hold(lane.mark(side=False), side=True)
        lane.run(lambda: slots_SX.copy_(staged_SX, non_blocking=True), side=True)
        staging.free = lane.mark(side=True)

    def load(self, slots_SX: Tensor, pool_NX: Tensor, places: Sequence[int]) -> None:
        """Copy slots_SX[i] into places[i] of the pool."""
        lane, index = self.lane, self.lane.upload(places)
        staging, staged_SX = self._next(slots_SX)
        target_NX = words(pool_NX)
        lane.hold(staging.free, side=True)
        lane.run(lambda: staged_SX.copy_(slots_SX, non_blocking=True), side=True)
        lane.hold(lane.mark(side=True), side=False)
        lane.run(lambda: target_NX.index_copy_(0, index, words(staged_SX)), side=False)
        staging.free = lane.mark(side=False)

    def drop_staging(self) -> None:
        """Give the staging buffers back, in order with the main stream."""
        for staging in self._staging:
            self.lane.hold(staging.free, side=False)
        self._staging = []

    def _next(self, slots_SX: Tensor) -> tuple[_Staging, Tensor]:
        """The staging buffer whose turn it is, and the part of it that is as `slots_SX`."""
        if self._staging and self._staging[0].memory_X.nbytes < slots_SX.nbytes:
            self.drop_staging()
        while len(self._staging) < NUM_STAGING:
            memory_X = self.lane.buffer(1 << (slots_SX.nbytes - 1).bit_length())  # few sizes: it seldom grows
            self._staging.append(_Staging(memory_X, self.lane.mark(side=False)))
        self._turn = (self._turn + 1) % NUM_STAGING
        staging = self._staging[self._turn]
        return staging, staging.memory_X[: slots_SX.nbytes].view(slots_SX.dtype).view(slots_SX.shape)


class Stopwatch:
    """Time of the copies between its making and `stop`: by the device's clock where there is a pipeline."""

    def __init__(self, pipeline: CopyPipeline | None) -> None:
        self._lane = None if pipeline is None else pipeline.lane
        self._start = time.perf_counter() if self._lane is None else self._lane.mark(side=False)

    def stop(self) -> float:
        """Seconds; waits for the copies."""
        if self._lane is None:
            return time.perf_counter() - self._start
        self._lane.hold(self._lane.mark(side=False), side=True)
        return self._lane.seconds(self._start, self._lane.mark(side=True))


def make_pipeline(device: torch.device) -> CopyPipeline | None:
    """None on a CPU, where host memory is the pool's own kind and a copy is done when its call returns."""
    if device.type != "cuda":
        return None
    wait(device)  # the device has a context from here on
    return CopyPipeline(CudaLane(device), PinnedPool(machine_share()))


def words(tensor_NX: Tensor) -> Tensor:
    """The same memory as elements of eight bytes where that divides it: fewer of them move faster."""
    row_bytes = tensor_NX.shape[-1] * tensor_NX.itemsize
    aligned = row_bytes % WORD_BYTES == 0 and tensor_NX.data_ptr() % WORD_BYTES == 0
    return tensor_NX.view(torch.int64) if aligned else tensor_NX

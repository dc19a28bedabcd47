"""One pool of equal places, KV blocks or recurrent states, and what of it was swapped out to the host.

                               swap_out / swap_in
    pool (device), by place  <-------------------->  host slots, numbered by the caller: blocks and states of
                                                     evicted requests, one place to a slot

A pool has no memory of its own: `bind` says where it is, as long as it is there. Suffix NX: [places, ...].
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_infer.memory.copy_pipeline import CopyPipeline
from megatron_infer.memory.host_arena import HostArena
from megatron_infer.memory.regions.choose import wait

NUM_TIMINGS = 5
COPY_S_SMOOTHING = 0.3


class PoolMemory:
    """Places of one shape. The place `dummy` holds zeros, and padding may write to it."""

    def __init__(
        self,
        noun: str,
        place_shape: Sequence[int],
        dtype: torch.dtype,
        *,
        dummy: int,
        device: torch.device,
        num_host_slots: int,
        pipeline: CopyPipeline | None = None,
    ) -> None:
        """pipeline: makes the copies between device and host; None: the pool is in host memory itself."""
        self.noun, self._dummy = noun, dummy
        self.place_bytes = math.prod(place_shape) * dtype.itemsize
        self.layers: Sequence[Sequence[Tensor]] = ()
        """The pool's memory by layer: the parts of each layer, [places, ...] each; empty without memory."""
        self._device = device
        self._pool_NX: Tensor | None = None
        self._pipeline = pipeline
        self._swapped = HostArena(place_shape, dtype, pipeline=pipeline, max_slots=num_host_slots)
        self._swapped.reserve()
        self._timed = HostArena(place_shape, dtype, pipeline=pipeline, max_slots=1)
        self.copy_s = 0.0
        """Seconds to copy one place to the host or back, as last measured or seen; 0.0 before the first."""

    def bind(self, pool_NX: Tensor, layers: Sequence[Sequence[Tensor]]) -> None:
        """The pool is in this memory now, content undefined: zero the dummy. layers: the same memory by layer."""
        self._pool_NX, self.layers = pool_NX, layers
        self._zero_dummy()

    def unbind(self) -> None:
        """The memory is given back."""
        self._pool_NX, self.layers = None, ()

    @property
    def pool_NX(self) -> Tensor:
        assert self._pool_NX is not None, f"the pool of {self.noun} has no memory now"
        return self._pool_NX

    def host_bytes(self) -> int:
        """Host memory taken now by places that were swapped out."""
        return self._swapped.resident_bytes()

    # ------------------------------------------------------------------ host slots

    def swap_out(self, places: Sequence[int], slots: Sequence[int]) -> None:
        """Copy places[i] to slots[i], no slot twice. Raises MemoryError when the host has no room."""
        started = time.perf_counter()
        self._swapped.offload(slots, self.pool_NX, places)
        self._record_speed(started, len(places))

    def swap_in(self, places: Sequence[int], slots: Sequence[int]) -> None:
        """Copy slots[i] to places[i], no place twice; the slots keep their content."""
        started = time.perf_counter()
        self._swapped.reload(slots, self.pool_NX, places)
        self._record_speed(started, len(places))

    def _record_speed(self, started: float, count: int) -> None:
        if self._pipeline is None:  # with one, copies have only been enqueued
            self.copy_s += COPY_S_SMOOTHING * ((time.perf_counter() - started) / count - self.copy_s)

    def free_host_slots(self, slots: Iterable[int]) -> None:
        """Drop what these slots hold; slots that were never written are fine."""
        self._swapped.free(list(slots))

    # ------------------------------------------------------------------ content

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """(source, destination) places, one after the other: a place may be read after it was written."""
        pool_NX = self.pool_NX
        for source, destination in pairs:
            pool_NX[destination].copy_(pool_NX[source])

    def read(self, places: Sequence[int]) -> Tensor:
        """A copy of places on the host, [len(places), ...]."""
        return self.pool_NX.index_select(0, self._on_device(places)).cpu()

    def write(self, places: Sequence[int], content_NX: Tensor) -> None:
        """Put what `read` gave into `places`."""
        self.pool_NX.index_copy_(0, self._on_device(places), content_NX.to(self._device))

    def measure_copy_s(self) -> float:
        """Measure `copy_s` on the dummy: half a round trip, the median of a few."""
        pool_NX, seconds = self.pool_NX, []
        for _ in range(NUM_TIMINGS + 1):
            wait(self._device)
            start = time.perf_counter()
            self._timed.offload((0,), pool_NX, (self._dummy,))
            self._timed.reload((0,), pool_NX, (self._dummy,))
            wait(self._device)
            seconds.append((time.perf_counter() - start) / 2)
        self._timed.clear()
        self._zero_dummy()
        self.copy_s = statistics.median(seconds[1:])  # the first one pays for the memory
        return self.copy_s

    def _zero_dummy(self) -> None:
        self.pool_NX[self._dummy].zero_()

    def _on_device(self, places: Sequence[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self._device)

"""One pool of equal places, KV blocks or recurrent states, and what of it is on the host.

                copy_out / copy_back                      swap_out / swap_in
    host copy  <-------------------->  pool, by place  <-------------------->  host slots, numbered by their user
    of a suspend, layer by layer                                               requests that gave way, place by place

A pool has no memory of its own: `bind` says where it is, as long as it is there. Suffix NX: [places, ...].
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence, Set

import torch
from torch import Tensor

from megatron_infer.memory.copy_pipeline import CopyPipeline
from megatron_infer.memory.host_arena import HostArena, Tick
from megatron_infer.memory.regions.choose import wait
from megatron_infer.memory.suspend_copy import SuspendCopy

NUM_TIMINGS = 5
MOVE_SMOOTHING = 0.3


class PoolMemory:
    """Places of one shape, the one numbered `dummy` being zeros that padding may write to; knows no owners."""

    def __init__(
        self,
        noun: str,
        place_shape: Sequence[int],
        dtype: torch.dtype,
        *,
        num_places: int,
        dummy: int,
        device: torch.device,
        num_host_slots: int,
        pipeline: CopyPipeline | None = None,
    ) -> None:
        """pipeline: how copies between device and host are made; without one the pool is host memory itself."""
        self.noun, self.num_places, self.dummy = noun, num_places, dummy
        self.place_bytes = math.prod(place_shape) * dtype.itemsize
        self._device = device
        self._pool_NX: Tensor | None = None
        self._layers: Sequence[Sequence[Tensor]] = ()
        self._pipeline = pipeline
        self._swapped = HostArena(place_shape, dtype, pipeline=pipeline, max_slots=num_host_slots)
        self._swapped.reserve()
        self._offloaded = SuspendCopy(noun, pipeline)
        self._trial = HostArena(place_shape, dtype, pipeline=pipeline, max_slots=1)
        self.copy_s = 0.0
        """Seconds to move one place to the host or back, as last seen; 0.0: nobody has measured or moved yet."""

    def bind(self, pool_NX: Tensor, layers: Sequence[Sequence[Tensor]]) -> None:
        """The pool's memory is there, its content undefined: zero the dummy.

        layers: the same memory as the layers' parts, [places, ...] each.
        """
        self._pool_NX, self._layers = pool_NX, layers
        self._zero_dummy()

    def unbind(self) -> None:
        """Let go of memory that is given back."""
        self._pool_NX, self._layers = None, ()

    @property
    def pool_NX(self) -> Tensor:
        assert self._pool_NX is not None, f"the pool of {self.noun} has no memory now"
        return self._pool_NX

    def host_bytes(self) -> int:
        """Host memory taken now by the copy of a suspend and by places that were swapped out."""
        return self._offloaded.resident_bytes() + self._swapped.resident_bytes()

    # ------------------------------------------------------------------ the copy of a suspend

    @property
    def num_kept(self) -> int:
        return len(self._offloaded.places)

    def kept_bytes(self) -> int:
        """Host memory of the copy."""
        return self._offloaded.resident_bytes()

    def begin_copy(self, places: Sequence[int]) -> None:
        """`copy_out` of every layer keeps these; when one raises, `drop_copy` undoes all of it."""
        self._offloaded.begin(places, self.place_bytes)

    def copy_out(self, layer: int, tick: Tick) -> None:
        """Copy a layer of the places to the host."""
        self._offloaded.save(layer, self._layers[layer], tick)

    def check_kept(self, keep: Set[int]) -> None:
        """Assert that the copy has all of `keep`."""
        lost = keep - set(self._offloaded.places)
        assert not lost, (
            f"{self.noun} {sorted(lost)[:8]} ({len(lost)} in all) were not offloaded: their content is gone"
        )

    def begin_return(self, keep: Set[int]) -> None:
        """`copy_back` of every layer brings these back; the copy stays until `drop_copy`."""
        self._offloaded.choose(keep)

    def copy_back(self, layer: int, tick: Tick) -> None:
        """Copy a layer of the places to where it was; with a pipeline Stream.SCATTER has it last."""
        self._offloaded.load(layer, self._layers[layer], tick)

    def drop_copy(self) -> None:
        """No copy may be under way."""
        self._offloaded.clear()

    # ------------------------------------------------------------------ host slots

    def swap_out(self, places: Sequence[int], slots: Sequence[int]) -> None:
        """places[i] to slots[i], no slot twice. Raises MemoryError when the host has no room."""
        started = time.perf_counter()
        self._swapped.save(slots, self.pool_NX, places)
        self._took(started, len(places))

    def swap_in(self, places: Sequence[int], slots: Sequence[int]) -> None:
        """slots[i] to places[i], no place twice; the slots keep their content."""
        started = time.perf_counter()
        self._swapped.load(slots, self.pool_NX, places)
        self._took(started, len(places))

    def _took(self, started: float, count: int) -> None:
        if self._pipeline is None:  # elsewhere copies have only been enqueued
            self.copy_s += MOVE_SMOOTHING * ((time.perf_counter() - started) / count - self.copy_s)

    def free_host_slots(self, slots: Iterable[int]) -> None:
        """Drop what these slots hold; slots that were never written are fine."""
        self._swapped.forget(list(slots))

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
            self._trial.save((0,), pool_NX, (self.dummy,))
            self._trial.load((0,), pool_NX, (self.dummy,))
            wait(self._device)
            seconds.append((time.perf_counter() - start) / 2)
        self._trial.clear()
        self._zero_dummy()
        self.copy_s = statistics.median(seconds[1:])  # the first one pays for the memory
        return self.copy_s

    def _zero_dummy(self) -> None:
        self.pool_NX[self.dummy].zero_()

    def _on_device(self, places: Sequence[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self._device)

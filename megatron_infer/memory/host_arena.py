"""Host memory for single places of a pool: slots of one place each, in chunks that are allocated while they are used.

    pool [layers, 2, N, B, K, H]  --offload (gather)-->  slot [layers, 2, B, K, H]  (block-major, one run of bytes)
                                  <--reload (scatter)--

Suffix NX: place-major view of the pool, for blocks [num_blocks, layers, 2, B, K, H].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_infer.memory.copy_pipeline import CopyPipeline
from megatron_infer.memory.regions.choose import MappedRegion
from megatron_infer.memory.regions.pinned import PinnedRegion

Progress = Callable[[str], None]
"""Called before every piece of work with a description of it; may raise to stop there (a deadline, an interrupt)."""
PIECE_BYTES = 64 << 20
"""Bytes copied at a time: bounds the staging buffers on a device and the time between two calls of a `Progress`."""
MAX_CHUNK_BYTES = 8 * PIECE_BYTES
MAX_WASTE = 1 / 8
"""Share of a chunk that may stay unused when its size is a power of two, as sizes of pinned memory are."""


@dataclass(slots=True)
class _Chunk:
    region: MappedRegion | PinnedRegion
    slots_SX: Tensor
    used: set[int] = field(default_factory=set)


class HostArena:
    """Slots numbered by the caller, 0 .. max_slots - 1; a chunk exists while one of its slots holds something.

    With a pipeline (CUDA) chunks are pinned, copies are in order with the work of the current stream, which must be the
    same one for every call, and nothing waits for them. Without one copies are done when a call returns.
    """

    def __init__(
        self, slot_shape: Sequence[int], dtype: torch.dtype, *, max_slots: int, pipeline: CopyPipeline | None = None
    ) -> None:
        self._slot_shape, self._dtype, self._pipeline = tuple(slot_shape), dtype, pipeline
        self._slot_bytes, self._max_slots = math.prod(slot_shape) * dtype.itemsize, max_slots
        self._slots_per_chunk = slots_per_chunk(self._slot_bytes)
        self._slots_per_piece = max(1, PIECE_BYTES // self._slot_bytes)
        self._chunks: dict[int, _Chunk] = {}
        self._is_reserved = False

    def reserve(self) -> None:
        """Pin every chunk now and keep it: pinning stops the device, so it must not happen in the middle of a step.

        Does nothing where host memory is not pinned. Raises MemoryError.
        """
        if self._pipeline is None or not self._max_slots:
            return
        for first in range(0, self._max_slots, self._slots_per_chunk):
            self._chunk(first // self._slots_per_chunk, first)
        self._is_reserved = True

    def resident_bytes(self) -> int:
        """Host memory the chunks take now."""
        return sum(chunk.region.resident_bytes() for chunk in self._chunks.values())

    def offload(self, slots: Sequence[int], pool_NX: Tensor, places: Sequence[int]) -> None:
        """Copy places[i] of the pool to slots[i], each slot once. Raises MemoryError when a chunk cannot be had."""
        for begin, end, slots_SX in self._runs(slots, fresh=True):
            index = device_index(self._pipeline, places[begin:end])
            if self._pipeline is None:
                torch.index_select(pool_NX, 0, index, out=slots_SX)
            else:
                self._pipeline.offload(pool_NX, index, slots_SX)

    def reload(self, slots: Sequence[int], pool_NX: Tensor, places: Sequence[int]) -> None:
        """Copy slots[i] to places[i] of the pool, each place once; the slots keep their content."""
        for begin, end, slots_SX in self._runs(slots, fresh=False):
            index = device_index(self._pipeline, places[begin:end])
            if self._pipeline is None:
                pool_NX.index_copy_(0, index, slots_SX)
            else:
                self._pipeline.reload(slots_SX, pool_NX, index)

    def free(self, slots: Sequence[int]) -> None:
        """Drop what slots hold, if anything; a chunk that holds nothing any more gives its memory back."""
        for slot in slots:
            number = slot // self._slots_per_chunk
            chunk = self._chunks.get(number)
            if chunk is None:
                continue
            chunk.used.discard(slot)
            if not chunk.used and not self._is_reserved:
                self._chunks.pop(number).region.release()  # in this order: an interrupt must not give it back twice

    def clear(self) -> None:
        """Drop everything."""
        for number in list(self._chunks):
            self.free(list(self._chunks[number].used))

    def _runs(self, slots: Sequence[int], *, fresh: bool) -> Iterator[tuple[int, int, Tensor]]:
        """Cut `slots` into runs that are contiguous in memory -> (begin, end, that memory)."""
        begin = 0
        while begin < len(slots):
            first, end = slots[begin], begin + 1
            number, offset = divmod(first, self._slots_per_chunk)
            longest = min(self._slots_per_piece, self._slots_per_chunk - offset)
            while end < len(slots) and end - begin < longest and slots[end] == first + end - begin:
                end += 1
            run = slots[begin:end]
            chunk = self._chunk(number, run[-1]) if fresh else self._chunks.get(number)
            if fresh:
                chunk.used.update(run)  # type: ignore[union-attr]
            assert chunk is not None and chunk.used.issuperset(run), f"host slots {run} hold nothing that was saved"
            yield begin, end, chunk.slots_SX[offset : offset + end - begin]
            begin = end

    def _chunk(self, number: int, last_slot: int) -> _Chunk:
        assert last_slot < self._max_slots, f"host slot {last_slot} of {self._max_slots}: the buffer has no such slot"
        if number not in self._chunks:
            size = min(self._slots_per_chunk, self._max_slots - number * self._slots_per_chunk)
            region = host_region(self._pipeline, size * self._slot_bytes)
            slots_SX = region.tensor.view(self._dtype).view(size, *self._slot_shape)
            self._chunks[number] = _Chunk(region, slots_SX)
        return self._chunks[number]


def host_region(pipeline: CopyPipeline | None, num_bytes: int) -> MappedRegion | PinnedRegion:
    """Host memory for copies of a pool, [num_bytes] uint8. Raises MemoryError."""
    if pipeline is None:
        return MappedRegion((num_bytes,), torch.uint8, keep_mapping=False)
    return PinnedRegion(pipeline.pinned, num_bytes)


def device_index(pipeline: CopyPipeline | None, places: Sequence[int]) -> Tensor:
    """The numbers as int64, where the pool is."""
    return torch.tensor(places, dtype=torch.int64) if pipeline is None else pipeline.streams.upload(places)


def slots_per_chunk(slot_bytes: int) -> int:
    """Slots of a chunk: 64 MiB of them, more where that would waste much of a power of two.

    Example: slots of 40 MiB -> 3 in 128 MiB, for 1 would waste 24 of 64 MiB.
    """
    size = PIECE_BYTES
    while size < MAX_CHUNK_BYTES and size - size // slot_bytes * slot_bytes > MAX_WASTE * size:
        size *= 2
    return max(1, size // slot_bytes)

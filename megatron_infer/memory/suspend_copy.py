"""The host copy of a suspend: blocks and state slots that requests hold, layer by layer in the order steps use them.

                 offload                                   reload
pools (device)  --------->  host: one PoolCopy per pool  --------->  pools; a step may use a layer that is back while
                                                                     later layers are on the way (LayerwiseRestore)
A PoolCopy keeps its rows in chunks:

chunk 0  [ layer 0: place place place ... | layer 1: place place ... ]     each row is one place of one part of a layer
chunk 1  [ layer 1: ... place place | layer 2: ...                   ]

A layer of a pool is one tensor [places, ...] or several (a Mamba layer's two states): its parts. Suffix NX: [places,
...], SX: [places copied, ...].
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_infer.memory import host_arena
from megatron_infer.memory.copy_pipeline import CopyPipeline, Stopwatch, Stream, words
from megatron_infer.memory.host_arena import Progress, device_index, host_region
from megatron_infer.memory.layerwise_restore import LayerwiseRestore
from megatron_infer.memory.pool import PoolMemory
from megatron_infer.memory.regions.choose import MappedRegion
from megatron_infer.memory.regions.pinned import PinnedRegion
from megatron_infer.memory.store_layout import Layer, StateTensors

Places = Mapping[str, Sequence[int]]
"""Noun of a pool ("blocks", "states") -> numbers of places in it; pools without any are left out."""


class SuspendCopy:
    """Owns the host memory of an offload until a restore has copied it back, or `drop`.

    With a pipeline (CUDA) `reload` only enqueues; `pending` is the restore whose copies may still run.
    """

    def __init__(self, pools: Sequence[PoolMemory], layers: Sequence[Layer], pipeline: CopyPipeline | None) -> None:
        """layers: of both pools, in the order in which they are copied."""
        self._pools = {pool.noun: pool for pool in pools}
        self._copies = {pool.noun: PoolCopy(pool.noun, pipeline) for pool in pools}
        self._layers, self._pipeline = layers, pipeline
        self.pending: LayerwiseRestore | None = None
        """The restore whose copies may still run; only this class sets it."""
        self.reload_s: float | None = None
        """Seconds that the copies of the last reload took, by the device's clock where it is not the CPU; None while
        they may still run, and before the first."""

    def num_places(self) -> dict[str, int]:
        """Noun of each pool -> how many of its places are copied."""
        return {noun: len(copy.places) for noun, copy in self._copies.items()}

    def resident_bytes(self) -> int:
        """Host memory the copy takes now."""
        return sum(copy.resident_bytes() for copy in self._copies.values())

    def offload(self, places: Places, progress: Progress) -> float:
        """Copy these places of the pools (by noun) to the host and wait -> seconds the copies took.

        Raises MemoryError when the host has no room, and what `progress` raises; `drop` then undoes all of it.
        """
        watch = Stopwatch(self._pipeline)
        for noun, chosen in places.items():
            self._copies[noun].begin(chosen, self._pools[noun].place_bytes)
        for noun, layer in self._layers:
            if noun in places:
                self._copies[noun].offload(layer, self._pools[noun].layers[layer], progress)
        seconds = watch.stop()
        self.drop_staging()
        return seconds

    def check_holds(self, places: Places) -> None:
        """Assert that the copy holds all of these."""
        for noun, wanted in places.items():
            lost = set(wanted) - set(self._copies[noun].places)
            assert not lost, f"{noun} {sorted(lost)[:8]} ({len(lost)} in all) were not offloaded: their content is gone"

    def reload(self, places: Places, kv_cache: Tensor, states: StateTensors | None, progress: Progress) -> None:
        """Copy these places back into the pools; `end_if_done` follows. With a pipeline nothing waits.

        kv_cache, states: the pools' memory, as steps see it. When it raises, `abandon_reload` keeps the copy.
        """
        start, restore = time.perf_counter(), None
        for noun, wanted in places.items():
            self._copies[noun].choose(set(wanted))
        if self._pipeline is not None and places:
            restore = LayerwiseRestore(self._pipeline.streams, kv_cache, states)
        for noun, layer in self._layers:
            if noun in places:
                self._copies[noun].reload(layer, self._pools[noun].layers[layer], progress)
                if restore is not None:
                    restore.record_layer((noun, layer))
        self.pending, self.reload_s = restore, (time.perf_counter() - start if restore is None else None)

    def abandon_reload(self) -> None:
        """After a reload that raised: the copy stays for the next try. The caller waits for the device."""
        self.pending = None
        self.drop_staging()

    def end_if_done(self) -> float:
        """Drop the copy if the reload's copies are done -> seconds they took; 0.0 while they may still run."""
        if self.pending is None:
            self._end_reload()
            return self.reload_s or 0.0
        return self.finish() if self.pending.is_done() else 0.0

    def finish(self) -> float:
        """Wait for a pending restore and drop the copy -> seconds its copies took; 0.0 where none is pending."""
        if (restore := self.pending) is None:
            return 0.0
        self.reload_s = seconds = restore.finish()
        restore.wait_for_all()
        self._end_reload()
        self.pending = None
        return seconds

    def drop(self) -> None:
        """Give the host copy's memory back. No copy may be running."""
        for copy in self._copies.values():
            copy.clear()

    def drop_staging(self) -> None:
        """Give the staging memory on the device back to torch's allocator."""
        if self._pipeline is not None:
            self._pipeline.drop_staging()

    def _end_reload(self) -> None:
        """Drop the copy, and unpin what is too much to keep."""
        self.drop_staging()
        self.drop()
        if self._pipeline is not None:
            self._pipeline.pinned.trim()


@dataclass(frozen=True, slots=True)
class _PoolPiece:
    part: int
    first: int
    """Number of the place in the first row, counted among the places copied."""
    rows_SX: Tensor


class PoolCopy:
    """Some places of one pool on the host; `offload` and `reload` each layer in any order, in pieces."""

    def __init__(self, noun: str, pipeline: CopyPipeline | None) -> None:
        self._noun, self._pipeline = noun, pipeline
        self._places: list[int] = []
        self._index_S: Tensor | None = None
        self._runs: list[tuple[int, int, int]] = []
        """Places that come back, as (begin, end, where they begin in the index)."""
        self._pieces: dict[int, list[_PoolPiece]] = {}
        self._chunks: list[MappedRegion | PinnedRegion] = []
        self._filled = self._bytes_left = 0
        """Bytes used of the last chunk; bytes still to be copied."""

    @property
    def places(self) -> Sequence[int]:
        """The places that `begin` was given."""
        return self._places

    def resident_bytes(self) -> int:
        """Host memory the chunks take now."""
        return sum(chunk.resident_bytes() for chunk in self._chunks)

    def begin(self, places: Sequence[int], place_bytes: int) -> None:
        """Choose what `offload` copies, no place twice; all parts of one place have place_bytes."""
        assert len(set(places)) == len(places), f"{len(places)} {self._noun}, some twice"
        self._places, self._bytes_left = list(places), len(places) * place_bytes
        self._index_S = device_index(self._pipeline, self._places)

    def offload(self, layer: int, parts_NX: Sequence[Tensor], progress: Progress) -> None:
        """Copy a layer of the places to the host.

        Raises MemoryError when the host has no room; then, and when `progress` raises, `clear` undoes all of it.
        """
        pieces = self._pieces[layer] = []
        for part, pool_NX in enumerate(parts_NX):
            first = 0
            while first < len(self._places):
                piece = _PoolPiece(part, first, self._room(pool_NX, len(self._places) - first))
                first += len(piece.rows_SX)
                self._report(progress, piece.first, first, layer, "to the host")
                self._offload(pool_NX, piece)
                pieces.append(piece)

    def choose(self, keep: Set[int]) -> None:
        """Choose which of the places `reload` copies back."""
        chosen = [slot for slot, place in enumerate(self._places) if place in keep]
        self._runs = []
        for at, slot in enumerate(chosen):
            if self._runs and self._runs[-1][1] == slot:
                begin, _, start = self._runs[-1]
                self._runs[-1] = begin, slot + 1, start
            else:
                self._runs.append((slot, slot + 1, at))
        self._index_S = device_index(self._pipeline, [self._places[slot] for slot in chosen])
        if self._pipeline is not None and self._pieces:
            self._pipeline.make_room(max((p.rows_SX.nbytes for ps in self._pieces.values() for p in ps), default=0))

    def reload(self, layer: int, parts_NX: Sequence[Tensor], progress: Progress) -> None:
        """Copy a layer of the chosen places back to where it was; with a pipeline, Stream.SCATTER writes it."""
        for piece in self._pieces.get(layer, ()):
            for rows_SX, index_S, begin in self._chosen(piece):
                self._report(progress, begin, begin + len(rows_SX), layer, "from the host")
                self._reload(rows_SX, parts_NX[piece.part], index_S)

    def clear(self) -> None:
        """Drop everything; no copy may be using it. After an interrupt it may be called again."""
        self._pieces, self._places, self._index_S = {}, [], None
        self._filled = self._bytes_left = 0
        while self._chunks:
            self._chunks.pop().release()  # popped first: a chunk released twice would be handed out twice

    def _report(self, progress: Progress, begin: int, end: int, layer: int, where: str) -> None:
        progress(f"copy {self._noun} {begin} .. {end - 1} of {len(self._places)}, layer {layer}, {where}")

    def _room(self, pool_NX: Tensor, count: int) -> Tensor:
        """Rows for up to `count` places of a part, one after the other on the host."""
        row_bytes = pool_NX[0].numel() * pool_NX.itemsize
        if not self._chunks or self._chunks[-1].tensor.nbytes - self._filled < row_bytes:
            size = max(row_bytes, min(host_arena.PIECE_BYTES, self._bytes_left))
            self._chunks.append(host_region(self._pipeline, size))
            self._filled = 0
        chunk_X = self._chunks[-1].tensor
        count = min(count, (chunk_X.nbytes - self._filled) // row_bytes)
        begin, self._filled = self._filled, self._filled + count * row_bytes
        self._bytes_left -= count * row_bytes
        return chunk_X[begin : self._filled].view(pool_NX.dtype).view(count, *pool_NX.shape[1:])

    def _chosen(self, piece: _PoolPiece) -> Iterator[tuple[Tensor, Tensor, int]]:
        """(rows of the piece, index of their places, number of the first) for each run that comes back."""
        assert self._index_S is not None
        for begin, end, start in self._runs:
            first, last = max(begin, piece.first), min(end, piece.first + len(piece.rows_SX))
            if first < last:
                rows_SX = piece.rows_SX[first - piece.first : last - piece.first]
                yield rows_SX, self._index_S[start + first - begin : start + last - begin], first

    def _offload(self, pool_NX: Tensor, piece: _PoolPiece) -> None:
        assert self._index_S is not None
        index_S = self._index_S[piece.first : piece.first + len(piece.rows_SX)]
        if self._pipeline is not None:
            self._pipeline.offload(pool_NX, index_S, piece.rows_SX)
            return
        source_NX, target_SX = _same_elements(pool_NX, piece.rows_SX)
        torch.index_select(source_NX, 0, index_S, out=target_SX)

    def _reload(self, rows_SX: Tensor, pool_NX: Tensor, index_S: Tensor) -> None:
        if self._pipeline is not None:
            self._pipeline.reload(rows_SX, pool_NX, index_S, on=Stream.SCATTER)
            return
        target_NX, source_SX = _same_elements(pool_NX, rows_SX)
        target_NX.index_copy_(0, index_S, source_SX)


def _same_elements(pool_NX: Tensor, rows_SX: Tensor) -> tuple[Tensor, Tensor]:
    """Both as words of eight bytes, or both as they are."""
    pool, rows = words(pool_NX), words(rows_SX)
    return (pool, rows) if pool.dtype is rows.dtype else (pool_NX, rows_SX)

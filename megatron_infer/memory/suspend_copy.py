"""The host copy of a suspend, layer after layer, so that a layer is back before the next one is on its way.

chunk 0  [ layer 0: place place place ... | layer 1: place place ... ]     each row is one place of one part of a layer
chunk 1  [ layer 1: ... place place | layer 2: ...                   ]

A layer of a pool is one tensor [places, ...] or several (a Mamba layer's two states): its parts. Suffix NX: [places,
...], SX: [places kept, ...].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_infer.memory import host_arena
from megatron_infer.memory.copy_pipeline import CopyPipeline, Stream, words
from megatron_infer.memory.host_arena import Tick, device_index, host_region
from megatron_infer.memory.regions.choose import MappedRegion
from megatron_infer.memory.regions.pinned import PinnedRegion


@dataclass(frozen=True, slots=True)
class _Piece:
    part: int
    first: int
    """Of the places, the one in the first row."""
    rows_SX: Tensor


class SuspendCopy:
    """Some places of a pool; `save` and `load` each layer in any order, in pieces."""

    def __init__(self, noun: str, pipeline: CopyPipeline | None) -> None:
        self._noun, self._pipeline = noun, pipeline
        self._places: list[int] = []
        self._index_S: Tensor | None = None
        self._runs: list[tuple[int, int, int]] = []
        """Places that come back, as (begin, end, where they begin in the index)."""
        self._pieces: dict[int, list[_Piece]] = {}
        self._chunks: list[MappedRegion | PinnedRegion] = []
        self._filled = self._left_bytes = 0
        """Of the last chunk; of what is to be saved."""

    @property
    def places(self) -> Sequence[int]:
        """What was begun with."""
        return self._places

    def resident_bytes(self) -> int:
        """Host memory the chunks take now."""
        return sum(chunk.resident_bytes() for chunk in self._chunks)

    def begin(self, places: Sequence[int], place_bytes: int) -> None:
        """Copy these from now on, no place twice; all parts of a place have place_bytes."""
        assert len(set(places)) == len(places), f"{len(places)} {self._noun}, some twice"
        self._places, self._left_bytes = list(places), len(places) * place_bytes
        self._index_S = device_index(self._pipeline, self._places)

    def save(self, layer: int, parts_NX: Sequence[Tensor], tick: Tick) -> None:
        """Raises MemoryError when the host has no room; then, and when `tick` raises, `clear` undoes all of it."""
        pieces = self._pieces[layer] = []
        for part, pool_NX in enumerate(parts_NX):
            first = 0
            while first < len(self._places):
                piece = _Piece(part, first, self._room(pool_NX, len(self._places) - first))
                first += len(piece.rows_SX)
                self._announce(tick, piece.first, first, layer, "to the host")
                self._save(pool_NX, piece)
                pieces.append(piece)

    def choose(self, keep: Set[int]) -> None:
        """Which of the places `load` brings back."""
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

    def load(self, layer: int, parts_NX: Sequence[Tensor], tick: Tick) -> None:
        """Copy the chosen places' layer back to where it was; SCATTER has it last."""
        for piece in self._pieces.get(layer, ()):
            for rows_SX, index_S, begin in self._chosen(piece):
                self._announce(tick, begin, begin + len(rows_SX), layer, "from the host")
                self._load(rows_SX, parts_NX[piece.part], index_S)

    def clear(self) -> None:
        """Drop everything, which no copy may use any more. Interrupted, it may be called again."""
        self._pieces, self._places, self._index_S = {}, [], None
        self._filled = self._left_bytes = 0
        while self._chunks:
            self._chunks.pop().release()  # given back twice it would be lent twice

    def _announce(self, tick: Tick, begin: int, end: int, layer: int, where: str) -> None:
        tick(f"copy {self._noun} {begin} .. {end - 1} of {len(self._places)}, layer {layer}, {where}")

    def _room(self, pool_NX: Tensor, count: int) -> Tensor:
        """Rows for up to `count` places of a part, one after the other on the host."""
        row_bytes = pool_NX[0].numel() * pool_NX.itemsize
        if not self._chunks or self._chunks[-1].tensor.nbytes - self._filled < row_bytes:
            size = max(row_bytes, min(host_arena.PIECE_BYTES, self._left_bytes))
            self._chunks.append(host_region(self._pipeline, size))
            self._filled = 0
        chunk_X = self._chunks[-1].tensor
        count = min(count, (chunk_X.nbytes - self._filled) // row_bytes)
        begin, self._filled = self._filled, self._filled + count * row_bytes
        self._left_bytes -= count * row_bytes
        return chunk_X[begin : self._filled].view(pool_NX.dtype).view(count, *pool_NX.shape[1:])

    def _chosen(self, piece: _Piece) -> Iterator[tuple[Tensor, Tensor, int]]:
        """(rows of the piece, their places' index, first of the places) for each run that comes back."""
        assert self._index_S is not None
        for begin, end, start in self._runs:
            first, last = max(begin, piece.first), min(end, piece.first + len(piece.rows_SX))
            if first < last:
                rows_SX = piece.rows_SX[first - piece.first : last - piece.first]
                yield rows_SX, self._index_S[start + first - begin : start + last - begin], first

    def _save(self, pool_NX: Tensor, piece: _Piece) -> None:
        assert self._index_S is not None
        index_S = self._index_S[piece.first : piece.first + len(piece.rows_SX)]
        if self._pipeline is not None:
            self._pipeline.save(pool_NX, index_S, piece.rows_SX)
            return
        source_NX, target_SX = _alike(pool_NX, piece.rows_SX)
        torch.index_select(source_NX, 0, index_S, out=target_SX)

    def _load(self, rows_SX: Tensor, pool_NX: Tensor, index_S: Tensor) -> None:
        if self._pipeline is not None:
            self._pipeline.load(rows_SX, pool_NX, index_S, on=Stream.SCATTER)
            return
        target_NX, source_SX = _alike(pool_NX, rows_SX)
        target_NX.index_copy_(0, index_S, source_SX)


def _alike(pool_NX: Tensor, rows_SX: Tensor) -> tuple[Tensor, Tensor]:
    """Both as words, or both as they are."""
    pool, rows = words(pool_NX), words(rows_SX)
    return (pool, rows) if pool.dtype is rows.dtype else (pool_NX, rows_SX)

"""Notices that live weights changed while the engine holds them, however they were written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from megatron_infer.kernels.te_tensors import is_quantised, memory_of, parts_of
from megatron_infer.memory.host_arena import PIECE_BYTES
from megatron_infer.memory.regions.pinned import unpin_idle
from megatron_infer.models.attached_lora import LinearLoRA
from megatron_infer.models.module_guard import modules_of


def guarded_tensors(model: torch.nn.Module) -> Iterator[Tensor]:
    """Tensors that a model computes with and training may change: parameters, and buffers that checkpoints hold (such
    as a router's bias)."""
    modules = [one for one in modules_of(model) if not (isinstance(one, LinearLoRA) and one.trains_only)]
    yield from {id(p): p for module in modules for p in module._parameters.values() if p is not None}.values()
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


class OffloadedWeights:
    """Live weights moved to the host and back in the same tensors, so that references to them stay valid.

    For an engine that owns its model on a device. Storages are empty meanwhile; addresses change. The host has the
    storages one after another in pieces of PIECE_BYTES: pinned memory comes in powers of two.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, pinned: bool) -> None:
        self._tensors, self._pinned = tensors, pinned
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []
        """(storage on the device, its bytes)."""
        self._pieces: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes on the host; 0 while the weights are in place."""
        return sum(piece.numel() for piece in self._pieces)

    @torch.no_grad()
    def offload(self, tick: Callable[[str], None]) -> None:
        """Copy all to the host, then free the device; an error before that leaves everything in place."""
        assert not self._emptied, "the weights are offloaded already"
        parts = (part for tensor in self._tensors() for part in memory_of(tensor))
        storages = list({part.untyped_storage()._cdata: part.untyped_storage() for part in parts}.values())
        total, pieces, at = sum(storage.nbytes() for storage in storages), [], 0
        for place, storage in enumerate(storages):
            tick(f"copying weights to the host, {place} of {len(storages)}")
            while len(pieces) * PIECE_BYTES < at + storage.nbytes():
                num_bytes = min(PIECE_BYTES, total - len(pieces) * PIECE_BYTES)
                pieces.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned))
            for on_host, on_device in _pairs(pieces, at, _bytes_of(storage)):
                on_host.copy_(on_device)
            at += storage.nbytes()
        self._pieces = pieces
        self._emptied = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:  # if this is interrupted, `reload` brings all of them back
            storage.resize_(0)

    @torch.no_grad()
    def reload(self, tick: Callable[[str], None]) -> None:
        """Bring them back; an error (no memory) leaves them on the host and the device free."""
        done, at = [], 0
        try:
            for place, (storage, num_bytes) in enumerate(self._emptied):
                tick(f"copying weights back, {place} of {len(self._emptied)}")
                storage.resize_(num_bytes)
                done.append(storage)
                for on_host, on_device in _pairs(self._pieces, at, _bytes_of(storage)):
                    on_device.copy_(on_host)
                at += num_bytes
        except BaseException:
            for storage in done:
                storage.resize_(0)
            raise
        self._emptied = []
        self._pieces = []
        if self._pinned:
            unpin_idle()


def _pairs(pieces: Sequence[Tensor], at: int, bytes_B: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(part of a piece, part of bytes_B), equally long, that hold bytes_B from byte `at` of the pieces on."""
    done = 0
    while done < len(bytes_B):
        piece, offset = pieces[(at + done) // PIECE_BYTES], (at + done) % PIECE_BYTES
        length = min(len(bytes_B) - done, PIECE_BYTES - offset)
        yield piece[offset : offset + length], bytes_B[done : done + length]
        done += length


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


_NOTHING_READ: Mapping[int, int] = {}
_VERSION, _POINTER = attrgetter("_version"), Tensor.data_ptr


class _Known(NamedTuple):
    """The accepted weights."""

    weights: list[Tensor]
    parts: list[Tensor]
    """Tensors that make up the weights: the weight itself, or codes and scales of a quantised one."""
    versioned: list[Tensor]
    """Those of both that count their versions."""


class WeightGuard:
    """Compares weights with what they were when last accepted.

    Four ways a live weight changes, and what shows it: an in-place operation increments `_version`; a re-pointed
    parameter changes `data_ptr`; writing through `.data` (as Megatron's mixed-precision optimizers do) does neither and
    shows only in the content; a replaced parameter object is another member of `weights()`. `moved` sees the first two
    and is cheap enough for every step; `changed` sees all four and reads all weights once, about as much as a decode
    step. A quantised weight shows its version itself; its codes and scales show addresses and content.

    While the engine is suspended the guard holds the weights weakly, so that the memory of a parameter that training
    replaces is free at once.
    """

    def __init__(
        self, weights: Callable[[], Iterable[Tensor]], *, checksums: Callable[[Sequence[Tensor]], list[int]]
    ) -> None:
        self._all, self._checksums = weights, checksums
        self._held: _Known | None = None
        self._weak: tuple[list[ref[Tensor]], ...] = ()
        """References to the lists of `_held`; used while that is None."""
        self._is_weak = self._has_quantised = False
        self._versions: list[int] = []
        self._pointers: list[int] = []
        self._sums: list[int] = []
        self.accept()

    def accept(self, read: Mapping[int, int] = _NOTHING_READ) -> None:
        """Take the present weights as known; interrupted, it has accepted nothing. read: see `changed`."""
        weights = self._present()
        parts = _parts(weights)
        # Tensors made under inference_mode carry no version counter; their pointer and content still tell.
        counted = {id(one): one for one in (*weights, *parts)}.values()
        versioned = [one for one in counted if not one.is_inference()]
        versions, pointers = list(map(_VERSION, versioned)), list(map(_POINTER, parts))
        sums = self._content(parts, read)
        self._held = _Known(weights, parts, versioned)
        self._has_quantised = any(map(is_quantised, weights))
        self._versions, self._pointers, self._sums = versions, pointers, sums
        if self._is_weak:
            self.hold_weakly()

    def hold_weakly(self) -> None:
        """Keep no weight alive until `hold`; a comparison takes a little longer meanwhile."""
        self._is_weak = True
        if self._held is not None:
            self._weak, self._held = tuple([ref(one) for one in tensors] for tensors in self._held), None

    def hold(self) -> None:
        """Undo `hold_weakly`."""
        self._is_weak, self._held = False, self._known()

    def _known(self) -> _Known | None:
        """The accepted weights; None if one of them exists no more."""
        if self._held is not None:
            return self._held
        lists = [[tensor for one in refs if (tensor := one()) is not None] for refs in self._weak]
        return _Known(*lists) if list(map(len, lists)) == list(map(len, self._weak)) else None

    def invalidate(self) -> None:
        """Until the next `accept` the weights count as moved: copies may be derived from old and from new weights."""
        self._pointers = []

    def new_address(self, weights: Sequence[Tensor]) -> None:
        """These have the content that they had: that is no change."""
        known = self._known()
        if known is not None and self._pointers:
            moved = {id(weight): weight.data_ptr() for weight in weights}
            places = zip(known.parts, self._pointers, strict=True)
            self._pointers = [moved.get(id(part), pointer) for part, pointer in places]

    @property
    def sums(self) -> tuple[int, ...]:
        """Checksums of the accepted weights' content, in order."""
        return tuple(self._sums)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the accepted weights, in order."""
        return tuple(self._pointers)

    def moved(self) -> bool:
        """True when a weight was updated in place or re-pointed since `accept`."""
        known = self._known()
        return known is None or self._moved(known)

    def _moved(self, known: _Known) -> bool:
        return (
            list(map(_VERSION, known.versioned)) != self._versions
            or list(map(_POINTER, _parts(known.weights) if self._has_quantised else known.parts)) != self._pointers
        )

    def changed(self, read: Mapping[int, int] = _NOTHING_READ, *, content: bool = True) -> bool:
        """True when any weight differs from what was accepted, however it was written.

        read: checksums, by id, of weights that were just read: they are not read again. content: False: nothing is
        read, and a write through `.data` does not show.
        """
        known, weights = self._known(), self._present()
        if known is None or list(map(id, weights)) != list(map(id, known.weights)):
            return True
        if list(map(id, _parts(weights))) != list(map(id, known.parts)):
            return True
        return self._moved(known) or (content and self._content(known.parts, read) != self._sums)

    def _present(self) -> list[Tensor]:
        return list({id(weight): weight for weight in self._all()}.values())

    @torch.no_grad()
    def _content(self, weights: Sequence[Tensor], read: Mapping[int, int]) -> list[int]:
        unread = iter(self._checksums([weight for weight in weights if id(weight) not in read]))
        return [read[id(weight)] if id(weight) in read else next(unread) for weight in weights]


def _parts(weights: Iterable[Tensor]) -> list[Tensor]:
    return [part for weight in weights for part in parts_of(weight)]

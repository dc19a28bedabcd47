"""Noticing that live weights changed under the engine, however they were written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

import torch
from torch import Tensor

_VERSION, _POINTER = attrgetter("_version"), Tensor.data_ptr


class WeightGuard:
    """Compares weights with what they were when last accepted.

    Four ways a live weight changes, and what tells: an in-place operation bumps `_version`; a re-pointed parameter
    moves `data_ptr`; writing through `.data` (as Megatron's mixed-precision optimizers do) does neither and only the
    content tells; a replaced parameter object is another member of `weights()`. `moved` sees the first two and is
    cheap enough for every step; `changed` sees all and reads all weights once, about what a decode step reads.
    """

    def __init__(self, weights: Callable[[], Iterable[Tensor]], *, checksum: Callable[[Tensor], int]) -> None:
        self._all, self._checksum = weights, checksum
        self._weights: list[Tensor] = []
        self._versioned: list[Tensor] = []
        self._versions: list[int] = []
        self._pointers: list[int] = []
        self._sums: list[int] = []
        self.accept()

    def accept(self) -> None:
        """Take the present weights as known."""
        self._weights = self._present()
        # Tensors made under inference_mode carry no version counter; their pointer and content still tell.
        self._versioned = [weight for weight in self._weights if not weight.is_inference()]
        self._versions = list(map(_VERSION, self._versioned))
        self._pointers = list(map(_POINTER, self._weights))
        self._sums = self._content()

    @property
    def sums(self) -> tuple[int, ...]:
        """Checksums of the accepted weights' content, in order."""
        return tuple(self._sums)

    def moved(self) -> bool:
        """True when a weight was updated in place or re-pointed since `accept`."""
        return (
            list(map(_VERSION, self._versioned)) != self._versions
            or list(map(_POINTER, self._weights)) != self._pointers
        )

    def changed(self) -> bool:
        """True when any weight differs from what was accepted, however it was written."""
        if list(map(id, self._present())) != list(map(id, self._weights)):
            return True
        return self.moved() or self._content() != self._sums

    def _present(self) -> list[Tensor]:
        return list({id(weight): weight for weight in self._all()}.values())

    @torch.no_grad()
    def _content(self) -> list[int]:
        return [self._checksum(weight) for weight in self._weights]

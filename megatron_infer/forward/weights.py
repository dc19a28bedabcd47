"""Noticing that live weights changed under the engine, however they were written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def content_sum(tensor: Tensor) -> int:
    """Sum of a tensor's bits as wrapping integers: any one changed element changes it; runs at memory speed."""
    flat = tensor.detach().reshape(-1)
    for wide in (torch.int64, torch.int32, torch.int16, torch.uint8):
        if flat.numel() * flat.element_size() % wide.itemsize == 0:
            return int(flat.view(wide).sum(dtype=torch.int64))
    return 0  # an empty tensor


class WeightGuard:
    """Compares weights with what they were when last accepted.

    Three ways a live weight changes, and what tells: an in-place operation bumps `_version`; a re-pointed parameter
    moves `data_ptr`; writing through `.data` (as Megatron's mixed-precision optimizers do) does neither and only the
    content tells. `moved` is cheap enough for every step, `changed` reads all weights once.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        unique = {id(weight): weight for weight in weights}
        self._weights = list(unique.values())
        self._versioned = [weight for weight in self._weights if not weight.is_inference()]
        self._versions: list[int] = []
        self._pointers: list[int] = []
        self._sums: list[int] = []
        self.accept()

    def accept(self) -> None:
        """Take the present weights as known."""
        self._versions = [weight._version for weight in self._versioned]
        self._pointers = [weight.data_ptr() for weight in self._weights]
        self._sums = self._content()

    def moved(self) -> bool:
        """True when a weight was updated in place or re-pointed since `accept`."""
        return [w._version for w in self._versioned] != self._versions or [
            w.data_ptr() for w in self._weights
        ] != self._pointers

    def changed(self) -> bool:
        """True when any weight differs from what was accepted, however it was written."""
        return self.moved() or self._content() != self._sums

    @torch.no_grad()
    def _content(self) -> list[int]:
        return [content_sum(weight) for weight in self._weights]

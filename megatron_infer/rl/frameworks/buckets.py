"""Tensors in buckets of a limited size, each of which is sent at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor


def buckets(tensors: Iterable[tuple[str, Tensor]], most_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in their order; a larger one than `most_bytes` is alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > most_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket

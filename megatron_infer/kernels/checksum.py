"""A checksum of a weight's content for devices without the native one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor


def content_sums(tensors: Sequence[Tensor]) -> list[int]:
    """Sum of each tensor's bits as wrapping integers, at memory speed, with one wait for all.

    A change of any one element changes the sum; an exchange of equal-sized words does not, but no training step is one.
    Equal-sized neighbours in one storage, such as experts in a trainer's flat buffer, are rows of one matrix and take
    one launch; their sums are those of each alone.
    """
    if not tensors:
        return []
    addresses = list(map(Tensor.data_ptr, tensors))
    order = sorted(range(len(tensors)), key=addresses.__getitem__)
    runs = [order[:1]]
    for before, place in zip(order, order[1:], strict=False):
        one, other = tensors[before], tensors[place]
        if addresses[place] - addresses[before] == one.nbytes > 0 and _are_alike(one, other):
            runs[-1].append(place)
        else:
            runs.append([place])
    sums = torch.cat([_row_sums(tensors[run[0]], len(run)) for run in runs]).tolist()
    by_place = dict(zip(chain.from_iterable(runs), sums, strict=True))
    return [by_place[place] for place in range(len(tensors))]


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether both are dense, of one size and in one storage; what comes next in memory may be another storage's."""
    return (
        one.dtype == other.dtype
        and one.numel() == other.numel()
        and one.is_contiguous()
        and other.is_contiguous()
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
    )


def _row_sums(first: Tensor, num_rows: int) -> Tensor:
    """Sums of `num_rows` neighbours of one size, of which this is the first -> int64 [num_rows], not awaited.

    A part of a trainer's flat buffer may begin anywhere: its words are as wide as its offset in the buffer allows.
    """
    size, width = first.numel(), first.element_size()
    rows = first.detach()
    rows = rows.reshape(-1) if num_rows == 1 else rows.as_strided((num_rows, size), (size, 1))
    for wide in (torch.int64, torch.int32, torch.int16, torch.uint8):
        if size * width % wide.itemsize == 0 and rows.storage_offset() * width % wide.itemsize == 0:
            return rows.view(wide).sum(dim=-1, keepdim=num_rows == 1, dtype=torch.int64)
    raise AssertionError("every tensor is a whole number of bytes")

"""CPU memory in huge pages: a large copy that every step reads then misses the TLB seldom."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

ALIGNMENT = 2 << 20
"""Bytes of a huge page on x86-64, and on AArch64 with pages of 4 KiB."""


def empty(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised (zeroed) memory, in huge pages where the kernel gives them; freed with the last view of it."""
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < ALIGNMENT or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_elements, dtype=dtype)
    # Private: huge pages of shared memory are another setting. The pages before the first whole one are never touched.
    mapping = mmap.mmap(-1, num_bytes + ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return torch.empty(num_elements, dtype=dtype)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    return whole[-whole.data_ptr() % ALIGNMENT :][:num_bytes].view(dtype)

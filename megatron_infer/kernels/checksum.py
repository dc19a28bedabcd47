"""A checksum of a weight's content for devices without the native one."""

from __future__ import annotations

import torch
from torch import Tensor


def content_sum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's bits as wrapping integers, at memory speed -> int64 scalar on the tensor's device, not awaited.

    A change of any one element changes the sum; an exchange of equal-sized words does not, but no training step is one.
    A part of a trainer's flat buffer may begin anywhere: its words are as wide as its offset in the buffer allows.
    """
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    for wide in (torch.int64, torch.int32, torch.int16, torch.uint8):
        if flat.numel() * size % wide.itemsize == 0 and flat.storage_offset() * size % wide.itemsize == 0:
            return flat.view(wide).sum(dtype=torch.int64)
    raise AssertionError("every tensor is a whole number of bytes")

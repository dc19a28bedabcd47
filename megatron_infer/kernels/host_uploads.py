"""Copies of small host arrays to the device, for backends that plan a step on the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on the device, without waiting; torch keeps the page-locked copy until the device has read it."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)

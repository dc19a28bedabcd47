"""Which backend carries a process group's tensors."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup


def backend_on(group: ProcessGroup | None, device_type: str) -> str:
    """What carries a group's collectives of tensors on such a device.

    A trainer may have asked for "nccl", for "cpu:gloo,cuda:nccl" or for nothing, which is the same as the latter where
    there are GPUs; torch's name for such a group is what was asked for.
    """
    config: str = torch.distributed.get_backend_config(group)
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair).get(device_type, config)


def home_of(group: ProcessGroup | None) -> torch.device:
    """Where tensors have to be for the group's main backend."""
    return torch.device("cuda" if backend_on(group, "cuda") == "nccl" else "cpu")

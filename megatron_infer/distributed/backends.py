"""Which backend and device a process group uses, its size and this process's place in it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup


def backend_on(group: ProcessGroup | None, device_type: str) -> str:
    """The backend of a group's collectives on tensors of this device type.

    A trainer may have initialized torch with "nccl", "cpu:gloo,cuda:nccl" or nothing, which is the latter where there
    are GPUs; torch's own name for the group's backend is what was given.
    """
    config: str = torch.distributed.get_backend_config(group)
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair).get(device_type, config)


def device_of(group: ProcessGroup | None) -> torch.device:
    """The device that tensors must be on for the group's main backend."""
    return torch.device("cuda" if backend_on(group, "cuda") == "nccl" else "cpu")


def group_size(group: Any) -> int:
    """Ranks in a process group; 1 for None."""
    return 1 if group is None else int(group.size())


def group_rank(group: Any) -> int:
    """This process's place in a process group; 0 for None."""
    return 0 if group is None else int(group.rank())

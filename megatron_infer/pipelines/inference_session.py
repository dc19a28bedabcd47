"""Devices and threads that the models of a process run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_infer.kernels.threads import apply_cpu_settings
from megatron_infer.memory.device import Device


@dataclass(slots=True, kw_only=True)
class InferenceSession:
    """Devices and CPU threads; on a CPU the number of threads is that of the process."""

    devices: Sequence[torch.device] = field(default_factory=lambda: [Device("auto").torch])
    num_threads: int | None = None
    """None: all cores."""

    def set_up(self, *, device: str, num_threads: int | None) -> None:
        """Take one device; num_threads: None keeps the session's own."""
        self.devices = [Device(device).torch]
        self.num_threads = self.num_threads if num_threads is None else num_threads
        self.__post_init__()

    def __post_init__(self) -> None:
        if all(device.type == "cpu" for device in self.devices):
            apply_cpu_settings(self.num_threads)

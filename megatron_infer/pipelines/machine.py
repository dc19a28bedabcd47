"""The device that a configuration is resolved for; on a machine without NVIDIA's driver torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_infer.errors import ConfigError
from megatron_infer.kernels.native import native_build
from megatron_infer.utils.host import cpu_has_bf16, free_host_bytes

DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device and its free memory."""

    device: str
    is_cuda: bool
    free_bytes: int

    def dtype(self, asked: str, *, linear_backend: str) -> str:
        """ "auto" as LLM chooses it, see `memory.device.choose_dtype`."""
        if asked in ("float32", "bfloat16"):
            return asked
        if asked != "auto":
            raise ConfigError(f"dtype is {asked!r}, it must be auto, float32 or bfloat16")
        is_half = self.is_cuda or cpu_has_bf16() or native_build.runs_linears(linear_backend)
        return "bfloat16" if is_half else "float32"


def find_machine(device: str) -> Machine:
    """device: auto, cpu, cuda or cuda:N. Raises ConfigError where there is no such device."""
    if device == "cpu" or (device == "auto" and not DRIVER.exists()):
        return Machine(device="cpu", is_cuda=False, free_bytes=free_host_bytes())
    from megatron_infer.memory.device import Device

    found = Device(device)
    return Machine(device=str(found.torch), is_cuda=found.is_cuda, free_bytes=found.available_bytes())

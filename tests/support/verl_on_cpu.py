"""verl's trainer on a machine without an accelerator: `VERL_USE_EXTERNAL_MODULES=verl_on_cpu VERL_PLATFORM=cpu`.

A platform by verl's own registry. One thing is no platform's: verl asks torch for the backend "cpu:gloo,cpu:gloo".
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*_: Any, **__: Any) -> int:
    return 0


class _DeviceModule(types.ModuleType):
    """`torch.cpu`; what a device module has beyond it does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, _nothing)


_module = _DeviceModule("verl_on_cpu_device")
_module.get_rng_state = torch.get_rng_state
_module.set_rng_state = torch.set_rng_state
_module.is_available = lambda: False
_module.get_device_name = lambda *_: "CPU"
_module.mem_get_info = lambda *_: (2**33, 2**33)

ANSWERS: dict[str, Any] = {
    "device_name": "cpu",
    "vendor_name": "cpu",
    "device_module": _module,
    "is_available": True,
    "is_platform_available": True,
    "current_device": torch.device("cpu"),
    "device_count": 1,
    "get_device_capability": (None, None),
    "communication_backend_name": "gloo",
    "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
    "ray_resource_name": "GPU",
    "ray_noset_envvars": [],
    "is_ipc_supported": False,
}


def _answer(name: str) -> Any:
    value = ANSWERS.get(name)
    if isinstance(getattr(PlatformBase, name), property):
        return property(lambda self: value)
    return lambda self, *_, **__: value


_members = {name: _answer(name) for name in PlatformBase.__abstractmethods__ | set(ANSWERS)}
_members["nvtx_range"] = lambda self, message: contextlib.nullcontext()
_members["ray_resource_options"] = lambda self, count: {"num_gpus": count}
PlatformRegistry.register(platform="cpu")(type("CpuPlatform", (PlatformBase,), _members))

_init = dist.init_process_group


@functools.wraps(_init)
def _init_process_group(backend: Any = None, *args: Any, **how: Any) -> Any:
    return _init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **how)


dist.init_process_group = _init_process_group

"""Run a script of Megatron-LM, which asks for CUDA and NCCL, on CPU ranks that talk over gloo.

    torchrun --nproc-per-node 2 examples/megatron_lm/on_cpu.py SCRIPT [its arguments]
    torchrun --nproc-per-node 2 examples/megatron_lm/on_cpu.py -m megatron_infer.mcore SCRIPT [its arguments]

For trying a script on a machine without a GPU: `torch.cuda` answers as if there were devices, and tensors
stay where they are. Nothing of Megatron-LM is changed.
"""

from __future__ import annotations

import collections
import os
import runpy
import sys
import typing
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}  # before torch is imported

import torch
import torch.distributed as dist
import typing_extensions

from megatron_infer.testing.cpu_shim import cpu_shim

MEMORY = 1 << 36
DEVICE = SimpleNamespace(major=9, minor=0, total_memory=MEMORY, multi_processor_count=1, name="none")
begin = dist.init_process_group


class Event:
    """What is measured with events takes a millisecond."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return 1.0


def is_available() -> bool:
    """Megatron-LM's training asks, and goes no further without; megatron-core and torch hear the truth."""
    return sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.training")


def ranges() -> SimpleNamespace:
    """torch.cuda.nvtx, which names parts of a trace."""
    return SimpleNamespace(**dict.fromkeys(("range_push", "range_pop", "mark"), lambda *_: None))


def over_gloo(*args: Any, **kwargs: Any) -> None:
    kwargs.pop("device_id", None)
    begin(*args, **kwargs | {"backend": "gloo"})


def main() -> None:
    answers: dict[str, Any] = {
        "is_available": is_available,
        "set_device": lambda *_: None,
        "device_count": lambda: int(os.environ["LOCAL_WORLD_SIZE"]),
        "get_device_properties": lambda *_: DEVICE,
        "get_device_capability": lambda *_: (DEVICE.major, DEVICE.minor),
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
        "memory_stats": lambda *_: collections.defaultdict(int),
        "reset_peak_memory_stats": lambda *_: None,
        "manual_seed": lambda *_: None,
        "memory_snapshot": lambda **_: [],
        "nvtx": ranges(),
        "LongTensor": torch.LongTensor,
        "Event": Event,
    }
    sizes = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    sizes += ("device_memory_used", "utilization")
    answers |= dict.fromkeys(sizes, lambda *_: 0)
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # of Python 3.12, which Megatron-LM needs for nothing else
    compiled = {"megatron.legacy.fused_kernels": SimpleNamespace(load=lambda args: None)}
    """megatron-core 0.16's script asks nvcc for its version here, and compiles nothing."""
    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[1 + is_module :]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    with (
        cpu_shim(),
        mock.patch.dict(sys.modules, compiled),
        mock.patch.object(dist, "init_process_group", over_gloo),
        mock.patch.multiple(torch.cuda, **answers),
    ):
        run = runpy.run_module if is_module else runpy.run_path
        run(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

"""How Triton kernels are reached: where they run, the one launch for all of them, and what is compiled ahead of time.

With TRITON_INTERPRET=1 in the environment, set before a kernel's module is imported, kernels run on a CPU: slowly, for
tests. The interpreter is right in float32 and float16 only, and knows neither autotuning nor libdevice nor PDL.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

MIN_CAPABILITY = (8, 0)
INTERPRET_VARIABLE = "TRITON_INTERPRET"
INTERPRETER_NEEDS_NUMPY_BELOW = (2, 4)
"""Triton 3.6's interpreter takes a loaded scalar as a bound of range(), which later numpy refuses."""
PDL_VARIABLE = "MEGATRON_INFER_PDL"
"""For debugging only, off until it has been measured: 1 lets a kernel's programs start while those of the one before
end (programmatic dependent launch)."""
PDL_CAPABILITY = (9, 0)
COMPILER_OPTIONS = ("launch_pdl",)
"""Options of a launch that the interpreter does not know."""

Launch = Callable[..., None]


def interpreted() -> bool:
    """Whether kernels imported from now on run in the interpreter."""
    return os.environ.get(INTERPRET_VARIABLE, "0") not in ("", "0")


def unavailable(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on tensors of this device; None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            return f"needs compute capability {_dotted(MIN_CAPABILITY)}, {device} has {_dotted(capability)}"
        return None
    if device.type != "cpu" or not interpreted():
        return f"runs on a GPU, the model is on {device.type}"
    version = tuple(int(part) for part in np.__version__.split(".")[:2])
    if version >= INTERPRETER_NEEDS_NUMPY_BELOW:
        return (
            f"Triton's interpreter needs numpy below {_dotted(INTERPRETER_NEEDS_NUMPY_BELOW)}, this is {np.__version__}"
        )
    return None


def overlapping(device: torch.device) -> dict[str, bool]:
    """Options of a launch on this device whether it may begin before the one before has ended.

    A kernel that takes PDL waits before it touches memory, so that its own programs' start is all that overlaps; what
    comes before may be anybody's kernel.
    """
    if os.environ.get(PDL_VARIABLE) != "1" or device.type != "cuda" or not _can_overlap(device):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= PDL_CAPABILITY


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


_LISTENERS: list[Callable[[Launch, Any, Any, tuple[Any, ...], Mapping[str, Any]], None]] = []


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel` over `grid`: every launch of the package goes through here, so that it can be seen and replayed.

    Numbers among `args` are those of this launch: a captured graph repeats them, only what tensors hold may change.
    """
    for listener in _LISTENERS:
        listener(launch, kernel, grid, args, options)
    if interpreted():
        options = {name: value for name, value in options.items() if name not in COMPILER_OPTIONS}
    if _LISTENERS:  # who listens has heard of the launch: what the interpreter does for it in torch is not theirs
        with _disable_current_modes():
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


@contextlib.contextmanager
def listening(
    listener: Callable[[Launch, Any, Any, tuple[Any, ...], Mapping[str, Any]], None],
) -> Iterator[None]:
    """Tell `listener(launch, kernel, grid, args, options)` of every launch in the body, before it runs."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


@dataclass(frozen=True, slots=True, kw_only=True)
class AotVariant:
    """One specialisation of a kernel that `tools/aot_compile.py` compiles without a device."""

    name: str
    kernel: Any
    """The `triton.jit` function."""
    signature: dict[str, str]
    """Argument -> Triton's type of it ("*bf16", "i32", "fp32"); constexpr arguments are "constexpr"."""
    constexprs: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)
    """num_warps, num_stages, ... as the launch gives them."""
    min_arch: int = 80
    """Older architectures lack an instruction of it."""

    def overlapping(self) -> AotVariant:
        """The same with programmatic dependent launch."""
        return replace(
            self,
            name=f"{self.name}-pdl",
            constexprs=self.constexprs | {"PDL": True},
            options=self.options | {"launch_pdl": True},
            min_arch=10 * PDL_CAPABILITY[0],
        )

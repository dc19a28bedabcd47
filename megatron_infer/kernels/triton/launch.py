"""How Triton kernels are reached: where they run, the one launch for all of them, and what is compiled ahead of time.

With TRITON_INTERPRET=1 in the environment, set before a kernel's module is imported, kernels run on a CPU: slowly, for
tests. The interpreter is right in float32 and float16 only, and knows neither autotuning nor libdevice nor PDL.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

MIN_CAPABILITY = (8, 0)
INTERPRET_VARIABLE = "TRITON_INTERPRET"
INTERPRETER_NEEDS_NUMPY_BELOW = (2, 4)
"""Triton 3.6's interpreter takes a loaded scalar as a bound of range(), which later numpy refuses."""
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
    min_arch: int = 0
    """Compute capability, in tenths, of the least GPU that it is for; 0: all."""

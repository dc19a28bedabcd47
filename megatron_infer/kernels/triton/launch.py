"""Where Triton kernels can run, and the one function that launches them.

With TRITON_INTERPRET=1 in the environment, set before a kernel's module is imported, kernels run on a CPU: slowly, for
tests. The interpreter is correct in float32 and float16 only, and has no autotuning, libdevice or PDL.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_infer.kernels.optional_packages import dotted
from megatron_infer.kernels.triton.compiled_launch import CompiledLaunches
from megatron_infer.kernels.triton_scratch import cdiv as cdiv
from megatron_infer.kernels.triton_scratch import power_of_2 as power_of_2

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The dtypes of kernels -> Triton's names."""
MIN_CAPABILITY = (8, 0)
INTERPRET_VARIABLE = "TRITON_INTERPRET"
INTERPRETER_NEEDS_NUMPY_BELOW = (2, 4)
"""Triton 3.6's interpreter uses a loaded scalar as a bound of range(), which later versions of numpy refuse."""
PDL_VARIABLE = "MEGATRON_INFER_PDL"
"""For debugging only, off until it has been measured: 1 lets the programs of a kernel start while those of the kernel
before end (programmatic dependent launch)."""
PDL_CAPABILITY = (9, 0)
COMPILER_OPTIONS = ("launch_pdl",)
"""Options of a launch that the interpreter does not accept."""
MAX_PROGRAMS = 2**31 - 1
"""Most programs of a launch: Triton's launcher multiplies the axes as int, and launches nothing if that overflows."""
MAX_GRID = (MAX_PROGRAMS, 65535, 65535)
"""Most programs along each axis in CUDA."""

MAX_LAUNCHERS = 4096
"""Kernels with compiled-in values that `launch` keeps."""

APART = MappingProxyType({"PDL": False})
"""What `overlapping` gives where every launch waits for the end of the one before."""

Launch = Callable[..., None]


def interpreted() -> bool:
    """Whether kernels that are imported now run in the interpreter."""
    return os.environ.get(INTERPRET_VARIABLE, "0") not in ("", "0")


def unavailable(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on tensors of this device; None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            return f"needs compute capability {dotted(MIN_CAPABILITY)}, {device} has {dotted(capability)}"
        return _no_launcher()
    if device.type != "cpu" or not interpreted():
        return f"runs on a GPU, the model is on {device.type}"
    version = tuple(int(part) for part in np.__version__.split(".")[:2])
    if version >= INTERPRETER_NEEDS_NUMPY_BELOW:
        return (
            f"Triton's interpreter needs numpy below {dotted(INTERPRETER_NEEDS_NUMPY_BELOW)}, this is {np.__version__}"
        )
    return None


def kernels_unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why kernels of this dtype are not supported on the device; None: they are."""
    if (reason := unavailable(device)) is not None:
        return reason
    if dtype not in DTYPES:
        return f"needs float32, bfloat16 or float16, got {dtype}"
    if device.type == "cpu" and dtype is torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly; use float32 or float16 with it"
    return None


def precision(element_bytes: int) -> str:
    """`input_precision` of tl.dot: fp32 is multiplied as fp32, not rounded to TF32; no effect in 16 bit."""
    return "ieee" if element_bytes > 2 else "tf32"


@functools.cache
def _no_launcher() -> str | None:
    """Why Triton cannot launch compiled kernels; None: it can. It compiles C for that: for the driver, here, and later
    for each kernel's arguments. Images for deployment often have no compiler."""
    try:
        from triton.runtime import driver

        _ = driver.active.utils
    except (RuntimeError, OSError, ImportError, AssertionError, subprocess.SubprocessError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        return f"triton builds its launchers with a C compiler (CC, gcc or clang) and Python's headers, and: {said}"
    return None


def overlapping(device: torch.device) -> dict[str, bool]:
    """Options that let a launch on this device begin before the previous one has ended, where that is turned on.

    A kernel with PDL waits before it accesses memory, so that only the start of its programs overlaps; the previous
    kernel may be any.
    """
    if os.environ.get(PDL_VARIABLE) != "1" or device.type != "cuda" or not _can_overlap(device):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= PDL_CAPABILITY


_LISTENERS: list[Callable[[Launch, Any, Any, tuple[Any, ...], Mapping[str, Any]], None]] = []


class Launcher:
    """A kernel with its compiled-in values and options, for launches that a step repeats with every layer.

    Calls do what `launch` does; on a GPU they find the compiled kernel without Triton's own search for it.
    """

    __slots__ = ("_compiled", "kernel", "options")

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self._compiled: CompiledLaunches | None = None

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """`launch(self.kernel, grid, *args, **self.options)`."""
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        programs = x * y * z
        if programs <= 0:
            return
        if programs > MAX_PROGRAMS or y > MAX_GRID[1] or z > MAX_GRID[2]:
            _refuse_grid(self.kernel, grid)
        if _LISTENERS or (device := current_device_of(args[0])) is None:
            _launch_heard(self.kernel, grid, args, self.options)
            return
        compiled = self._compiled
        if compiled is None:
            compiled = self._compiled = CompiledLaunches(self.kernel, self.options, args)
        try:
            key = compiled.run(device, x, y, z, *args)
        except (AttributeError, TypeError):  # an argument of another type than at first
            key = ()
        if key is not None:
            compiled.search(key, (x, y, z), args)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel` over `grid`; every launch of the package comes here or to a `Launcher`, so that it can be recorded
    and replayed.

    A captured graph repeats the numbers among `args`; only the content of tensors may change. The kernel runs on the
    device of the first argument, a tensor, whatever the thread's current device. An empty grid launches nothing; a grid
    that a GPU does not support raises ValueError, in the interpreter too. On meta tensors listeners hear of the launch,
    and nothing runs.
    """
    key = (id(kernel), *options.items())  # a kernel's own hash takes longer
    if (launcher := _LAUNCHERS.get(key)) is None:
        if len(_LAUNCHERS) >= MAX_LAUNCHERS:
            _LAUNCHERS.clear()
        launcher = _LAUNCHERS[key] = Launcher(kernel, **options)  # it keeps the kernel, so that its id stays taken
    launcher(grid, *args)


_LAUNCHERS: dict[tuple[Any, ...], Launcher] = {}


def current_device_of(where: Tensor) -> int | None:
    """The number of the GPU that holds `where`, if it is the thread's current one; else None."""
    if where.is_cuda and (device := where.get_device()) == torch.cuda.current_device():
        return device
    return None


def _refuse_grid(kernel: Any, grid: tuple[int, ...]) -> None:
    raise ValueError(
        f"{kernel.fn.__name__} over a grid of {grid}: a launch has {MAX_PROGRAMS:,} programs at most, and along "
        f"its axes {MAX_GRID}; run fewer tokens or rows a step (max_tokens, max_requests)"
    )


def _launch_heard(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Launch through Triton, on whatever device, after all listeners have heard of it."""
    where = args[0]
    for listener in _LISTENERS:
        listener(launch, kernel, grid, args, options)
    if not where.is_cuda:
        if where.is_meta:
            return
        _refuse_what_is_not_compiled(kernel, args)
        options = {name: value for name, value in options.items() if name not in COMPILER_OPTIONS}
    # listeners have seen the launch: hide the interpreter's own torch calls from their dispatch modes
    with _disable_current_modes() if _LISTENERS else _NOTHING, _device_of(where):
        kernel.run(*args, grid=grid, warmup=False, **options)


_NOTHING = contextlib.nullcontext()


def _refuse_what_is_not_compiled(kernel: Any, args: tuple[Any, ...]) -> None:
    """Raise TypeError for what only the interpreter takes: Triton compiles for tensors, None and Python's numbers."""
    for name, value in zip(kernel.arg_names, args, strict=False):
        if not isinstance(value, torch.Tensor | int | float | None):
            raise TypeError(
                f"{kernel.fn.__name__}: {name} is a {type(value).__name__}; give an int, a float or a tensor"
            )


def _device_of(x: Any) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current stream of the current device: make that the device of x."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return torch.cuda.device(x.get_device())
    return _NOTHING


@contextlib.contextmanager
def listening(
    listener: Callable[[Launch, Any, Any, tuple[Any, ...], Mapping[str, Any]], None],
) -> Iterator[None]:
    """Call `listener(launch, kernel, grid, args, options)` before every launch in the body."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)

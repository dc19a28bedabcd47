"""Find and import the optional packages of backends, or give the exact reason why they cannot be used."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib import metadata

import torch

HALF = (torch.float16, torch.bfloat16)


def not_on_gpu(device: torch.device, min_capability: tuple[int, int] = (8, 0)) -> str | None:
    """Why kernels for NVIDIA GPUs cannot run on tensors of this device; None: they can."""
    if device.type != "cuda":
        return f"runs on a GPU, the model is on {device.type}"
    if torch.version.hip is not None:
        return "runs on NVIDIA GPUs, this torch is built for ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < min_capability:
        return f"needs compute capability {dotted(min_capability)}, {device} has {dotted(capability)}"
    return None


def needs_half(dtype: torch.dtype) -> str | None:
    """Why kernels of 16-bit floats cannot compute in `dtype`; None: they can."""
    return None if dtype in HALF else f"needs float16 or bfloat16, got {dtype}"


@functools.cache
def missing(modules: tuple[str, ...], distribution: str, at_least: tuple[int, ...] = ()) -> str | None:
    """Why these modules of one package cannot be used; None: all import, and the version is new enough.

    A broken package (built against another torch, a CUDA library missing) gives its own error message. Cached for the
    process.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name == modules[0].split(".")[0]:
                return f"{distribution} is not installed"
            return f"{distribution} does not import: {error}"
        except Exception as error:
            return f"{distribution} does not import: {type(error).__name__}: {first_line(error)}"
    found = version(distribution, modules[0].split(".")[0])
    if found is not None and numbers(found) < at_least:
        return f"needs {distribution} {dotted(at_least)} or newer, this is {found}"
    return None


def version(distribution: str, module: str) -> str | None:
    """The installed version, else the imported module's own `__version__`; None: neither is known."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        found = getattr(sys.modules.get(module), "__version__", None)
        return None if found is None else str(found)


def numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.7.4.post1 -> (2, 7, 4)."""
    parts = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
        if digits != part:
            break
    return tuple(parts)


def dotted(parts: Sequence[int]) -> str:
    return ".".join(map(str, parts))


def first_line(error: Exception) -> str:
    """The first line of an error's message, short enough for a table."""
    return (str(error).strip().splitlines() or ["no message"])[0][:200]

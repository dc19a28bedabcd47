"""Backends beside the portable ones, in order of preference: those available on a device, and why the others are not.

A backend is a module with `unavailable(device, dtype) -> str | None` and `make(device, dtype) -> object`. It is
imported when it is tried for a device, and its packages inside `unavailable` and `make`: none of them is required.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_infer.kernels.triton import launch


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend of one operation."""

    name: str
    module: str
    """Below megatron_infer.kernels."""


ATTENTION: tuple[Candidate, ...] = (Candidate("triton", "triton.attention"),)
SPARSE: tuple[Candidate, ...] = (Candidate("triton", "triton.sparse_attention"),)
SCAN: tuple[Candidate, ...] = (Candidate("triton", "triton.scan"),)
OPS: tuple[Candidate, ...] = (Candidate("triton", "triton.elementwise"),)
STEP: tuple[Candidate, ...] = (Candidate("triton", "triton.step_gather"),)
LORA: tuple[Candidate, ...] = (Candidate("triton", "triton.lora"),)
SAMPLING: tuple[Candidate, ...] = (Candidate("triton", "triton.sampling"),)
TRITON = "triton."
"""Prefix of modules that import triton, and are imported only where it can run."""
NAMES = ("triton",)
"""Backends that the debugging variable may force besides the portable ones."""


def available(
    candidates: Sequence[Candidate], device: torch.device, dtype: torch.dtype, *, forced: str | None
) -> tuple[list[Any], dict[str, str]]:
    """(backends available here, best first; name of each other backend -> the reason).

    forced: try this one alone; a portable one: try none. On a CPU they are tried only where one is forced: Triton's
    interpreter is for tests.
    """
    backends: list[Any] = []
    reasons: dict[str, str] = {}
    for candidate in _to_try(candidates, device, forced):
        backend, reason = _made(candidate, device, dtype)
        if reason is None:
            backends.append(backend)
        else:
            reasons[candidate.name] = reason
    return backends, reasons


def first(
    candidates: Sequence[Candidate],
    device: torch.device,
    dtype: torch.dtype,
    *,
    forced: str | None,
    refuses: Callable[[Any], str | None],
) -> tuple[Any | None, dict[str, str], dict[str, str]]:
    """(the first that is available and not refused; name -> why it is unavailable; name -> why it is refused).

    The backends behind the first are not tried: importing them takes seconds. forced: see `available`.
    """
    missing: dict[str, str] = {}
    refused: dict[str, str] = {}
    for candidate in _to_try(candidates, device, forced):
        backend, reason = _made(candidate, device, dtype)
        if reason is not None:
            missing[candidate.name] = reason
        elif (reason := refuses(backend)) is not None:
            refused[candidate.name] = reason
        else:
            return backend, missing, refused
    return None, missing, refused


def _to_try(candidates: Sequence[Candidate], device: torch.device, forced: str | None) -> Iterator[Candidate]:
    if device.type == "cpu" and forced not in NAMES:
        return
    for candidate in candidates:
        if forced is None or candidate.name == forced:
            yield candidate


def _made(candidate: Candidate, device: torch.device, dtype: torch.dtype) -> tuple[Any, str | None]:
    """(the backend, None), or (None, why it is unavailable)."""
    if candidate.module.startswith(TRITON) and (reason := launch.unavailable(device)) is not None:
        return None, reason
    module = importlib.import_module(f"megatron_infer.kernels.{candidate.module}")
    reason = module.unavailable(device, dtype)
    return (module.make(device, dtype), None) if reason is None else (None, reason)

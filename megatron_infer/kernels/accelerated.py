"""Backends beside the portable ones, in order of preference: which exist for a device, and why the others do not.

A backend is a module with `unavailable(device, dtype) -> str | None` and `make(device, dtype) -> object`. It is
imported when a device asks for it, and its packages inside `unavailable` and `make`: none of them is ever required.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
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


ATTENTION: tuple[Candidate, ...] = ()
SCAN: tuple[Candidate, ...] = ()
OPS: tuple[Candidate, ...] = ()
STEP: tuple[Candidate, ...] = (Candidate("triton", "triton.step_gather"),)
SAMPLING: tuple[Candidate, ...] = (Candidate("triton", "triton.sampling"),)
TRITON = "triton."
"""Modules that import triton themselves: only where it can run."""
NAMES = ("triton", "flashinfer", "flash_attn", "mamba_ssm")
"""What the debugging variable may force besides the portable backends."""


def available(
    candidates: Sequence[Candidate], device: torch.device, dtype: torch.dtype, *, forced: str | None
) -> tuple[list[Any], dict[str, str]]:
    """(backends that exist here, best first; name -> why not, of the others).

    forced: only this one, none of them where it is a portable one. On a CPU they are looked at only where one is
    forced: Triton's interpreter is for tests.
    """
    if device.type == "cpu" and forced not in NAMES:
        return [], {}
    backends: list[Any] = []
    reasons: dict[str, str] = {}
    for candidate in candidates:
        if forced is not None and candidate.name != forced:
            continue
        if candidate.module.startswith(TRITON) and (reason := launch.unavailable(device)) is not None:
            reasons[candidate.name] = reason
            continue
        module = importlib.import_module(f"megatron_infer.kernels.{candidate.module}")
        reason = module.unavailable(device, dtype)
        if reason is None:
            backends.append(module.make(device, dtype))
        else:
            reasons[candidate.name] = reason
    return backends, reasons

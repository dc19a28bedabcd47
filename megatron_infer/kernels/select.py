"""Which backend runs which operation, decided once at start-up and shown in one table."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_infer.errors import ConfigError
from megatron_infer.kernels import packing
from megatron_infer.kernels.base import AttendSpec, AttentionBackend, Ops
from megatron_infer.kernels.cpu_torch import TorchOps, TorchPagedAttention
from megatron_infer.kernels.torch_ref import ReferenceAttention, ReferenceOps

BACKEND_VARIABLE = "MEGATRON_INFER_CPU_BACKEND"
"""For debugging only: `native`, `torch` or `reference` forces that backend."""
BACKENDS = ("native", "torch", "reference")


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """One line of the start-up table."""

    operation: str
    chosen: str
    reasons: dict[str, str]
    """Backend that was not chosen -> why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The kernels of one engine."""

    ops: Ops
    attention: AttentionBackend
    packed: packing.PackedLinears | None
    """Give it the model's weights with `pack`; `ops.linear` then uses the packed copies. None: packing is unavailable."""
    argmax: Callable[[Tensor], Tensor]
    """argmax(logits_SV) -> int64 [S]; the lowest id wins ties."""
    rows: list[BackendChoice]

    def table(self) -> str:
        """The choices as text: operation, backend, why not the others."""
        return format_rows(self.rows)


def format_rows(rows: list[BackendChoice]) -> str:
    """Aligned text, one line an operation."""
    lines = [("operation", "chosen", "why not the others")]
    for row in rows:
        why = "; ".join(f"{name}: {reason}" for name, reason in row.reasons.items()) or "first choice"
        lines.append((row.operation, row.chosen, why))
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    return "\n".join(f"{op:<{widths[0]}}  {chosen:<{widths[1]}}  {why}" for op, chosen, why in lines)


def lowest_argmax(logits_SV: Tensor) -> Tensor:
    """Index of the largest entry of each row; torch's argmax on a CPU already prefers the lowest index."""
    return logits_SV.argmax(-1)


def _forced_backend() -> str | None:
    name = os.environ.get(BACKEND_VARIABLE) or None
    if name is not None and name not in BACKENDS:
        raise ConfigError(f"{BACKEND_VARIABLE} is {name!r}; it can be {', '.join(BACKENDS)}")
    return name


def _choose_linear(device: torch.device, dtype: torch.dtype, forced: str | None) -> tuple[BackendChoice, bool]:
    if forced == "reference":
        reason: str | None = f"{BACKEND_VARIABLE}=reference"
    elif device.type != "cpu":
        reason = f"weights are on {device.type}"
    else:
        reason = packing.unavailable(dtype)
    if reason is None:
        return BackendChoice("linear", "oneDNN prepacked", {}), True
    return BackendChoice("linear", "torch", {"oneDNN prepacked": reason}), False


def choose(device: torch.device | str, dtype: torch.dtype, *, specs: list[AttendSpec], block_size: int) -> Chosen:
    """The fastest backends that can run every layer in `specs` here; never fails for lack of a compiler or a library.

    Raises ConfigError if the debugging variable forces a backend that cannot run.
    """
    device = torch.device(device)
    forced = _forced_backend()
    linear_row, can_pack = _choose_linear(device, dtype, forced)
    packed = packing.PackedLinears() if can_pack else None
    reasons: dict[str, str] = {}
    if forced == "reference":
        reasons = dict.fromkeys(("native", "torch"), f"{BACKEND_VARIABLE}=reference")
        rows = [BackendChoice(name, "reference", reasons) for name in ("attention", "norms, activations", "argmax")]
        reference = ReferenceOps()
        return Chosen(
            ops=reference, attention=ReferenceAttention(), packed=None, argmax=lowest_argmax, rows=[*rows, linear_row]
        )
    rows = [BackendChoice(name, "torch", reasons) for name in ("attention", "norms, activations", "argmax")]
    return Chosen(
        ops=TorchOps(packed), attention=TorchPagedAttention(), packed=packed, argmax=lowest_argmax, rows=[*rows, linear_row]
    )

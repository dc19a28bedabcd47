"""What an update of the weights did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One finished update of a model's weights, as this rank saw it."""

    version: int
    num_tensors: int
    """Parameters and buffers written."""
    bytes_copied: int
    """Written into live tensors."""
    bytes_received: int
    """Of these, what came from other processes."""
    seconds: float
    checksum: str | None
    """Of the whole model's weights, the same in every layout; None where nobody asked for it."""

"""What an update of the weights did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One finished update of a model's weights, as this rank saw it."""

    version: int
    """The weights' version from here on."""
    num_tensors: int
    """Parameters and saved buffers of this rank that the update was about."""
    bytes_copied: int
    """Written into live tensors; 0 where the model that trains is the model that generates."""
    bytes_received: int
    """Of these, what came from other processes."""
    seconds: float
    checksum: str | None = None
    """Of the whole model's weights, the same in every layout; None where nobody asked for it."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"version {self.version}: {self.num_tensors} tensors, {self.bytes_copied / 2**20:,.1f} MiB copied, "
            f"{self.bytes_received / 2**20:,.1f} MiB received, {self.seconds * 1e3:.1f} ms"
        )

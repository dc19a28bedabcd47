"""The report of a weight update."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One finished weight update on this rank."""

    version: int
    """Version of the new weights."""
    num_tensors: int
    """Parameters and saved buffers of this rank that were updated."""
    bytes_copied: int
    """Bytes written into live tensors; 0 where the model that trains is the model that generates."""
    bytes_received: int
    """How many of them came from other processes."""
    seconds: float
    checksum: str | None = None
    """Digest of the whole model's weights, the same in every layout; None if it was not requested."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"version {self.version}: {self.num_tensors} tensors, {self.bytes_copied / 2**20:,.1f} MiB copied, "
            f"{self.bytes_received / 2**20:,.1f} MiB received, {self.seconds * 1e3:.1f} ms"
        )

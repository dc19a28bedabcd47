"""Training clients on the disk, for a durable server of the Tinker API: they go on after it was killed.

DIR/MODEL/client            adapter, optimizer and version after the last change, with the change's number and reply
DIR/MODEL/operations.json   the next operation's number, and the numbers of those whose gradients no change has used yet
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.server.tinker.training import LiveTrainer, TrainingClient, manifest_of

STATE, OPERATIONS = "client", "operations.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptClient:
    id: str
    client: TrainingClient
    changed_seq: int
    """Number of the operation that changed adapter or optimizer last; 0: none had a number."""
    reply: Any
    """Of that operation."""
    next_seq: int
    lost: list[int]
    """Operations that were computed later, whose gradients are gone."""


class KeptClients:
    """The clients of one state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._dir = state_dir

    def keep(self, id: str, client: TrainingClient, *, seq_id: int, reply: Any) -> None:
        """On the disk when this returns. seq_id, reply: of the operation that has changed the client."""
        client.save(self._dir / id / STATE, seq_id=seq_id, reply=reply)

    def note(self, id: str, *, next_seq: int, gradients: Sequence[int]) -> None:
        """An operation has ended."""
        path = self._dir / id / OPERATIONS
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps({"next_seq": next_seq, "gradients": list(gradients)}))
        partial.replace(path)

    def forget(self, id: str) -> None:
        for name in (STATE, OPERATIONS):
            (self._dir / id / name).unlink(missing_ok=True)

    def load(self, trainer: LiveTrainer) -> Iterator[KeptClient]:
        """All that are there. Raises ConfigError for one that this server cannot have."""
        for path in sorted(self._dir.glob(f"*/{STATE}")):
            try:
                about = manifest_of(path)
                client = trainer.create(path.parent.name, rank=about["rank"], seed=None)
                client.load(path, optimizer=True)
            except InferenceError as error:
                remedy = "serve the model and rank that it was written with, or remove the file"
                raise ConfigError(f"{path}: {error}; {remedy}") from None
            seq_id, noted = about["seq_id"], path.with_name(OPERATIONS)
            operations: dict[str, Any] = {"next_seq": 1, "gradients": []}
            if noted.exists():
                operations = json.loads(noted.read_text())
            yield KeptClient(
                id=path.parent.name,
                client=client,
                changed_seq=seq_id,
                reply=about["reply"],
                next_seq=max(operations["next_seq"], seq_id + 1),
                lost=[number for number in operations["gradients"] if number > seq_id],
            )

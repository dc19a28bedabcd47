"""Training clients on the disk, for a durable server of the Tinker API: they go on after it was killed.

DIR/MODEL/client            adapter, optimizer and version after the last change, with the change's number and reply
DIR/MODEL/operations.json   `Operations`
DIR/lock                    held by the server that has these clients; names the server
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megatron_infer.engine.durable import file_format
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.server.http_errors import ApiError
from megatron_infer.server.tinker.training import LiveTrainer, TrainingClient

STATE, OPERATIONS, LOCK = "client", "operations.json", "lock"


class Operations(msgspec.Struct, frozen=True, kw_only=True):
    next_seq: int = 1
    """Number of the next operation."""
    gradients: list[int] = []
    """Operations whose gradients no change has used yet."""
    settled: int = 0
    """The last operation that used or dropped gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptClient:
    id: str
    client: TrainingClient
    changed: tuple[int, Any]
    """The operation that changed adapter or optimizer last: its number, 0 if none had one, and its reply."""
    operations: Operations
    """As noted, but for what that operation has used. The gradients of those that it names are gone."""


class KeptClients:
    """The clients of one state directory."""

    def __init__(self, state_dir: Path) -> None:
        """Raises ConfigError where another server has the directory."""
        self._dir = state_dir
        state_dir.mkdir(parents=True, exist_ok=True)
        self._lock = (state_dir / LOCK).open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with self._lock:
                self._lock.seek(0)
                other = self._lock.read().strip()
            remedy = "end that server, give this one another --state-dir, or --no-durable"
            raise ConfigError(f"{state_dir}: another server has the clients of it ({other}); {remedy}") from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        self._lock.flush()
        self._writer = ThreadPoolExecutor(1, "megatron-infer-notes")
        """Notes are written in their order."""

    def close(self) -> None:
        self._writer.shutdown()
        self._lock.close()

    def keep(self, id: str, client: TrainingClient, *, seq_id: int, reply: Any) -> None:
        """On the disk when this returns. seq_id, reply: of the operation that has changed the client.

        Raises ApiError where it cannot be written: the client is what its file has then.
        """
        path = self._dir / id / STATE
        is_new = not path.exists()
        try:
            client.save(path, seq_id=seq_id, reply=reply)
        except Exception as error:
            if is_new:
                raise
            client.load(path, optimizer=True)
            raise ApiError(
                500,
                f"the client could not be written to --state-dir ({error}); it is at version {client.version}, as in "
                "its file, without gradients: make room, then send the batches and the step with new numbers",
                code="not_written",
            ) from None
        if is_new:
            file_format.sync(self._dir)

    def note(self, id: str, operations: Operations) -> Future[None]:
        """On the disk when the future is done. Its error is an ApiError."""
        return self._writer.submit(self._note, self._dir / id / OPERATIONS, operations)

    def _note(self, path: Path, operations: Operations) -> None:
        partial = path.with_suffix(".tmp")
        try:
            partial.write_bytes(msgspec.json.encode(operations))
            file_format.sync(partial)
            file_format.put_in_place(partial, path)
        except OSError as error:
            raise ApiError(
                500,
                f"the operation's number could not be written to --state-dir ({error}), and gradients of the operation "
                "do not count: make room, then send it with a new number",
                code="not_written",
            ) from None

    def forget(self, id: str) -> None:
        """After the notes that wait."""
        self._writer.submit(self._forget, id).result()

    def _forget(self, id: str) -> None:
        for name in (STATE, OPERATIONS):
            (self._dir / id / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds what was saved, or is not there
            (self._dir / id).rmdir()

    def load(self, trainer: LiveTrainer) -> Iterator[KeptClient]:
        """All that are there. Raises ConfigError for one that this server cannot have."""
        for path in sorted(self._dir.glob(f"*/{STATE}")):
            try:
                about = file_format.read_manifest(path)
                client = trainer.create(path.parent.name, rank=about["rank"], seed=None)
                client.load(path, optimizer=True)
            except InferenceError as error:
                remedy = "serve the model and rank of the client, give another --state-dir, or remove the file"
                raise ConfigError(f"{path}: {error}; {remedy}") from None
            seq_id, noted = about["seq_id"], path.with_name(OPERATIONS)
            try:
                operations = (
                    msgspec.json.decode(noted.read_bytes(), type=Operations) if noted.exists() else Operations()
                )
            except (msgspec.MsgspecError, UnicodeError) as error:
                remedy = "remove the file, and send the batches since the client's last optim_step again"
                raise ConfigError(f"{noted}: damaged ({error}); {remedy}") from None
            yield KeptClient(
                id=path.parent.name,
                client=client,
                changed=(seq_id, about["reply"]),
                operations=Operations(
                    next_seq=max(operations.next_seq, seq_id + 1),
                    gradients=[number for number in operations.gradients if number > seq_id],
                    settled=max(operations.settled, seq_id),
                ),
            )

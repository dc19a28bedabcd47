"""Where the sockets of a server's processes lie: in a folder, or at a base that one server holds at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from megatron_infer.errors import ConfigError

SCHEME, COORDINATOR = "ipc://", "-coordinator"
MAX_SOCKET_PATH = 107
"""Bytes of the path of a Unix socket, at most."""


def checked_base(base: str) -> Path:
    """The path of ipc://PATH, which every socket's name begins with. Raises ConfigError before anything is bound."""
    if not base.startswith(SCHEME):
        raise ConfigError(
            f"zmq_endpoint_base is {base!r}, it must be {SCHEME}PATH: the processes of one server talk over Unix "
            "sockets; for other machines start `megatron-infer coordinator`"
        )
    path = Path(base.removeprefix(SCHEME)).expanduser().absolute()
    socket = f"{path}{COORDINATOR}"
    if len(os.fsencode(socket)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"zmq_endpoint_base: the socket's path {socket!r} has {len(os.fsencode(socket))} bytes, the limit is "
            f"{MAX_SOCKET_PATH}; take a shorter folder"
        )
    return path


class SocketBase:
    """A claim on a base; sockets that a dead server left behind are removed.

    The folder is made where it is missing, and then only this user enters it. Raises ConfigError while another server
    holds the base.
    """

    def __init__(self, base: str) -> None:
        path = checked_base(base)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"zmq_endpoint_base {base!r}: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"zmq_endpoint_base {base!r} is in use by another server; stop it, or give another base"
            ) from None
        self._socket = Path(f"{path}{COORDINATOR}")
        self._socket.unlink(missing_ok=True)
        self.coordinator = f"{SCHEME}{self._socket}"
        """The address of the coordinator."""

    def close(self) -> None:
        """Remove the socket and give the base up."""
        self._socket.unlink(missing_ok=True)
        os.close(self._lock)


class ServerFolder:
    """The files and sockets of one server's processes; only this user can open the folder. A context manager.

    base: what the coordinator's address begins with; None: the coordinator's socket is in the folder. Raises as
    `SocketBase`.
    """

    def __init__(self, base: str | None = None) -> None:
        self._base = None if base is None else SocketBase(base)
        self.path = tempfile.mkdtemp(prefix="megatron-infer-")
        self.coordinator = f"{SCHEME}{self.path}/coordinator" if self._base is None else self._base.coordinator
        """The address of the coordinator."""

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._base is not None:
            self._base.close()

    def __enter__(self) -> ServerFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

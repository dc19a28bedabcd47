"""The wire between the processes of an engine or a server: frames with a limit, and when a silent peer counts as lost.

who                                    over             body        who may speak
ranks of an engine (`rank_links`)      TCP              JSON        who shows the token that the ranks have exchanged
child and supervisor (`supervisor`)    a socket pair    JSON        the two of them
HTTP processes (`http_workers`)        Unix sockets     JSON        who can open the server's folder: its user
audio decoder (`audio_decoder`)        a Unix socket    msgpack     who can open the server's folder: its user

Ranks and children hold a `Link`. At a Unix socket each question has a connection of its own (`ask`, `answer`).

The coordinator and its peers talk over ZeroMQ, which has frames and limits of its own and proves keys
(`coordinator.access`). `Silence` judges these peers as well. Tensors go over process groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("!I")
MAX_BODY_BYTES = 1 << 30


class LinkClosed(Exception):
    """The peer has closed the connection, its process has ended, or what it sends is no message."""


def frame(body: bytes | memoryview) -> bytes:
    """A body with its length before it."""
    return LENGTH.pack(len(body)) + body


def _size(length: bytes, max_bytes: int) -> int:
    size: int = LENGTH.unpack(length)[0]
    if size > max_bytes:
        raise LinkClosed(f"a message of {size:,} bytes, the limit is {max_bytes:,}")
    return size


class Link:
    """JSON messages over a connected socket; one thread at a time may use it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()

    def send(self, message: Any, *, wait_s: float | None = 5.0) -> None:
        """Raises LinkClosed if the peer is gone, or does not receive for `wait_s` seconds. None: no limit."""
        self.send_body(json.dumps(message, separators=(",", ":")).encode(), wait_s=wait_s)

    def send_body(self, body: bytes | memoryview, *, wait_s: float | None) -> None:
        """As `send`, of bytes that are no JSON."""
        try:
            self._socket.settimeout(wait_s)
            self._socket.sendall(frame(body))
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self, wait_s: float | None, *, max_bytes: int = MAX_BODY_BYTES) -> Any | None:
        """The next message; None if none comes within `wait_s` seconds. wait_s None: no limit.

        Raises LinkClosed after the last one, for one larger than `max_bytes` and for one that is no JSON.
        """
        body = self.receive_body(wait_s, max_bytes=max_bytes)
        try:
            return None if body is None else json.loads(body)
        except (ValueError, RecursionError) as error:
            raise LinkClosed(f"a damaged message: {error}") from None

    def receive_body(self, wait_s: float | None, *, max_bytes: int = MAX_BODY_BYTES) -> bytes | None:
        """As `receive`, of bytes that are no JSON."""
        while (body := self._next(max_bytes)) is None:
            try:
                self._socket.settimeout(wait_s)
                data = self._socket.recv(1 << 16)
            except (TimeoutError, BlockingIOError):
                return None
            except OSError as error:
                raise LinkClosed(str(error)) from error
            if not data:
                raise LinkClosed("end of file")
            self._buffer += data
        return body

    def _next(self, max_bytes: int) -> bytes | None:
        """The body of the next frame, once all of it has come."""
        if len(self._buffer) < LENGTH.size:
            return None
        end = LENGTH.size + _size(self._buffer[: LENGTH.size], max_bytes)
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return body

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


async def receive_frame(reader: asyncio.StreamReader, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The next body. Raises OSError, and LinkClosed at the end of the stream and for a body larger than max_bytes."""
    try:
        return await reader.readexactly(_size(await reader.readexactly(LENGTH.size), max_bytes))
    except asyncio.IncompleteReadError:
        raise LinkClosed("end of file") from None


async def ask(path: str, question: bytes) -> bytes:
    """The answer of the process that listens at a Unix socket.

    Raises LinkClosed, OSError; FileNotFoundError or ConnectionRefusedError where no process listens.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(frame(question))
        return await receive_frame(reader)
    finally:
        writer.close()


async def answer(
    path: str, reply: Callable[[bytes], Awaitable[bytes]], *, max_bytes: int = MAX_BODY_BYTES
) -> asyncio.Server:
    """Answer what other processes `ask` at a Unix socket. Raises OSError.

    The socket that an earlier process left at the path is replaced. A reply is cancelled once its asker has left.
    max_bytes: limit of a question.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks: list[asyncio.Future[Any]] = []
        try:
            tasks.append(asyncio.ensure_future(reply(await receive_frame(reader, max_bytes))))
            tasks.append(asyncio.ensure_future(_end_of(reader)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                writer.write(frame(tasks[0].result()))
                await writer.drain()
        except (OSError, LinkClosed):  # the asker has left
            pass
        finally:
            for task in tasks:
                task.cancel()
            writer.close()

    Path(path).unlink(missing_ok=True)
    return await asyncio.start_unix_server(serve, path)


async def _end_of(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass


class Silence:
    """How long a peer has been silent.

    Time in which this process itself did not run is not counted: what the peer sent in that time is still unread.
    """

    def __init__(self, max_pass_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """max_pass_s: longest time between two calls of `seconds` of a process that runs."""
        self.max_pass_s = max_pass_s
        self._clock = clock
        self._last_heard = self._last_pass = clock()

    def heard(self) -> None:
        """The peer has sent something; from any thread."""
        self._last_heard = self._clock()

    def seconds(self) -> float:
        """Seconds of silence; the loop that watches the peer asks in every pass."""
        now = self._clock()
        late = now - self._last_pass - self.max_pass_s
        self._last_pass = now
        if late > 0:
            self._last_heard = min(now, self._last_heard + late)
        return now - self._last_heard

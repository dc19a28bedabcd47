"""The wire between the processes of an engine or a server: frames with a limit, and when a silent peer counts as lost.

who                                    over             body        who may speak
ranks of an engine (`rank_links`)      TCP              JSON        who shows the token that the ranks have exchanged
child and supervisor (`supervisor`)    pipes            JSON        the two of them
HTTP processes (`http_workers`)        Unix sockets     JSON        who can open the server's folder: its user
audio decoder (`audio_decoder`)        a Unix socket    msgpack     who can open the server's folder: its user

The coordinator and its peers talk over ZeroMQ, which has frames and limits of its own and proves keys
(`coordinator.access`). `Silence` judges these peers as well. Tensors go over process groups.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

LENGTH = struct.Struct("!I")
MAX_BODY_BYTES = 1 << 30


class LinkClosed(Exception):
    """The peer has closed the connection, its process has ended, or what it sends is no message."""


def frame(body: bytes) -> bytes:
    """A body with its length before it."""
    return LENGTH.pack(len(body)) + body


def json_frame(message: Any) -> bytes:
    return frame(json.dumps(message, separators=(",", ":")).encode())


def json_message(body: bytes) -> Any:
    """Raises LinkClosed for a body that is no JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise LinkClosed(f"a damaged message: {error}") from None


def _size(length: bytes, max_bytes: int) -> int:
    size: int = LENGTH.unpack(length)[0]
    if size > max_bytes:
        raise LinkClosed(f"a message of {size:,} bytes, the limit is {max_bytes:,}")
    return size


class FrameBuffer:
    """Takes bytes as they come and gives the bodies of whole frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        self._bytes += data

    def next(self, max_bytes: int = MAX_BODY_BYTES) -> bytes | None:
        """The next body; None if it is not whole yet. Raises LinkClosed for one larger than max_bytes."""
        if len(self._bytes) < LENGTH.size:
            return None
        end = LENGTH.size + _size(self._bytes[: LENGTH.size], max_bytes)
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[LENGTH.size : end])
        del self._bytes[:end]
        return body


def read_frame(file: IO[bytes], max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The next body of a pipe. Raises LinkClosed at the end of the file and for a body larger than max_bytes."""
    length = file.read(LENGTH.size)
    if len(length) == LENGTH.size:
        size = _size(length, max_bytes)
        body = file.read(size)
        if len(body) == size:
            return body
    raise LinkClosed("end of file")


async def receive_frame(reader: asyncio.StreamReader, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """`read_frame` of an asyncio stream; raises OSError, too."""
    try:
        return await reader.readexactly(_size(await reader.readexactly(LENGTH.size), max_bytes))
    except EOFError:  # asyncio.IncompleteReadError
        raise LinkClosed("end of file") from None


async def listen_at(
    path: str, connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> asyncio.Server:
    """Listen at a Unix socket, also where a process that has ended left its own. Raises OSError."""
    import asyncio  # here: ranks import this module and need no event loop

    Path(path).unlink(missing_ok=True)
    return await asyncio.start_unix_server(connected, path)


class Silence:
    """How long a peer has been silent. Time in which this process itself did not run is not counted: what the peer has
    sent meanwhile has not been read yet."""

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

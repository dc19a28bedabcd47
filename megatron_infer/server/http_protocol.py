"""HTTP/1.1 of one connection, under uvicorn: limits that act before the application does, or after it has replied.

A head is the request line and the headers. Trailers are the headers after a chunked body: they are dropped, and have a
head's limits. A connection that is beyond a limit is answered in HTTP and closed; all other connections go on.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from megatron_infer.server.http_errors import ApiError, unavailable

log = logging.getLogger("megatron_infer.server")

MAX_HEAD_BYTES, MAX_HEADERS = 64 << 10, 256
HEAD_TIMEOUT_S = 10.0
"""Most seconds from the connection, or from the first byte behind a reply, to the end of the head."""
IDLE_TIMEOUT_S = 30.0
"""Most seconds without a byte between a reply and the next request."""
MAX_PIPELINED = 16
"""Most requests of a connection that wait for the reply to the one before."""
MAX_DESCRIPTORS = 1 << 20
"""Limit of the process where the system sets none."""
SPARE_DESCRIPTORS = 64
"""Kept for everything that is no connection of a client: files, the coordinator, threads."""
LOG_EVERY_S = 60.0
"""Between two lines of the log that say that connections are refused."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors to the hard one -> how many connections there may be at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    most = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return max(1, most - SPARE_DESCRIPTORS)


class Connections:
    """What the connections of a server share: the limit of their number, and when a refusal was logged last."""

    def __init__(self, limit: int, *, reply_timeout_s: float) -> None:
        """reply_timeout_s: most seconds that a reply waits in memory for a client that does not read it."""
        self.limit, self.reply_timeout_s = limit, reply_timeout_s
        self._last_logged = float("-inf")

    def refused(self, count: int) -> None:
        if time.monotonic() - self._last_logged >= LOG_EVERY_S:
            self._last_logged = time.monotonic()
            log.warning("%d connections are open, the limit: further ones get 503 until some close", count)


def protocol_of(connections: Connections) -> type[asyncio.Protocol]:
    """The protocol class of a server's connections."""

    class Bounded(BoundedProtocol):
        shared = connections

    return Bounded


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits; `shared` is set by `protocol_of`."""

    shared: Connections

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        """Bytes since a message, its head or a piece of its body: of a head, of trailers, of chunks' sizes."""
        self._num_trailers = 0
        self._in_head = True
        self._refusal: ApiError | None = None
        self._cycles: list[RequestResponseCycle] = []
        """Requests without a whole reply: the one that runs, and those behind it."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._awaits_body = self._is_head_known = False
        """A request offers another protocol: its body comes; its head is read again. See `_ignore_offer`."""

    # ------------------------------------------------------------------ the connection

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.shared.limit:
            self.shared.refused(self.shared.limit)
            self._end(unavailable("too many connections are open; ask again in a moment", "too_many_connections"))
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        self.resume_writing()
        self._end_cycles()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """More of a reply waits than the system takes. A reply that has ended waits in memory, also of a connection
        that is being closed, until the client reads."""
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self.shared.reply_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        self._feed(data)  # sets the count to 0 where something ends: the rest of `data` is not counted
        if self._in_head:
            self._expect_head()
        if self._head_bytes > MAX_HEAD_BYTES and self._refusal is None:
            self._end(_too_large(f"more than {MAX_HEAD_BYTES:,} bytes"))

    def send_400_response(self, msg: str) -> None:
        """uvicorn's reply to what is no HTTP, or to what a callback below has refused."""
        if self._refusal is None:
            self._end(ApiError(400, msg, code="invalid_http"))

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data and self._refusal is None:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as offer:
                    data = data[offer.args[0] :]
                    self._ignore_offer()
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _ignore_offer(self) -> None:
        """Read on as HTTP/1.1 behind the head of a request that offers another protocol (`Upgrade: h2c` of Java's
        client, WebSocket). httptools ends there, as if the protocol were changed: what follows may begin with the
        body. Raises HttpParserError for a head whose body has no readable length."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        if self._awaits_body:
            framing = [b"%b: %b\r\n" % one for one in self.headers if one[0] in _FRAMING]
            self._is_head_known, self._awaits_body = True, False
            try:
                self.parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n"]))
            finally:
                self._is_head_known = False

    # ------------------------------------------------------------------ the parser's callbacks

    def on_message_begin(self) -> None:
        if not self._is_head_known:
            self._in_head, self._num_trailers = True, 0
            self._head_bytes = max(self._head_bytes, 1)
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_head_known:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_head_known:
            return
        if self._in_head:
            super().on_header(name, value)
        else:
            self._num_trailers += 1
        if max(len(self.headers), self._num_trailers) > MAX_HEADERS:
            self._refuse(_too_large(f"more than {MAX_HEADERS} lines"))

    def on_headers_complete(self) -> None:
        if self._is_head_known:
            return
        self._head_arrived()
        self._head_bytes = 0
        self._check_version_and_host()
        self._awaits_body = self.parser.should_upgrade() and any(
            name in _FRAMING and value != b"0" for name, value in self.headers
        )
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(ApiError(400, f"more than {MAX_PIPELINED} requests wait on this connection", code="pipeline"))
        super().on_headers_complete()
        self._cycles = [one for one in self._cycles if not one.response_complete]
        self._cycles.append(self.cycle)
        self.flow.resume_reading()  # uvicorn reads no further behind a request that waits, and misses the client's end

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if not self._awaits_body:
            super().on_message_complete()
            self.cycle.more_body = False  # uvicorn leaves True where the reply came first

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answered_early:  # else the rest of the body could go on without end
            self._expect_head()

    @property
    def _is_answered_early(self) -> bool:
        """Whether the body of a request comes that has a whole reply already."""
        return self.cycle is not None and self.cycle.response_complete and self.cycle.more_body

    def _check_version_and_host(self) -> None:
        """RFC 9112, 2.3 and 3.2: programs in between may route by another Host than the one that is looked at."""
        version, hosts = self.parser.get_http_version(), sum(name == b"host" for name, _ in self.headers)
        if version not in ("1.0", "1.1"):
            self._refuse(ApiError(400, f"the request is HTTP/{version}; send HTTP/1.1", code="http_version"))
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            self._refuse(ApiError(400, f"the request has {hosts} Host headers; send one", code="invalid_host"))

    # ------------------------------------------------------------------ refusals

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_arrived(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._head_bytes == 0:  # a browser connects before it has a request
            self.transport.close()
        elif not self.transport.is_closing():
            self._end(ApiError(408, f"no request came within {HEAD_TIMEOUT_S:g} s", code="head_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """From a callback of the parser, which goes no further."""
        self._end(error)
        raise ConnectionAbortedError(error.message)

    def _end(self, error: ApiError) -> None:
        """Answer and close. Calls under way on this connection see that their client is gone."""
        self._refusal = error
        body = msgspec.json.encode(error.body())
        lines = [f"HTTP/1.1 {error.status} {_REASONS[error.status]}", "content-type: application/json"]
        lines += [f"content-length: {len(body)}", "connection: close"]
        lines += [f"{name.lower()}: {value}" for name, value in error.headers.items()]
        unanswered = [cycle for cycle in self._cycles if not cycle.response_complete]
        is_of_last = [cycle.more_body and not cycle.response_started for cycle in unanswered]
        # Else it would stand within another reply, or in its place, or be a second one.
        if is_of_last in ([], [True]) and not self._is_answered_early:
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()
        self._end_cycles()

    def _end_cycles(self) -> None:
        """No reply reaches the client any more. uvicorn tells the last request alone, which may not even run."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()


_FRAMING = (b"content-length", b"transfer-encoding")
_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def _too_large(got: str) -> ApiError:
    limits = f"{MAX_HEAD_BYTES:,} bytes in {MAX_HEADERS} lines"
    message = f"the request line and headers (or the trailers) have {got}, the limit is {limits}"
    return ApiError(431, message, code="headers_too_large")

"""Records generation calls with their times in a file, for `megatron-infer bench-serve --replay`."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

from megatron_infer.errors import ConfigError

PATHS = ("/v1/completions", "/v1/chat/completions")


class TrafficLog:
    """ASGI middleware that writes a line of JSON for each generation call that was answered 200.

    {"at": seconds since the server started, "path": ..., "body": ..., "seconds": ..., "first_s": ..., "complete": ...}.
    Headers and refused calls, whose body may be anything, are not written.
    """

    def __init__(self, inner: Any, path: str, *, max_body_bytes: int, started: float) -> None:
        """Appends to the file, which only its owner can read from now on. Raises ConfigError if it cannot be written.

        max_body_bytes: of a call that is not refused for its size. started: when the server was, on time.time's clock.
        """
        self._inner, self._max_body_bytes = inner, max_body_bytes
        self._began = time.monotonic() - (time.time() - started)
        try:
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab", buffering=0)
            os.fchmod(self._file.fileno(), 0o600)  # a file that was there before may be open to others
        except OSError as error:
            raise ConfigError(f"record: cannot write {path}: {error.strerror}") from None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self._inner(scope, receive, send)
            return
        call = _RecordedCall(receive, send, self._max_body_bytes)
        scope["state"]["send_body"] = call.send  # events take this way, see `EventSender`
        try:
            await self._inner(scope, call.receive, call.send)
        finally:
            if call.status == 200:
                self._write(scope["path"], call)

    def _write(self, path: str, call: _RecordedCall) -> None:
        line = {
            "at": round(call.began - self._began, 6),
            "path": path,
            "body": msgspec.json.decode(b"".join(call.parts)),
            "seconds": round(time.monotonic() - call.began, 6),
            "first_s": None if call.first is None else round(call.first - call.began, 6),
            "complete": call.complete,
        }
        self._file.write(msgspec.json.encode(line) + b"\n")  # one write, so that lines of concurrent calls do not mix


class _RecordedCall:
    def __init__(self, receive: Any, send: Any, max_bytes: int) -> None:
        self._receive, self._send = receive, send
        self._room = max_bytes
        self.began = time.monotonic()
        self.parts: list[bytes] = []
        self.status = 0
        self.first: float | None = None
        self.complete = False

    async def receive(self) -> Any:
        message = await self._receive()
        if message["type"] == "http.request":
            part = message.get("body", b"")
            self._room -= len(part)
            if self._room >= 0:  # what is beyond is dropped with the call, which is refused
                self.parts.append(part)
        return message

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif self.first is None:
            self.first = time.monotonic()
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
        await self._send(message)

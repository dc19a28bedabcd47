"""One call of an operation: its body read and checked, its handler run, its answer sent, its client watched.

A client that goes away cancels the handler wherever it waits; what the handler has under way ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from megatron_infer.server import limits, streaming
from megatron_infer.server.http_errors import ApiError, api_error_of, of_validation
from megatron_infer.server.settings import ServerConfig

log = logging.getLogger("megatron_infer.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a handler is given."""

    request: Request
    body: Any
    """Of the operation's type, checked."""
    id: str
    """X-Request-Id, the client's or ours."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A JSON answer."""

    content: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Events:
    """A stream of server-sent events: JSON values, or None where a comment keeps the connection alive."""

    items: AsyncGenerator[Any]


Handler = Callable[[Call], Awaitable[Any]]


class CallEndpoint:
    """An ASGI endpoint of one operation."""

    def __init__(
        self,
        handler: Handler,
        body: Any,
        settings: ServerConfig,
        hints: dict[str, str],
        *,
        optional: bool = False,
        limit: str = "max_body_bytes",
    ) -> None:
        """optional: no body counts as {}. limit: the option that says how many bytes a body may have."""
        self._handler, self._body, self._settings = handler, body, settings
        self._hints, self._optional = hints, optional
        self._limit = limit
        self._decoder = None if body is None else msgspec.json.Decoder(body)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            body = await self._read(scope, receive)
        except limits.Disconnected:
            return
        except ApiError as error:
            await _send_error(error, scope, receive, send)
            return
        call = Call(request=Request(scope), body=body, id=scope["state"]["request_id"])
        answering = asyncio.create_task(self._answer(call, scope, receive, send))
        watching = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                scope["state"]["left"] = True
        finally:
            for task in (answering, watching):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            with contextlib.suppress(asyncio.CancelledError):
                await answering

    async def _read(self, scope: Any, receive: Any) -> Any:
        headers = dict(scope["headers"])
        data = await limits.read_body(headers, receive, limit=getattr(self._settings, self._limit), option=self._limit)
        if self._decoder is None:
            return data
        if not data and self._optional:
            return self._decoder.decode(b"{}")
        limits.check_content_type(headers.get(b"content-type"))
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise of_validation(error, self._body, self._hints) from None

    async def _answer(self, call: Call, scope: Any, receive: Any, send: Any) -> None:
        deadline = asyncio.get_running_loop().time() + self._settings.request_timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                answer = await self._handler(call)
        except Exception as error:
            await _send_error(_told(error, call.id), scope, receive, send)
            return
        if isinstance(answer, Events):
            await streaming.EventSender(send).send_all(answer.items, deadline=deadline, call_id=call.id)
            return
        if isinstance(answer, Reply):
            data = msgspec.json.encode(answer.content)
            answer = Response(data, answer.status, answer.headers, media_type="application/json")
        await answer(scope, receive, send)


async def _gone(receive: Any) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _told(error: Exception, call_id: str) -> ApiError:
    """The answer to an error; what nobody foresaw goes to the log."""
    answer = api_error_of(error)
    if answer.code == "internal_error":
        log.error("request %s failed", call_id, exc_info=error)
    return answer


async def _send_error(error: ApiError, scope: Any, receive: Any, send: Any) -> None:
    scope["state"]["error"] = error.message
    data = msgspec.json.encode(error.body())
    await Response(data, error.status, error.headers, media_type="application/json")(scope, receive, send)

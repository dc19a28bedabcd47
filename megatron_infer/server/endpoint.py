"""The ASGI endpoint of one operation: reads and checks the body, runs the handler, sends its reply.

A client that disconnects cancels the handler wherever it waits; the handler's requests are aborted as it unwinds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from megatron_infer.server import request_body, streaming
from megatron_infer.server.http_errors import ApiError, api_error_of, of_validation
from megatron_infer.server.inactive_fields import FieldTable, ignored_header
from megatron_infer.server.server_config import ServerConfig

log = logging.getLogger("megatron_infer.server")

CALLER: ContextVar[str] = ContextVar("caller", default="")
"""Who makes the current call: a tenant by its name, else an address; "" outside a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP call, as its handler gets it."""

    request: Request
    body: Any
    """The decoded body, of the operation's type."""
    id: str
    """X-Request-Id, sent by the client or made here."""
    ignored: list[str] = field(default_factory=list)
    """Fields of the body that have no effect, for the header x-ignored-fields; a handler may add some."""
    room: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Gives the body's bytes back at the call's end. A handler may move them with pop_all, for a body that waits on."""

    @property
    def caller(self) -> str:
        """The tenant whose key it has, else the address it comes from."""
        return _caller(self.request.scope)

    @property
    def route(self) -> str:
        """The path of its operation, as registered."""
        route: str = self.request.scope["state"]["route"]
        return route


def _caller(scope: Any) -> str:
    client = scope.get("client")
    return scope.get("state", {}).get("tenant") or ("" if client is None else str(client[0]))


@dataclass(frozen=True, slots=True)
class Reply:
    """A JSON reply."""

    content: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Events:
    """A stream of server-sent events: JSON values, or None for a comment that keeps the connection alive."""

    items: AsyncGenerator[Any]
    named: bool = False
    """Each event has the name of its field `type`, and the stream ends without [DONE]."""


Handler = Callable[[Call], Awaitable[Any]]
"""Returns a Reply, an Events or a Starlette Response; raises ApiError or another InferenceError."""


class Endpoint:
    """An ASGI endpoint of one operation."""

    def __init__(
        self,
        handler: Handler,
        body: Any,
        settings: ServerConfig,
        fields: FieldTable,
        *,
        room: request_body.BodyRoom,
        optional_body: bool = False,
        body_limit: str = "max_body_bytes",
        open: bool = False,
    ) -> None:
        """body: msgspec type, None for raw bytes. room: of all endpoints. The rest: see `Operation`."""
        self._room, self._open = room, open
        self._handler, self._body, self._settings = handler, body, settings
        self._fields, self._optional_body, self._body_limit = fields, optional_body, body_limit
        self._decoder = None if body is None else msgspec.json.Decoder(body)
        self._acting = [] if body is None else [one.encode_name for one in msgspec.structs.fields(body)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        CALLER.set(caller := _caller(scope))
        with contextlib.ExitStack() as room:
            await self._serve(scope, receive, send, room, room.enter_context(self._room.reserve(caller)))

    async def _serve(
        self, scope: Any, receive: Any, send: Any, room: contextlib.ExitStack, add: Callable[[int], None]
    ) -> None:
        try:
            body, ignored = await self._read(scope, receive, add)
        except request_body.Disconnected:
            return
        except ApiError as error:
            await _send_error(error, scope, receive, send)
            return
        call = Call(request=Request(scope), body=body, id=scope["state"]["request_id"], ignored=ignored, room=room)
        replying = asyncio.create_task(self._reply(call, scope, receive, send))
        watching = asyncio.create_task(_wait_disconnect(receive))
        try:
            await asyncio.wait({replying, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not replying.done():
                scope["state"]["disconnected"] = True
        finally:
            for task in (replying, watching):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            with contextlib.suppress(asyncio.CancelledError):
                await replying

    async def _read(self, scope: Any, receive: Any, add: Callable[[int], None]) -> tuple[Any, list[str]]:
        """The decoded body, and its fields that have no effect. Raises ApiError."""
        if self._open:  # who has no key takes no room
            await request_body.discard(receive)
            return b"", []
        headers, option = dict(scope["headers"]), self._body_limit
        limit, counted = getattr(self._settings, option), {"add": add} if option == "max_body_bytes" else {}
        data = await request_body.read_body(headers, receive, limit=limit, option=option, **counted)
        if self._decoder is None:
            return data, []
        if not data and self._optional_body:
            return self._decoder.decode(b"{}"), []
        request_body.check_content_type(headers)
        try:
            if len(data) > request_body.INLINE_BYTES:
                return await asyncio.to_thread(self._decoded, data)
            return self._decoded(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise of_validation(error, self._body) from None

    def _decoded(self, data: bytes) -> tuple[Any, list[str]]:
        """A body that fits its type is decoded once; any other, without the fields that ask for nothing, again."""
        assert self._decoder is not None
        request_body.check_structure(data)
        try:
            return self._decoder.decode(data), []
        except msgspec.ValidationError as error:
            try:
                rest, ignored = self._fields.settle(data, self._acting, strict=self._settings.strict_fields)
            except (msgspec.ValidationError, RecursionError):
                raise error from None
            return self._decoder.decode(rest), ignored

    async def _reply(self, call: Call, scope: Any, receive: Any, send: Any) -> None:
        deadline = asyncio.get_running_loop().time() + self._settings.request_timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                reply = await self._handler(call)
        except Exception as error:
            await _send_error(_logged(error, call.id), scope, receive, send)
            return
        headers = ignored_header(call.ignored)
        if isinstance(reply, Events):
            sender = streaming.EventSender(send, scope["state"], headers, named=reply.named)
            await sender.send_all(reply.items, deadline=deadline, call_id=call.id)
            return
        if isinstance(reply, Reply):
            data = msgspec.json.encode(reply.content)
            reply = Response(data, reply.status, reply.headers | headers, media_type="application/json")
        await reply(scope, receive, send)


async def _wait_disconnect(receive: Any) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _logged(error: Exception, call_id: str) -> ApiError:
    """The reply to an error; an unexpected one is logged."""
    reply = api_error_of(error)
    if reply.code == "internal_error":
        log.error("request %s failed", call_id, exc_info=error)
    return reply


async def _send_error(error: ApiError, scope: Any, receive: Any, send: Any) -> None:
    scope["state"]["error"] = error.message
    data = msgspec.json.encode(error.body())
    await Response(data, error.status, error.headers, media_type="application/json")(scope, receive, send)

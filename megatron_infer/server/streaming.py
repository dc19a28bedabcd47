"""Server-sent events: JSON chunks, keep-alive comments, and errors within a stream that has begun."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from megatron_infer.server.http_errors import api_error_of

log = logging.getLogger("megatron_infer.server")

DONE = b"data: [DONE]\n\n"
LAST_EVENT_TIMEOUT_S = 5.0
"""Most seconds to send the last event of a stream to a client that does not read."""
COMMENT = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventSender:
    """Sends events as they come. `send` waits while the client does not read, and the generator with it."""

    def __init__(
        self, send: Any, state: dict[str, Any], headers: Mapping[str, str] | None = None, *, named: bool = False
    ) -> None:
        """state: the call's; gets `error` and `failed_status` of a stream that ends by an error. Events go to its
        `send_body`, past layers that read the start of a reply alone. headers: further ones. named: each event has its
        type as its name, and there is no [DONE]."""
        self._send, self._state, self._named = send, state, named
        self._send_body = state.get("send_body", send)
        self._headers = [*_HEADERS, *((name.encode(), value.encode()) for name, value in (headers or {}).items())]

    async def send_all(self, items: AsyncGenerator[Any], *, deadline: float, call_id: str) -> None:
        """Send every item as an event, None as a comment; then [DONE].

        An error of the generator is the last event, without [DONE], which marks a whole stream.

        deadline: on the event loop's clock. The generator is closed in every case.
        """
        last = b"" if self._named else DONE
        try:
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            async with asyncio.timeout_at(deadline):
                async for item in items:
                    await self._body(COMMENT if item is None else self._event(item))
        except Exception as error:
            reply = api_error_of(error)
            self._state["error"], self._state["failed_status"] = reply.message, reply.status
            if reply.code == "internal_error":
                log.error("request %s failed in its stream", call_id, exc_info=error)
            last = self._event(reply.body())
        finally:
            await items.aclose()
        async with asyncio.timeout(LAST_EVENT_TIMEOUT_S):
            await self._body(last, more=False)

    def _event(self, item: Any) -> bytes:
        data = msgspec.json.encode(item)
        return b"event: %b\ndata: %b\n\n" % (item["type"].encode(), data) if self._named else b"data: %b\n\n" % data

    async def _body(self, data: bytes, *, more: bool = True) -> None:
        await self._send_body({"type": "http.response.body", "body": data, "more_body": more})

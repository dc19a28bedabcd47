"""Server-sent events: JSON chunks, keep-alive comments, and errors within a stream that has begun."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
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

    def __init__(self, send: Any, state: dict[str, Any]) -> None:
        """state: the call's; gets `error` and `failed_status` of a stream that ends by an error."""
        self._send, self._state = send, state

    async def send_all(self, items: AsyncGenerator[Any], *, deadline: float, call_id: str) -> None:
        """Send every item as an event, None as a comment; then [DONE].

        An error of the generator is the last event, without [DONE], which marks a whole stream.

        deadline: on the event loop's clock. The generator is closed in every case.
        """
        last = DONE
        try:
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            async with asyncio.timeout_at(deadline):
                async for item in items:
                    await self._body(COMMENT if item is None else b"data: %b\n\n" % msgspec.json.encode(item))
        except Exception as error:
            reply = api_error_of(error)
            self._state["error"], self._state["failed_status"] = reply.message, reply.status
            if reply.code == "internal_error":
                log.error("request %s failed in its stream", call_id, exc_info=error)
            last = b"data: %b\n\n" % msgspec.json.encode(reply.body())
        finally:
            await items.aclose()
        async with asyncio.timeout(LAST_EVENT_TIMEOUT_S):
            await self._body(last, more=False)

    async def _body(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

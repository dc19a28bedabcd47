"""Around the whole application: request ids, the API key, the last word on errors, a log line, the count of calls."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

import msgspec
from starlette.responses import Response

from megatron_infer.metrics.server_meter import CLIENT_LEFT, ServerMeter
from megatron_infer.server.auth import KeyCheck
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import ApiError
from megatron_infer.server.limits import discard
from megatron_infer.server.settings import ServerConfig

log = logging.getLogger("megatron_infer.server")


class Middleware:
    """The outermost ASGI application. Every reply bears X-Request-Id: the caller's if it is one, else a new one."""

    def __init__(
        self, inner: Any, service: EngineClient, settings: ServerConfig, *, open_paths: frozenset[str] = frozenset()
    ) -> None:
        self._inner, self._service, self._open = inner, service, open_paths
        self._key = KeyCheck(settings.api_key)
        self._log_requests = settings.log_requests

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        await _GuardedCall(scope, send, self._log_requests, self._service.meter).run(
            self._inner, receive, self._refusal(scope)
        )

    def _refusal(self, scope: Any) -> ApiError | None:
        """What stands in the way of the call, before anything of it is read."""
        if scope["path"] not in self._open and not self._key.allows(_header(scope, b"authorization")):
            message = "this server asks for an API key: send Authorization: Bearer KEY with the right one"
            return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] == "POST":
            return self._service.refusal()
        return None


class _GuardedCall:
    def __init__(self, scope: Any, send: Any, logged: bool, meter: ServerMeter) -> None:
        self._scope, self._send, self._logged, self._meter = scope, send, logged, meter
        meter.call_began()
        self._status = 0
        self._began = time.perf_counter()
        given = (_header(scope, b"x-request-id") or b"").decode("latin-1")
        self._id = given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = self._id

    async def run(self, inner: Any, receive: Any, refusal: ApiError | None) -> None:
        try:
            if refusal is not None:
                if self._scope["method"] == "POST":
                    await discard(receive)
                await self._refuse(refusal, receive)
            else:
                await inner(self._scope, receive, self._tagged)
        except Exception:
            log.exception("request %s failed", self._id)
            if not self._status:
                message = "the server failed; its log has the reason under this request's id"
                await self._refuse(ApiError(500, message, code="internal_error"), receive)
        finally:
            self._count()
            if self._logged:
                self._write()

    async def _refuse(self, error: ApiError, receive: Any) -> None:
        self._scope["state"]["error"] = error.message
        headers = {**error.headers, "Connection": "close"}
        reply = Response(msgspec.json.encode(error.body()), error.status, headers, media_type="application/json")
        await reply(self._scope, receive, self._tagged)

    async def _tagged(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._id.encode())]
        await self._send(message)

    def _count(self) -> None:
        state = self._scope["state"]
        status = CLIENT_LEFT if state.get("left") or not self._status else self._status
        seconds = time.perf_counter() - self._began
        self._meter.call_ended(self._scope["method"], state.get("route"), status, seconds)

    def _write(self) -> None:
        """One line; neither query nor body, where secrets and prompts may be."""
        state, ms = self._scope["state"], 1e3 * (time.perf_counter() - self._began)
        left = " (the client left)" if state.get("left") else ""
        reason = f": {state['error'][:300]}" if "error" in state else ""
        path = self._scope["path"][:200].encode("unicode_escape").decode()
        log.info("%s %s %s %d %.0f ms%s%s", self._id, self._scope["method"], path, self._status, ms, left, reason)


def _header(scope: Any, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)

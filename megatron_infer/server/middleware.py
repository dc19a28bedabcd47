"""The outermost ASGI application: request ids, names and sites, the API key, unexpected errors, log lines, metrics."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import msgspec
from starlette.responses import Response

from megatron_infer.engine.metrics.server_meter import CLIENT_LEFT
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import ApiError
from megatron_infer.server.request_body import discard
from megatron_infer.server.routes import Tenants
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.web_origins import Sites

log = logging.getLogger("megatron_infer.server")


def one_line(text: str) -> str:
    """A caller's text for the log: what is not printable (line ends, terminal sequences, other directions) escaped."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class ApiKeys:
    """Checks the Authorization header in constant time; without a key every call is allowed."""

    def __init__(self, api_key: str | None, tenants: Mapping[str, str]) -> None:
        """tenants: their keys by name."""
        named = {} if api_key is None else {"": api_key, **tenants}
        self._digests = {name: hashlib.sha256(key.encode()).digest() for name, key in named.items()}

    def holder(self, authorization: bytes | None) -> str | None:
        """The tenant whose key it is; "" for the server's own key; None: the call is refused.

        authorization: the header's value, "Bearer KEY". Digests are compared, so a key's length does not show.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        found = [name for name, digest in self._digests.items() if hmac.compare_digest(given, digest)]
        return found[0] if found and scheme.lower() == b"bearer" else None


class Middleware:
    """Every reply has X-Request-Id: the client's, where it is a valid one, else a new one."""

    def __init__(
        self,
        inner: Any,
        client: EngineClient,
        settings: ServerConfig,
        *,
        open_paths: frozenset[str] = frozenset(),
        tenants: Tenants,
    ) -> None:
        """open_paths: served without the API key."""
        self._inner, self._client, self._open_paths = inner, client, open_paths
        self._keys = ApiKeys(settings.api_key, tenants.keys)
        self._sites = Sites(settings)
        self._tenants = tenants
        self._log_requests = settings.log_requests

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        preflight = self._sites.preflight(scope)
        if preflight is not None:
            await send({"type": "http.response.start", "status": 204, "headers": preflight})
            await send({"type": "http.response.body"})
            return
        cors = self._sites.cors(scope["headers"])
        call = _WrappedCall(scope, send, self._log_requests, self._client, headers=cors)
        await call.run(self._inner, receive, self._refusal(scope))

    def _refusal(self, scope: Any) -> ApiError | None:
        """The error that the call is refused with before its body is read; None: it is accepted."""
        if (refusal := self._sites.refusal(scope["headers"])) is not None:
            return refusal
        if (path := scope["path"]) not in self._open_paths:
            if (tenant := self._keys.holder(_authorization(scope))) is None:
                message = "this server asks for an API key: send Authorization: Bearer KEY with the right one"
                return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            if bool(tenant) != (bool(self._tenants.keys) and path.startswith(self._tenants.prefix)):
                message = f"a tenant's key opens {self._tenants.prefix} alone, and the server's own key all else"
                return ApiError(403, message, code="key_of_others")
            scope["state"]["tenant"] = tenant
        if scope["method"] == "POST":
            return self._client.refusal()
        return None


class _WrappedCall:
    def __init__(
        self, scope: Any, send: Any, is_logged: bool, client: EngineClient, *, headers: list[tuple[bytes, bytes]]
    ) -> None:
        """headers: of the reply, besides its own."""
        self._scope, self._send, self._is_logged, self._meter = scope, send, is_logged, client.meter
        self._meter.call_began()
        self._status = 0
        self._began = time.perf_counter()
        given = (_header(scope, b"x-request-id") or b"").decode("latin-1")
        self._headers = headers
        self._id = given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=self._id, send_body=send)
        self._span = None if client.tracing is None else client.tracing.begin_call(scope, self._id)

    async def run(self, inner: Any, receive: Any, refusal: ApiError | None) -> None:
        try:
            if refusal is not None:
                if self._scope["method"] == "POST":
                    await discard(receive)
                await self._refuse(refusal, receive)
            else:
                with nullcontext() if self._span is None else self._span.active():
                    await inner(self._scope, receive, self._send_with_id)
        except Exception:
            log.exception("request %s failed", self._id)
            if not self._status:
                message = "the server failed; its log has the reason under this request's id"
                await self._refuse(ApiError(500, message, code="internal_error"), receive)
        finally:
            self._count()
            if self._is_logged:
                self._log()

    async def _refuse(self, error: ApiError, receive: Any) -> None:
        self._scope["state"]["error"] = error.message
        headers = {**error.headers, "Connection": "close"}
        reply = Response(msgspec.json.encode(error.body()), error.status, headers, media_type="application/json")
        await reply(self._scope, receive, self._send_with_id)

    async def _send_with_id(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            own = (b"x-request-id", self._id.encode())
            message["headers"] = [*message.get("headers", ()), own, *self._headers]
        await self._send(message)

    def _count(self) -> None:
        state = self._scope["state"]
        status = CLIENT_LEFT if state.get("disconnected") or not self._status else self._ended_with
        seconds = time.perf_counter() - self._began
        self._meter.call_ended(self._scope["method"], state.get("route"), status, seconds)
        if self._span is not None:
            self._span.end(route=state.get("route"), status=status, error=state.get("error"))

    @property
    def _ended_with(self) -> int:
        """The reply's status; of a stream that began with 200 and ended by an error, the error's."""
        status: int = self._scope["state"].get("failed_status", self._status)
        return status

    def _log(self) -> None:
        """One line, without query and body, which may hold secrets and prompts."""
        state, ms = self._scope["state"], 1e3 * (time.perf_counter() - self._began)
        how = " (the client disconnected)" if state.get("disconnected") else ""
        how += " in its stream" if "failed_status" in state else ""
        reason = f": {one_line(state['error'][:300])}" if "error" in state else ""
        path = one_line(self._scope["path"][:200])
        method, status = self._scope["method"], self._ended_with
        log.info("%s %s %s %d %.0f ms%s%s", self._id, method, path, status, ms, how, reason)


def _authorization(scope: Any) -> bytes | None:
    """The Authorization header, or as Anthropic's clients send the key: x-api-key."""
    key = _header(scope, b"x-api-key")
    return b"Bearer " + key if key is not None else _header(scope, b"authorization")


def _header(scope: Any, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)

"""The ASGI application of the server.

create_app                          each module of MODULES registers its operations and fields in Routes
    |
Middleware                          request id, Host, API key, log line, metrics
    |  TrafficLog                   only with `record`
Starlette, Endpoint                 path and method; body read and checked; client's disconnect watched
    |  Call
handler of a module                 chat_completions, completions, embeddings, control/*, health, ...
    |  Generator (generation.py)    whole reply or server-sent events
EngineClient                        see engine_client.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from megatron_infer.server import (
    anthropic_messages,
    chat_completions,
    completions,
    control,
    embeddings,
    health,
    megatron_generate,
    metrics_route,
    models_route,
    openapi,
    reasoning_splitter,
    responses,
    score,
    status_page,
    structured_outputs,
    tokenize,
    tool_calls,
)
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import ApiError
from megatron_infer.server.middleware import Middleware
from megatron_infer.server.routes import Routes
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.traffic_log import TrafficLog


class Module(Protocol):
    """Adds operations, request fields or both."""

    def register(self, routes: Routes, client: EngineClient, settings: ServerConfig) -> None: ...


MODULES: tuple[Module, ...] = (
    completions,
    chat_completions,
    tool_calls,
    structured_outputs,
    reasoning_splitter,
    responses,
    anthropic_messages,
    megatron_generate,
    embeddings,
    score,
    models_route,
    tokenize,
    health,
    status_page,
    metrics_route,
    control,
)
"""In the order in which their fields apply. `openapi` registers last, as it describes all of them."""


def registered_routes(client: EngineClient, settings: ServerConfig, *, modules: Sequence[Module] = ()) -> Routes:
    """Every operation. modules: register after those of the package."""
    routes = Routes(settings)
    for module in (*MODULES, *modules, openapi):
        module.register(routes, client, settings)
    return routes


def create_app(client: EngineClient, settings: ServerConfig, *, modules: Sequence[Module] = ()) -> Middleware:
    """The application. modules: register after those of the package."""
    routes = registered_routes(client, settings, modules=modules)

    async def refuse(request: Request, error: Exception) -> Response:
        return _refusal(request, error, routes)

    starlette = Starlette(routes=routes.starlette_routes(), exception_handlers={HTTPException: refuse})
    starlette.router.redirect_slashes = False
    inner: Any = starlette
    if settings.record is not None:
        inner = TrafficLog(starlette, settings.record, max_body_bytes=settings.max_body_bytes, started=client.started)
    open_paths = {operation.path for operation in routes.operations.values() if operation.open}
    return Middleware(inner, client, settings, open_paths=frozenset(open_paths), tenants=routes.tenants)


def _refusal(request: Request, error: Exception, routes: Routes) -> Response:
    """The reply to an unknown path or method."""
    assert isinstance(error, HTTPException)
    shown = f"{request.method} {request.url.path[:200]}"
    text, code = {
        404: (f"there is no {shown}; GET /openapi.json lists what there is", "unknown_path"),
        405: (f"{shown} is not served", "method_not_allowed"),
    }.get(error.status_code, (str(error.detail), "refused"))
    if error.status_code == 404 and request.url.path in routes.control_paths_off:
        text, code = f"{shown} controls the engines: it is served with --control only", "control_off"
    body = msgspec.json.encode(ApiError(error.status_code, text, code=code).body())
    headers = dict(error.headers or {})
    if "Allow" in headers:  # Starlette joins a set, whose order differs from process to process
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
    return Response(body, error.status_code, headers, media_type="application/json")

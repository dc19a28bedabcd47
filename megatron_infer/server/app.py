"""The ASGI application: `create_app` lets every module register what it serves and ties it together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from megatron_infer.server import (
    chat,
    completions,
    control,
    embeddings,
    health,
    metrics_route,
    models_route,
    openapi,
    reasoning_splitter,
    status_page,
    structured_fields,
    tokenize,
    tools,
)
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import ApiError
from megatron_infer.server.middleware import Middleware
from megatron_infer.server.routes import App
from megatron_infer.server.settings import ServerConfig
from megatron_infer.server.traffic_log import TrafficLog


class Module(Protocol):
    """A module of routes, request fields or both."""

    def register(self, app: App, service: EngineClient, settings: ServerConfig) -> None: ...


MODULES: tuple[Module, ...] = (
    completions,
    chat,
    tools,
    structured_fields,
    reasoning_splitter,
    embeddings,
    models_route,
    tokenize,
    health,
    status_page,
    metrics_route,
    control,
)
"""The package's own, in the order in which fields apply; `openapi` comes last, as it shows all of them."""


def create_app(service: EngineClient, settings: ServerConfig, *, modules: Sequence[Module] = ()) -> Middleware:
    """The application; `modules` register after the package's own."""
    app = App(settings)
    for module in (*MODULES, *modules, openapi):
        module.register(app, service, settings)

    async def refused(request: Request, error: Exception) -> Response:
        return _refused(request, error, app)

    routed = Starlette(routes=app.routes(), exception_handlers={HTTPException: refused})
    routed.router.redirect_slashes = False
    inner = routed if settings.record is None else TrafficLog(routed, settings.record)
    open_paths = {operation.path for operation in app.operations.values() if operation.open}
    return Middleware(inner, service, settings, open_paths=frozenset(open_paths))


def _refused(request: Request, error: Exception, app: App) -> Response:
    """Paths and methods that there are not."""
    assert isinstance(error, HTTPException)
    shown = f"{request.method} {request.url.path[:200]}"
    text, code = {
        404: (f"there is no {shown}; GET /openapi.json lists what there is", "unknown_path"),
        405: (f"{shown} is not served", "method_not_allowed"),
    }.get(error.status_code, (str(error.detail), "refused"))
    if error.status_code == 404 and request.url.path in app.withheld:
        text, code = f"{shown} steers the engines: it is served with --control only", "control_off"
    body = msgspec.json.encode(ApiError(error.status_code, text, code=code).body())
    return Response(body, error.status_code, dict(error.headers or {}), media_type="application/json")

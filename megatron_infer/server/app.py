"""The ASGI application: `create_app` lets every module register what it serves and ties it together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from megatron_infer.errors import ConfigError
from megatron_infer.server import chat, completions, health, metrics, models, openapi, tokenize
from megatron_infer.server.errors import ApiError
from megatron_infer.server.guard import Guard
from megatron_infer.server.record import Recorder
from megatron_infer.server.registry import App
from megatron_infer.server.service import Service
from megatron_infer.server.settings import ServerConfig


class Module(Protocol):
    """A module of routes, request fields or both."""

    def register(self, app: App, service: Service, settings: ServerConfig) -> None: ...


MODULES: tuple[Module, ...] = (completions, chat, models, tokenize, health, metrics)
"""The package's own, in the order in which fields apply; `openapi` comes last, as it shows all of them."""


def create_app(service: Service, settings: ServerConfig, *, modules: Sequence[Module] = ()) -> Guard:
    """The application; `modules` register after the package's own. Raises ConfigError for options nobody acts on."""
    app = App(settings)
    for module in (*MODULES, *modules, openapi):
        module.register(app, service, settings)
    if settings.control and not any(operation.control for operation in app.operations.values()):
        raise ConfigError("control is on, but nothing that steers engines is installed; leave it out")
    routed = Starlette(routes=app.routes(), exception_handlers={HTTPException: _refused})
    routed.router.redirect_slashes = False
    inner = routed if settings.record is None else Recorder(routed, settings.record)
    open_paths = {operation.path for operation in app.operations.values() if operation.open}
    return Guard(inner, service, settings, open_paths=frozenset(open_paths))


async def _refused(request: Request, error: Exception) -> Response:
    """Paths and methods that there are not."""
    assert isinstance(error, HTTPException)
    shown = f"{request.method} {request.url.path[:200]}"
    text, code = {
        404: (f"there is no {shown}; GET /openapi.json lists what there is", "unknown_path"),
        405: (f"{shown} is not served", "method_not_allowed"),
    }.get(error.status_code, (str(error.detail), "refused"))
    body = msgspec.json.encode(ApiError(error.status_code, text, code=code).body())
    return Response(body, error.status_code, dict(error.headers or {}), media_type="application/json")

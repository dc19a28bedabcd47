"""The routes of the server: each module of the package registers its operations and request fields here.

def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    routes.add("POST", "/v1/things", handler, "Make a thing", body=ThingBody)
    routes.fields.add("chat", ExtraField(name="tools", type=list[Tool], apply=apply_tools))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.routing import Route

from megatron_infer.server.endpoint import Endpoint, Handler
from megatron_infer.server.generation_request import ExtraFields
from megatron_infer.server.inactive_fields import NO_FIELDS, FieldTable
from megatron_infer.server.request_body import BodyRoom
from megatron_infer.server.server_config import ServerConfig

GENERATION_STATUSES = (404, 429, 503, 504)
"""`Operation.statuses` of calls that wait for an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    """In Starlette's form: /v1/models/{model:path}."""
    handler: Handler
    summary: str
    body: Any = None
    """msgspec type of the JSON body, or a function that returns it once every module has registered. None: no body."""
    statuses: tuple[int, ...] = ()
    """Statuses the handler may reply with, beside 200 and those of calls that do not reach it."""
    media_types: tuple[str, ...] = ("application/json",)
    """Media types of its replies."""
    open: bool = False
    """Served without the API key; a body is dropped as it comes."""
    control: bool = False
    """It controls the engines: served only with `ServerConfig.control`."""
    optional_body: bool = False
    """An empty body counts as {}."""
    body_limit: str = "max_body_bytes"
    """The option with the most bytes its body may have."""
    fields: FieldTable = NO_FIELDS
    """What becomes of fields that its body's type does not have."""


class Tenants(NamedTuple):
    """Callers with keys of their own. These keys open paths below `prefix` only, which the server's key does not."""

    prefix: str = ""
    keys: Mapping[str, str] = {}
    """By the tenant's name. {}: there are no tenants."""


class Routes:
    """Operations by path and method, and request fields that modules add to the OpenAI bodies."""

    def __init__(self, settings: ServerConfig) -> None:
        self._settings = settings
        self.operations: dict[tuple[str, str], Operation] = {}
        self.fields = ExtraFields()
        self.control_paths_off: set[str] = set()
        """Paths that `ServerConfig.control` would serve."""
        self.tenants = Tenants()

    def add(self, method: str, path: str, handler: Handler, summary: str, **options: Any) -> None:
        """options: the other fields of `Operation`."""
        operation = Operation(method=method, path=path, handler=handler, summary=summary, **options)
        assert not (operation.open and operation.control), f"{path} would control engines without a key"
        assert not (operation.open and operation.body is not None), f"the body of {path} would be dropped"
        if operation.control and not self._settings.control:
            self.control_paths_off.add(path)
            return
        assert (path, method) not in self.operations, f"{method} {path} is registered already"
        self.operations[path, method] = operation

    def body_of(self, operation: Operation) -> Any:
        """The type of its body, with every registered field; None: no body."""
        body = operation.body
        return body() if callable(body) and not isinstance(body, type) else body

    def starlette_routes(self) -> list[Route]:
        paths: dict[str, dict[str, Endpoint]] = {}
        room = BodyRoom(self._settings.max_bodies_bytes, body_limit=self._settings.max_body_bytes)
        for operation in self.operations.values():
            endpoint = Endpoint(
                operation.handler,
                self.body_of(operation),
                self._settings,
                operation.fields,
                room=room,
                optional_body=operation.optional_body,
                body_limit=operation.body_limit,
                open=operation.open,
            )
            paths.setdefault(operation.path, {})[operation.method] = endpoint
        return [Route(path, _ByMethod(path, methods), methods=list(methods)) for path, methods in paths.items()]


class _ByMethod:
    """The endpoints of a path, by method."""

    def __init__(self, path: str, endpoints: dict[str, Endpoint]) -> None:
        self._path, self._endpoints = path, endpoints

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["route"] = self._path
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self._endpoints[method](scope, receive, send)

"""What is served: operations and request fields, which modules register.

def register(app: App, service: Service, settings: ServerConfig) -> None:
    app.add(Operation(method="POST", path="/v1/things", handler=handler, body=ThingBody, summary="..."))
    app.fields.add("chat", ExtraField(name="tools", type=list[Tool], apply=apply_tools))
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.routing import Route

from megatron_infer.server.calls import Call, CallEndpoint
from megatron_infer.server.extra_fields import ExtraFields
from megatron_infer.server.settings import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    """As Starlette writes it: /v1/models/{model:path}."""
    handler: Callable[[Call], Awaitable[Any]]
    """Returns a Reply, an Events or a Starlette Response; raises ApiError or an error of the package's family."""
    summary: str
    body: Any = None
    """msgspec type of the JSON body; or a function that gives it once every module has registered. None: no body."""
    statuses: tuple[int, ...] = ()
    """Statuses it may answer with, beside 200 and what is refused before the handler is asked."""
    media_types: tuple[str, ...] = ("application/json",)
    """Of its answers."""
    open: bool = False
    """Served without the API key."""
    control: bool = False
    """It steers the engines: served only with `ServerConfig.control`."""
    optional_body: bool = False
    """No body at all counts as {}."""
    body_limit: str = "max_body_bytes"
    """Option that says how many bytes its body may have."""


class App:
    """What is served: operations by path, and request fields beyond the core's."""

    def __init__(self, settings: ServerConfig) -> None:
        self._settings = settings
        self.operations: dict[tuple[str, str], Operation] = {}
        self.fields = ExtraFields()
        self.withheld: set[str] = set()
        """Paths that would be served with `ServerConfig.control`."""

    def add(self, operation: Operation) -> None:
        assert not (operation.open and operation.control), f"{operation.path} would steer engines without a key"
        if operation.control and not self._settings.control:
            self.withheld.add(operation.path)
            return
        key = (operation.path, operation.method)
        assert key not in self.operations, f"{operation.method} {operation.path} is registered already"
        self.operations[key] = operation

    def body_of(self, operation: Operation) -> Any:
        """The type of its body, with every field that was registered; None: it has none."""
        body = operation.body
        return body() if callable(body) and not isinstance(body, type) else body

    def routes(self) -> list[Route]:
        paths: dict[str, dict[str, CallEndpoint]] = {}
        for operation in self.operations.values():
            endpoint = CallEndpoint(
                operation.handler,
                self.body_of(operation),
                self._settings,
                self.fields.hints,
                optional=operation.optional_body,
                limit=operation.body_limit,
            )
            paths.setdefault(operation.path, {})[operation.method] = endpoint
        return [Route(path, _ByMethod(path, methods), methods=list(methods)) for path, methods in paths.items()]


class _ByMethod:
    """The endpoint of each method of a path."""

    def __init__(self, path: str, endpoints: dict[str, CallEndpoint]) -> None:
        self._path, self._endpoints = path, endpoints

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["route"] = self._path
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self._endpoints[method](scope, receive, send)

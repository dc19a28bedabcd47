"""What all control routes share: query parameters, protection from foreign web pages, registration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron_infer.errors import unknown_name
from megatron_infer.server.endpoint import Call, Handler
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.routes import Routes
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.web_origins import Sites

SWITCHES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class QueryParams:
    """The query parameters of a call. Reading one makes it known; `end` refuses all others."""

    def __init__(self, call: Call) -> None:
        self._items: dict[str, list[str]] = {}
        for name, value in call.request.query_params.multi_items():
            self._items.setdefault(name, []).append(value)
        self._known: list[str] = []

    def text(self, name: str, default: str) -> str:
        values = self.all(name)
        if len(values) > 1:
            raise bad_request(f"{name} is given {len(values)} times; give it once", name, "invalid_value")
        return values[0] if values else default

    def switch(self, name: str, default: bool) -> bool:
        value = self.text(name, "true" if default else "false")
        if value.lower() not in SWITCHES:
            raise bad_request(f"{name} is {value[:40]!r}; true or false", name, "invalid_value")
        return SWITCHES[value.lower()]

    def number(self, name: str, default: int, allowed: Iterable[int]) -> int:
        value, known = self.text(name, str(default)), [str(one) for one in allowed]
        if value not in known:
            raise bad_request(f"{name} is {value[:40]!r}; one of {', '.join(known)}", name, "invalid_value")
        return int(value)

    def all(self, name: str) -> list[str]:
        """Every value of a parameter that may be given several times."""
        self._known.append(name)
        return self._items.get(name, [])

    def end(self) -> None:
        """Raises ApiError 400 for parameters that were not read."""
        for name in self._items:
            if name not in self._known:
                what = f"; known: {', '.join(self._known)}" if self._known else "; it takes none"
                raise bad_request(unknown_name("parameter", name[:60], self._known) + what, name[:60], "unknown_field")


@dataclass(frozen=True, slots=True)
class ControlRoutes:
    """Registers control routes: served with `control` only and, without an API key, refused to foreign web pages."""

    routes: Routes
    settings: ServerConfig

    def add(self, method: str, path: str, handler: Handler, summary: str, **options: Any) -> None:
        """Like `Routes.add`; by default an empty body counts as {}."""
        sites = Sites(self.settings)

        async def guarded(call: Call) -> Any:
            if self.settings.api_key is None:
                sites.check_same_site(call.request.scope["headers"])
            return await handler(call)

        statuses = (400, 403, 404, 409, 413, 415, 429, 500, 503, 504)
        defaults = {"optional_body": True, "control": True, "statuses": statuses}
        self.routes.add(method, path, guarded, summary, **defaults | options)

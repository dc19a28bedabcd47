"""What all routes of the dialects share: query parameters, who may call from a browser, how they are registered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from megatron_infer.errors import unknown_name
from megatron_infer.server.calls import Call
from megatron_infer.server.http_errors import ApiError, bad_request
from megatron_infer.server.routes import App, Operation
from megatron_infer.server.settings import ServerConfig

SWITCHES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class Query:
    """The parameters of a call's query. Whoever reads one says that it is known; `end` refuses all others."""

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
        """Of a parameter that may come several times."""
        self._known.append(name)
        return self._items.get(name, [])

    def end(self) -> None:
        """Raises ApiError 400 for parameters that nobody has read."""
        for name in self._items:
            if name not in self._known:
                what = f"; known: {', '.join(self._known)}" if self._known else "; it takes none"
                raise bad_request(unknown_name("parameter", name[:60], self._known) + what, name[:60], "unknown_field")


@dataclass(frozen=True, slots=True)
class Dialect:
    """Registers routes that steer: with `control` only, and, where there is no key, never for a foreign web page."""

    app: App
    settings: ServerConfig

    def add(
        self,
        method: str,
        path: str,
        handler: Callable[[Call], Awaitable[Any]],
        summary: str,
        *,
        body: Any = None,
        **options: Any,
    ) -> None:
        """A body may be left out: {} then."""

        async def guarded(call: Call) -> Any:
            if self.settings.api_key is None:
                refuse_foreign_pages({name.lower(): value for name, value in call.request.headers.items()})
            return await handler(call)

        self.app.add(
            Operation(
                method=method,
                path=path,
                handler=guarded,
                body=body,
                summary=summary,
                control=True,
                optional_body=options.pop("optional_body", True),
                statuses=(400, 403, 404, 409, 413, 415, 429, 500, 503, 504),
                **options,
            )
        )


def refuse_foreign_pages(headers: Mapping[str, str]) -> None:
    """A browser sends what any page tells it to, also to this machine. Raises ApiError 403 where it says so."""
    host = headers.get("host", "")
    name = urlsplit(f"//{host}").hostname or ""
    origin = headers.get("origin")
    foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    foreign |= origin is not None and urlsplit(origin).netloc != host
    if foreign or not (name in LOCAL_NAMES or name.startswith("127.")):
        message = "a page of another site asks for this; without an API key only programs and the server's own page may"
        raise ApiError(403, message, code="foreign_page")

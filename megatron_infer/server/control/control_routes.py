"""What all control routes share: query parameters, protection from foreign web pages, registration."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_infer.errors import unknown_name
from megatron_infer.server.endpoint import Call, Handler, Reply
from megatron_infer.server.http_errors import ApiError, bad_request
from megatron_infer.server.routes import Routes
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.web_origins import Sites

SWITCHES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def query_values(call: Call, name: str) -> list[str]:
    """Every value of a query parameter that may be given several times."""
    values: list[str] = call.request.query_params.getlist(name)
    return values


def query_text(call: Call, name: str, default: str) -> str:
    """The value of a query parameter. Raises ApiError 400 for one that is given several times."""
    values = query_values(call, name)
    if len(values) > 1:
        raise bad_request(f"{name} is given {len(values)} times; give it once", name, "invalid_value")
    return values[0] if values else default


def query_switch(call: Call, name: str) -> bool:
    """A query parameter that is false where it is not given. Raises ApiError 400."""
    value = query_text(call, name, "false")
    if value.lower() not in SWITCHES:
        raise bad_request(f"{name} is {value[:40]!r}; true or false", name, "invalid_value")
    return SWITCHES[value.lower()]


def check_query(call: Call, known: Sequence[str]) -> None:
    """Raises ApiError 400 for query parameters that are not in `known`."""
    for name in call.request.query_params:
        if name not in known:
            what = f"; known: {', '.join(known)}" if known else "; it takes none"
            raise bad_request(unknown_name("parameter", name[:60], known) + what, name[:60], "unknown_field")


@dataclass(frozen=True, slots=True)
class ControlRoutes:
    """Registers control routes: served with `control` only and, without an API key, refused to foreign web pages."""

    routes: Routes
    settings: ServerConfig

    def add(
        self,
        method: str,
        path: str,
        handler: Handler,
        summary: str,
        *,
        query: Sequence[str] | None = (),
        **options: Any,
    ) -> None:
        """Like `Routes.add`; by default an empty body counts as {}. query: the parameters there are; None: any."""
        sites = Sites(self.settings)

        async def guarded(call: Call) -> Any:
            if self.settings.api_key is None:
                sites.check_same_site(call.request.scope["headers"])
            if query is not None:
                check_query(call, query)
            return await handler(call)

        statuses = (400, 403, 404, 409, 413, 415, 429, 500, 503, 504)
        defaults = {"optional_body": True, "control": True, "statuses": statuses}
        self.routes.add(method, path, guarded, summary, **defaults | options)

    def add_not_served(self, reasons: Mapping[str, str]) -> None:
        """Routes that clients know and that are answered with 501 and the reason, by path."""

        def refuse(path: str, reason: str) -> Handler:
            async def handler(call: Call) -> Reply:
                raise ApiError(501, f"{path} is not served: {reason}", code="not_served")

            return handler

        for path, reason in reasons.items():
            summary = "Not served; the error says why"
            self.add("POST", path, refuse(path, reason), summary, query=None, statuses=(501,))


async def _nothing() -> None:
    pass


def replying(reply: Callable[[str], Reply], text: str, change: Callable[[], Awaitable[object]] = _nothing) -> Handler:
    """A handler that awaits `change` and replies with `text`."""

    async def handler(call: Call) -> Reply:
        await change()
        return reply(text)

    return handler

"""The page at / for the person who runs the server, and /v1/status, which it is drawn from.

The page, its script and its style are open to whoever reaches the port: they are the same for everyone. What the server
does is told, and chats are answered, with the API key only, which the page asks for and keeps in memory.
"""

from __future__ import annotations

import time
from importlib import resources
from typing import Any

from starlette.responses import Response

from megatron_infer.server.calls import Call, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.routes import App, Operation
from megatron_infer.server.settings import ServerConfig

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/static/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/static/page.css": ("page.css", "text/css; charset=utf-8"),
}
"""Path -> file of the package and its type; no other file can be asked for."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
KINDS = ("used", "cached", "paused", "free")
"""Of blocks: held by requests that run, free but kept for the prefix cache, held by paused requests, blank."""
UNTOLD = dict.fromkeys(["num_paused", "output_tokens", *(f"blocks_{kind}" for kind in KINDS)], 0)
"""Of a replica that has not beaten yet."""


def register(app: App, service: EngineClient, settings: ServerConfig) -> None:
    folder = resources.files("megatron_infer.server") / "static"
    for path, (name, media_type) in FILES.items():
        handler = _File((folder / name).read_bytes(), media_type).answer
        summary, kind = f"The page's {name}", media_type.split(";")[0]
        app.add(
            Operation(method="GET", path=path, handler=handler, summary=summary, media_types=(kind,), open=True),
        )

    async def status(call: Call) -> Reply:
        return Reply(_status(app, service), headers={"Cache-Control": "no-store"})

    summary = "How the server stands: requests, tokens, blocks of each replica"
    app.add(Operation(method="GET", path="/v1/status", handler=status, summary=summary))


class _File:
    """A file of the package, read once."""

    def __init__(self, content: bytes, media_type: str) -> None:
        self._content, self._media_type = content, media_type

    async def answer(self, call: Call) -> Response:
        return Response(self._content, headers=HEADERS, media_type=self._media_type)


def _status(app: App, service: EngineClient) -> dict[str, Any]:
    replicas = [_replica(one) for one in service.replicas]
    return {
        "status": service.state,
        "model": service.names[0],
        "max_model_len": service.max_length,
        "time": time.time(),
        "started": service.started,
        "calls": service.num_calls,
        "waiting": service.stats.get("waiting", 0) if service.is_connected else 0,
        "controls": sorted(operation.path for operation in app.operations.values() if operation.control),
        "replicas": replicas,
        "workers": service.workers,
    }


def _replica(seat: dict[str, Any]) -> dict[str, Any]:
    """A replica's figures, of what the coordinator says of it."""
    figures: dict[str, Any] = seat["stats"].get("figures", UNTOLD)
    return {
        "name": seat["name"],
        "state": seat["state"],
        "weight_version": seat["weight_version"],
        "capacity": seat["capacity"],
        "running": seat["running"],
        "waiting": seat["waiting"],
        "paused": figures["num_paused"],
        "output_tokens": figures["output_tokens"],
        "blocks": {kind: figures[f"blocks_{kind}"] for kind in KINDS},
    }

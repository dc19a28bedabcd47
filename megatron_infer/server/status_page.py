"""The status page at / for operators, and /v1/status, which has its figures.

The page, its scripts and its style are served without the API key: they are the same on every server. Status and chats
need the key, which the page asks for and keeps in memory.
"""

from __future__ import annotations

import time
from importlib import resources
from typing import Any

from starlette.responses import Response

from megatron_infer.server.audio.speech_model import voice_files
from megatron_infer.server.endpoint import Call, Handler, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.routes import Routes
from megatron_infer.server.server_config import ServerConfig

SCRIPTS = ("theme.js", "page.js", "chat.js", "charts.js", "markdown.js", "server.js", "speech.js")
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/static/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"/static/{name}": (name, "text/javascript; charset=utf-8") for name in SCRIPTS},
}
"""Path -> file of the package and its media type; no other file is served."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
KINDS = ("used", "cached", "paused", "free")
"""Kinds of blocks: held by running requests, free but kept for the prefix cache, held by paused requests, free."""
NO_FIGURES = dict.fromkeys(["num_paused", "output_tokens", *(f"blocks_{kind}" for kind in KINDS)], 0)
"""Figures of a replica that has not sent a heartbeat yet."""


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    folder = resources.files("megatron_infer.server") / "static"
    for path, (name, media_type) in FILES.items():
        handler, kind = _file_handler((folder / name).read_bytes(), media_type), media_type.split(";")[0]
        routes.add("GET", path, handler, f"The page's {name}", media_types=(kind,), open=True)

    async def status(call: Call) -> Reply:
        return Reply(_status(routes, client, settings), headers={"Cache-Control": "no-store"})

    routes.add("GET", "/v1/status", status, "State, requests, tokens and blocks of each replica")


def _file_handler(content: bytes, media_type: str) -> Handler:
    async def file(call: Call) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return file


def _status(routes: Routes, client: EngineClient, settings: ServerConfig) -> dict[str, Any]:
    paths = {operation.path for operation in routes.operations.values()}
    return {
        "status": client.state,
        "model": client.model_names[0],
        "max_model_len": client.max_length,
        "time": time.time(),
        "started": client.started,
        "calls": client.num_server_calls,
        "waiting": client.stats.get("waiting", 0) if client.is_connected else 0,
        "controls": sorted(operation.path for operation in routes.operations.values() if operation.control),
        "replicas": [_replica(replica) for replica in client.replicas],
        "workers": client.workers,
        "voices": list(voice_files(settings.voice)) if "/v1/audio/speech" in paths else None,
        **{name: read() for name, read in client.shown.items()},
    }


def _replica(replica: dict[str, Any]) -> dict[str, Any]:
    """A replica's figures from the coordinator's description of it."""
    figures: dict[str, Any] = NO_FIGURES | replica["stats"].get("figures", {})
    names = ("name", "state", "weight_version", "capacity", "running", "waiting")
    return {
        **{name: replica[name] for name in names},
        "paused": figures["num_paused"],
        "output_tokens": figures["output_tokens"],
        "blocks": {kind: figures[f"blocks_{kind}"] for kind in KINDS},
    }

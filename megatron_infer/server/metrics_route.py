"""GET /metrics, for Prometheus. Like every route but the health checks it needs the API key."""

from __future__ import annotations

from starlette.responses import Response

from megatron_infer.engine.metrics.prometheus import exposition
from megatron_infer.server.endpoint import Call
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.routes import Routes
from megatron_infer.server.server_config import ServerConfig


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    async def metrics(call: Call) -> Response:
        """Metrics of all HTTP processes, the coordinator and every replica."""
        accept = call.request.headers.get("accept", "")
        if client.frontend is not None:
            data, content_type = await client.frontend.metrics(accept)
            return Response(data, headers={"Content-Type": content_type})
        await client.refresh()
        data, content_type = await client.run_in_thread(exposition, client.meter.families, accept)
        return Response(data, headers={"Content-Type": content_type})

    routes.add("GET", "/metrics", metrics, "Metrics in Prometheus' text format", media_types=("text/plain",))

"""GET /metrics: what Prometheus scrapes. It asks for the API key, as every route that is not for health checks."""

from __future__ import annotations

from starlette.responses import Response

from megatron_infer.metrics.prometheus import exposition
from megatron_infer.server.calls import Call
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.routes import App, Operation
from megatron_infer.server.settings import ServerConfig


def register(app: App, service: EngineClient, settings: ServerConfig) -> None:
    async def metrics(call: Call) -> Response:
        """Figures of this process, the coordinator and every replica."""
        await service.look()
        accept = call.request.headers.get("accept", "")
        data, content_type = await service.off_loop(exposition, service.meter.families, accept)
        return Response(data, headers={"Content-Type": content_type})

    summary = "Metrics in Prometheus' text format"
    app.add(Operation(method="GET", path="/metrics", handler=metrics, summary=summary, media_types=("text/plain",)))

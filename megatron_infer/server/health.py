"""Whether the server serves: /health and /v1/health, /health_generate, /version."""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_infer import __version__
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.server.calls import Call, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import ApiError, unavailable
from megatron_infer.server.inflight import Job
from megatron_infer.server.routes import App, Operation
from megatron_infer.server.settings import ServerConfig

GENERATE_TIMEOUT_S = 20.0


def register(app: App, service: EngineClient, settings: ServerConfig) -> None:
    async def health(call: Call) -> Reply:
        """200 while requests are served; 503 while loading, draining or failed."""
        await service.look()
        state = service.state
        return Reply(_report(service), 200 if state == "ok" else 503)

    async def generate(call: Call) -> Reply:
        """A token is drawn: queue, coordinator, engine and model answer."""
        facts = await service.facts()
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True)
        try:
            async with (
                asyncio.timeout(GENERATE_TIMEOUT_S),
                service.fly([Job(prompt_ids=[min(1, facts.vocab_size - 1)], params=params)]) as flight,
            ):
                await flight.results()
        except TimeoutError:
            raise unavailable(f"no token within {GENERATE_TIMEOUT_S:g} s", "no_token") from None
        except ApiError:
            raise
        return Reply({"status": "ok"})

    async def version(call: Call) -> Reply:
        return Reply({"version": __version__})

    for path in ("/health", "/v1/health"):
        summary = "Whether requests are served"
        app.add(Operation(method="GET", path=path, handler=health, summary=summary, statuses=(503,), open=True))
    summary = "Draw one token"
    app.add(Operation(method="GET", path="/health_generate", handler=generate, summary=summary, statuses=(429, 503)))
    app.add(Operation(method="GET", path="/version", handler=version, summary="The server's version", open=True))


def _report(service: EngineClient) -> dict[str, Any]:
    """Figures, no names of files or hosts: it is open to everyone who reaches the port."""
    shown = ("state", "weight_version", "running", "waiting", "capacity", "free_rows")
    return {
        "status": service.state,
        "waiting": service.stats.get("waiting", 0) if service.is_connected else None,
        "replicas": [{name: replica[name] for name in shown} for replica in service.replicas],
        "workers": service.workers,
    }

"""/health and /v1/health, /health_generate, /version."""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_infer import __version__
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.engine_client import EngineClient, is_outdated
from megatron_infer.server.http_errors import unavailable
from megatron_infer.server.inflight import EngineRequest
from megatron_infer.server.routes import Routes
from megatron_infer.server.server_config import ServerConfig

GENERATE_TIMEOUT_S = 20.0


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    async def health(call: Call) -> Reply:
        """200 while requests are served; 503 while loading, unavailable, outdated, draining or failed.

        It is what this process knows: nothing is asked, so that the reply does not wait for a busy coordinator.
        """
        return Reply(report_of(client), 200 if client.state == "ok" else 503)

    async def generate(call: Call) -> Reply:
        """Generates one token, through the queue, the coordinator, an engine and the model."""
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True)
        request = EngineRequest(prompt_ids=[min(1, client.limits.vocab_size - 1)], params=params)
        try:
            async with asyncio.timeout(GENERATE_TIMEOUT_S), client.submit([request]) as inflight:
                await inflight.results()
        except TimeoutError:
            raise unavailable(f"no token within {GENERATE_TIMEOUT_S:g} s", "no_token") from None
        return Reply({"status": "ok"})

    async def version(call: Call) -> Reply:
        return Reply({"version": __version__})

    async def load(call: Call) -> Reply:
        """Calls in progress, under vLLM's name."""
        return Reply({"server_load": client.num_server_calls})

    for path in ("/health", "/v1/health", "/ping", "/ready"):
        routes.add("GET", path, health, "Whether requests are served", statuses=(503,), open=True)
    routes.add("POST", "/ping", health, "The same, as SageMaker asks", statuses=(503,), open=True)
    routes.add("GET", "/health_generate", generate, "Generate one token", statuses=(429, 503, 504))
    routes.add("GET", "/load", load, "Calls in progress")
    routes.add("GET", "/version", version, "The server's version", open=True)


def report_of(client: EngineClient) -> dict[str, Any]:
    """Figures without names of files and hosts: every client that reaches the port can read them."""
    fields = ("state", "role", "weight_version", "running", "waiting", "capacity", "free_rows")
    return {
        "status": client.state,
        "waiting": client.stats.get("waiting", 0) if client.is_connected else None,
        "replicas": [
            {name: replica[name] for name in fields} | {"outdated": is_outdated(replica)} for replica in client.replicas
        ],
        "workers": client.workers,
    }

"""/v1/models: what is served."""

from __future__ import annotations

from typing import Any

from megatron_infer.server.calls import Call, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.routes import App, Operation
from megatron_infer.server.settings import ServerConfig


def register(app: App, service: EngineClient, settings: ServerConfig) -> None:
    def card(name: str) -> dict[str, Any]:
        length = service.max_length
        owner = {"object": "model", "created": service.started, "owned_by": "megatron-infer"}
        return {"id": name, **owner, "root": service.names[0], "max_model_len": length}

    async def every(call: Call) -> Reply:
        return Reply({"object": "list", "data": [card(name) for name in service.names]})

    async def one(call: Call) -> Reply:
        name = call.request.path_params["model"]
        service.check_model(name)
        return Reply(card(name))

    app.add(Operation(method="GET", path="/v1/models", handler=every, summary="The models that are served"))
    path = "/v1/models/{model:path}"
    app.add(Operation(method="GET", path=path, handler=one, summary="One model", statuses=(404,)))

"""/v1/models: the names of the served model and of its LoRA adapters."""

from __future__ import annotations

from typing import Any

from megatron_infer.server.audio.speech_model import voice_files
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.routes import Routes
from megatron_infer.server.served_models import adapter_of, check_model
from megatron_infer.server.server_config import ServerConfig


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    def card(name: str) -> dict[str, Any]:
        owner = {"object": "model", "created": client.started, "owned_by": "megatron-infer"}
        voices = {"voices": list(voice_files(settings.voice))} if settings.voice else {}
        return {"id": name, **owner, "root": client.model_names[0], "max_model_len": client.max_length, **voices}

    def card_of(name: str) -> dict[str, Any]:
        adapter = adapter_of(client, name)
        return card(name) if adapter is None else card(name) | {"parent": client.model_names[0]}

    async def models(call: Call) -> Reply:
        return Reply({"object": "list", "data": [card_of(name) for name in (*client.model_names, *client.adapters)]})

    async def model(call: Call) -> Reply:
        name = call.request.path_params["model"]
        if not name:  # /v1/models/
            return await models(call)
        check_model(client, name)
        return Reply(card_of(name))

    async def model_info(call: Call) -> Reply:
        """SGLang's description of the model."""
        tokenizer = client.tokenizer
        versions = [replica["weight_version"] for replica in client.replicas]
        info = {
            "model_path": client.model_names[0],
            "served_model_name": client.model_names[0],
            "tokenizer_path": None if tokenizer is None else tokenizer.name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": str(max(versions, default=0)),
            "reasoning_parser": settings.reasoning_parser,
            "tool_call_parser": settings.tool_call_parser,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "max_model_len": client.max_length,
        }
        return Reply(info)

    for path in ("/model_info", "/get_model_info"):
        routes.add("GET", path, model_info, "The model, under SGLang's names")
    routes.add("GET", "/v1/models", models, "The models that are served")
    routes.add("GET", "/v1/models/{model:path}", model, "One model", statuses=(404,))

"""/v1/embeddings: texts or token ids -> vectors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from megatron_infer.outputs.embeddings import flattened, params_for, vector_of
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.server.body_types import Body, Prompts
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.field_tables import SHARED
from megatron_infer.server.generation import prompt_outputs
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inactive_fields import FieldTable, no_effect, refused
from megatron_infer.server.reply_format import as_base64
from megatron_infer.server.routes import GENERATION_STATUSES, Routes
from megatron_infer.server.served_models import check_model, shown_name
from megatron_infer.server.server_config import ServerConfig

FIELDS = FieldTable(
    SHARED
    | {
        "priority": no_effect("vectors take one forward each", 0),
        "embed_dtype": refused("numbers are float32", "float32", "auto"),
        "endianness": refused("base64 is little-endian", "little", "native"),
        "messages": refused("send the rendered text as input"),
    }
)


class EmbeddingBody(Body, kw_only=True):
    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    pooling: Literal["last", "mean", "all"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    default = "last" if settings.pool_embeddings else "all"

    async def embeddings(call: Call) -> Reply:
        body: EmbeddingBody = call.body
        check_model(client, body.model)
        add_special = body.add_special_tokens
        prompts = await client.encode_prompts(body.input, field="input", add_special=add_special is not False)
        if add_special is not None and not isinstance(body.input, str) and not isinstance(body.input[0], str):
            raise bad_request("add_special_tokens goes with texts; token ids are taken as given", "add_special_tokens")
        outputs = await prompt_outputs(client, call, prompts, params_for(body.pooling or default), field="input")
        data = await client.run_in_thread(_data, outputs, body)
        num_tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return Reply({"object": "list", "data": data, "model": shown_name(client, body.model), "usage": usage})

    options = {"body": EmbeddingBody, "fields": FIELDS, "statuses": GENERATION_STATUSES}
    routes.add("POST", "/v1/embeddings", embeddings, "Vectors of texts or token ids", **options)


def _data(outputs: list[RequestOutput], body: EmbeddingBody) -> list[dict[str, Any]]:
    """The vector, or vectors, of each output; millions of numbers take a second."""
    data = []
    for index, output in enumerate(outputs):
        vector = vector_of(output, dimensions=body.dimensions, normalize=body.normalize is not False)
        data.append({"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)})
    return data


def _encoded(vector: Any, encoding: str | None) -> Any:
    """The vector, or a list of them, as numbers, or for base64 as little-endian fp32, one after the other."""
    return vector if encoding != "base64" else as_base64(flattened(vector) or (), "<f4")

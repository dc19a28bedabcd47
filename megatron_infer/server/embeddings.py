"""/v1/embeddings: texts or token ids as vectors."""

from __future__ import annotations

import base64
import sys
from array import array
from typing import Annotated, Any, Literal

from msgspec import Meta

from megatron_infer.outputs.embeddings import params_for, vector_of
from megatron_infer.server.calls import Call, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inflight import Job
from megatron_infer.server.routes import App, Operation
from megatron_infer.server.schemas import Body, Text, TokenId, TokenIds
from megatron_infer.server.settings import ServerConfig


class EmbeddingBody(Body, kw_only=True):
    model: str | None = None
    input: Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1)]
    """A text, token ids, or a list of either; not a mixture."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    user: str | None = None


def register(app: App, service: EngineClient, settings: ServerConfig) -> None:
    app.add(
        Operation(
            method="POST",
            path="/v1/embeddings",
            handler=Embeddings(service, settings).answer,
            body=EmbeddingBody,
            summary="Vectors of texts or token ids",
            statuses=(404, 429, 503, 504),
        )
    )


class Embeddings:
    """The handler."""

    def __init__(self, service: EngineClient, settings: ServerConfig) -> None:
        self._service, self._settings = service, settings

    async def answer(self, call: Call) -> Reply:
        body: EmbeddingBody = call.body
        service = self._service
        service.check_model(body.model)
        params = params_for(body.pooling or "last")
        jobs = [Job(prompt_ids=ids, params=params) for ids in await self._inputs(body)]
        for job in jobs:
            await service.check(job, field="input")
        async with service.fly(jobs) as flight:
            outputs = await flight.results()
        normalize = body.normalize is not False
        data = []
        for index, output in enumerate(outputs):
            vector = vector_of(output, dimensions=body.dimensions, normalize=normalize)
            data.append({"object": "embedding", "index": index, "embedding": _shown(vector, body.encoding_format)})
        num_tokens = sum(len(job.prompt_ids) for job in jobs)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return Reply({"object": "list", "data": data, "model": service.names[0], "usage": usage})

    async def _inputs(self, body: EmbeddingBody) -> list[list[int]]:
        given: Any = body.input
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        if len(given) > self._settings.max_prompts:
            limit = self._settings.max_prompts
            raise bad_request(f"input has {len(given)} prompts, the limit is {limit} (max_prompts)", "input")
        kinds = {type(one) for one in given}
        wrong = len(kinds) > 1 or any(type(token) is not int for one in given if isinstance(one, list) for token in one)
        if wrong or int in kinds:
            raise bad_request("input mixes texts and token ids; give one kind", "input")
        if str not in kinds:
            if body.add_special_tokens is not None:
                raise bad_request(
                    "add_special_tokens goes with texts; token ids are taken as given", "add_special_tokens"
                )
            return [list(one) for one in given]
        add_special = body.add_special_tokens is not False
        return [await self._service.encode(text, add_special=add_special) for text in given]


def _shown(vector: list[float], encoding: str | None) -> Any:
    """base64: of little-endian fp32."""
    if encoding != "base64":
        return vector
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()

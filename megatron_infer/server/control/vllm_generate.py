"""vLLM's POST /inference/v1/generate, and SkyRL's form of it: token ids in, token ids out, without text."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from msgspec import Meta

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from megatron_infer.server.control.control_routes import ControlRoutes, QueryParams
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.endpoint import Call, Events, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.field_tables import SHARED, STREAM_OPTIONS
from megatron_infer.server.generation import generate
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inflight import EngineRequest
from megatron_infer.server.openai_logprobs import TokenTexts, by_id, chat_content
from megatron_infer.server.openai_protocol import Body, Priority, SamplingFields, StreamOptions, Text, TokenIds
from megatron_infer.server.reply_fields import DeltaReader, usage_of, version_spans_of
from megatron_infer.server.request_fields import FieldTable, refused
from megatron_infer.server.sampling_fields import check_limit, check_lists, check_stream_options, params_from
from megatron_infer.server.served_models import check_model
from megatron_infer.server.structured_outputs import StructuredOutputFields

FIELDS = FieldTable(
    SHARED | {"output_mode": refused("the reply has token ids; /v1/completions has text", "tokens")},
    {"stream_options": STREAM_OPTIONS, "sampling_params": FieldTable(SHARED)},
)


class VllmSampling(SamplingFields):
    """vLLM's SamplingParams."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None
    detokenize: bool | None = None
    """Without effect: the reply has no text, and stop texts are matched in any case."""
    structured_outputs: dict[str, Any] | None = None


PARAMS = (*SamplingFields.__struct_fields__, "max_tokens", "logprobs")
"""Fields of `VllmSampling` that SamplingParams has under the same name."""


class VllmGenerateBody(Body, kw_only=True):
    token_ids: TokenIds
    sampling_params: VllmSampling | None = None
    request_id: Annotated[Text, Meta(max_length=256)] | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Priority | None = None


def register(control_routes: ControlRoutes, machine: ControlMachine, fields: StructuredOutputFields) -> None:
    control_routes.add(
        "POST",
        "/inference/v1/generate",
        VllmGenerate(machine, fields).reply,
        "Continue token ids (vLLM's API)",
        body=VllmGenerateBody,
        fields=FIELDS,
        optional_body=False,
        media_types=("application/json", "text/event-stream"),
    )
    control_routes.add(
        "POST",
        "/skyrl/v1/generate",
        VllmGenerate(machine, fields, with_experts=True).reply,
        "Continue token ids, with the experts of each position (SkyRL's API)",
        body=VllmGenerateBody,
        fields=FIELDS,
        optional_body=False,
    )


async def vllm_params(
    given: Sequence[VllmSampling], fields: StructuredOutputFields, client: EngineClient, **further: Any
) -> SamplingParams:
    """Parameters of a request whose reply has no text. given: a later one goes before those before it.

    Raises ApiError 400 for values beyond the server's limits.
    """
    settings = client.settings
    values = {name: value for one in given for name in PARAMS if (value := getattr(one, name)) is not None}
    check_lists(values, settings)
    values["detokenize"] = bool(values.get("stop"))  # stop texts are matched in the text
    if values.get("stop"):
        client.require_tokenizer()
    structured = next((one.structured_outputs for one in reversed(given) if one.structured_outputs is not None), None)
    if structured is not None:
        values["structured"] = await fields.of_structured_outputs(structured)
    params = params_from(values | further)
    check_limit("n", params.n, settings.max_n, "max_n")
    for name in ("logprobs", "prompt_logprobs"):
        check_limit(name, getattr(params, name) or 0, settings.max_logprobs, "max_logprobs")
    return params


class VllmGenerate:
    """The handler: a body -> one engine request."""

    def __init__(self, machine: ControlMachine, fields: StructuredOutputFields, *, with_experts: bool = False) -> None:
        """with_experts: replies have `routed_experts`, as SkyRL reads them."""
        self._machine, self._fields, self._with_experts = machine, fields, with_experts

    async def reply(self, call: Call) -> Reply | Events:
        QueryParams(call).end()
        body: VllmGenerateBody = call.body
        client = self._machine.client
        check_model(client, body.model)
        check_stream_options(body)
        further = {} if body.priority is None else {"priority": body.priority}
        if self._with_experts:
            further["return_routing"] = True
            if body.stream:
                raise bad_request("routed experts come with whole replies only; give no stream: true", "stream")
        params = await vllm_params((body.sampling_params or VllmSampling(),), self._fields, client, **further)
        if body.stream and params.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs comes with whole replies only; give no stream: true", "prompt_logprobs")
        salt = body.cache_salt or ""
        requests = client.checked([EngineRequest(prompt_ids=body.token_ids, params=params, cache_salt=salt)], call)
        reply = VllmReply(body, body.request_id or call.id, requests[0], self._machine)
        return await generate(client, requests, reply, stream=body.stream, abort_ids=(reply.id, call.id))


class VllmReply:
    """The ReplyFormat of one call. A stream has what is new in each sequence."""

    def __init__(self, body: VllmGenerateBody, id: str, request: EngineRequest, machine: ControlMachine) -> None:
        self.id = id
        self._num_top, self._machine = request.params.logprobs, machine
        self._shows_cached = machine.client.settings.show_cached_tokens
        self._has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._readers = [DeltaReader() for _ in range(request.params.n)]
        self._token_texts = TokenTexts(None)
        self._latest: RequestOutput | None = None

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        return {
            "request_id": self.id,
            "choices": [self._choice(one, one.token_ids, one.logprobs) for one in output.outputs],
            "prompt_logprobs": by_id(output.prompt_logprobs),
            "kv_transfer_params": None,
            "usage": usage_of(outputs, shows_cached=self._shows_cached),
        }

    def first_events(self) -> tuple[()]:
        return ()

    def events(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        self._latest = output
        for one in output.outputs:
            delta = self._readers[one.index].read(one)
            if delta is not None:
                yield {"request_id": self.id, "choices": [self._choice(one, delta.token_ids, delta.logprobs)]}

    def last_events(self) -> Iterator[dict[str, Any]]:
        if self._has_usage and self._latest is not None:
            usage = usage_of([self._latest], shows_cached=self._shows_cached)
            yield {"request_id": self.id, "choices": [], "usage": usage}

    def _choice(
        self, one: CompletionOutput, tokens: list[int], entries: Sequence[dict[int, Logprob]] | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": one.index,
            "token_ids": tokens,
            "logprobs": None,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self._num_top is not None and entries is not None:
            choice["logprobs"] = {"content": chat_content(entries, self._token_texts, num_top=self._num_top)}
        if one.finish_reason is not None:
            if one.routing is not None:
                choice["routed_experts"] = _packed_experts(one.routing)
            choice["version_spans"] = version_spans_of(one)
            choice["weight_version"] = self._machine.shown_version(one.spans[-1].policy_version if one.spans else None)
        return choice


def _packed_experts(routing: Any) -> dict[str, Any]:
    """Expert ids [positions, layers, top-k] in the smallest dtype that SkyRL knows and that holds them."""
    dtype = "uint8" if not routing.size or int(routing.max()) < 1 << 8 else "int16"
    data = base64.b64encode(routing.astype(dtype).tobytes()).decode("ascii")
    return {"data": data, "shape": list(routing.shape), "dtype": dtype}

"""vLLM's POST /inference/v1/generate, and SkyRL's form of it: token ids in, token ids out, without text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from megatron_infer.outputs.request_output import CompletionOutput, RequestOutput
from megatron_infer.server.body_types import (
    Body,
    NumTokens,
    Priority,
    SamplingFields,
    ShortText,
    StreamOptions,
    TokenIds,
    TopCount,
)
from megatron_infer.server.control.control_routes import ControlRoutes
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.endpoint import Call
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.field_tables import SHARED, STREAM_OPTIONS
from megatron_infer.server.generation import Dialect, Generator, PreparedCall
from megatron_infer.server.generation_request import GenerationRequest, sampling_of
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inactive_fields import FieldTable, refused
from megatron_infer.server.openai_logprobs import TokenTexts, by_id, chat_content
from megatron_infer.server.reply_format import Delta, ReplyFormat, as_base64, usage_of, version_spans_of, whole_delta
from megatron_infer.server.structured_outputs import StructuredOutputFields

FIELDS = FieldTable(
    SHARED | {"output_mode": refused("the reply has token ids; /v1/completions has text", "tokens")},
    {"stream_options": STREAM_OPTIONS, "sampling_params": FieldTable(SHARED)},
)


class VllmSampling(SamplingFields):
    """vLLM's SamplingParams."""

    max_tokens: NumTokens | None = None
    logprobs: TopCount | None = None
    detokenize: bool | None = None
    """Without effect: the reply has no text, and stop texts are matched in any case."""
    structured_outputs: dict[str, Any] | None = None


class VllmGenerateBody(Body, kw_only=True):
    token_ids: TokenIds
    sampling_params: VllmSampling | None = None
    request_id: ShortText | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: ShortText | None = None
    priority: Priority | None = None


def register(control_routes: ControlRoutes, machine: ControlMachine, fields: StructuredOutputFields) -> None:
    async def read(body: VllmGenerateBody, call: Call) -> GenerationRequest:
        asked = vllm_sampling((body.sampling_params or VllmSampling(),), fields, machine.client, call.caller)
        asked["sampling"] = sampling_of(body) | asked["sampling"]
        return GenerationRequest.of(body, call, prompt=body.token_ids, field="token_ids", **asked)

    async def read_with_experts(body: VllmGenerateBody, call: Call) -> GenerationRequest:
        if body.stream:
            raise bad_request("routed experts come with whole replies only; give no stream: true", "stream")
        asked = await read(body, call)
        asked.sampling["return_routing"] = True
        return asked

    common: dict[str, Any] = {"fields": FIELDS, "reply": VllmReply}
    generator = Generator(control_routes.routes, machine.client)
    generator.register(
        control_routes.add,
        Dialect(
            bodies={"/inference/v1/generate": VllmGenerateBody},
            summary="Continue token ids (vLLM's API)",
            read=read,
            **common,
        ),
    )
    generator.register(
        control_routes.add,
        Dialect(
            bodies={"/skyrl/v1/generate": VllmGenerateBody},
            summary="Continue token ids, with the experts of each position (SkyRL's API)",
            read=read_with_experts,
            streams=False,
            **common,
        ),
    )


def vllm_sampling(
    given: Sequence[VllmSampling], fields: StructuredOutputFields, client: EngineClient, caller: str
) -> dict[str, Any]:
    """Fields of a GenerationRequest whose reply has no text. given: a later one goes before those before it.

    Raises ApiError 400.
    """
    values = sampling_of(*given)
    values["detokenize"] = bool(values.get("stop"))  # stop texts are matched in the text
    if values.get("stop"):
        client.require_tokenizer()
    structured = next((one.structured_outputs for one in reversed(given) if one.structured_outputs is not None), None)
    return {"sampling": values, "grammars": partial(fields.of_structured_outputs, structured, caller)}


class VllmReply(ReplyFormat):
    """A stream has what is new in each sequence."""

    def __init__(self, prepared: PreparedCall) -> None:
        super().__init__(prepared, prepared.asked.request_id or prepared.id)
        self._num_top = prepared.requests[0].params.logprobs
        options = prepared.asked.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        self._token_texts = TokenTexts(None)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        return {
            "request_id": self.id,
            "choices": [self._choice(one, whole_delta(one)) for one in output.outputs],
            "prompt_logprobs": by_id(output.prompt_logprobs),
            "kv_transfer_params": None,
            "usage": usage_of(outputs, shows_cached=self.shows_cached),
        }

    def chunks(self, index: int, output: RequestOutput, one: CompletionOutput, delta: Delta) -> Iterator[Any]:
        yield {"request_id": self.id, "choices": [self._choice(one, delta)]}

    def last_events(self) -> Iterator[dict[str, Any]]:
        if self._has_usage:
            usage = usage_of(self.latest.values(), shows_cached=self.shows_cached)
            yield {"request_id": self.id, "choices": [], "usage": usage}

    def _choice(self, one: CompletionOutput, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": one.index,
            "token_ids": delta.token_ids,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._num_top is not None and delta.logprobs is not None:
            choice["logprobs"] = {"content": chat_content(delta.logprobs, self._token_texts, num_top=self._num_top)}
        if delta.finish_reason is not None:
            if one.routing is not None:
                choice["routed_experts"] = _packed_experts(one.routing)
            choice["version_spans"] = version_spans_of(one)
            choice["weight_version"] = self.weight_version(one)
        return choice


def _packed_experts(routing: Any) -> dict[str, Any]:
    """Expert ids [positions, layers, top-k] in the smallest dtype that SkyRL knows and that holds them."""
    dtype = "uint8" if not routing.size or int(routing.max()) < 1 << 8 else "int16"
    return {"data": as_base64(routing, dtype), "shape": list(routing.shape), "dtype": dtype}

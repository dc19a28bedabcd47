"""POST /inference/v1/generate as vLLM has it: token ids in, token ids out, no text anywhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from megatron_infer.errors import unknown_name
from megatron_infer.outputs.request_output import CompletionOutput, RequestOutput
from megatron_infer.server.calls import Call, Events, Reply
from megatron_infer.server.control.common import Dialect, Query
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inflight import Job, params_from
from megatron_infer.server.openai_logprobs import TokenTexts, by_id, chat_content
from megatron_infer.server.sampling_fields import Reader, check_limit, spans_of, usage_of
from megatron_infer.server.schemas import SAMPLING_FIELDS, Body, Priority, StreamOptions, Text, TokenIds
from megatron_infer.server.settings import ServerConfig
from megatron_infer.server.structured_fields import Fields

STRUCTURED = "structured_outputs"
SAMPLING = (
    *(name for name in SAMPLING_FIELDS if name != "priority"), "max_tokens", "logprobs", "detokenize", STRUCTURED
)  # fmt: skip
"""Fields of sampling_params."""


class GenerateBody(Body, kw_only=True):
    token_ids: TokenIds
    sampling_params: dict[str, Any] | None = None
    """By the names of SamplingParams, which are vLLM's."""
    request_id: Annotated[Text, Meta(max_length=256)] | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Priority | None = None
    features: None = None
    kv_transfer_params: None = None


def register(dialect: Dialect, machine: ControlMachine, service: EngineClient, fields: Fields) -> None:
    dialect.add(
        "POST",
        "/inference/v1/generate",
        Generate(machine, service, dialect.settings, fields).answer,
        "Continue token ids (vLLM's dialect)",
        body=GenerateBody,
        optional_body=False,
        media_types=("application/json", "text/event-stream"),
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    body: GenerateBody
    job: Job
    name: str


def _checked(given: dict[str, Any], settings: ServerConfig) -> dict[str, Any]:
    """What was given of the names that are honoured here, within the server's limits. Raises ApiError 400."""
    values = {name: value for name, value in given.items() if value is not None}
    for name in values:
        if name not in SAMPLING:
            raise bad_request(f"sampling_params: {unknown_name('field', name[:60], SAMPLING)}", "sampling_params")
    stops = [values["stop"]] if isinstance(values.get("stop"), str) else values.get("stop", ())
    for name, items in (("stop", stops), ("stop_token_ids", values.get("stop_token_ids", ()))):
        if not isinstance(items, list | tuple):
            raise bad_request(f"sampling_params: {name} is a list", "sampling_params", "invalid_value")
        check_limit(f"the number of {name}", len(items), settings.max_stop, "max_stop")
    longest = max((len(text) for text in stops if isinstance(text, str)), default=0)
    check_limit("the length of stop", longest, settings.max_stop_chars, "max_stop_chars")
    return values


class Generate:
    """The handler, and how its replies look."""

    def __init__(self, machine: ControlMachine, service: EngineClient, settings: ServerConfig, fields: Fields) -> None:
        self._fields = fields
        self._machine, self._service, self._settings = machine, service, settings
        self._token_texts = TokenTexts(None)

    async def answer(self, call: Call) -> Reply | Events:
        Query(call).end()
        asked = await self._prepare(call.body, call.id)
        if asked.body.stream:
            items = self._stream(asked, call.id)
            await anext(items)  # refusals are answers with a status of their own
            return Events(items)
        async with self._service.fly([asked.job], names=(asked.name, call.id)) as flight:
            (output,) = await flight.results()
        choices = [self._choice(asked, one, one.token_ids, one.logprobs) for one in output.outputs]
        reply = {"request_id": asked.name, "choices": choices, "prompt_logprobs": by_id(output.prompt_logprobs)}
        return Reply({**reply, "kv_transfer_params": None, **self._about(output)})

    async def _prepare(self, body: GenerateBody, call_id: str) -> _Asked:
        service, settings = self._service, self._settings
        service.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options is given without stream: true; give both or none", "stream_options")
        values = _checked(body.sampling_params or {}, settings)
        values["detokenize"] = bool(values.get("stop"))  # nobody sees the text; stop texts are looked for in it
        if values.get("stop"):
            service.require_tokenizer()
        if body.priority is not None:
            values["priority"] = body.priority
        if STRUCTURED in values:
            values["structured"] = await self._fields.of_outputs(values.pop(STRUCTURED))
        params = params_from(values)
        check_limit("n", params.n, settings.max_n, "max_n")
        for name in ("logprobs", "prompt_logprobs"):
            check_limit(name, getattr(params, name) or 0, settings.max_logprobs, "max_logprobs")
        if body.stream and params.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs comes with whole replies only; give no stream: true", "prompt_logprobs")
        job = Job(prompt_ids=list(body.token_ids), params=params, salt=body.cache_salt or "")
        await service.check(job)
        return _Asked(body, job, body.request_id or call_id)

    async def _stream(self, asked: _Asked, call_id: str) -> AsyncGenerator[Any]:
        """None once the call is accepted, then what is new."""
        readers = [Reader() for _ in range(asked.job.params.n)]
        output: RequestOutput | None = None
        async with self._service.fly([asked.job], stream=True, names=(asked.name, call_id)) as flight:
            await flight.taken(min(1.0, self._settings.keep_alive_s))
            yield None
            async for news in flight.updates(self._settings.keep_alive_s):
                if not news:
                    yield None
                for output in news.values():
                    for one in output.outputs:
                        delta = readers[one.index].read(one)
                        if delta is not None:
                            choice = self._choice(asked, one, delta.token_ids, delta.logprobs)
                            yield {"request_id": asked.name, "choices": [choice]}
        options = asked.body.stream_options
        if options is not None and options.include_usage and output is not None:
            yield {"request_id": asked.name, "choices": [], **self._about(output)}

    def _choice(self, asked: _Asked, one: CompletionOutput, tokens: list[int], entries: Any) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": one.index,
            "token_ids": tokens,
            "logprobs": None,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if asked.job.params.logprobs is not None and entries is not None:
            content = chat_content(entries, self._token_texts, num_top=asked.job.params.logprobs)
            choice["logprobs"] = {"content": content}
        if one.finish_reason is not None:
            choice["version_spans"] = spans_of(one)
            choice["weight_version"] = one.spans[-1].policy_version if one.spans else self._machine.version
        return choice

    def _about(self, output: RequestOutput) -> dict[str, Any]:
        return {"usage": usage_of([output])}

"""The path of a call that generates, the same for every dialect.

body ──▶ Dialect.read ──▶ GenerationRequest ──▶ Generator.prepare ──▶ EngineRequests ──▶ EngineClient.submit
                                                                                                 │ RequestOutputs
                              one JSON reply, or a stream of events ◀── Dialect.reply ◀──────────┘
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.server import call_limits
from megatron_infer.server.body_types import Message, renamed
from megatron_infer.server.chat_prompt import prompt_ids
from megatron_infer.server.endpoint import Call, Events, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.generation_request import GenerationRequest, Splitter, check_request, params_from
from megatron_infer.server.http_errors import ApiError, unavailable
from megatron_infer.server.inactive_fields import FieldTable
from megatron_infer.server.inflight import EngineRequest
from megatron_infer.server.openai_logprobs import TokenTexts
from megatron_infer.server.output_detokenizer import INLINE_TOKENS
from megatron_infer.server.reply_format import ReplyFormat
from megatron_infer.server.routes import Routes
from megatron_infer.server.served_models import check_model, shown_name

CHAT = "chat"
"""The route in `ExtraFields` of conversations whose texts are split into reasoning, content and tool calls."""
PIECE = 1000
"""Entries of a list that are encoded at once: with 20 alternatives each, some milliseconds."""
NUM_PROMPT_END = 32
"""Tokens of a prompt's end that `GenerationRequest.prompt_end` is decoded from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API of generation calls: the forms of its bodies and of its replies."""

    bodies: Mapping[str, Any]
    """Path -> type of its bodies, see `Operation.body`."""
    summary: str
    fields: FieldTable
    """Its fields without an action."""
    read: Callable[[Any, Call], Awaitable[GenerationRequest]]
    """A body -> what it asks for. Raises ApiError 400."""
    reply: Callable[[PreparedCall], ReplyFormat]
    module_fields: str = ""
    """The route in `ExtraFields` whose fields and rules act; "": none do."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Fields in errors and in the header x-ignored-fields -> this dialect's names of them, besides those that the body
    says (`renamed`)."""
    method: str = "POST"
    streams: bool = True
    named_events: bool = False
    """See `Events.named`."""

    def name_of(self, field: str, body: Any) -> str:
        """This dialect's name of a field."""
        return {**self.names, **renamed(type(body))}.get(field, field)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCall:
    """A call whose engine requests are ready to be submitted, and what its reply is made of."""

    body: Any
    """Of the call, as the dialect has it."""
    asked: GenerationRequest
    requests: Sequence[EngineRequest]
    id: str
    """X-Request-Id."""
    model: str
    """The model's name in the reply."""
    prompt_texts: Sequence[str]
    """The prompts as texts, with `echo` or `return_raw_text`."""
    splitters: Sequence[Splitter]
    """Of a chat: one for each sequence."""
    token_texts: TokenTexts
    shows_cached: bool
    """See `usage_of`."""
    version_name: Callable[[int | None], int | str | None]
    """See `EngineClient`."""


class Generator:
    """Serves the calls of all dialects."""

    def __init__(self, routes: Routes, client: EngineClient) -> None:
        self._fields, self._client, self._settings = routes.fields, client, client.settings
        self._token_texts, self._token_ids = TokenTexts(client.tokenizer), TokenTexts(None)

    def register(self, add: Callable[..., None], dialect: Dialect, **options: Any) -> None:
        """add: `Routes.add` or `ControlRoutes.add`. options: for it."""
        for path, body in dialect.bodies.items():
            add(
                dialect.method,
                path,
                partial(self.serve, dialect),
                dialect.summary,
                body=body,
                fields=dialect.fields,
                optional_body=False,
                media_types=("application/json", "text/event-stream") if dialect.streams else ("application/json",),
                **options,
            )

    async def serve(self, dialect: Dialect, call: Call) -> Reply | Events:
        """Raises what the requests are refused with, also for a stream that has not begun."""
        prepared = await self.prepare(dialect, call)
        reply = dialect.reply(prepared)
        if prepared.asked.stream:
            events = _events(self._client, prepared.requests, reply)
            await anext(events)  # a refusal still gets a status of its own
            return Events(events, named=dialect.named_events)
        async with self._client.submit(prepared.requests, abort_ids=reply.abort_ids) as inflight:
            outputs = await inflight.results()
        for hook in self._client.reply_hooks:
            hook(reply.id, outputs)
        if num_entries(outputs) <= INLINE_TOKENS:
            return Reply(reply.whole(outputs))
        return Reply(msgspec.Raw(await self._client.run_in_thread(_whole_as_json, reply, outputs)))

    async def prepare(self, dialect: Dialect, call: Call) -> PreparedCall:
        """Raises ApiError 400, in the dialect's names of fields."""
        try:
            asked = await dialect.read(call.body, call)
            prepared = await self._prepared(asked, dialect.module_fields, call)
        except ApiError as error:
            if error.param is not None:
                name = dialect.name_of(error.param, call.body)
                error.message, error.param = error.message.replace(error.param, name, 1), name
            raise
        call.ignored[:] = [dialect.name_of(name, call.body) for name in call.ignored]
        return prepared

    async def _prepared(self, asked: GenerationRequest, module_fields: str, call: Call) -> PreparedCall:
        client = self._client
        check_model(client, asked.model)
        check_request(asked, self._settings)
        await self._fields.apply(module_fields, asked.body, asked)
        params = [params_from(asked.sampling | values) for values in asked.each or ({},)]
        prompts = await prompts_of(client, asked)
        params = params if asked.each else params * len(prompts)
        texts = await self._prompt_texts(asked, prompts) if asked.return_raw_text else ()
        requests = [
            EngineRequest(
                prompt_ids=ids,
                params=params[place],
                cache_salt=asked.cache_salt or "",
                prompt_bytes=_prompt_bytes(asked, place, ids, texts[place] if texts else ""),
            )
            for place, ids in enumerate(prompts)
        ]
        checked: Sequence[EngineRequest] = client.checked(requests, call, field=asked.field)
        if asked.echo:  # prompts are decoded only once the call is known to be within its limits
            texts = await self._prompt_texts(asked, prompts)
            checked = client.within_reply(
                replace(one, prompt_bytes=(one.prompt_bytes or 0.0) + call_limits.text_bytes(text))
                for one, text in zip(checked, texts, strict=True)
            )
        if asked.grammars is not None:
            found = await asked.grammars()
            found = found if len(found) == len(checked) else [*found] * len(checked)
            checked = [
                one if structured is None else replace(one, params=replace(one.params, structured=structured))
                for one, structured in zip(checked, found, strict=True)
            ]
        splitters: list[Splitter] = []
        if module_fields == CHAT:
            asked.prompt_end = await client.decode(prompts[0][-NUM_PROMPT_END:], skip_special=False)
            splitters = [asked.make_splitter() for _ in range(params[0].n)]
        return PreparedCall(
            body=call.body,
            asked=asked,
            requests=checked,
            id=call.id,
            model=shown_name(client, asked.model),
            prompt_texts=texts,
            splitters=splitters,
            token_texts=self._token_ids if asked.return_tokens_as_token_ids else self._token_texts,
            shows_cached=self._settings.show_cached_tokens,
            version_name=client.version_name,
        )

    async def _prompt_texts(self, asked: GenerationRequest, prompts: Sequence[list[int]]) -> Sequence[str]:
        """The prompts as the reply has them: the given texts, or token ids decoded."""
        client = self._client
        given = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt or ()
        if given and isinstance(given[0], str):
            return list(given)
        if client.tokenizer is None:
            return [""] * len(prompts)
        for ids in prompts:
            call_limits.check_ids(ids, client.limits, field=asked.field)
        skip_special = not asked.return_raw_text and asked.sampling.get("skip_special_tokens") is not False
        return [await client.decode(ids, skip_special=skip_special) for ids in prompts]


async def prompts_of(client: EngineClient, asked: GenerationRequest) -> list[list[int]]:
    """The token ids of each prompt. Raises ApiError 400."""
    if not asked.conversations:
        add_special = asked.add_special_tokens is not False
        return await client.encode_prompts(asked.prompt, field=asked.field, add_special=add_special)
    tokenizer = client.require_tokenizer()

    async def ids_of(messages: Sequence[Message]) -> list[int]:
        return await client.tokenize(
            prompt_ids,
            tokenizer,
            messages,
            limits=client.limits,
            tools=asked.tools,
            call_format=asked.call_format,
            variables=asked.template,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final=bool(asked.continue_final_message),
            keep_tokens=asked.prevent_retokenization is not False,
            has_bos=asked.add_BOS,
        )

    return [await ids_of(messages) for messages in asked.conversations]


def _prompt_bytes(asked: GenerationRequest, place: int, ids: Sequence[int], text: str) -> float | None:
    """See `EngineRequest.prompt_bytes`. text: of the prompt, in the reply."""
    return None if asked.prompt_bytes is None else asked.prompt_bytes(place, len(ids)) + call_limits.text_bytes(text)


def num_entries(outputs: Iterable[RequestOutput]) -> int:
    """Tokens and log probabilities of prompts: what formatting a reply takes time for."""
    return sum(
        len(output.prompt_logprobs or ()) + sum(len(one.token_ids) for one in output.outputs) for output in outputs
    )


def _whole_as_json(reply: ReplyFormat, outputs: list[RequestOutput]) -> bytes:
    return msgspec.json.encode(in_pieces(reply.whole(outputs)))


def in_pieces(value: Any) -> Any:
    """The JSON value with long lists encoded, some entries at a time: between these calls other threads run."""
    if isinstance(value, dict):
        return {name: in_pieces(one) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) <= PIECE:
        return [in_pieces(one) if isinstance(one, dict) else one for one in value]
    pieces = (msgspec.json.encode(value[start : start + PIECE])[1:-1] for start in range(0, len(value), PIECE))
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


async def prompt_outputs(
    client: EngineClient,
    call: Call,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    field: str,
    prompt_bytes: float | None = None,
) -> list[RequestOutput]:
    """The outputs of prompts whose vectors or log probabilities are asked for. field: the body's, with the prompts.

    Raises ApiError 503 where a request was aborted before its prompt was computed.
    """
    requests = [EngineRequest(prompt_ids=ids, params=params, prompt_bytes=prompt_bytes) for ids in prompts]
    async with client.submit(client.checked(requests, call, field=field), abort_ids=(call.id,)) as inflight:
        outputs = await inflight.results()
    if any(one.finish_reason == "abort" for output in outputs for one in output.outputs):
        raise unavailable("a request was aborted before its prompt was computed; ask again", "aborted")
    return outputs


def scoring_params(num_top: int) -> SamplingParams:
    """Parameters of a prompt whose log probabilities are asked for, those of `num_top` other tokens with each."""
    return SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=num_top, detokenize=False, ignore_eos=True)


async def _events(client: EngineClient, requests: Sequence[EngineRequest], reply: ReplyFormat) -> AsyncGenerator[Any]:
    """None once the requests are accepted, then the events."""
    async with client.submit(requests, stream=True, abort_ids=reply.abort_ids) as call:
        updates = call.updates(client.settings.keep_alive_s)
        await anext(updates)
        yield None
        for event in reply.first_events():
            yield event
        async for outputs in updates:
            if not outputs:
                yield None
            for index, output in outputs.items():
                for event in reply.events(index, output):
                    yield event
    for event in reply.last_events():
        yield event

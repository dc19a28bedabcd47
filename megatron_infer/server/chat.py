"""/v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from megatron_infer.outputs.request_output import CompletionOutput, RequestOutput
from megatron_infer.server.calls import Call, Events, Reply
from megatron_infer.server.chat_deltas import join
from megatron_infer.server.chat_prompt import prompt_ids
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.extra_fields import Draft, Splitter
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inflight import Job, params_from
from megatron_infer.server.openai_logprobs import TokenTexts, by_id, chat_content
from megatron_infer.server.routes import App, Operation
from megatron_infer.server.sampling_fields import Delta, Reader, check_limit, sampling_of, spans_of, usage_of
from megatron_infer.server.schemas import ChatBody
from megatron_infer.server.settings import ServerConfig

ROUTE = "chat"
PROMPT_END = 32
"""Tokens of a prompt that its `prompt_end` is made of."""


def register(app: App, service: EngineClient, settings: ServerConfig) -> None:
    app.add(
        Operation(
            method="POST",
            path="/v1/chat/completions",
            handler=Chat(app, service, settings).answer,
            body=lambda: app.fields.extend(ROUTE, ChatBody),
            summary="Answer a conversation",
            media_types=("application/json", "text/event-stream"),
            statuses=(404, 429, 503, 504),
        )
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """One call, ready to run."""

    id: str
    created: int
    body: ChatBody
    job: Job
    draft: Draft

    @property
    def shows_tokens(self) -> bool:
        return bool(self.body.return_token_ids or self.body.return_tokenized_data)


class Chat:
    """The handler, and how its replies look."""

    def __init__(self, app: App, service: EngineClient, settings: ServerConfig) -> None:
        self._app, self._service, self._settings = app, service, settings
        self._token_texts = TokenTexts(service.tokenizer)

    async def answer(self, call: Call) -> Reply | Events:
        asked = await self._prepare(call.body)
        if asked.body.stream:
            items = self._stream(asked, call.id)
            await anext(items)  # refusals are answers with a status of their own
            return Events(items)
        async with self._service.fly([asked.job], names=(asked.id, call.id)) as flight:
            (output,) = await flight.results()
        return Reply(self._whole(asked, output))

    async def _prepare(self, body: ChatBody) -> _Asked:
        service, settings = self._service, self._settings
        service.check_model(body.model)
        draft = Draft(sampling=sampling_of(body, settings), template=dict(body.chat_template_kwargs or {}))
        await self._app.fields.apply(ROUTE, body, draft)
        self._settle(body, draft.sampling)
        params = params_from(draft.sampling)
        tokenizer = service.require_tokenizer()
        continued = bool(body.continue_final_message)
        ids = await service.off_loop(
            prompt_ids,
            tokenizer,
            body.messages,
            tools=draft.tools,
            call_format=draft.call_format,
            variables=draft.template,
            add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final=continued,
            keep_tokens=body.prevent_retokenization is not False,
        )
        job = Job(prompt_ids=ids, params=params, salt=body.cache_salt or "")
        await service.check(job)
        draft.prompt_end = await service.decode(ids[-PROMPT_END:], skip_special=False)
        return _Asked(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), body, job, draft)

    def _settle(self, body: ChatBody, values: dict[str, Any]) -> None:
        """Fields that act together. Raises ApiError 400."""
        given = [length for length in (body.max_tokens, body.max_completion_tokens) if length is not None]
        if len(set(given)) > 1:
            raise bad_request(
                f"max_tokens is {given[0]} and max_completion_tokens {given[1]}; give one", "max_completion_tokens"
            )
        values["max_tokens"] = given[0] if given else None
        check_limit("top_logprobs", body.top_logprobs or 0, self._settings.max_logprobs, "max_logprobs")
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs is given without logprobs: true; give both", "top_logprobs")
        if body.logprobs:
            values["logprobs"] = body.top_logprobs or 0

    # ------------------------------------------------------------------ whole replies

    def _whole(self, asked: _Asked, output: RequestOutput) -> dict[str, Any]:
        reply = {
            "id": asked.id,
            "object": "chat.completion",
            "created": asked.created,
            "model": self._service.names[0],
            "choices": [self._choice(asked, output, one) for one in output.outputs],
            "usage": usage_of([output]),
        }
        if asked.body.prompt_logprobs is not None:
            reply["prompt_logprobs"] = by_id(output.prompt_logprobs)
        if asked.shows_tokens:
            reply["prompt_token_ids"] = output.prompt_token_ids
        return reply

    def _choice(self, asked: _Asked, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        splitter = asked.draft.make_splitter()
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for part in splitter.feed(one.text, finished=True):
            join(message, part)
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""
        if asked.shows_tokens:
            message["prompt_token_ids"] = output.prompt_token_ids
            message["generation_token_ids"] = one.token_ids
            message["version_spans"] = spans_of(one)
            if one.logprobs is not None:
                message["generation_log_probs"] = [next(iter(entry.values())).logprob for entry in one.logprobs]
        choice = {
            "index": one.index,
            "message": message,
            "logprobs": None if one.logprobs is None else {"content": self._content(asked, one.logprobs)},
            "finish_reason": splitter.finish_reason(one.finish_reason),
            "stop_reason": one.stop_reason,
        }
        if asked.shows_tokens:
            choice["token_ids"] = one.token_ids
        return choice

    def _content(self, asked: _Asked, entries: Any) -> list[dict[str, Any]]:
        return chat_content(entries, self._token_texts, num_top=asked.body.top_logprobs or 0)

    # ------------------------------------------------------------------ streams

    async def _stream(self, asked: _Asked, call_id: str) -> AsyncGenerator[Any]:
        """None once the call is accepted, then chunks: each sample's role first, its finish_reason last."""
        number = asked.job.params.n
        readers = [Reader() for _ in range(number)]
        splitters = [asked.draft.make_splitter() for _ in range(number)]
        output: RequestOutput | None = None
        async with self._service.fly([asked.job], stream=True, names=(asked.id, call_id)) as flight:
            await flight.taken(min(1.0, self._settings.keep_alive_s))
            yield None
            for index in range(number):
                yield self._chunk(asked, _empty_choice(index, {"role": "assistant", "content": ""}))
            async for news in flight.updates(self._settings.keep_alive_s):
                if not news:
                    yield None
                    continue
                output = news[0]
                for one in output.outputs:
                    delta = readers[one.index].read(one)
                    if delta is None:
                        continue
                    for choice in self._pieces(asked, output, one, delta, splitters[one.index]):
                        yield self._chunk(asked, choice)
        options = asked.body.stream_options
        if options is not None and options.include_usage and output is not None:
            yield {**self._head(asked), "choices": [], "usage": usage_of([output])}

    def _head(self, asked: _Asked) -> dict[str, Any]:
        head = {"id": asked.id, "object": "chat.completion.chunk", "created": asked.created}
        return {**head, "model": self._service.names[0]}

    def _chunk(self, asked: _Asked, choice: dict[str, Any]) -> dict[str, Any]:
        options = asked.body.stream_options
        extra = {"usage": None} if options is not None and options.include_usage else {}
        return {**self._head(asked), "choices": [choice], **extra}

    def _pieces(
        self, asked: _Asked, output: RequestOutput, one: CompletionOutput, delta: Delta, splitter: Splitter
    ) -> list[dict[str, Any]]:
        """Choices of the chunks that a sample's news make: its parts, the last one with what belongs to all of it."""
        finished = delta.finish_reason is not None
        parts = splitter.feed(delta.text, finished=finished) or [{}]
        choices = [_empty_choice(one.index, part) for part in parts]
        last = choices[-1]
        if finished:
            last["finish_reason"] = splitter.finish_reason(delta.finish_reason)
            last["stop_reason"] = delta.stop_reason
        if delta.logprobs:
            last["logprobs"] = {"content": self._content(asked, delta.logprobs)}
        if asked.shows_tokens:
            last["token_ids"] = delta.token_ids
            if delta.is_first:
                last["prompt_token_ids"] = output.prompt_token_ids
            if finished:
                last["version_spans"] = spans_of(one)
        empty = not any(parts) and not finished and not delta.logprobs and not asked.shows_tokens
        return [] if empty else choices


def _empty_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

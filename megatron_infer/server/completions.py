"""/v1/completions: texts, token ids or lists of either, continued."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from megatron_infer.outputs.request_output import CompletionOutput, RequestOutput
from megatron_infer.server.calls import Call, Events, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.extra_fields import Draft
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inflight import Job, params_from
from megatron_infer.server.openai_logprobs import TokenTexts, by_id, completion_logprobs
from megatron_infer.server.routes import App, Operation
from megatron_infer.server.sampling_fields import Delta, Reader, check_limit, sampling_of, spans_of, usage_of
from megatron_infer.server.schemas import CompletionBody
from megatron_infer.server.settings import ServerConfig

ROUTE = "completions"
DEFAULT_MAX_TOKENS = 16


def register(app: App, service: EngineClient, settings: ServerConfig) -> None:
    app.add(
        Operation(
            method="POST",
            path="/v1/completions",
            handler=Completions(app, service, settings).answer,
            body=lambda: app.fields.extend(ROUTE, CompletionBody),
            summary="Continue texts or token ids",
            media_types=("application/json", "text/event-stream"),
            statuses=(404, 429, 503, 504),
        )
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """One call, ready to run."""

    id: str
    created: int
    body: CompletionBody
    jobs: list[Job]
    texts: list[str]
    """Of the prompts, where they are echoed."""
    num_given: int
    """Samples of each prompt in the reply: n of best_of."""

    @property
    def num_logprobs(self) -> int | None:
        return self.body.logprobs


class Completions:
    """The handler, and how its replies look."""

    def __init__(self, app: App, service: EngineClient, settings: ServerConfig) -> None:
        self._app, self._service, self._settings = app, service, settings
        self._token_texts = TokenTexts(service.tokenizer)

    async def answer(self, call: Call) -> Reply | Events:
        body: CompletionBody = call.body
        asked = await self._prepare(body)
        if body.stream:
            items = self._stream(asked, call.id)
            await anext(items)  # refusals are answers with a status of their own
            return Events(items)
        async with self._service.fly(asked.jobs, names=(asked.id, call.id)) as flight:
            outputs = await flight.results()
        return Reply(self._whole(asked, outputs))

    # ------------------------------------------------------------------ what is asked

    async def _prepare(self, body: CompletionBody) -> _Asked:
        service, settings = self._service, self._settings
        service.check_model(body.model)
        draft = Draft(sampling=sampling_of(body, settings))
        await self._app.fields.apply(ROUTE, body, draft)
        values = draft.sampling
        self._settle(body, values)
        params = params_from(values)
        prompts = await self._prompts(body)
        jobs = [Job(prompt_ids=ids, params=params, salt=body.cache_salt or "") for ids in prompts]
        for job in jobs:
            await service.check(job)
        texts = await self._echoed(body, jobs) if body.echo else []
        return _Asked(f"cmpl-{uuid.uuid4().hex}", int(time.time()), body, jobs, texts, body.n or 1)

    def _settle(self, body: CompletionBody, values: dict[str, Any]) -> None:
        """Fields that act together. Raises ApiError 400."""
        check_limit("best_of", body.best_of or 1, self._settings.max_n, "max_n")
        check_limit("logprobs", body.logprobs or 0, self._settings.max_logprobs, "max_logprobs")
        if body.max_tokens == 0 and not body.echo:
            raise bad_request(
                "max_tokens is 0, which gives something with echo: true only; give 1 or more", "max_tokens"
            )
        if body.max_tokens == 0 and (body.min_tokens or 0) > 0:
            raise bad_request("min_tokens is more than max_tokens, which is 0", "min_tokens")
        given = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        values["max_tokens"] = max(1, given)  # one has to be drawn, and is dropped
        if body.logprobs is not None:
            values["logprobs"] = body.logprobs
            if body.echo:
                if body.stream:
                    raise bad_request("echo with logprobs comes with whole replies only; give no stream: true", "echo")
                values["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
        if body.best_of is not None:
            number = body.n or 1
            if body.best_of < number:
                raise bad_request(f"best_of is {body.best_of}, less than n, which is {number}", "best_of")
            if body.best_of > number:
                if body.stream:
                    raise bad_request("best_of needs whole samples to choose from; give no stream: true", "best_of")
                values["n"] = body.best_of
                values.setdefault("logprobs", 0)

    async def _prompts(self, body: CompletionBody) -> list[list[int]]:
        """Token ids of each prompt. Raises ApiError 400."""
        given = body.prompt
        add_special = body.add_special_tokens is not False
        if isinstance(given, str):
            return [await self._service.encode(given, add_special=add_special)]
        kinds = {type(item) for item in given}
        if len(kinds) > 1:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise bad_request(
                f"prompt holds {names}; give texts, token ids, or lists of token ids, not a mixture", "prompt"
            )
        if kinds == {int}:
            return [list(given)]  # type: ignore[arg-type]
        if len(given) > self._settings.max_prompts:
            limit = self._settings.max_prompts
            raise bad_request(f"prompt holds {len(given):,} prompts, the limit is {limit:,} (max_prompts)", "prompt")
        if kinds == {str}:
            return [await self._service.encode(text, add_special=add_special) for text in given]  # type: ignore[arg-type]
        return [list(ids) for ids in given]  # type: ignore[arg-type]

    async def _echoed(self, body: CompletionBody, jobs: list[Job]) -> list[str]:
        """The prompts as texts; as they came where they were texts."""
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if isinstance(given[0], str):
            return list(given)  # type: ignore[arg-type]
        if self._service.tokenizer is None:
            return ["" for _ in jobs]
        skip = body.skip_special_tokens is not False
        return [await self._service.decode(job.prompt_ids, skip_special=skip) for job in jobs]

    # ------------------------------------------------------------------ whole replies

    def _whole(self, asked: _Asked, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        uncounted = 0
        for place, output in enumerate(outputs):
            for one in _best(output.outputs, asked.num_given):
                choices.append(self._choice(asked, place, output, one, len(choices)))
        if asked.body.max_tokens == 0:
            uncounted = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        reply = self._head(asked)
        return {**reply, "choices": choices, "usage": usage_of(outputs, uncounted=uncounted)}

    def _head(self, asked: _Asked) -> dict[str, Any]:
        return {"id": asked.id, "object": "text_completion", "created": asked.created, "model": self._service.names[0]}

    def _choice(
        self, asked: _Asked, place: int, output: RequestOutput, one: CompletionOutput, index: int
    ) -> dict[str, Any]:
        body = asked.body
        text, tokens, entries, reason = one.text, one.token_ids, one.logprobs, one.finish_reason
        if body.max_tokens == 0:
            text, tokens, entries, reason = "", [], None if entries is None else [], "length"
        echoed = asked.texts[place] if body.echo else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": echoed + text,
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": one.stop_reason,
        }
        if asked.num_logprobs is not None and entries is not None:
            shown: list[Any] = list(entries)
            ids = list(tokens)
            if body.echo:
                shown = [*(output.prompt_logprobs or [None] * len(output.prompt_token_ids)), *shown]
                ids = [*output.prompt_token_ids, *ids]
            choice["logprobs"] = completion_logprobs(ids, shown, self._token_texts, num_top=asked.num_logprobs)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = by_id(output.prompt_logprobs)
        if body.return_token_ids:
            choice |= _token_fields(output.prompt_token_ids, tokens, entries)
            choice["version_spans"] = spans_of(one)
        return choice

    # ------------------------------------------------------------------ streams

    async def _stream(self, asked: _Asked, call_id: str) -> AsyncGenerator[Any]:
        """None once the call is accepted, then chunks."""
        body = asked.body
        number = asked.jobs[0].params.n
        readers = [[Reader() for _ in range(number)] for _ in asked.jobs]
        latest: dict[int, RequestOutput] = {}
        async with self._service.fly(asked.jobs, stream=True, names=(asked.id, call_id)) as flight:
            await flight.taken(min(1.0, self._settings.keep_alive_s))
            yield None
            for place, text in enumerate(asked.texts):
                for index in range(number):
                    yield self._chunk(asked, _plain_choice(place * number + index, text))
            async for news in flight.updates(self._settings.keep_alive_s):
                if not news:
                    yield None
                latest.update(news)
                for place, output in news.items():
                    for one in output.outputs:
                        delta = readers[place][one.index].read(one)
                        if delta is not None:
                            index = place * number + one.index
                            yield self._chunk(asked, self._piece(asked, index, output, one, delta))
        if body.stream_options is not None and body.stream_options.include_usage:
            dropped = sum(len(o.token_ids) for out in latest.values() for o in out.outputs) if _none(body) else 0
            yield {**self._head(asked), "choices": [], "usage": usage_of(latest.values(), uncounted=dropped)}

    def _chunk(self, asked: _Asked, choice: dict[str, Any]) -> dict[str, Any]:
        options = asked.body.stream_options
        extra = {"usage": None} if options is not None and options.include_usage else {}
        return {**self._head(asked), "choices": [choice], **extra}

    def _piece(
        self, asked: _Asked, index: int, output: RequestOutput, one: CompletionOutput, delta: Delta
    ) -> dict[str, Any]:
        if _none(asked.body):
            delta = Delta("", [], [], 0, "length" if delta.finish_reason else None, None, delta.is_first)
        choice = _plain_choice(index, delta.text)
        choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if asked.num_logprobs is not None and delta.logprobs is not None:
            choice["logprobs"] = completion_logprobs(
                delta.token_ids, delta.logprobs, self._token_texts, num_top=asked.num_logprobs, offset=delta.offset
            )
        if asked.body.return_token_ids:
            choice |= _token_fields(
                output.prompt_token_ids if delta.is_first else None, delta.token_ids, delta.logprobs
            )
            if delta.finish_reason is not None:
                choice["version_spans"] = spans_of(one)
        return choice


def _none(body: CompletionBody) -> bool:
    """The prompt alone is asked for."""
    return body.max_tokens == 0


def _plain_choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}


def _token_fields(prompt: list[int] | None, tokens: list[int], entries: Any) -> dict[str, Any]:
    """Token ids under the names of both families of RL clients."""
    fields: dict[str, Any] = {"token_ids": tokens, "generation_token_ids": tokens}
    if prompt is not None:
        fields["prompt_token_ids"] = prompt
    if entries is not None:
        fields["generation_log_probs"] = [next(iter(entry.values())).logprob for entry in entries]
    return fields


def _best(samples: list[CompletionOutput], number: int) -> list[CompletionOutput]:
    """`number` samples, the likeliest first where there are more."""
    if len(samples) == number:
        return samples
    return sorted(samples, key=lambda one: -(one.cumulative_logprob or 0.0))[:number]

"""/v1/completions: continues texts, token ids or lists of either."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from megatron_infer.server import call_limits
from megatron_infer.server.endpoint import Call, Events, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.extra_fields import ParsedBody
from megatron_infer.server.field_tables import SHARED, STREAM_OPTIONS
from megatron_infer.server.generation import generate
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inflight import EngineRequest
from megatron_infer.server.openai_logprobs import TokenTexts, by_id, completion_logprobs
from megatron_infer.server.openai_protocol import CompletionBody, MegatronCompletionBody
from megatron_infer.server.reply_fields import (
    CallUsage,
    Delta,
    DeltaReader,
    sampled_logprobs,
    version_spans_of,
)
from megatron_infer.server.request_fields import FieldTable, no_effect, refused, rows
from megatron_infer.server.routes import Routes
from megatron_infer.server.sampling_fields import check_limit, params_from, sampling_of
from megatron_infer.server.served_models import check_model, shown_name
from megatron_infer.server.server_config import ServerConfig

ROUTE = "completions"
DEFAULT_MAX_TOKENS = 16
_CHAT_ONLY = "tool calls are served at /v1/chat/completions and /v1/responses only"
FIELDS = FieldTable(
    SHARED
    | rows(
        {
            "tools functions": refused(_CHAT_ONLY, []),
            "tool_choice function_call": refused(_CHAT_ONLY, "none"),
            "parallel_tool_calls": no_effect(_CHAT_ONLY),
            "reasoning_effort": refused("a text has no chat template that could read it"),
            "add_BOS": refused("texts begin with the tokenizer's special tokens; see add_special_tokens", False),
        }
    ),
    {"stream_options": STREAM_OPTIONS},
)


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    completions = Completions(routes, client, settings)
    for path, base in (("/v1/completions", CompletionBody), ("/completions", MegatronCompletionBody)):
        routes.add(
            "POST",
            path,
            completions.reply,
            "Continue texts or token ids",
            body=partial(routes.fields.extend, ROUTE, base),
            fields=FIELDS,
            media_types=("application/json", "text/event-stream"),
            statuses=(404, 429, 503, 504),
        )


class Completions:
    """The handler: a body -> one engine request per prompt."""

    def __init__(self, routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
        self._fields, self._client, self._settings = routes.fields, client, settings
        self._token_texts, self._token_ids = TokenTexts(client.tokenizer), TokenTexts(None)

    async def reply(self, call: Call) -> Reply | Events:
        body: CompletionBody = call.body
        client = self._client
        check_model(client, body.model)
        parsed = ParsedBody(sampling=sampling_of(body, self._settings), caller=call.caller, ignored=call.ignored)
        await self._fields.apply(ROUTE, body, parsed)
        self._apply_limits(body, parsed.sampling)
        params = params_from(parsed.sampling)
        prompts = await client.encode_prompts(
            body.prompt, field="prompt", add_special=body.add_special_tokens is not False
        )
        salt = body.cache_salt or ""
        asked = [
            EngineRequest(prompt_ids=ids, params=params, cache_salt=salt, prompt_bytes=_prompt_bytes(body, len(ids)))
            for ids in prompts
        ]
        requests: Sequence[EngineRequest] = client.checked(asked, call)
        echoed = await self._echoed(body, prompts) if body.echo else []
        if echoed:
            requests = client.within_reply(
                replace(one, prompt_bytes=(one.prompt_bytes or 0) + call_limits.text_bytes(text))
                for one, text in zip(requests, echoed, strict=True)
            )
        texts = self._token_ids if body.return_tokens_as_token_ids else self._token_texts
        shown = self._settings.show_cached_tokens
        reply = CompletionReply(body, shown_name(client, body.model), requests, echoed, texts, shows_cached=shown)
        ids = (reply.id, call.id, *([body.request_id] if body.request_id else ()))
        return await generate(client, requests, reply, stream=body.stream, abort_ids=ids)

    def _apply_limits(self, body: CompletionBody, values: dict[str, Any]) -> None:
        """Set max_tokens, n and logprobs in `values`. Raises ApiError 400."""
        check_limit("best_of", body.best_of or 1, self._settings.max_n, "max_n")
        check_limit("logprobs", body.logprobs or 0, self._settings.max_logprobs, "max_logprobs")
        if body.max_tokens == 0 and not body.echo:
            raise bad_request(
                "max_tokens is 0, which gives something with echo: true only; give 1 or more", "max_tokens"
            )
        if body.max_tokens == 0 and (body.min_tokens or 0) > 0:
            raise bad_request("min_tokens is more than max_tokens, which is 0", "min_tokens")
        given = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        values["max_tokens"] = max(1, given)  # for 0 the engine samples one token, which the reply leaves out
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

    async def _echoed(self, body: CompletionBody, prompts: list[list[int]]) -> list[str]:
        """The prompts as texts: the given ones, or token ids decoded."""
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if isinstance(given[0], str):
            return list(given)  # type: ignore[arg-type]
        if self._client.tokenizer is None:
            return ["" for _ in prompts]
        skip_special = body.skip_special_tokens is not False
        return [await self._client.decode(ids, skip_special=skip_special) for ids in prompts]


def _prompt_bytes(body: CompletionBody, num_tokens: int) -> int:
    """See `EngineRequest.prompt_bytes`; without the echoed text."""
    a_token = call_limits.logprob_bytes(body.prompt_logprobs)
    if body.echo:
        a_token += call_limits.logprob_bytes(body.logprobs)
    if body.return_token_ids:
        a_token += call_limits.NUMBER_BYTES
    return num_tokens * a_token


class CompletionReply:
    def __init__(
        self,
        body: CompletionBody,
        model: str,
        requests: Sequence[EngineRequest],
        echoed: list[str],
        token_texts: TokenTexts,
        *,
        shows_cached: bool,
    ) -> None:
        """echoed: each prompt as text, with `echo`. shows_cached: see `usage_of`."""
        self.id = f"cmpl-{body.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        self._body, self._model, self._echoed, self._token_texts = body, model, echoed, token_texts
        self._num_sequences = requests[0].params.n
        self._hides_output = body.max_tokens == 0
        self._usage = CallUsage(body.stream_options, shows_cached=shows_cached, hides_output=self._hides_output)
        self._readers = [[DeltaReader() for _ in range(self._num_sequences)] for _ in requests]
        self._latest: dict[int, RequestOutput] = {}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self._created, "model": self._model}

    # ------------------------------------------------------------------ whole reply

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for request_index, output in enumerate(outputs):
            for one in _best(output.outputs, self._body.n or 1):
                echoed = self._echoed[request_index] if self._body.echo else ""
                choices.append(self._choice(len(choices), echoed, output, one))
        return {**self._head(), "choices": choices, "usage": self._usage.of(outputs)}

    def _choice(self, index: int, echoed: str, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        body = self._body
        text, tokens, entries, reason = one.text, one.token_ids, one.logprobs, one.finish_reason
        if self._hides_output:
            text, tokens, entries, reason = "", [], None if entries is None else [], "length"
        choice = _plain_choice(index, echoed + text)
        choice |= {"finish_reason": reason, "stop_reason": one.stop_reason}
        if body.logprobs is not None and entries is not None:
            shown: list[Any] = list(entries)
            ids = list(tokens)
            if body.echo:
                shown = [*(output.prompt_logprobs or [None] * len(output.prompt_token_ids)), *shown]
                ids = [*output.prompt_token_ids, *ids]
            choice["logprobs"] = completion_logprobs(ids, shown, self._token_texts, num_top=body.logprobs)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = by_id(output.prompt_logprobs)
        if body.return_token_ids:
            choice |= _token_fields(output.prompt_token_ids, tokens, entries)
            choice["version_spans"] = version_spans_of(one)
        return choice

    # ------------------------------------------------------------------ stream

    def first_events(self) -> Iterator[dict[str, Any]]:
        for index, text in enumerate(text for text in self._echoed for _ in range(self._num_sequences)):
            yield self._chunk(_plain_choice(index, text))

    def events(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        self._latest[index] = output
        for one in output.outputs:
            delta = self._readers[index][one.index].read(one)
            if delta is not None:
                choice_index = index * self._num_sequences + one.index
                yield self._chunk(self._choice_of_delta(choice_index, output, one, delta))

    def last_events(self) -> Iterator[dict[str, Any]]:
        if self._usage.at_end:
            yield {**self._head(), "choices": [], "usage": self._usage.of(self._latest.values())}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(), "choices": [choice], **self._usage.of_chunk(self._latest.values())}

    def _choice_of_delta(
        self, index: int, output: RequestOutput, one: CompletionOutput, delta: Delta
    ) -> dict[str, Any]:
        body = self._body
        if self._hides_output:
            delta = Delta("", [], [], 0, "length" if delta.finish_reason else None, None, delta.is_first)
        choice = _plain_choice(index, delta.text)
        choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if body.logprobs is not None and delta.logprobs is not None:
            choice["logprobs"] = completion_logprobs(
                delta.token_ids, delta.logprobs, self._token_texts, num_top=body.logprobs, offset=delta.offset
            )
        if body.return_token_ids:
            choice |= _token_fields(
                output.prompt_token_ids if delta.is_first else None, delta.token_ids, delta.logprobs
            )
            if delta.finish_reason is not None:
                choice["version_spans"] = version_spans_of(one)
        return choice


def _plain_choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}


def _token_fields(
    prompt: list[int] | None, tokens: list[int], entries: Sequence[dict[int, Logprob]] | None
) -> dict[str, Any]:
    """Token ids and logprobs under both names that RL clients read."""
    fields: dict[str, Any] = {"token_ids": tokens, "generation_token_ids": tokens}
    if prompt is not None:
        fields["prompt_token_ids"] = prompt
    if entries is not None:
        fields["generation_log_probs"] = sampled_logprobs(entries)
    return fields


def _best(outputs: list[CompletionOutput], number: int) -> list[CompletionOutput]:
    """`number` sequences, those with the largest cumulative logprob first where there are more."""
    if len(outputs) == number:
        return outputs
    return sorted(outputs, key=lambda one: -(one.cumulative_logprob or 0.0))[:number]

"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from megatron_infer.server import call_limits
from megatron_infer.server.chat_prompt import prompt_ids
from megatron_infer.server.endpoint import Call, Events, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.extra_fields import ParsedBody, Splitter
from megatron_infer.server.field_tables import ALLOWED_TOOLS, MESSAGE, SHARED, STREAM_OPTIONS, TOOL
from megatron_infer.server.generation import generate
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inflight import EngineRequest
from megatron_infer.server.openai_logprobs import TokenTexts, by_id, chat_content
from megatron_infer.server.openai_protocol import ChatBody, MegatronChatBody
from megatron_infer.server.reply_fields import CallUsage, DeltaReader, sampled_logprobs, version_spans_of
from megatron_infer.server.request_fields import FieldTable, ignore, refused, rows
from megatron_infer.server.routes import Routes
from megatron_infer.server.sampling_fields import check_limit, params_from, sampling_of
from megatron_infer.server.served_models import check_model, shown_name
from megatron_infer.server.server_config import ServerConfig

ROUTE = "chat"
NUM_PROMPT_END = 32
"""Tokens of a prompt's end that `ParsedBody.prompt_end` is decoded from."""
FIELDS = FieldTable(
    SHARED
    | rows(
        {
            "functions": refused("use tools", []),
            "function_call": refused("use tool_choice", "none", "auto"),
            "echo": refused("use continue_final_message, or join the texts", False),
            "add_special_tokens": refused("the chat template writes the special tokens; see add_BOS", False),
            "return_prompt_text": refused("use return_raw_text", False),
            "separate_reasoning": refused("the server separates reasoning by --reasoning-parser", True),
            "stream_reasoning": refused("thoughts are streamed as they come", True),
            "skip_prompt_log_probs": refused("ask for prompt_logprobs", True),
        }
    ),
    {
        "stream_options": STREAM_OPTIONS,
        "messages": MESSAGE,
        "tools": TOOL,
        "tool_choice": FieldTable(nested={"allowed_tools": ALLOWED_TOOLS}),
    },
)


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    chat = ChatCompletions(routes, client, settings)
    for path, base in (("/v1/chat/completions", ChatBody), ("/chat/completions", MegatronChatBody)):
        routes.add(
            "POST",
            path,
            chat.reply,
            "Answer a conversation",
            body=partial(routes.fields.extend, ROUTE, base),
            fields=FIELDS,
            media_types=("application/json", "text/event-stream"),
            statuses=(404, 429, 503, 504),
        )


class ChatCompletions:
    """The handler: a body -> one engine request."""

    def __init__(self, routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
        self._fields, self._client, self._settings = routes.fields, client, settings
        self._token_texts, self._token_ids = TokenTexts(client.tokenizer), TokenTexts(None)

    async def reply(self, call: Call) -> Reply | Events:
        body: ChatBody = call.body
        if body.return_raw_text and body.stream:
            raise bad_request("return_raw_text comes with whole replies only; give no stream: true", "return_raw_text")
        chat = await self.prepare(body, call)
        texts = self._token_ids if body.return_tokens_as_token_ids else self._token_texts
        reply = ChatReply(body, shown_name(self._client, body.model), chat, texts)
        ids = (reply.id, call.id, *([body.request_id] if body.request_id else ()))
        return await generate(self._client, [chat.request], reply, stream=body.stream, abort_ids=ids)

    async def prepare(self, body: ChatBody, call: Call) -> PreparedChat:
        """The engine request of a conversation, and what splits its texts. Raises ApiError 400."""
        client = self._client
        check_model(client, body.model)
        parsed = ParsedBody(
            sampling=sampling_of(body, self._settings),
            caller=call.caller,
            template=dict(body.chat_template_kwargs or {}),
            ignored=call.ignored,
        )
        self._apply_template_fields(body, parsed)
        await self._fields.apply(ROUTE, body, parsed)
        self._apply_limits(body, parsed.sampling)
        params = params_from(parsed.sampling)
        ids = await client.tokenize(
            prompt_ids,
            client.require_tokenizer(),
            body.messages,
            limits=client.limits,
            tools=parsed.tools,
            call_format=parsed.call_format,
            variables=parsed.template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final=bool(body.continue_final_message),
            keep_tokens=body.prevent_retokenization is not False,
            has_bos=body.add_BOS,
        )
        salt = body.cache_salt or ""
        raw_prompt = await client.decode(ids, skip_special=False) if body.return_raw_text else ""
        num_bytes = call_limits.text_bytes(raw_prompt) + len(ids) * _bytes_a_prompt_token(body)
        request = EngineRequest(prompt_ids=ids, params=params, cache_salt=salt, prompt_bytes=num_bytes)
        (request,) = client.checked([request], call)
        parsed.prompt_end = await client.decode(ids[-NUM_PROMPT_END:], skip_special=False)
        splitters = [parsed.make_splitter() for _ in range(params.n)]
        shown = self._settings.show_cached_tokens
        return PreparedChat(request=request, splitters=splitters, raw_prompt=raw_prompt, shows_cached=shown)

    def _apply_template_fields(self, body: ChatBody, parsed: ParsedBody) -> None:
        """Give the chat template its variables that are fields here, where it reads them."""
        for name in ("reasoning_effort", "documents"):
            value = getattr(body, name)
            if value is None:
                continue
            if self._client.require_tokenizer().template_reads(name):
                parsed.template.setdefault(name, value)
            else:
                ignore(parsed.ignored, name, "the chat template does not read it", strict=self._settings.strict_fields)

    def _apply_limits(self, body: ChatBody, values: dict[str, Any]) -> None:
        """Set max_tokens and logprobs in `values`. Raises ApiError 400."""
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


def _bytes_a_prompt_token(body: ChatBody) -> float:
    """See `EngineRequest.prompt_bytes`; without the raw text. Log probabilities are in the reply once."""
    has_ids = body.return_token_ids or body.return_tokenized_data
    once = call_limits.logprob_bytes(body.prompt_logprobs) / (body.n or 1)
    return once + (2 * call_limits.NUMBER_BYTES if has_ids else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A conversation that is ready to be submitted."""

    request: EngineRequest
    splitters: list[Splitter]
    """One for each sequence."""
    raw_prompt: str = ""
    """The prompt as text, with `return_raw_text`."""
    shows_cached: bool
    """See `usage_of`."""


class ChatReply:
    """The ReplyFormat of one call. In a stream, each sequence begins with its role and ends with its finish_reason."""

    def __init__(self, body: ChatBody, model: str, chat: PreparedChat, token_texts: TokenTexts) -> None:
        self.id = f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        self._body, self._model, self._token_texts = body, model, token_texts
        self._splitters, self._raw_prompt = chat.splitters, chat.raw_prompt
        self._has_tokens = bool(body.return_token_ids or body.return_tokenized_data)
        self._usage = CallUsage(body.stream_options, shows_cached=chat.shows_cached)
        self._readers = [DeltaReader() for _ in self._splitters]
        self._latest: RequestOutput | None = None

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    # ------------------------------------------------------------------ whole reply

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        reply = self._head("chat.completion")
        reply |= {"choices": [self._choice(output, one) for one in output.outputs], "usage": self._usage.of(outputs)}
        if self._body.prompt_logprobs is not None:
            reply["prompt_logprobs"] = by_id(output.prompt_logprobs)
        if self._has_tokens:
            reply["prompt_token_ids"] = output.prompt_token_ids
        return reply

    def _choice(self, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        splitter = self._splitters[one.index]
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for delta in splitter.feed(one.text, finished=True):
            _join(message, delta)
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""
        if self._body.return_raw_text:
            message["raw_text"] = self._raw_prompt + one.text
        if self._has_tokens:
            message["prompt_token_ids"] = output.prompt_token_ids
            message["generation_token_ids"] = one.token_ids
            message["version_spans"] = version_spans_of(one)
            if one.logprobs is not None:
                message["generation_log_probs"] = sampled_logprobs(one.logprobs)
        choice = {
            "index": one.index,
            "message": message,
            "logprobs": None if one.logprobs is None else self._logprobs(one.logprobs),
            "finish_reason": splitter.finish_reason(one.finish_reason),
            "stop_reason": one.stop_reason,
        }
        if self._has_tokens:
            choice["token_ids"] = one.token_ids
        return choice

    def _logprobs(self, entries: Sequence[dict[int, Logprob]]) -> dict[str, Any]:
        return {"content": chat_content(entries, self._token_texts, num_top=self._body.top_logprobs or 0)}

    # ------------------------------------------------------------------ stream

    def first_events(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self._readers)):
            yield self._chunk(_empty_choice(index, {"role": "assistant", "content": ""}))

    def events(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        self._latest = output
        for one in output.outputs:
            for choice in self._choices_of_delta(output, one):
                yield self._chunk(choice)

    def last_events(self) -> Iterator[dict[str, Any]]:
        if self._usage.at_end and self._latest is not None:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage.of([self._latest])}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = self._usage.of_chunk([] if self._latest is None else [self._latest])
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}

    def _choices_of_delta(self, output: RequestOutput, one: CompletionOutput) -> list[dict[str, Any]]:
        """Choices for what is new in a sequence, one for each message delta; the last has all that is no text."""
        delta, splitter = self._readers[one.index].read(one), self._splitters[one.index]
        if delta is None:
            return []
        finished = delta.finish_reason is not None
        parts = splitter.feed(delta.text, finished=finished) or [{}]
        choices = [_empty_choice(one.index, part) for part in parts]
        last = choices[-1]
        if finished:
            last["finish_reason"] = splitter.finish_reason(delta.finish_reason)
            last["stop_reason"] = delta.stop_reason
        if delta.logprobs:
            last["logprobs"] = self._logprobs(delta.logprobs)
        if self._has_tokens:
            last["token_ids"] = delta.token_ids
            if delta.is_first:
                last["prompt_token_ids"] = output.prompt_token_ids
            if finished:
                last["version_spans"] = version_spans_of(one)
        is_empty = not any(parts) and not finished and not delta.logprobs and not self._has_tokens
        return [] if is_empty else choices


def _empty_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _join(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Join a delta to its message as clients do: texts are concatenated, tool calls by their index."""
    for name, value in delta.items():
        if name == "tool_calls":
            _join_calls(message.setdefault(name, []), value)
            continue
        before = message.get(name)
        message[name] = value if before is None else before + value


def _join_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    """Calls of a whole message have no index."""
    for delta in deltas:
        function = delta["function"]
        if delta["index"] == len(calls):
            calls.append({"id": delta["id"], "type": delta["type"], "function": dict(function)})
        else:
            calls[delta["index"]]["function"]["arguments"] += function["arguments"]

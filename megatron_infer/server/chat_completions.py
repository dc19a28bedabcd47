"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from megatron_infer.server import call_limits
from megatron_infer.server.body_types import Body, Messages, NumTokens, OpenAIBody, ShareOrNone, TopCount
from megatron_infer.server.endpoint import Call
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.field_tables import ALLOWED_TOOLS, MESSAGE, SHARED, STREAM_OPTIONS, TOOL
from megatron_infer.server.generation import CHAT, Dialect, Generator, PreparedCall
from megatron_infer.server.generation_request import GenerationRequest, sampling_of
from megatron_infer.server.http_errors import bad_request, of_validation
from megatron_infer.server.inactive_fields import FieldTable, ignore, refused
from megatron_infer.server.openai_logprobs import by_id, chat_content
from megatron_infer.server.reply_format import Delta, OpenAIReply, sampled_logprobs, version_spans_of
from megatron_infer.server.routes import GENERATION_STATUSES, Routes
from megatron_infer.server.server_config import ServerConfig

FIELDS = FieldTable(
    SHARED
    | {
        "functions": refused("use tools", []),
        "function_call": refused("use tool_choice", "none", "auto"),
        "echo": refused("use continue_final_message, or join the texts", False),
        "add_special_tokens": refused("the chat template writes the special tokens; see add_BOS", False),
        "return_prompt_text": refused("use return_raw_text", False),
        "separate_reasoning": refused("the server separates reasoning by --reasoning-parser", True),
        "stream_reasoning": refused("thoughts are streamed as they come", True),
        "skip_prompt_log_probs": refused("ask for prompt_logprobs", True),
    },
    {
        "stream_options": STREAM_OPTIONS,
        "messages": MESSAGE,
        "tools": TOOL,
        "tool_choice": FieldTable(nested={"allowed_tools": ALLOWED_TOOLS}),
    },
)


class ChatBody(OpenAIBody, kw_only=True):
    messages: Messages
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    has_logprobs: bool | None = msgspec.field(default=None, name="logprobs")
    top_logprobs: TopCount | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """A variable of the chat template; without effect where the template does not read it."""
    documents: list[dict[str, Any]] | None = None
    """A variable of the chat template; without effect where the template does not read it."""
    include_reasoning: bool | None = None
    """False: the reply leaves out reasoning, where the server separates it."""
    prevent_retokenization: bool | None = None
    return_tokenized_data: bool | None = None
    return_raw_text: bool | None = None
    """Each message has raw_text: the prompt as text with its special tokens, and the answer behind it."""
    add_BOS: bool | None = None
    """True: the prompt begins with one BOS token; False: with none; not given: as the chat template writes it."""


class MegatronChatBody(ChatBody, kw_only=True):
    """At /chat/completions, as of megatron-core's server: top_p 0 sets no limit."""

    top_p: ShareOrNone | None = None


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    async def read(body: ChatBody, call: Call) -> GenerationRequest:
        return read_chat(body, call, client)

    dialect = Dialect(
        bodies={
            "/v1/chat/completions": partial(routes.fields.extend, CHAT, ChatBody),
            "/chat/completions": partial(routes.fields.extend, CHAT, MegatronChatBody),
        },
        summary="Answer a conversation",
        fields=FIELDS,
        read=read,
        reply=ChatReply,
        module_fields=CHAT,
    )
    Generator(routes, client).register(routes.add, dialect, statuses=GENERATION_STATUSES)


def read_chat(body: ChatBody, call: Call, client: EngineClient) -> GenerationRequest:
    """What a conversation asks for. Raises ApiError 400 for fields that contradict each other."""
    if body.return_raw_text and body.stream:
        raise bad_request("return_raw_text comes with whole replies only; give no stream: true", "return_raw_text")
    return GenerationRequest.of(
        body,
        call,
        conversations=[body.messages],
        template=_template_of(body, call, client),
        sampling=_sampling_of(body),
        names={"logprobs": "top_logprobs"},
        prompt_bytes=lambda place, num_tokens: num_tokens * _bytes_a_prompt_token(body),
    )


def read_as_chat(
    body: Body, fields: Mapping[str, Any], routes: Routes, call: Call, client: EngineClient
) -> GenerationRequest:
    """What a conversation of another dialect asks for.

    Attributes of `body` that are named as in the chat's body are copied; a null is not given. fields: the others, by
    their names in a chat's body.
    Raises ApiError 400, in the chat's names of the fields.
    """
    kind = routes.fields.extend(CHAT, ChatBody)
    copied = {name: getattr(body, name) for name in body.__struct_fields__ if name in kind.__struct_fields__}
    given = {name: value for name, value in (copied | dict(fields)).items() if value is not None}
    try:
        chat: Any = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise of_validation(error, kind) from None
    return read_chat(chat, call, client)


def _template_of(body: ChatBody, call: Call, client: EngineClient) -> dict[str, Any]:
    """The variables of the chat template; those that are fields here where the template reads them."""
    variables = dict(body.chat_template_kwargs or {})
    for name in ("reasoning_effort", "documents"):
        value = getattr(body, name)
        if value is None:
            continue
        if client.require_tokenizer().template_reads(name):
            variables.setdefault(name, value)
        else:
            ignore(call.ignored, name, "the chat template does not read it", strict=client.settings.strict_fields)
    return variables


def _sampling_of(body: ChatBody) -> dict[str, Any]:
    """Fields of SamplingParams. Raises ApiError 400 for fields that contradict each other."""
    given = [length for length in (body.max_tokens, body.max_completion_tokens) if length is not None]
    if len(set(given)) > 1:
        text = f"max_tokens is {given[0]} and max_completion_tokens {given[1]}; give one"
        raise bad_request(text, "max_completion_tokens")
    if body.top_logprobs and not body.has_logprobs:
        raise bad_request("top_logprobs is given without logprobs: true; give both", "top_logprobs")
    values = sampling_of(body) | {"max_tokens": given[0] if given else None}
    return values | {"logprobs": body.top_logprobs or 0} if body.has_logprobs else values


def _bytes_a_prompt_token(body: ChatBody) -> float:
    """Log probabilities are in the reply once."""
    has_ids = body.return_token_ids or body.return_tokenized_data
    once = call_limits.logprob_bytes(body.prompt_logprobs) / (body.n or 1)
    return once + (2 * call_limits.NUMBER_BYTES if has_ids else 0)


class ChatReply(OpenAIReply):
    """In a stream, each sequence begins with its role and ends with its finish_reason."""

    def __init__(self, prepared: PreparedCall) -> None:
        super().__init__(prepared, prefix="chatcmpl", chunk_kind="chat.completion.chunk")
        self._body: ChatBody = prepared.body
        self._splitters = prepared.splitters
        self._prompt_texts = prepared.prompt_texts
        self._has_tokens = bool(self._body.return_token_ids or self._body.return_tokenized_data)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        reply = self.head("chat.completion")
        reply |= {"choices": [self._choice(output, one) for one in output.outputs], "usage": self.usage(outputs)}
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
            message["raw_text"] = self._prompt_texts[0] + one.text
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
            choice |= {"token_ids": one.token_ids, "weight_version": self.weight_version(one)}
        return choice

    def _logprobs(self, entries: Sequence[dict[int, Logprob]]) -> dict[str, Any]:
        return {"content": chat_content(entries, self.token_texts, num_top=self._body.top_logprobs or 0)}

    def first_events(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self._splitters)):
            yield self.chunk(_empty_choice(index, {"role": "assistant", "content": ""}))

    def chunks(
        self, index: int, output: RequestOutput, one: CompletionOutput, delta: Delta
    ) -> Iterator[dict[str, Any]]:
        """A chunk for each message delta; the last one has all that is no text."""
        splitter = self._splitters[one.index]
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
                last |= {"weight_version": self.weight_version(one), "version_spans": version_spans_of(one)}
        is_empty = not any(parts) and not finished and not delta.logprobs and not self._has_tokens
        if not is_empty:
            for choice in choices:
                yield self.chunk(choice)


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

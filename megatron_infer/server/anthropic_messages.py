"""/v1/messages and /v1/messages/count_tokens: Anthropic's API of a conversation."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron_infer.server.body_types import Body, NumTokens, Share, Temperature, TopK
from megatron_infer.server.chat_completions import read_as_chat
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.field_tables import LABEL, MESSAGE, PART, SHARED, TOOL
from megatron_infer.server.generation import CHAT, Dialect, Generator, PreparedCall
from megatron_infer.server.generation_request import GenerationRequest
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inactive_fields import FieldTable, no_effect
from megatron_infer.server.reply_blocks import Block, BlockKind, BlockReply, Change
from megatron_infer.server.reply_format import usage_of
from megatron_infer.server.routes import GENERATION_STATUSES, Routes
from megatron_infer.server.server_config import ServerConfig

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "max_tokens"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NAMES = {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "tools[].function.strict": "tools[].strict",
}
"""Fields of the chat's body -> those of this body; see `Dialect.names`."""
FIELDS = FieldTable(
    SHARED | {"metadata": LABEL, "service_tier": no_effect("there is one tier", "auto", "standard_only")},
    {
        "messages": FieldTable(MESSAGE.rules, {"content": FieldTable(PART.rules, {"content": PART})}),
        "system": PART,
        "tools": FieldTable(TOOL.rules, kinds=("custom",)),
        "output_config": FieldTable({"task_budget": no_effect("outputs are bounded by max_tokens only")}),
    },
)


class ContentBlock(Body, kw_only=True):
    """A text, a tool_use, its tool_result, or thinking."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    thinking: str | None = None


class AnthropicMessage(Body, kw_only=True):
    role: str
    content: str | list[ContentBlock]


class AnthropicTool(Body, kw_only=True):
    name: str
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(Body, kw_only=True):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnswerFormat(Body, kw_only=True, rename={"schema_": "schema"}):
    type: Literal["json_schema"]
    schema_: dict[str, Any]


class OutputConfig(Body):
    format: AnswerFormat | None = None
    """What the answer is held to; with tools, the answer is a call or of this form."""
    effort: str | None = None
    """See `ChatBody.reasoning_effort`."""


class CountBody(Body, kw_only=True):
    """What a prompt is made of."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: AnswerFormat | None = None
    """The older name of output_config.format."""


class MessagesBody(CountBody, kw_only=True):
    max_completion_tokens: NumTokens = msgspec.field(name="max_tokens")
    stop: list[str] | None = msgspec.field(default=None, name="stop_sequences")
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    stream: bool | None = None


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    async def read(body: CountBody, call: Call) -> GenerationRequest:
        return read_as_chat(body, chat_of(body), routes, call, client)

    async def count(call: Call) -> Reply:
        prepared = await generator.prepare(dialect, call)
        return Reply({"input_tokens": len(prepared.requests[0].prompt_ids)})

    generator = Generator(routes, client)
    dialect = Dialect(
        bodies={"/v1/messages": MessagesBody},
        summary="Answer a conversation (Anthropic's Messages API)",
        fields=FIELDS,
        read=read,
        reply=MessagesReply,
        module_fields=CHAT,
        names=NAMES,
        named_events=True,
    )
    generator.register(routes.add, dialect, statuses=GENERATION_STATUSES)
    options = {"body": CountBody, "fields": FIELDS, "statuses": GENERATION_STATUSES}
    routes.add("POST", "/v1/messages/count_tokens", count, "Tokens of a prompt", **options)


# ---------------------------------------------------------------------- body


def chat_of(body: CountBody) -> dict[str, Any]:
    """The fields of a chat's body that are named or made otherwise here. Raises ApiError 400."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for place, message in enumerate(body.messages):
        messages += _messages_of(message, f"messages[{place}]")
    config = body.output_config or OutputConfig()
    fields: dict[str, Any] = {"messages": messages, "reasoning_effort": config.effort}
    if body.messages[-1].role == "assistant":
        _check_continued(messages[-1] if messages else {}, f"messages[{len(body.messages) - 1}]")
        fields["continue_final_message"] = True
    fields["tools"] = [_tool(tool) for tool in body.tools or ()] or None
    choice = body.tool_choice
    fields["tool_choice"] = None
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = CHOICES.get(choice.type, named)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    form = config.format or body.output_format
    if form is not None:
        if "continue_final_message" in fields:
            text = "the form is that of a whole answer, and the last turn has begun one; give one of both"
            raise bad_request(f"output_config.format: {text}", "output_config.format", "invalid_value")
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}}
    return fields


def _messages_of(message: AnthropicMessage, where: str) -> list[dict[str, Any]]:
    """The chat messages of one turn: results of calls come before the rest of the user's turn."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    turn: dict[str, Any] = {"role": message.role}
    texts = []
    for block in message.content:
        if block.type == "tool_use":
            arguments = msgspec.json.encode({} if block.input is None else block.input).decode()
            call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
            turn.setdefault("tool_calls", []).append(call)
        elif block.type == "tool_result":
            content = _text(block.content or "", where)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif block.type == "thinking":
            turn["reasoning"] = turn.get("reasoning", "") + (block.thinking or "")
        elif block.type == "text":
            texts.append(_text([block], where))
    if texts:
        turn["content"] = "\n".join(texts)
    return [*results, turn] if len(turn) > 1 else results


def _check_continued(turn: dict[str, Any], where: str) -> None:
    """Raises ApiError 400 for a last turn of the assistant that the answer cannot go on with."""
    if "tool_calls" in turn:
        text = "the last turn has a tool_use without its tool_result; send the result in a turn of the user"
        raise bad_request(f"{where}: {text}", where, "invalid_value")
    if turn.get("role") != "assistant" or not turn.get("content"):
        text = "the answer goes on with the last turn of the assistant, and that turn has no text; leave it out"
        raise bad_request(f"{where}: {text}", where, "invalid_value")


def _text(value: str | list[ContentBlock], where: str) -> str:
    """The text of a content. Raises ApiError 400."""
    if isinstance(value, str):
        return value
    texts = [block.text for block in value]
    if None in texts:
        raise bad_request(f"{where}: a block has no text", where, "invalid_value")
    return "\n".join(text for text in texts if text is not None)


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


# ---------------------------------------------------------------------- reply


class MessagesReply(BlockReply):
    def __init__(self, prepared: PreparedCall) -> None:
        super().__init__(prepared, f"msg_{uuid.uuid4().hex}")
        self._num_prompt = len(prepared.requests[0].prompt_ids)

    def reply(self) -> dict[str, Any]:
        content = [_shown(block, empty=False) for block in self.blocks]
        return {**self._head(), "content": content, **self._end(), "usage": self._usage()}

    def first_events(self) -> Iterator[dict[str, Any]]:
        usage = {"input_tokens": self._num_prompt, "output_tokens": 0}
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield {"type": "message_start", "message": message}

    def block_events(self, change: Change, block: Block, text: str) -> Iterator[dict[str, Any]]:
        if change is Change.OPENED:
            shown = _shown(block, empty=True)
            yield {"type": "content_block_start", "index": block.index, "content_block": shown}
        elif change is Change.GREW:
            yield {"type": "content_block_delta", "index": block.index, "delta": _delta(block, text)}
        else:
            yield {"type": "content_block_stop", "index": block.index}

    def last_events(self) -> Iterator[dict[str, Any]]:
        if self.output is not None:
            yield {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model}

    def _end(self) -> dict[str, Any]:
        assert self.output is not None
        one = self.output.outputs[0]
        matched = one.stop_reason if isinstance(one.stop_reason, str) else None
        reason = STOP_REASONS.get(self.splitter.finish_reason(one.finish_reason) or "", "end_turn")
        return {"stop_reason": "stop_sequence" if matched else reason, "stop_sequence": matched}

    def _usage(self) -> dict[str, Any]:
        """As Anthropic counts: input_tokens are those that were not in the cache."""
        usage = usage_of(self.latest.values(), shows_cached=self.shows_cached)
        cached = (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }


def _shown(block: Block, *, empty: bool) -> dict[str, Any]:
    """A content block. empty: as it begins."""
    text = "" if empty else block.text
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": {} if empty else _arguments(text)}


def _arguments(text: str) -> Any:
    """A call's arguments as an object; what max_tokens cut, as the text that there is."""
    try:
        return msgspec.json.decode(text or "{}")
    except msgspec.MsgspecError:
        return {"_incomplete": text}


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking_delta", "thinking": text}
    if block.kind is BlockKind.TEXT:
        return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}

"""/v1/responses: OpenAI's newer API of a conversation, whole or as events. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron_infer.outputs.request_output import CompletionOutput, RequestOutput
from megatron_infer.server.body_types import Body, NumTokens, Share, Temperature, Text, TopCount
from megatron_infer.server.chat_completions import read_as_chat
from megatron_infer.server.endpoint import Call
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.field_tables import ALLOWED_TOOLS, PART, SHARED, TOOL
from megatron_infer.server.generation import CHAT, Dialect, Generator, PreparedCall
from megatron_infer.server.generation_request import GenerationRequest
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inactive_fields import FieldTable, ignore, no_effect, refused
from megatron_infer.server.openai_logprobs import chat_content
from megatron_infer.server.reply_blocks import Block, BlockKind, BlockReply, Change
from megatron_infer.server.reply_format import Delta, usage_of
from megatron_infer.server.routes import GENERATION_STATUSES, Routes
from megatron_infer.server.server_config import ServerConfig

LOGPROBS = "message.output_text.logprobs"
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "reasoning_effort": "reasoning.effort",
    "tools[].function.strict": "tools[].strict",
}
"""Fields of the chat's body -> those of this body; see `Dialect.names`."""
_STORES_NOTHING = "this server stores nothing"
_NO_PLACE = "a template has no place for it"
_SHOWN_CONTENT = "a template is shown the reasoning's content"
_WHOLE = "reasoning is shown as a whole"
FIELDS = FieldTable(
    SHARED
    | {
        "store": refused(f"{_STORES_NOTHING}; give false", False),
        "previous_response_id conversation": refused(f"{_STORES_NOTHING}; send the conversation as input"),
        "prompt": refused("this server stores no prompts; send the text"),
        "stream_options": no_effect("events are not padded", {}),
    },
    {
        "input": FieldTable(
            {
                "id": no_effect("items are known by their place"),
                "status": no_effect("items are taken as they are"),
                "summary": no_effect(_SHOWN_CONTENT, []),
                "encrypted_content": no_effect(_SHOWN_CONTENT),
                "phase caller namespace agent created_by": no_effect(_NO_PLACE),
            },
            {"content": PART, "output": PART},
        ),
        "tools": TOOL,
        "tool_choice": ALLOWED_TOOLS,
        "text": FieldTable({"verbosity": SHARED["verbosity"]}),
        "reasoning": FieldTable(
            {
                "summary": no_effect(_WHOLE, "auto", "none"),
                "generate_summary": no_effect(_WHOLE, "auto"),
                "encrypted_content": no_effect(_WHOLE),
            }
        ),
    },
)


class TextConfig(Body):
    format: dict[str, Any] | None = None
    """{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "name", "schema", "strict"}."""


class Reasoning(Body):
    effort: str | None = None
    """See `ChatBody.reasoning_effort`."""


class Part(Body, kw_only=True):
    """A piece of a content: input_text, output_text, text, reasoning_text, summary_text; refusal has its own field."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(Body):
    """A message, a function_call, its function_call_output, or reasoning; a reply's items can be sent as they are."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    """None: a message."""
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class FunctionTool(Body, kw_only=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Body, kw_only=True, tag_field="type", tag="function"):
    name: str


class AllowedChoice(Body, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Calls of some of the tools only; the model is shown all."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Meta(min_length=1)]


class ResponsesBody(Body, kw_only=True):
    model: str | None = None
    input: Text | Annotated[list[Item], Meta(min_length=1)]
    """A text of the user, or the items of the conversation."""
    instructions: str | None = None
    """A system message before the input."""
    max_completion_tokens: NumTokens | None = msgspec.field(default=None, name="max_output_tokens")
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_logprobs: TopCount | None = None
    include: list[str] | None = None
    """"message.output_text.logprobs" acts; top_logprobs implies it."""
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    async def read(body: ResponsesBody, call: Call) -> GenerationRequest:
        if set(body.include or ()) - {LOGPROBS}:
            text = f"replies have all that there is; {LOGPROBS} acts"
            ignore(call.ignored, "include", text, strict=settings.strict_fields)
        return read_as_chat(body, chat_of(body), routes, call, client)

    dialect = Dialect(
        bodies={"/v1/responses": ResponsesBody},
        summary="Answer a conversation (OpenAI's Responses API)",
        fields=FIELDS,
        read=read,
        reply=ResponsesReply,
        module_fields=CHAT,
        names=NAMES,
        named_events=True,
    )
    Generator(routes, client).register(routes.add, dialect, statuses=GENERATION_STATUSES)


def chat_of(body: ResponsesBody) -> dict[str, Any]:
    """The fields of a chat's body that are named or made otherwise here. Raises ApiError 400."""
    return {
        "messages": messages_of(body),
        "tools": None if not body.tools else [_tool(tool) for tool in body.tools],
        "tool_choice": _choice(body.tool_choice),
        "response_format": None if body.text is None else _response_format(body.text.format),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "logprobs": has_logprobs(body) or None,
    }


def has_logprobs(body: ResponsesBody) -> bool:
    """Whether the reply has the log probabilities of its tokens."""
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def messages_of(body: ResponsesBody) -> list[dict[str, Any]]:
    """The conversation as chat messages: calls and reasoning join the assistant's turn that they belong to."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    turn: dict[str, Any] | None = None  # the assistant's turn that goes on
    for place, item in enumerate(body.input):
        kind, where = item.type or "message", f"input[{place}]"
        if kind not in ("reasoning", "function_call") and item.role != "assistant":
            turn = None
        elif turn is None or (kind == "message" and "content" in turn):
            turn = {"role": "assistant"}
            messages.append(turn)
        if kind == "function_call_output":
            output = _text(item.output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif turn is None:
            messages.append({"role": item.role, "content": _text(item.content, f"{where}.content")})
        elif kind == "function_call":
            function = {"name": item.name, "arguments": item.arguments or "{}"}
            call = {"id": item.call_id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        elif kind == "message":
            turn["content"] = _text(item.content, f"{where}.content")
        elif item.content is not None:
            turn["reasoning"] = _text(item.content, f"{where}.content")
    return messages


def _text(value: str | list[Part] | None, where: str) -> str:
    """The text of a content. Raises ApiError 400."""
    if isinstance(value, str):
        return value
    texts = [part.refusal if part.type == "refusal" else part.text for part in value or (Part(type="none"),)]
    if None in texts:
        raise bad_request(f"{where} is a text, or a list of parts with a text", where, "invalid_value")
    return "\n".join(text for text in texts if text is not None)


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": {name: getattr(tool, name) for name in tool.__struct_fields__[1:]}}


def _choice(choice: str | ChosenTool | AllowedChoice | None) -> Any:
    if isinstance(choice, ChosenTool):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedChoice):
        allowed = {"mode": choice.mode, "tools": [_choice(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _response_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


class ResponsesReply(BlockReply):
    """A whole reply is made as a stream's last event is."""

    def __init__(self, prepared: PreparedCall) -> None:
        super().__init__(prepared, f"resp_{uuid.uuid4().hex}")
        self._body: ResponsesBody = prepared.body
        self._texts = prepared.token_texts
        self._created = int(time.time())
        self._logprobs: list[dict[str, Any]] = []
        self._new_logprobs: list[dict[str, Any]] = []
        """Of the tokens whose text is to come."""
        self._number = 0

    def reply(self) -> dict[str, Any]:
        return self._response(self._status())

    def first_events(self) -> Iterator[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def chunks(self, index: int, output: RequestOutput, one: CompletionOutput, delta: Delta) -> Iterator[Any]:
        self._new_logprobs = []
        if has_logprobs(self._body) and delta.logprobs:
            self._new_logprobs = chat_content(delta.logprobs, self._texts, num_top=self._body.top_logprobs or 0)
            self._logprobs += self._new_logprobs
        yield from super().chunks(index, output, one, delta)

    def last_events(self) -> Iterator[dict[str, Any]]:
        status = self._status()
        yield self._event(f"response.{status}", response=self._response(status))

    def _status(self) -> str:
        return "incomplete" if self._finish_reason() in ("length", "abort") else "completed"

    def _finish_reason(self) -> str | None:
        return None if self.output is None else self.output.outputs[0].finish_reason

    def _status_of(self, block: Block) -> str:
        """The status of a closed block: what ends a sequence too early cuts its last block."""
        return self._status() if block.is_last else "completed"

    def block_events(self, change: Change, block: Block, text: str) -> Iterator[dict[str, Any]]:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        part = place | {"content_index": 0}
        is_call = block.kind is BlockKind.CALL
        name = {BlockKind.REASONING: "reasoning_text", BlockKind.TEXT: "output_text"}.get(block.kind, "")
        if change is Change.OPENED:
            item = self._item(block, "in_progress")
            if is_call:
                item["arguments"] = ""
            else:
                item["content"] = []
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if not is_call:
                yield self._event("response.content_part.added", **part, part=_part(block, []))
        elif change is Change.GREW:
            if is_call:
                yield self._event("response.function_call_arguments.delta", **place, delta=text)
            else:
                extra = {}
                if block.kind is BlockKind.TEXT:
                    extra, self._new_logprobs = {"logprobs": self._new_logprobs}, []
                yield self._event(f"response.{name}.delta", **part, delta=text, **extra)
        else:
            if is_call:
                done = {"name": block.name, "arguments": block.text}
                yield self._event("response.function_call_arguments.done", **place, **done)
            else:
                extra = {"logprobs": self._logprobs} if block.kind is BlockKind.TEXT else {}
                yield self._event(f"response.{name}.done", **part, text=block.text, **extra)
                yield self._event("response.content_part.done", **part, part=_part(block, self._logprobs))
            item = self._item(block, self._status_of(block))
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _item_id(self, block: Block) -> str:
        prefix = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}[block.kind]
        return f"{prefix}_{self.id.removeprefix('resp_')}_{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._item_id(block), "status": status}
        if block.kind is BlockKind.CALL:
            return {**head, "type": "function_call", "call_id": block.id, "name": block.name, "arguments": block.text}
        content = [_part(block, self._logprobs)]
        if block.kind is BlockKind.REASONING:
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        form = None if body.text is None else body.text.format
        reason = "max_output_tokens" if self._finish_reason() == "length" else "aborted"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status != "in_progress" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_completion_tokens,
            "model": self.model,
            "output": [self._item(one, self._status_of(one)) for one in self.blocks],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"} if form is None else form},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "metadata": {},
            "usage": None if self.output is None else self._usage(self.output),
        }

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        usage = usage_of([output], shows_cached=self.shows_cached)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] or {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def _part(block: Block, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": list(logprobs)}

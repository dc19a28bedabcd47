"""The body of /v1/responses, and the chat that it asks for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from megatron_infer.server.body_types import Body, NumTokens, Share, Temperature, Text, TopCount
from megatron_infer.server.field_tables import ALLOWED_TOOLS, PART, SHARED, TOOL
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.request_fields import FieldTable, no_effect, refused, rows

LOGPROBS = "message.output_text.logprobs"
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "reasoning_effort": "reasoning.effort",
    "tools[].function.strict": "tools[].strict",
}
"""Fields of the chat's body -> those of this body."""
_STORES_NOTHING = "this server stores nothing"
_NO_PLACE = "a template has no place for it"
_SHOWN_CONTENT = "a template is shown the reasoning's content"
_WHOLE = "reasoning is shown as a whole"
FIELDS = FieldTable(
    SHARED
    | rows(
        {
            "store": refused(f"{_STORES_NOTHING}; give false", False),
            "previous_response_id conversation": refused(f"{_STORES_NOTHING}; send the conversation as input"),
            "prompt": refused("this server stores no prompts; send the text"),
            "stream_options": no_effect("events are not padded", {}),
        }
    ),
    {
        "input": FieldTable(
            rows(
                {
                    "id": no_effect("items are known by their place"),
                    "status": no_effect("items are taken as they are"),
                    "summary": no_effect(_SHOWN_CONTENT, []),
                    "encrypted_content": no_effect(_SHOWN_CONTENT),
                    "phase caller namespace agent created_by": no_effect(_NO_PLACE),
                }
            ),
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
    max_output_tokens: NumTokens | None = None
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


def chat_of(body: ResponsesBody) -> dict[str, Any]:
    """The fields of the chat's body; a null is not given. Raises ApiError 400."""
    return {
        "messages": messages_of(body),
        "model": body.model,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": None if not body.tools else [_tool(tool) for tool in body.tools],
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": None if body.text is None else _response_format(body.text.format),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "stream": body.stream,
        "logprobs": has_logprobs(body) or None,
        "top_logprobs": body.top_logprobs,
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

"""From messages to token ids: the model's chat template, and turns that keep the tokens they were drawn as."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.schemas import Message
from megatron_infer.text import tool_prompt
from megatron_infer.text.tokenizer import Tokenizer
from megatron_infer.text.tool_parsers import HERMES, CallFormat

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that have fields of their own."""


def prompt_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: list[dict[str, Any]] | None = None,
    call_format: CallFormat = HERMES,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    keep_tokens: bool = True,
) -> list[int]:
    """The conversation as token ids. keep_tokens: assistant turns that bring their token ids are made of these.
    call_format: how calls are written where the chat template knows no tools.

    Text of a turn drawn by a model and encoded anew may give other tokens than were drawn; a trainer needs the same
    ones. Raises ApiError 400, or InvalidPrompt from the template.
    """
    if continue_final and add_generation_prompt:
        text = "continue_final_message goes on with the last message; give add_generation_prompt: false with it"
        raise bad_request(text, "continue_final_message")
    given = [_plain(message, place) for place, message in enumerate(messages)]
    marks = _put_marks(given, messages) if keep_tokens else {}
    cut = ""
    if continue_final:
        last = given[-1]
        if not last["content"]:
            raise bad_request("continue_final_message: the last message is empty", "continue_final_message")
        cut = last["content"] if last["content"] in marks else _mark()
        if cut not in marks:
            last["content"] += cut
    for name in RESERVED:
        if name in (variables or {}):
            raise bad_request(f"chat_template_kwargs: {name} has a field of its own", "chat_template_kwargs")
    if not tokenizer.knows_tools:
        given, tools = tool_prompt.as_plain(given, tools, call_format), None
    text = tokenizer.apply_chat_template(
        given, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
    )
    if cut:
        text = _cut(text, cut, keep=cut in marks)
    if not marks:
        return tokenizer.encode(text, add_special=False)
    return _spliced(tokenizer, text, marks, messages)


def _plain(message: Message, place: int) -> dict[str, Any]:
    """A message as templates expect it: content as one text, arguments of calls as objects."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    if content is None and not message.tool_calls and message.role != "assistant":
        raise bad_request(f"messages[{place}]: content must be given", f"messages[{place}].content")
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    plain["content"] = "" if content is None else content
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, place) for call in message.tool_calls]
    return plain


def _call(call: dict[str, Any], place: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        where = f"messages[{place}].tool_calls"
        raise bad_request(f"{where}: a call has a function with a name and arguments", where)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
            arguments = msgspec.json.decode(arguments or "{}")  # what a model wrote need not be JSON
    return {**call, "function": {"name": function["name"], **function, "arguments": arguments}}


def _mark() -> str:
    """A text that no template changes and nobody else writes."""
    return f"\ue000{secrets.token_hex(8)}\ue001"


def _put_marks(given: list[dict[str, Any]], messages: Sequence[Message]) -> dict[str, int]:
    """Put a mark in place of each turn that brings its tokens -> the turn's place by its mark."""
    marks: dict[str, int] = {}
    for place, message in enumerate(messages):
        if message.generation_token_ids is None:
            if message.prompt_token_ids is not None:
                where = f"messages[{place}].prompt_token_ids"
                raise bad_request(f"{where} comes with generation_token_ids; give both or none", where)
            continue
        if message.role != "assistant":
            where = f"messages[{place}].generation_token_ids"
            raise bad_request(f"{where}: only assistant turns were drawn", where)
        mark = _mark()
        given[place]["content"] = mark
        given[place].pop("reasoning_content", None)  # the drawn tokens hold it, and calls too
        given[place].pop("tool_calls", None)
        marks[mark] = place
    return marks


def _cut(text: str, mark: str, *, keep: bool) -> str:
    """The text up to the mark, where the last message ends."""
    at = text.rfind(mark)
    if at < 0:
        raise bad_request("continue_final_message: the chat template does not show the last message", "messages")
    return text[: at + len(mark)] if keep else text[:at]


def _spliced(tokenizer: Tokenizer, text: str, marks: Mapping[str, int], messages: Sequence[Message]) -> list[int]:
    """Token ids of the text, with those of the turns in place of their marks.

    A turn that gives prompt_token_ids, too, replaces all before it. Where a turn's tokens end with the end token that
    the template writes behind it, it comes once.
    """
    ids: list[int] = []
    for mark, place in marks.items():
        before, found, text = text.partition(mark)
        if not found:  # templates drop old turns: then there is nothing to keep
            text = before
            continue
        message = messages[place]
        assert message.generation_token_ids is not None
        if message.prompt_token_ids is not None:
            ids = list(message.prompt_token_ids)
        else:
            ids += tokenizer.encode(before, add_special=False)
        ids += message.generation_token_ids
        if message.generation_token_ids and message.generation_token_ids[-1] in tokenizer.eos_ids:
            text = text.removeprefix(tokenizer.token_str(message.generation_token_ids[-1]))
    return ids + tokenizer.encode(text, add_special=False)

"""Messages -> token ids of the prompt: the chat template, and assistant messages that keep their sampled tokens."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from megatron_infer.server.body_types import Message
from megatron_infer.server.call_limits import EngineLimits, check_num_chars, encode_within
from megatron_infer.server.http_errors import bad_request
from megatron_infer.text import tool_prompt
from megatron_infer.text.tokenizer import Tokenizer
from megatron_infer.text.tool_call_formats import HERMES, CallFormat

RESERVED = ("messages", "tools", "add_generation_prompt")
"""Template variables that chat_template_kwargs may not set: they have fields of their own."""


def prompt_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    limits: EngineLimits | None = None,
    tools: list[dict[str, Any]] | None = None,
    call_format: CallFormat = HERMES,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final: bool = False,
    keep_tokens: bool = True,
    has_bos: bool | None = None,
) -> list[int]:
    """The conversation as token ids.

    limits: of the engines; a conversation far beyond them is refused before it is tokenized. call_format: of tool
    calls, where the chat template has no tools. variables: further ones of the template.
    add_generation_prompt: None is True unless continue_final. keep_tokens: an assistant message with
    generation_token_ids becomes these tokens. Its text, tokenized again, may give other tokens than were sampled, and
    a trainer needs the sampled ones. has_bos: whether the prompt begins with a BOS token; None: as the template says.
    Raises ApiError 400, or InvalidPrompt from the template.
    """
    if limits is not None:
        _check_size(tokenizer, messages, tools, variables, limits)
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final
    if continue_final and add_generation_prompt:
        text = "continue_final_message goes on with the last message; give add_generation_prompt: false with it"
        raise bad_request(text, "continue_final_message")
    plain = [_plain_message(message, index) for index, message in enumerate(messages)]
    markers = _put_markers(plain, messages) if keep_tokens else {}
    end = ""
    if continue_final:
        last = plain[-1]
        if not last["content"]:
            raise bad_request("continue_final_message: the last message is empty", "continue_final_message")
        if "tool_calls" in last:  # they come after the content, where the prompt ends
            text = "continue_final_message: the last message has tool_calls; send their results, or no tool_calls"
            raise bad_request(text, "continue_final_message")
        end = last["content"] if last["content"] in markers else _new_marker()
        if end not in markers:
            last["content"] += end
    for name in RESERVED:
        if name in (variables or {}):
            raise bad_request(f"chat_template_kwargs: {name} has a field of its own", "chat_template_kwargs")
    if not tokenizer.knows_tools:
        plain, tools = tool_prompt.as_plain(plain, tools, call_format), None
    text = tokenizer.apply_chat_template(
        plain,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        variables=variables,
        limits=None if limits is None else limits.rendering(tokenizer),
    )
    if end:
        text = _cut_behind(text, end, keep_marker=end in markers)

    def encode(part: str) -> list[int]:
        if limits is None:
            return tokenizer.encode(part, add_special=False)
        return encode_within(tokenizer, part, limits, field="messages", add_special=False)

    ids = _encode_with_kept_tokens(tokenizer, encode, text, markers, messages) if markers else encode(text)
    return ids if has_bos is None else _with_bos(ids, tokenizer, has_bos)


def _check_size(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any] | None,
    limits: EngineLimits,
) -> None:
    """Raises ApiError 400 for what cannot fit, before the chat template is rendered."""
    if len(messages) > limits.max_length:  # each is a token at least
        text = f"messages has {len(messages):,} entries, more than the context length of {limits.max_length:,} tokens"
        raise bad_request(f"{text}; shorten the conversation", "messages", "context_length_exceeded")
    num_chars = 0
    for message in messages:
        content = message.content or ""
        num_chars += len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
        if message.tool_calls or message.reasoning_content:
            num_chars += len(message.reasoning_content or "") + len(msgspec.json.encode(message.tool_calls))
    for shown in (tools, variables):
        num_chars += 0 if not shown else len(msgspec.json.encode(shown))
    check_num_chars(num_chars, limits, tokenizer, field="messages")


def _with_bos(ids: list[int], tokenizer: Tokenizer, has_bos: bool) -> list[int]:
    if tokenizer.bos_id is None:
        if has_bos:
            raise bad_request("add_BOS: the tokenizer has no BOS token; leave it out", "add_BOS")
        return ids
    begin = next((place for place, token in enumerate(ids) if token != tokenizer.bos_id), len(ids))
    return [tokenizer.bos_id] * has_bos + ids[begin:]


def _plain_message(message: Message, index: int) -> dict[str, Any]:
    """A message in the form that templates expect: content as one text, arguments of tool calls as objects."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    if content is None and not message.tool_calls and message.role != "assistant":
        raise bad_request(f"messages[{index}]: content must be given", f"messages[{index}].content")
    plain: dict[str, Any] = {"role": {"developer": "system", "function": "tool"}.get(message.role, message.role)}
    plain["content"] = "" if content is None else content
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        plain |= {"reasoning_content": reasoning, "reasoning": reasoning}  # templates read one or the other
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call, index) for call in message.tool_calls]
    return plain


def _plain_call(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        where = f"messages[{index}].tool_calls"
        raise bad_request(f"{where}: a call has a function with a name and arguments", where)
    written = arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
            arguments = msgspec.json.decode(arguments or "{}")  # what a model wrote need not be JSON
    if isinstance(arguments, dict):
        arguments = _Arguments(arguments)
        arguments.written = (written or "{}") if isinstance(written, str) else json.dumps(written, ensure_ascii=False)
    return {**call, "function": {"name": function["name"], **function, "arguments": arguments}}


class _Arguments(dict[str, Any]):
    """Arguments that are their JSON where a template writes them or joins them to text: some templates expect text."""

    written = ""

    def __str__(self) -> str:
        return self.written

    def __add__(self, other: str) -> str:
        return self.written + other

    def __radd__(self, other: str) -> str:
        return other + self.written


def _new_marker() -> str:
    """A text that no template changes and no message contains."""
    return f"\ue000{secrets.token_hex(8)}\ue001"


def _put_markers(plain: list[dict[str, Any]], messages: Sequence[Message]) -> dict[str, int]:
    """Replace the content of each message that has its tokens by a marker -> index of the message by marker."""
    markers: dict[str, int] = {}
    for index, message in enumerate(messages):
        if message.generation_token_ids is None:
            if message.prompt_token_ids is not None:
                where = f"messages[{index}].prompt_token_ids"
                raise bad_request(f"{where} comes with generation_token_ids; give both or none", where)
            continue
        if message.role != "assistant":
            where = f"messages[{index}].generation_token_ids"
            raise bad_request(f"{where}: only assistant turns were drawn", where)
        marker = _new_marker()
        plain[index]["content"] = marker
        for name in ("reasoning_content", "reasoning"):  # the sampled tokens contain it, and tool calls too
            plain[index].pop(name, None)
        plain[index].pop("tool_calls", None)
        markers[marker] = index
    return markers


def _cut_behind(text: str, marker: str, *, keep_marker: bool) -> str:
    """The text up to the marker, where the last message ends."""
    at = text.rfind(marker)
    if at < 0:
        raise bad_request("continue_final_message: the chat template does not show the last message", "messages")
    return text[: at + len(marker)] if keep_marker else text[:at]


def _encode_with_kept_tokens(
    tokenizer: Tokenizer,
    encode: Callable[[str], list[int]],
    text: str,
    markers: Mapping[str, int],
    messages: Sequence[Message],
) -> list[int]:
    """Token ids of the text, with the sampled tokens of messages in place of their markers.

    prompt_token_ids of a message replace everything before it. Where the sampled tokens end with the end token that
    the template writes behind the message, it comes once.
    """
    ids: list[int] = []
    for marker, index in markers.items():
        before, found, text = text.partition(marker)
        if not found:  # templates may drop old messages, and their tokens with them
            text = before
            continue
        message = messages[index]
        assert message.generation_token_ids is not None
        if message.prompt_token_ids is not None:
            ids = list(message.prompt_token_ids)
        else:
            ids += encode(before)
        ids += message.generation_token_ids
        if message.generation_token_ids and message.generation_token_ids[-1] in tokenizer.eos_ids:
            text = text.removeprefix(tokenizer.token_str(message.generation_token_ids[-1]))
    return ids + encode(text)

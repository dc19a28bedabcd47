"""Tools for chat templates without tools: described in the system message; calls and results as plain messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_infer.text.tool_call_formats import CallFormat

HEAD = "You can call functions. These are described here, one a line, as JSON:"
INSTRUCTION = "To call functions, write every call like this and nothing else:"
CLOSING = (
    "Results of calls come between <tool_response> and </tool_response>. "
    "Where no function helps, answer in plain words."
)
RESULT = "<tool_response>\n{text}\n</tool_response>"


def system_text(tools: Sequence[Mapping[str, Any]], call_format: CallFormat) -> str:
    """The description of the tools for the model."""
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = call_format.write([("NAME", {"ARGUMENT": "VALUE"})])
    return f"{HEAD}\n{described}\n\n{INSTRUCTION}\n{example}\n\n{CLOSING}"


def as_plain(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, call_format: CallFormat
) -> list[dict[str, Any]]:
    """Messages for any template: tools at the end of the system message, calls at the end of their message, and
    consecutive results as one user message."""
    plain: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        turn = dict(message)
        calls = turn.pop("tool_calls", None)
        turn.pop("tool_call_id", None)
        if calls:
            written = call_format.write([_written(call["function"]) for call in calls])
            turn["content"] = f"{turn['content']}\n{written}" if turn["content"] else written
        is_result = turn["role"] == "tool"
        if is_result:
            turn = {"role": "user", "content": RESULT.format(text=turn["content"])}
        if is_result and follows_result:
            plain[-1]["content"] += "\n" + turn["content"]
        else:
            plain.append(turn)
        follows_result = is_result
    if tools:
        text = system_text(tools, call_format)
        if plain and plain[0]["role"] == "system":
            plain[0]["content"] = f"{plain[0]['content']}\n\n{text}" if plain[0]["content"] else text
        else:
            plain.insert(0, {"role": "system", "content": text})
    return plain


def _written(function: Mapping[str, Any]) -> tuple[str, Any]:
    return function["name"], function.get("arguments", {})

"""Deltas of a chat message, joined to the message that they make: as clients do it."""

from __future__ import annotations

from typing import Any


def join(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """A delta into its message: texts are joined, tool calls by their index (which the message does not have)."""
    for name, value in delta.items():
        if name == "tool_calls":
            _join_calls(message.setdefault(name, []), value)
            continue
        before = message.get(name)
        message[name] = value if before is None else before + value


def _join_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        function = delta["function"]
        if delta["index"] == len(calls):
            calls.append({"id": delta["id"], "type": delta["type"], "function": dict(function)})
        else:
            calls[delta["index"]]["function"]["arguments"] += function["arguments"]

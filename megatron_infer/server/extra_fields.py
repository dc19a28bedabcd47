"""Request fields that modules add to the OpenAI bodies: name, type, and how they act."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from megatron_infer.server.generation_request import GenerationRequest


class Splitter(Protocol):
    """Turns the growing text of one sequence into deltas of a chat message: content, reasoning, tool calls."""

    def feed(self, text: str, *, finished: bool) -> list[dict[str, Any]]:
        """The deltas of the next piece of text, in order: {"content": "..."}, {"tool_calls": [...]}."""

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish_reason to reply with: "tool_calls" where the text was tool calls, else `reason`."""


class PlainSplitter:
    """All text is content."""

    def feed(self, text: str, *, finished: bool) -> list[dict[str, Any]]:
        return [{"content": text}] if text else []

    def finish_reason(self, reason: str | None) -> str | None:
        return reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraField:
    """A field of a module.

    `apply` is awaited with the field's value, unless it is missing or null, in the order of registration; it raises
    ApiError 400 for a value it cannot honour. None: a rule of the module reads the field.
    """

    name: str
    type: Any
    apply: Callable[[Any, GenerationRequest], Awaitable[None]] | None


Rule = Callable[[Any, "GenerationRequest"], Awaitable[None]]


class ExtraFields:
    """Fields and rules by the route they belong to: "chat", "completions"."""

    def __init__(self) -> None:
        self._fields: dict[str, list[ExtraField]] = {}
        self._rules: dict[str, list[Rule]] = {}

    def add(self, route: str, extra: ExtraField) -> None:
        fields = self._fields.setdefault(route, [])
        assert extra.name not in [one.name for one in fields], f"{route}: {extra.name} is registered already"
        fields.append(extra)

    def add_rule(self, route: str, rule: Rule) -> None:
        """`rule` is awaited with every body and its GenerationRequest, after all fields."""
        self._rules.setdefault(route, []).append(rule)

    def extend(self, route: str, base: type[msgspec.Struct]) -> type[msgspec.Struct]:
        """`base` with the route's fields: the type that its bodies are decoded as."""
        added = self._fields.get(route, ())
        if not added:
            return base
        fields = [(extra.name, extra.type | None, None) for extra in added]
        return msgspec.defstruct(
            base.__name__, fields, bases=(base,), kw_only=True, forbid_unknown_fields=True, module=base.__module__
        )

    async def apply(self, route: str, body: Any, asked: GenerationRequest) -> None:
        for extra in self._fields.get(route, ()):
            value = getattr(body, extra.name, None)
            if value is not None and extra.apply is not None:
                await extra.apply(value, asked)
        for rule in self._rules.get(route, ()):
            await rule(body, asked)

"""Request fields that modules add: a name, a type, and what honours it. What nobody added is refused by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from megatron_infer.text.tool_parsers import HERMES, CallFormat

NOT_SERVED: dict[str, str] = {
    "tools": "tools: tool calls are served at /v1/chat/completions only",
    "tool_choice": "tool_choice: tool calls are served at /v1/chat/completions only",
    "parallel_tool_calls": "parallel_tool_calls: tool calls are served at /v1/chat/completions only",
    "functions": "functions: use tools",
    "function_call": "function_call: use tool_choice",
    "guided_whitespace_pattern": "guided_whitespace_pattern: use structured_outputs with disable_any_whitespace",
    "guided_decoding_backend": "guided_decoding_backend: there is one, llguidance; leave it out",
    "reasoning_effort": "reasoning_effort: give what the model's template knows in chat_template_kwargs",
    "audio": "audio: this server makes text",
    "prediction": "prediction: predicted outputs are not served",
    "web_search_options": "web_search_options: this server does not search",
    "verbosity": "verbosity: this server does not steer it; say it in a message",
    "metadata": "metadata: this server stores no completions",
    "use_beam_search": "use_beam_search: beam search is not served; use best_of",
    "length_penalty": "length_penalty: beam search is not served",
}
"""Fields of OpenAI's and others' APIs -> why they are refused here, unless a module serves them."""


class Splitter(Protocol):
    """Turns one sample's text, as it grows, into deltas of a chat message: content, reasoning, tool calls."""

    def feed(self, text: str, *, finished: bool) -> list[dict[str, Any]]:
        """What the next piece of text says, as deltas in their order: {"content": "..."}, {"tool_calls": [...]}."""

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason to give for `reason`: "tool_calls" where the text was calls."""


class PlainSplitter:
    """All text is content."""

    def feed(self, text: str, *, finished: bool) -> list[dict[str, Any]]:
        return [{"content": text}] if text else []

    def finish_reason(self, reason: str | None) -> str | None:
        return reason


@dataclass(slots=True)
class Draft:
    """A call on its way to the engine; fields of modules may change it."""

    sampling: dict[str, Any]
    """Of SamplingParams, by name."""
    tools: list[dict[str, Any]] | None = None
    """Given to the chat template."""
    call_format: CallFormat = HERMES
    """How calls are written for a chat template that knows no tools."""
    template: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    structured: tuple[str, dict[str, Any]] | None = None
    """(a field, what it asks of the answer: fields of StructuredOutput), for a rule of `structured` to settle."""
    make_splitter: Callable[[], Splitter] = PlainSplitter
    """One for each sample of a chat, made when `prompt_end` is known."""
    prompt_end: str = ""
    """The last words of a chat's prompt, special tokens too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraField:
    """A field of a module. `apply` is called with its value where it was given and is not null, in the order of
    registration; it raises ApiError (400) for what it cannot honour. None: a rule of the module reads it."""

    name: str
    type: Any
    apply: Callable[[Any, Draft], Awaitable[None]] | None


Rule = Callable[[Any, Draft], Awaitable[None]]


class ExtraFields:
    """Fields by the route they belong to: "chat", "completions"."""

    def __init__(self) -> None:
        self._fields: dict[str, list[ExtraField]] = {}
        self._rules: dict[str, list[Rule]] = {}
        self.hints = dict(NOT_SERVED)
        """Field -> why it is refused, of those that nobody serves."""

    def add(self, route: str, extra: ExtraField) -> None:
        fields = self._fields.setdefault(route, [])
        assert extra.name not in [one.name for one in fields], f"{route}: {extra.name} is registered already"
        fields.append(extra)

    def add_rule(self, route: str, rule: Rule) -> None:
        """`rule` is called with the body of every call and its draft, after all fields: for what acts together, or
        though no field was given."""
        self._rules.setdefault(route, []).append(rule)

    def extend(self, route: str, base: type[msgspec.Struct]) -> type[msgspec.Struct]:
        """`base` with the route's fields: what its bodies are decoded as."""
        added = self._fields.get(route, ())
        if not added:
            return base
        fields = [(extra.name, extra.type | None, None) for extra in added]
        return msgspec.defstruct(
            base.__name__, fields, bases=(base,), kw_only=True, forbid_unknown_fields=True, module=base.__module__
        )

    async def apply(self, route: str, body: Any, draft: Draft) -> None:
        for extra in self._fields.get(route, ()):
            value = getattr(body, extra.name, None)
            if value is not None and extra.apply is not None:
                await extra.apply(value, draft)
        for rule in self._rules.get(route, ()):
            await rule(body, draft)

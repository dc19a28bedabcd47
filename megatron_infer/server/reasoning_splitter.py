"""Splits reasoning from the answer of a chat: reasoning, whole and streamed, before tool calls and content."""

from __future__ import annotations

from typing import Any

from megatron_infer.server.chat_completions import ChatBody
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.generation_request import GenerationRequest, Splitter
from megatron_infer.server.routes import Routes
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.tool_calls import keep_special_marks
from megatron_infer.text.reasoning_parsers import REASONING, ReasoningFormat, ReasoningParser


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    if settings.reasoning_parser is None:
        return
    reasoning = REASONING[settings.reasoning_parser]

    async def split(body: ChatBody, asked: GenerationRequest) -> None:
        keep_special_marks(client.tokenizer, asked, reasoning.marks, "reasoning")
        make_inner = asked.make_splitter

        def make() -> Splitter:
            end = _mark_of_continued(body, reasoning) if body.continue_final_message else asked.prompt_end
            if asked.sampling.get("structured") is not None and not asked.begins_freely:
                end = reasoning.ends[0]  # structured output begins at once, without reasoning
            hides = body.include_reasoning is False
            return ReasoningSplitter(ReasoningParser(reasoning, end), make_inner(), hides_reasoning=hides)

        asked.make_splitter = make

    routes.fields.add_rule("chat", split)


def _mark_of_continued(body: ChatBody, reasoning: ReasoningFormat) -> str:
    """The mark that ends the prompt, in effect, when the last message is continued: it is in its reasoning or not."""
    content = body.messages[-1].content
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    begun = max(text.rfind(mark) for mark in reasoning.starts)
    ended = max(text.rfind(mark) for mark in reasoning.ends)
    return reasoning.starts[0] if begun > ended else reasoning.ends[0]


class ReasoningSplitter:
    """Reasoning becomes reasoning and reasoning_content, the same text; the text behind it goes to `inner`."""

    def __init__(self, parser: ReasoningParser, inner: Splitter, *, hides_reasoning: bool = False) -> None:
        self._parser, self._inner, self._hides_reasoning = parser, inner, hides_reasoning

    def feed(self, text: str, *, finished: bool) -> list[dict[str, Any]]:
        parts = self._parser.feed(text)
        if finished:
            parts += self._parser.finish()
        deltas: list[dict[str, Any]] = []
        for one in parts:
            if one.reasoning and not self._hides_reasoning:
                deltas.append({"reasoning": one.reasoning, "reasoning_content": one.reasoning})
            if one.content:
                deltas += self._inner.feed(one.content, finished=False)
        return deltas + self._inner.feed("", finished=True) if finished else deltas

    def finish_reason(self, reason: str | None) -> str | None:
        return self._inner.finish_reason(reason)

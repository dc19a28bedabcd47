"""A chat's thoughts apart from its answer: reasoning_content, whole and streamed, before tool calls and content."""

from __future__ import annotations

from typing import Any

from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.extra_fields import Draft, Splitter
from megatron_infer.server.routes import App
from megatron_infer.server.schemas import ChatBody
from megatron_infer.server.settings import ServerConfig
from megatron_infer.server.tools import keep_special
from megatron_infer.text.reasoning import REASONING, ReasoningFormat, ReasoningParser


def register(app: App, service: EngineClient, settings: ServerConfig) -> None:
    if settings.reasoning_parser is None:
        return
    form = REASONING[settings.reasoning_parser]

    async def split(body: ChatBody, draft: Draft) -> None:
        keep_special(service.tokenizer, draft, form.starts + form.ends, "thoughts")
        make_inner = draft.make_splitter

        def make() -> Splitter:
            end = _continued(body, form) if body.continue_final_message else draft.prompt_end
            if draft.sampling.get("structured") is not None:
                end = form.ends[0]  # held to a form from the first letter: no thoughts
            return ReasoningSplitter(ReasoningParser(form, end), make_inner())

        draft.make_splitter = make

    app.fields.add_rule("chat", split)


def _continued(body: ChatBody, form: ReasoningFormat) -> str:
    """The mark that says whether a last message which is continued is still in its thoughts."""
    content = body.messages[-1].content
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    begun = max(text.rfind(mark) for mark in form.starts)
    ended = max(text.rfind(mark) for mark in form.ends)
    return form.starts[0] if begun > ended else form.ends[0]


class ReasoningSplitter:
    """Thoughts as reasoning_content; what follows them goes to `inner`."""

    def __init__(self, parser: ReasoningParser, inner: Splitter) -> None:
        self._parser, self._inner = parser, inner

    def feed(self, text: str, *, finished: bool) -> list[dict[str, Any]]:
        said = self._parser.feed(text)
        if finished:
            said += self._parser.finish()
        deltas: list[dict[str, Any]] = []
        for one in said:
            if one.reasoning:
                deltas.append({"reasoning_content": one.reasoning})
            if one.content:
                deltas += self._inner.feed(one.content, finished=False)
        return deltas + self._inner.feed("", finished=True) if finished else deltas

    def finish_reason(self, reason: str | None) -> str | None:
        return self._inner.finish_reason(reason)

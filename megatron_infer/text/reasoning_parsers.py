"""Reasoning in a model's text: formats by name, and a parser that separates it from the answer as the text grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_infer.text.stop_strings import partial_length


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models marks its reasoning."""

    name: str
    starts: tuple[str, ...]
    """Marks before reasoning, at the beginning of the output; the prompt may end with one instead."""
    ends: tuple[str, ...]
    """Marks behind reasoning; if the prompt ends with one, the output has no reasoning."""
    answers: tuple[str, ...] = ()
    """Marks before an answer without reasoning, at the beginning of the output; they belong to neither."""
    kept: Mapping[str, str] | None = None
    """Ends of which a part is the answer's: that part by the mark."""
    wrap: tuple[str, str] | None = None
    """Marks that may stand around the answer after reasoning; they belong to neither."""
    is_implied: bool = False
    """The output begins with reasoning even without a mark, unless the prompt ends with an end mark."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.starts, *self.ends, *self.answers, *(self.wrap or ()))


REASONING: dict[str, ReasoningFormat] = {}
"""Formats by name; `register` adds to them."""


def register(one: ReasoningFormat) -> ReasoningFormat:
    assert one.name not in REASONING, f"a format {one.name} is registered already"
    REASONING[one.name] = one
    return one


_THINK = {"starts": ("<think>",), "ends": ("</think>",)}
for _name in ("deepseek_r1", "minimax_m2"):
    register(ReasoningFormat(name=_name, is_implied=True, **_THINK))
for _name in ("qwen3", "deepseek_v3", "glm45", "nemotron"):
    register(ReasoningFormat(name=_name, **_THINK))
_KIMI_CALLS = "<|tool_calls_section_begin|>"
register(
    ReasoningFormat(
        name="kimi_k2", starts=("<think>",), ends=("</think>", _KIMI_CALLS), kept={_KIMI_CALLS: _KIMI_CALLS}
    )
)
register(ReasoningFormat(name="ernie45", is_implied=True, wrap=("<response>", "</response>"), **_THINK))
register(ReasoningFormat(name="hunyuan_a13b", wrap=("<answer>", "</answer>"), **_THINK))
register(ReasoningFormat(name="gemma4", starts=("<|channel>thought",), ends=("<channel|>",)))
register(ReasoningFormat(name="mistral", starts=("[THINK]",), ends=("[/THINK]",)))
register(
    ReasoningFormat(
        name="granite",
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    )
)
_FINAL = "<|channel|>final<|message|>"
_TURN = "<|end|><|start|>assistant"
_CALLS = {f"{_TURN}{mark}": mark for mark in ("<|channel|>commentary", " to=")}
register(
    ReasoningFormat(
        name="gpt_oss",
        starts=("<|channel|>analysis<|message|>",),
        ends=(f"{_TURN}{_FINAL}", *_CALLS),
        answers=(_FINAL,),
        kept=_CALLS,
    )
)


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of reasoning or of the answer."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Separates one sequence's text; the joined deltas do not depend on how the text is split into pieces.

    Line breaks around reasoning are dropped. Reasoning without an end mark stays reasoning.
    """

    def __init__(self, reasoning_format: ReasoningFormat, prompt_end: str = "") -> None:
        """prompt_end: the end of the prompt as text, special tokens included."""
        end = prompt_end.rstrip()
        self._format = reasoning_format
        self._is_inside = end.endswith(reasoning_format.starts) or (
            reasoning_format.is_implied and not end.endswith(reasoning_format.ends)
        )
        self._answers = "opening" if reasoning_format.wrap else "answer"
        """The state in which an answer begins."""
        self._state = self._answers if end.endswith(reasoning_format.ends) else "start"
        self._held = ""
        self._is_at_start = True

    def feed(self, text: str) -> list[ReasoningDelta]:
        """The deltas of the next piece of text."""
        self._held += text
        out: list[ReasoningDelta] = []
        if self._state == "start":
            self._start()
        if self._state == "reasoning":
            out.append(self._reasoning())
        if self._state == "break":
            self._held = self._held.lstrip("\r\n")
            self._state = self._answers if self._held else "break"
        if self._state == "opening":
            self._open()
        if self._state == "wrapped":
            out.append(ReasoningDelta(content=self._wrapped()))
        if self._state == "after":
            self._held = self._held.lstrip("\r\n")
            self._state = "answer" if self._held else "after"
        if self._state == "answer":
            out.append(ReasoningDelta(content=self._held))
            self._held = ""
        return [delta for delta in out if delta.reasoning or delta.content]

    def finish(self) -> list[ReasoningDelta]:
        """The text has ended: the deltas of what was held back."""
        held, self._held = self._held, ""
        if self._state == "start" and self._is_inside:
            self._state, held = "reasoning", held.lstrip("\r\n")
        is_reasoning = self._state == "reasoning"
        delta = ReasoningDelta(reasoning=held.rstrip("\r\n")) if is_reasoning else ReasoningDelta(content=held)
        return [delta] if delta.reasoning or delta.content else []

    def _start(self) -> None:
        text, marks = self._held.lstrip(), self._format.starts + self._format.answers
        mark = next((mark for mark in marks if text.startswith(mark)), None)
        if mark is not None:
            self._state, self._held = "reasoning" if mark in self._format.starts else "answer", text[len(mark) :]
        elif not any(one.startswith(text) for one in marks):
            self._state = "reasoning" if self._is_inside else self._answers

    def _open(self) -> None:
        assert self._format.wrap is not None
        text, mark = self._held.lstrip(), self._format.wrap[0]
        if text.startswith(mark):
            self._held, self._state, self._is_at_start = text[len(mark) :], "wrapped", True
        elif not mark.startswith(text):
            self._state = "answer"

    def _wrapped(self) -> str:
        """The next piece of an answer that stands between marks."""
        assert self._format.wrap is not None
        if self._is_at_start:
            self._held = self._held.lstrip("\r\n")
            self._is_at_start = not self._held
        mark = self._format.wrap[1]
        at = self._held.find(mark)
        end = at if at >= 0 else len(self._held) - partial_length(self._held, (mark,))
        shown = self._held[:end].rstrip("\r\n")
        if at >= 0:
            self._held, self._state = self._held[at + len(mark) :], "after"
        else:
            self._held = self._held[len(shown) :]
        return shown

    def _reasoning(self) -> ReasoningDelta:
        if self._is_at_start:
            self._held = self._held.lstrip("\r\n")
            self._is_at_start = not self._held
        at, mark = min(
            ((self._held.find(mark), mark) for mark in self._format.ends if mark in self._held), default=(-1, "")
        )
        if at >= 0:
            reasoning = self._held[:at].rstrip("\r\n")
            self._held, self._state = (self._format.kept or {}).get(mark, "") + self._held[at + len(mark) :], "break"
            return ReasoningDelta(reasoning=reasoning)
        keep = partial_length(self._held, self._format.ends)
        shown = self._held[: len(self._held) - keep].rstrip("\r\n")
        self._held = self._held[len(shown) :]
        return ReasoningDelta(reasoning=shown)

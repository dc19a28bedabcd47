"""What a model thinks before it answers, told from the answer as the text grows."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_infer.text.tool_parsers import undecided


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models marks its thoughts."""

    name: str
    starts: tuple[str, ...]
    """Marks before them, at the very beginning of the answer; a prompt that ends with one has begun them."""
    ends: tuple[str, ...]
    """Marks behind them; a prompt that ends with one has ended them: all text is the answer."""
    is_implied: bool = False
    """Thoughts come first though no mark says so, unless the prompt has ended them."""


REASONING: dict[str, ReasoningFormat] = {}
"""Formats by name; `register` adds to them."""


def register(one: ReasoningFormat) -> ReasoningFormat:
    assert one.name not in REASONING, f"a format {one.name} is registered already"
    REASONING[one.name] = one
    return one


_THINK = {"starts": ("<think>",), "ends": ("</think>",)}
DEEPSEEK_R1 = register(ReasoningFormat(name="deepseek_r1", is_implied=True, **_THINK))
QWEN3 = register(ReasoningFormat(name="qwen3", **_THINK))
GRANITE = register(
    ReasoningFormat(
        name="granite",
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    )
)


@dataclass(frozen=True, slots=True)
class Said:
    """Text that follows: thoughts, then answer."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """One sample's text, into thoughts and answer; joined, the same for every way of cutting the text.

    Line breaks around thoughts belong to neither. Thoughts that the text ends in stay thoughts.
    """

    def __init__(self, form: ReasoningFormat, prompt_end: str = "") -> None:
        """prompt_end: the prompt's last words."""
        end = prompt_end.rstrip()
        self._form = form
        self._is_inside = end.endswith(form.starts) or (form.is_implied and not end.endswith(form.ends))
        self._state = "answer" if end.endswith(form.ends) else "start"
        self._held = ""
        self._is_fresh = True

    def feed(self, text: str) -> list[Said]:
        """What the next piece of text says."""
        self._held += text
        out: list[Said] = []
        if self._state == "start":
            self._start()
        if self._state == "thoughts":
            out.append(self._thoughts())
        if self._state == "break":
            self._held = self._held.lstrip("\r\n")
            self._state = "answer" if self._held else "break"
        if self._state == "answer":
            out.append(Said(content=self._held))
            self._held = ""
        return [said for said in out if said.reasoning or said.content]

    def finish(self) -> list[Said]:
        """The text is over: what is still held."""
        held, self._held = self._held, ""
        if self._state == "start" and self._is_inside:
            self._state, held = "thoughts", held.lstrip("\r\n")
        said = Said(reasoning=held.rstrip("\r\n")) if self._state == "thoughts" else Said(content=held)
        return [said] if said.reasoning or said.content else []

    def _start(self) -> None:
        text = self._held.lstrip()
        mark = next((mark for mark in self._form.starts if text.startswith(mark)), None)
        if mark is not None:
            self._state, self._held = "thoughts", text[len(mark) :]
        elif not any(one.startswith(text) for one in self._form.starts):
            self._state = "thoughts" if self._is_inside else "answer"

    def _thoughts(self) -> Said:
        if self._is_fresh:
            self._held = self._held.lstrip("\r\n")
            self._is_fresh = not self._held
        at, mark = min(
            ((self._held.find(mark), mark) for mark in self._form.ends if mark in self._held), default=(-1, "")
        )
        if at >= 0:
            said = self._held[:at].rstrip("\r\n")
            self._held, self._state = self._held[at + len(mark) :], "break"
            return Said(reasoning=said)
        keep = undecided(self._held, self._form.ends)
        shown = self._held[: len(self._held) - keep].rstrip("\r\n")
        self._held = self._held[len(shown) :]
        return Said(reasoning=shown)

"""Tool calls in a model's text: formats by name, and one machine that takes the calls out as the text grows.

What it says, joined, does not depend on how the text is cut into pieces. Text that could be the beginning of a call
is held back until it is decided; what turns out to be none is content, to the letter.

    START --- { or [, where a format's calls need no mark ---> BODY --- an object that is a call ---> OBJECT
      |                                                        ^  |                                  |   ^
      +------> TEXT --- the opening mark ----------------------+  +-- no call: content, TEXT         v   | {
                 ^                                                                                  AFTER
                 +---------------------- the closing mark, or anything else --------------------------+
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_infer.text.tool_json import SPACE, CallObject, ValueScan


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a family of models writes calls."""

    name: str
    opening: str
    """The mark before calls."""
    closing: str = ""
    """The mark behind them; "": they end by themselves."""
    is_marked: bool = True
    """False: calls may also stand at the very beginning without a mark; then only names of given tools are calls."""
    is_listed: bool = False
    """Written as a JSON list."""
    key: str = "arguments"
    """What it writes for arguments."""
    takes_bare_names: bool = False
    """NAME{...} and NAME[ARGS]{...} behind the mark are calls, too."""
    id_length: int | None = None
    """Letters and digits of a call's id where templates insist on a number of them."""

    @property
    def between(self) -> str:
        """Text between two calls."""
        if self.is_listed:
            return ", "
        return "; " if self.key == "parameters" else "\n"

    def write(self, calls: list[str]) -> str:
        """The text of calls, each given as a JSON object."""
        if self.is_listed:
            return f"{self.opening}[{self.between.join(calls)}]{self.closing}"
        if self.is_marked:
            calls = [f"{self.opening}\n{call}\n{self.closing}" for call in calls]
        return self.between.join(calls)


FORMATS: dict[str, CallFormat] = {}
"""Formats by name; `register` adds to them."""


def register(one: CallFormat) -> CallFormat:
    assert one.name not in FORMATS, f"a format {one.name} is registered already"
    FORMATS[one.name] = one
    return one


HERMES = register(CallFormat(name="hermes", opening="<tool_call>", closing="</tool_call>"))
LLAMA3 = register(CallFormat(name="llama3_json", opening="<|python_tag|>", is_marked=False, key="parameters"))
MISTRAL = register(
    CallFormat(name="mistral", opening="[TOOL_CALLS]", is_listed=True, takes_bare_names=True, id_length=9)
)
GRANITE = register(CallFormat(name="granite", opening="<|tool_call|>", is_listed=True))
JSON = register(CallFormat(name="json", opening="```json", closing="```", is_marked=False))


def format_of(template: str | None, *, knows_tools: bool) -> CallFormat | None:
    """The format that a chat template teaches; None: one that is not known here. HERMES where it knows no tools."""
    if template is None or not knows_tools:
        return HERMES
    if "<function=" in template:  # calls as XML
        return None
    for one in (HERMES, MISTRAL, GRANITE, LLAMA3):
        if one.opening in template:
            return one
    return LLAMA3 if "ipython" in template and "parameters" in template else None


@dataclass(frozen=True, slots=True)
class Piece:
    """Some content; or, where `call` is its number, a call's name (once, first) or more of its arguments."""

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""


_BARE_NAME = re.compile(r"([\w.-]{1,256})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?[ \t\r\n]{0,16}")  # 351 at most
_BARE_TEXT = re.compile(r"[\w.\-\[\] \t\r\n]{0,400}")
_CLOSERS = "]},;"


class CallParser:
    """One sample's text, into content and calls. tools: names of the tools that were given."""

    def __init__(self, form: CallFormat, tools: frozenset[str]) -> None:
        self._form = form
        self._known = None if form.is_marked else tools
        self._state = "text" if form.is_marked else "start"
        self._held = ""
        """Text that is not yet decided, whatever the state."""
        self._raw = ""
        """What was read since the mark, as long as it may turn out to be no call."""
        self._call = CallObject(self._known)
        self._scan = ValueScan()
        self._in_list = False
        self.num_calls = 0
        self._space = ""
        self._behind_call = False
        self._out: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        """What the next piece of text says."""
        self._held += text
        while self._held and getattr(self, f"_{self._state}")():
            pass
        return self._given()

    def finish(self) -> list[Piece]:
        """The text is over: what is still held."""
        in_call = self._state == "object" and self._call.announced
        if not in_call and self._state not in ("bare_arguments", "after", "broken"):
            self._say(self._raw + self._held)
        if not self._behind_call:
            self._out.append(Piece(content=self._space))
        self._held = self._raw = self._space = ""
        return self._given()

    def _given(self) -> list[Piece]:
        out = [piece for piece in self._out if piece.content or piece.call is not None]
        self._out = []
        return out

    # Each state reads from _held and says whether to go on; False: it needs more text.

    def _start(self) -> bool:
        text = self._held.lstrip(SPACE)
        if not text:
            return False
        self._state = "text"
        if text[0] in "{[":
            self._open(self._held[: -len(text)])
            self._held = text
        return True

    def _text(self) -> bool:
        mark = self._form.opening
        at = self._held.find(mark)
        if at >= 0:
            self._say(self._held[:at])
            self._held = self._held[at + len(mark) :]
            self._open(mark)
            return True
        keep = undecided(self._held, (mark,))
        self._say(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _open(self, raw: str) -> None:
        self._state, self._raw, self._in_list = "body", raw, False
        self._call = CallObject(self._known)

    def _body(self) -> bool:
        char = self._held[0]
        if char in SPACE or (char == "[" and not self._in_list):
            self._in_list = self._in_list or char == "["
            self._skip(1)
        elif char == "{":
            self._state = "object"
        elif char == "]" and self._in_list and self._form.is_marked:
            self._skip(1)
            self._state, self._raw = "after", ""  # no calls, said so
        elif self._form.takes_bare_names and not self._in_list:
            self._state = "bare"
        else:
            self._refuse()
        return True

    def _bare(self) -> bool:
        at = self._held.find("{")
        name = _BARE_NAME.fullmatch(self._held[:at]) if at >= 0 else None
        if name is not None:
            self._announce(name[1])
            self._held = self._held[at:]
            self._state, self._scan = "bare_arguments", ValueScan()
        elif at >= 0 or _BARE_TEXT.fullmatch(self._held) is None:
            self._refuse()
        else:
            return False
        return True

    def _bare_arguments(self) -> bool:
        end = self._scan.read(self._held, 0)
        self._say_arguments(self._held[:end])
        self._held = self._held[end:]
        if self._scan.done:
            self._state = "after"
        return True

    def _object(self) -> bool:
        end = self._call.read(self._held, 0)
        self._skip(end)
        name, arguments = self._call.take()
        if name is not None:
            self._announce(name)
        self._say_arguments(arguments)
        if self._call.announced:
            self._raw = ""
        if self._call.done:
            self._state = "after"
        elif self._call.failed:
            if not self._call.announced:
                self._refuse()
            else:
                self._state = "broken" if self._form.closing else "after"
        return True

    def _after(self) -> bool:
        text, closing = self._held.lstrip(SPACE + _CLOSERS), self._form.closing
        if not text:
            return False
        if closing and text.startswith(closing):
            self._held, self._state = text[len(closing) :], "text"
        elif closing and closing.startswith(text):
            return False
        elif text[0] == "{":
            self._open(self._held[: -len(text)])
            self._held, self._in_list = text, True
        else:
            self._held, self._state = text, "text"
        return True

    def _broken(self) -> bool:
        """Behind what broke a call that was announced: nothing counts before the closing mark."""
        closing = self._form.closing
        at = self._held.find(closing)
        if at >= 0:
            self._held, self._state = self._held[at + len(closing) :], "text"
            return True
        self._held = self._held[len(self._held) - undecided(self._held, (closing,)) :]
        return False

    def _skip(self, number: int) -> None:
        self._raw += self._held[:number]
        self._held = self._held[number:]

    def _refuse(self) -> None:
        """What was read since the mark is no call."""
        self._say(self._raw)
        self._raw, self._state = "", "text"

    # What is said. Spaces around calls belong to neither.

    def _say(self, text: str) -> None:
        text = self._space + text
        if self._behind_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._out.append(Piece(content=shown))
            self._behind_call = False

    def _announce(self, name: str) -> None:
        self._out.append(Piece(call=self.num_calls, name=name))
        self.num_calls += 1
        self._raw = self._space = ""
        self._behind_call = True

    def _say_arguments(self, text: str) -> None:
        if text:
            self._out.append(Piece(call=self.num_calls - 1, arguments=text))


def undecided(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins a mark."""
    longest = max(map(len, marks)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) for mark in marks):
            return length
    return 0

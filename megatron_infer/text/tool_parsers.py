"""Tool calls in a model's text: formats by name, and one parser that extracts the calls as the text grows.

The joined deltas do not depend on how the text is split into pieces. Text that may begin a call is held back until that
is decided; if it does not, it is content, unchanged.

    START --- { or [, where a format's calls need no mark ---> BODY --- an object that is a call ---> OBJECT
      |                                                        ^  |                                  |   ^
      +------> TEXT --- the opening mark ----------------------+  +-- no call: content, TEXT         v   | {
                 ^                                                                                  AFTER
                 +---------------------- the closing mark, or anything else --------------------------+
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_infer.text.stop_strings import partial_length
from megatron_infer.text.tool_json import SPACE, CallObject, ValueScan


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a family of models writes tool calls."""

    name: str
    opening: str
    """The mark before calls."""
    closing: str = ""
    """The mark behind calls; "": there is none."""
    is_marked: bool = True
    """False: calls may also begin the text without a mark; then only the names of given tools make a call."""
    is_listed: bool = False
    """Calls are written as a JSON list."""
    key: str = "arguments"
    """The JSON key of the arguments."""
    takes_bare_names: bool = False
    """NAME{...} and NAME[ARGS]{...} behind the mark are calls too."""
    id_length: int | None = None
    """Letters and digits of a call's id, where templates require a fixed number."""

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
    """The format that a chat template shows to the model; None: not one of FORMATS. HERMES if it has no tools."""
    if template is None or not knows_tools:
        return HERMES
    if "<function=" in template:  # calls as XML: not supported
        return None
    for one in (HERMES, MISTRAL, GRANITE, LLAMA3):
        if one.opening in template:
            return one
    return LLAMA3 if "ipython" in template and "parameters" in template else None


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """Content; or, with the number of a call in `call`, its name (once, first) or more of its arguments."""

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""


_BARE_NAME = re.compile(r"([\w.-]{1,256})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?[ \t\r\n]{0,16}")  # 351 at most
_BARE_TEXT = re.compile(r"[\w.\-\[\] \t\r\n]{0,400}")
_CLOSERS = "]},;"


class CallParser:
    """Parses one sequence's text into content and calls.

    tools: names of the given tools. holds_calls: a call comes when it is complete; one that is cut is content.
    """

    def __init__(self, call_format: CallFormat, tools: frozenset[str], *, holds_calls: bool = False) -> None:
        self._format, self._holds_calls = call_format, holds_calls
        self._known = None if call_format.is_marked else tools
        self._state = "text" if call_format.is_marked else "start"
        self._held = ""
        """Text that has come and is not parsed yet."""
        self._raw = ""
        """Text parsed since the mark, while it may turn out to be no call."""
        self._call = CallObject(self._known)
        self._scan = ValueScan()
        self._bare_name = ""
        """Name of a bare call that was not announced yet."""
        self._bare_start = 0
        """Where its arguments begin in _raw."""
        self._in_list = False
        self.num_calls = 0
        self._space = ""
        self._is_behind_call = False
        self._out: list[ToolDelta] = []

    def feed(self, text: str) -> list[ToolDelta]:
        """The deltas of the next piece of text."""
        self._held += text
        while self._held and getattr(self, f"_{self._state}")():
            pass
        return self._take()

    def finish(self, *, drops_cut: bool = False) -> list[ToolDelta]:
        """The text has ended: the deltas of what was held back. drops_cut: a call that has not come is no content."""
        if not self._in_call and self._state not in ("after", "broken") and not drops_cut:
            self._add_content(self._raw + self._held)
        if not self._is_behind_call:
            self._out.append(ToolDelta(content=self._space))
        self._held = self._raw = self._space = ""
        return self._take()

    @property
    def _in_call(self) -> bool:
        """Whether the text so far ends within an announced call."""
        if self._state == "bare_arguments":
            return not self._bare_name
        return self._state == "object" and self._call.announced

    @property
    def is_cut(self) -> bool:
        """Whether the text so far ends before a call's arguments are complete."""
        return self._state in ("bare", "bare_arguments") or (self._state == "object" and not self._call.is_whole)

    @property
    def num_whole(self) -> int:
        """Calls that came and whose arguments are complete."""
        return self.num_calls - (self.is_cut and self._in_call)

    def _take(self) -> list[ToolDelta]:
        deltas = [delta for delta in self._out if delta.content or delta.call is not None]
        self._out = []
        return deltas

    # Each state parses _held and returns whether to go on; False: it needs more text.

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
        mark = self._format.opening
        at = self._held.find(mark)
        if at >= 0:
            self._add_content(self._held[:at])
            self._held = self._held[at + len(mark) :]
            self._open(mark)
            return True
        keep = partial_length(self._held, (mark,))
        self._add_content(self._held[: len(self._held) - keep])
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
        elif char == "]" and self._in_list and self._format.is_marked:
            self._skip(1)
            self._state, self._raw = "after", ""  # an empty list of calls
        elif self._format.takes_bare_names and not self._in_list:
            self._state = "bare"
        else:
            self._reject()
        return True

    def _bare(self) -> bool:
        at = self._held.find("{")
        name = _BARE_NAME.fullmatch(self._held[:at]) if at >= 0 else None
        if name is not None:
            self._skip(at)
            self._state, self._scan, self._bare_name = "bare_arguments", ValueScan(), name[1]
            self._bare_start = len(self._raw)
        elif at >= 0 or _BARE_TEXT.fullmatch(self._held) is None:
            self._reject()
        else:
            return False
        return True

    def _bare_arguments(self) -> bool:
        end = self._scan.read(self._held, 0)
        self._skip(end)
        if self._scan.done or not self._holds_calls:
            arguments = self._raw[self._bare_start :]
            if self._bare_name:
                self._announce(self._bare_name)
            self._add_arguments(arguments)
            self._raw, self._bare_start, self._bare_name = "", 0, ""
        if self._scan.done:
            self._state = "after"
        return True

    def _object(self) -> bool:
        end = self._call.read(self._held, 0)
        self._skip(end)
        if self._call.is_whole or not self._holds_calls:
            name, arguments = self._call.take()
            if name is not None:
                self._announce(name)
            self._add_arguments(arguments)
        if self._call.announced:
            self._raw = ""
        if self._call.done:
            self._state = "after"
        elif self._call.failed:
            if not self._call.announced:
                self._reject()
            else:
                self._state = "broken" if self._format.closing else "after"
        return True

    def _after(self) -> bool:
        text, closing = self._held.lstrip(SPACE + _CLOSERS), self._format.closing
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
        """After an error within an announced call: text up to the closing mark is dropped."""
        closing = self._format.closing
        at = self._held.find(closing)
        if at >= 0:
            self._held, self._state = self._held[at + len(closing) :], "text"
            return True
        self._held = self._held[len(self._held) - partial_length(self._held, (closing,)) :]
        return False

    def _skip(self, number: int) -> None:
        self._raw += self._held[:number]
        self._held = self._held[number:]

    def _reject(self) -> None:
        """The text since the mark is no call: it is content."""
        self._add_content(self._raw)
        self._raw, self._state = "", "text"

    # White space around calls is dropped.

    def _add_content(self, text: str) -> None:
        text = self._space + text
        if self._is_behind_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._out.append(ToolDelta(content=shown))
            self._is_behind_call = False

    def _announce(self, name: str) -> None:
        self._out.append(ToolDelta(call=self.num_calls, name=name))
        self.num_calls += 1
        self._raw = self._space = ""
        self._is_behind_call = True

    def _add_arguments(self, text: str) -> None:
        if text:
            self._out.append(ToolDelta(call=self.num_calls - 1, arguments=text))

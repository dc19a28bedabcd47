"""Tool calls in a model's text, extracted as the text grows: what parsers have in common, and that of JSON objects.

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
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_infer.text.stop_strings import partial_length
from megatron_infer.text.tool_call_formats import CallFormat
from megatron_infer.text.tool_json import SPACE, CallObject, ValueScan


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """Content; or, with the number of a call in `call`, its name (once, first) or more of its arguments."""

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""
    id: str | None = None
    """The call's id, where the model wrote one."""


_BARE_NAME = re.compile(r"([\w.-]{1,256})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?[ \t\r\n]{0,16}")  # 351 at most
_BARE_TEXT = re.compile(r"[\w.\-\[\] \t\r\n]{0,400}")
_CLOSERS = "]},;"


class TextAndCalls(ABC):
    """What parsers of calls have in common: a state parses what is held, and white space around calls is dropped."""

    def __init__(self, call_format: CallFormat, state: str, *, holds_calls: bool) -> None:
        self._format, self._holds_calls, self._state = call_format, holds_calls, state
        self._held = ""
        """Text that has come and is not parsed yet."""
        self._raw = ""
        """Text parsed since the mark, while it may turn out to be no call."""
        self.num_calls = 0
        self._space = ""
        self._is_after_call = False
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
        if not self._is_after_call:
            self._out.append(ToolDelta(content=self._space))
        self._held = self._raw = self._space = ""
        return self._take()

    @property
    @abstractmethod
    def _in_call(self) -> bool:
        """Whether the text so far ends within an announced call."""

    @property
    @abstractmethod
    def is_cut(self) -> bool:
        """Whether the text so far ends before a call's arguments are complete."""

    @property
    def num_whole(self) -> int:
        """Calls that came and whose arguments are complete."""
        return self.num_calls - (self.is_cut and self._in_call)

    # Each state parses _held and returns whether to go on; False: it needs more text.

    def _broken(self) -> bool:
        """After an error within an announced call: text up to the closing mark is dropped."""
        closing = self._format.closing.strip()
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

    def _take(self) -> list[ToolDelta]:
        deltas = [delta for delta in self._out if delta.content or delta.call is not None]
        self._out = []
        return deltas

    def _add_content(self, text: str) -> None:
        text = self._space + text
        if self._is_after_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._out.append(ToolDelta(content=shown))
            self._is_after_call = False

    def _announce(self, name: str, id: str | None = None) -> None:
        self._out.append(ToolDelta(call=self.num_calls, name=name, id=id))
        self.num_calls += 1
        self._raw = self._space = ""
        self._is_after_call = True

    def _add_arguments(self, text: str) -> None:
        if text:
            self._out.append(ToolDelta(call=self.num_calls - 1, arguments=text))


class CallParser(TextAndCalls):
    """Parses one sequence's text into content and calls that are JSON objects.

    tools: schemas of the arguments by the tools' names. holds_calls: a call comes when it is complete; one that is cut
    is content.
    """

    def __init__(
        self, call_format: CallFormat, tools: Mapping[str, Mapping[str, Any]], *, holds_calls: bool = False
    ) -> None:
        super().__init__(call_format, "text" if call_format.is_marked else "start", holds_calls=holds_calls)
        self._known = None if call_format.is_marked else frozenset(tools)
        self._call = CallObject(self._known)
        self._scan = ValueScan()
        self._bare_name = ""
        """Name of a bare call that was not announced yet."""
        self._bare_start = 0
        """Where its arguments begin in _raw."""
        self._in_list = False

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

"""Parses a tool call in JSON as its text grows: the name as soon as it is known, the arguments piece by piece."""

from __future__ import annotations

import json
import re
from typing import Any

from megatron_infer.text.stop_strings import partial_length

SPACE = " \t\r\n"
NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
_IN_STRING = re.compile(r'["\\]')
_IN_NESTED = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[^\w.+-]")
_BARE_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_BARE_END = re.compile(r"[:,{}\[\]]")
_LONGEST_BARE = 1000
"""Characters of a key or value without quotes."""


def is_bare_key(text: str) -> bool:
    """Whether `BareScan` reads the key as it is."""
    return 0 < len(text) < _LONGEST_BARE and text == text.strip() and _BARE_END.search(text) is None


class ValueScan:
    """Finds the end of one JSON value that comes in pieces, by its strings and brackets alone."""

    __slots__ = ("_depth", "_escaped", "_in_string", "done", "first")

    def __init__(self) -> None:
        self.first = ""
        """The value's first character; "" before it."""
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False

    def read(self, text: str, at: int) -> int:
        """Parse from text[at] -> the index behind the value if it ends in `text` (then `done`), else len(text)."""
        if not self.first and at < len(text):
            self.first = text[at]
        if self.first and self.first not in '"{[':
            end = _SCALAR_END.search(text, at)
            self.done = end is not None
            return len(text) if end is None else end.start()
        while at < len(text) and not self.done:
            at = self._read_string(text, at) if self._in_string else self._read_nested(text, at)
        return at

    def _read_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _IN_STRING.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = self._depth == 0
        return found.end()

    def _read_nested(self, text: str, at: int) -> int:
        found = _IN_NESTED.search(text, at)
        if found is None:
            return len(text)
        if found[0] == '"':
            self._in_string = True
        else:
            self._depth += 1 if found[0] in "{[" else -1
            self.done = self._depth == 0
        return found.end()


class CallObject:
    """Parses {"name": "f", "arguments": {...}} as it grows; keys in any order, "parameters" means "arguments".

    `take` returns the arguments as they were written, spaces included; the content of a string, if they were written as
    one; {} if there are none. known: names that make it a call; None: every name does.
    """

    __slots__ = ("_announced", "_arguments", "_has_arguments", "_key", "_known", "_name", "_part", "_scan", "_state",
                 "done", "failed")  # fmt: skip

    def __init__(self, known: frozenset[str] | None) -> None:
        self._known = known
        self.done = self.failed = False
        self._state = "open"
        self._scan = ValueScan()
        self._part = ""
        self._key = ""
        self._name: str | None = None
        self._arguments = ""
        self._has_arguments = self._announced = False

    @property
    def announced(self) -> bool:
        """Whether `take` has returned its name: from then on it is a call, even if it breaks off."""
        return self._announced

    @property
    def is_whole(self) -> bool:
        """Whether its name and its arguments have come, though the object may not be closed."""
        in_arguments = self._state == "value" and self._key == "arguments"
        return self._name is not None and (self.done or (self._has_arguments and not in_arguments))

    def read(self, text: str, at: int) -> int:
        """Parse from text[at] -> where it stopped: behind the object (`done`), at the character that makes it no object
        (`failed`), or at the end of the text."""
        while at < len(text) and not self.done and not self.failed:
            at = self._read_value(text, at) if self._state in ("key", "value") else self._read_punctuation(text, at)
        return at

    def take(self) -> tuple[str | None, str]:
        """(its name, once, as soon as it is certainly a call; more of its arguments)."""
        if self._name is None or not (self._has_arguments or self.done):
            return None, ""
        name = None if self._announced else self._name
        self._announced = True
        arguments, self._arguments = self._arguments, ""
        return name, arguments

    def _read_punctuation(self, text: str, at: int) -> int:
        """One character between keys and values."""
        char, state = text[at], self._state
        if char in SPACE and state != "open":
            return at + 1
        if state == "open" and char == "{":
            self._state = "first key"
        elif char == '"' and state in ("first key", "next key"):
            self._begin("key")
            return at
        elif state == "colon" and char == ":":
            self._state = "before value"
        elif state == "before value":
            self._begin("value")
            return at
        elif state == "comma" and char == ",":
            self._state = "next key"
        elif char == "}" and state in ("comma", "next key") and self._name is not None:
            self.done = True
            self._arguments += "" if self._has_arguments else "{}"
        else:
            self.failed = True
            return at
        return at + 1

    def _begin(self, state: str) -> None:
        self._state, self._scan, self._part = state, ValueScan(), ""

    def _read_value(self, text: str, at: int) -> int:
        end = self._scan.read(text, at)
        piece = text[at:end]
        is_streamed = self._state == "value" and self._key == "arguments" and self._scan.first in "{["
        if is_streamed:
            self._arguments += piece
            self._has_arguments = True
        else:
            self._part += piece
        if self._scan.done:
            self._end_value(is_streamed)
        return end

    def _end_value(self, was_streamed: bool) -> None:
        """A key or a value is complete."""
        if self._state == "key":
            self._key, self._state = self._meaning(_parsed(self._part)), "colon"
            return
        self._state = "comma"
        if not was_streamed and not self._part:
            self.failed = True
        elif self._key == "name":
            name = _parsed(self._part)
            if isinstance(name, str) and name and (self._known is None or name in self._known):
                self._name = name
            else:
                self.failed = True
        elif self._key == "arguments" and not was_streamed:
            self._arguments += _unquoted(self._part)
            self._has_arguments = True

    def _meaning(self, key: Any) -> str:
        if key in NAME_KEYS and self._name is None:
            return "name"
        return "arguments" if key in ARGUMENT_KEYS and not self._has_arguments else ""


class BareScan:
    """Reads an object whose keys are bare and whose texts stand between two marks, in pieces, and writes JSON.

    A bare value that is no JSON is text. Commas before a closing bracket are dropped.
    """

    __slots__ = ("_brackets", "_needs_comma", "_quote", "_state", "_text_of", "done", "failed")

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._brackets = ""
        """The open ones."""
        self._state = "value"
        self._text_of = ""
        """Within a text: the state that it belongs to."""
        self._needs_comma = False
        self.done = self.failed = False

    def read(self, text: str) -> tuple[int, str]:
        """(the characters that are read, their JSON). Others wait for more text, unless it is done or has failed."""
        at, written = 0, ""
        while at < len(text) and not self.done and not self.failed:
            end, piece = self._read_text(text, at) if self._text_of else self._read_token(text, at)
            written += piece
            if end == at:
                break
            at = end
        return at, written

    def _read_text(self, text: str, at: int) -> tuple[int, str]:
        close = text.find(self._quote, at)
        end = close if close >= 0 else len(text) - partial_length(text[at:], (self._quote,))
        written = json.dumps(text[at:end], ensure_ascii=False)[1:-1]
        if close < 0:
            return end, written
        self._state, self._text_of = "colon" if self._text_of == "key" else "comma", ""
        return close + len(self._quote), f'{written}"'

    def _read_token(self, text: str, at: int) -> tuple[int, str]:
        char = text[at]
        if char in SPACE:
            return at + 1, ""
        if char in "}]":
            return at + 1, self._close(char)
        if self._state in ("colon", "comma"):
            return at + 1, self._separate(char)
        comma = ", " if self._needs_comma else ""
        if text.startswith(self._quote, at):
            self._text_of, self._needs_comma = self._state, False
            return at + len(self._quote), f'{comma}"'
        if self._quote.startswith(text[at:]):
            return at, ""
        if char in "{[" and self._state == "value":
            self._brackets += char
            self._state, self._needs_comma = "key" if char == "{" else "value", False
            return at + 1, comma + char
        return self._read_bare(text, at, comma)

    def _read_bare(self, text: str, at: int, comma: str) -> tuple[int, str]:
        found = _BARE_END.search(text, at)
        end = found.start() if found else len(text)
        is_key = self._state == "key"
        if end - at > _LONGEST_BARE or (found and (end == at or is_key != (found[0] == ":"))):
            self.failed = True
            return at, ""
        if found is None:
            return at, ""
        word = text[at:end].strip()
        self._state, self._needs_comma = "colon" if is_key else "comma", False
        is_json = not is_key and _BARE_SCALAR.fullmatch(word) is not None
        return end, comma + (word if is_json else json.dumps(word, ensure_ascii=False))

    def _close(self, char: str) -> str:
        is_after_colon = self._state == "value" and self._brackets[-1:] == "{"
        if self._brackets[-1:] + char not in ("{}", "[]") or self._state == "colon" or is_after_colon:
            self.failed = True
            return ""
        self._brackets = self._brackets[:-1]
        self._state, self._needs_comma, self.done = "comma", False, not self._brackets
        return char

    def _separate(self, char: str) -> str:
        if char != {"colon": ":", "comma": ","}[self._state]:
            self.failed = True
            return ""
        if self._state == "colon":
            self._state = "value"
            return ": "
        self._state, self._needs_comma = "key" if self._brackets[-1] == "{" else "value", True
        return ""


def _parsed(raw: str) -> Any:
    try:
        return json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None


def _unquoted(raw: str) -> str:
    """Arguments that are no object: a string's content, {} for null or "", other values unchanged."""
    if raw.startswith('"'):
        text = _parsed(raw)
        return (text or "{}") if isinstance(text, str) else raw
    return "{}" if raw == "null" else raw

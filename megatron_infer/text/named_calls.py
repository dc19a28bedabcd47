"""Tool calls that write their name between marks, and their arguments as JSON, with bare keys, or as one field each.

TEXT --- the opening mark ---> HEAD --- the mark before a name ---> NAME --- the mark after it ---> JSON, BARE, FIELDS
  ^                                                                                                    |    ^
  |                                                                                                    v    |
  +--- the closing mark, or anything else --- AFTER <--- the last mark of the call             KEY, then VALUE
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from megatron_infer.text.stop_strings import partial_length
from megatron_infer.text.tool_call_formats import CallFormat, NamedFormat
from megatron_infer.text.tool_json import SPACE, BareScan, ValueScan
from megatron_infer.text.tool_parsers import CallParser, TextAndCalls

_NAME_END = re.compile(r"[^\w.:-]|$")
_LONGEST = 320
"""Characters of a name, or of an argument's."""
_DEEPEST = 8
"""References and alternatives within each other that are followed."""


def call_parser(
    call_format: CallFormat, tools: Mapping[str, Mapping[str, Any]], *, holds_calls: bool = False
) -> TextAndCalls:
    """The parser of a format. tools, holds_calls: see `CallParser`."""
    kind = NamedCallParser if isinstance(call_format, NamedFormat) else CallParser
    return kind(call_format, tools, holds_calls=holds_calls)


class NamedCallParser(TextAndCalls):
    """Parses one sequence's text into content and calls; arguments come as JSON.

    Of an argument in marks that is text, the letters come as they are drawn; others come when they are complete.
    """

    def __init__(
        self, call_format: CallFormat, tools: Mapping[str, Mapping[str, Any]], *, holds_calls: bool = False
    ) -> None:
        assert isinstance(call_format, NamedFormat), call_format.name
        super().__init__(call_format, "text", holds_calls=holds_calls)
        self._named = one = call_format
        self._tools = tools
        self._openings = one.openings
        self._before, self._tail, self._closing = one.before.strip(), one.tail.strip(), one.closing.strip()
        self._after_names = tuple(mark.strip() for mark in one.after)
        self._called = ""
        self._is_begun = self._is_announced = False
        self._arguments = ""
        """Of a call that is not announced."""
        self._num_fields = 0
        self._field = ""
        self._is_text = self._is_json = False
        """Whether the argument is text, or its mark says that it is JSON; else the schema tells at its end."""
        self._part = ""
        self._scan, self._bare_scan = ValueScan(), BareScan(one.quote)

    @property
    def _in_call(self) -> bool:
        return self._is_announced and self._state in ("json", "bare", "fields", "key", "value", "broken")

    @property
    def is_cut(self) -> bool:
        return self._state in ("name", "json", "bare", "fields", "key", "value")

    def _text(self) -> bool:
        marks = (*self._openings, *self._named.dropped)
        found = [(at, -len(mark), mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        # a mark that begins earlier may still be growing, and the longest of one place counts
        keep = partial_length(self._held, marks)
        if not found or (keep and min(found)[0] >= len(self._held) - keep):
            self._add_content(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        at, _, mark = min(found)
        if mark not in self._openings and any(other.startswith(self._held[at:]) for other in marks if other != mark):
            return False
        self._add_content(self._held[:at])
        self._held = self._held[at + len(mark) :]
        if mark in self._openings:
            self._raw, self._state = mark, "head"
        return True

    def _head(self) -> bool:
        text = self._held.lstrip(SPACE)
        if not text:
            return False
        if self._named.is_section and text.startswith(self._closing):
            self._held, self._raw, self._state = text[len(self._closing) :], "", "text"  # a section without calls
        elif text.startswith(self._before):
            self._skip(len(self._held) - len(text) + len(self._before))
            self._state, self._called, self._is_begun, self._is_announced = "name", "", False, False
            self._arguments, self._num_fields = "", 0
        elif self._begins(text, self._before, self._closing):
            return False
        else:
            self._reject()
        return True

    def _name(self) -> bool:
        match = _NAME_END.search(self._held)
        assert match is not None
        end = match.start()
        if end == len(self._held) <= _LONGEST:
            return False
        rest = self._held[end:].lstrip(SPACE)
        mark = max((mark for mark in self._after_names if rest.startswith(mark)), key=len, default=None)
        if not 0 < end <= _LONGEST or (mark is None and not self._begins(rest, *self._after_names)):
            self._reject()
        elif mark is None or not rest or any(one != mark and one.startswith(rest) for one in self._after_names):
            return False
        else:
            self._called = self._held[:end]
            if not self._named.holds_strict and self._called not in self._tools:
                self._reject()
                return True
            self._skip(len(self._held) - len(rest) + len(mark))
            self._state = "fields" if self._named.fields else "bare" if self._named.quote else "json"
            self._scan, self._bare_scan = ValueScan(), BareScan(self._named.quote)
        return True

    def _begins_object(self) -> bool:
        """Whether the object of the arguments begins with what is held; what is none makes no call."""
        text = self._held.lstrip(SPACE)
        if text and text[0] != "{":
            self._reject()
            return False
        self._skip(len(self._held) - len(text))
        if text:
            self._begin()
        return bool(text)

    def _bare(self) -> bool:
        if not self._is_begun and not self._begins_object():
            return self._state == "text"
        end, written = self._bare_scan.read(self._held)
        self._emit(written)
        self._skip(end)
        if self._bare_scan.failed:
            self._fail()
        elif self._bare_scan.done:
            self._end()
        return self._state != "bare"

    def _json(self) -> bool:
        if not self._is_begun and not self._begins_object():
            return self._state == "text"
        end = self._scan.read(self._held, 0)
        self._emit(self._held[:end])
        self._skip(end)
        if self._scan.done:
            self._end()
        return True

    def _fields(self) -> bool:
        marks = self._named.fields
        assert marks is not None
        text, before = self._held.lstrip(SPACE), marks.before.strip()
        if not text:
            return False
        if text.startswith(before):
            self._begin()
            self._skip(len(self._held) - len(text) + len(before))
            self._state = "key"
        elif any(mark and text.startswith(mark) for mark in (self._tail, self._closing)):
            self._begin()
            self._skip(len(self._held) - len(text))
            self._emit("}" if self._num_fields else "{}")
            self._end()
        elif self._begins(text, before, self._tail, self._closing):
            return False
        elif self._is_begun:
            self._fail()
        else:
            self._reject()
        return True

    def _key(self) -> bool:
        marks = self._named.fields
        assert marks is not None
        ends = [mark.strip() for mark in (marks.after_key, marks.other) if mark]
        at, end = min(((self._held.find(end), end) for end in ends if end in self._held), default=(-1, ""))
        if at < 0 and len(self._held) <= _LONGEST + max(map(len, ends)):
            return False
        rest, before = self._held[at + len(end) :], marks.before_value.strip()
        value = rest.lstrip(SPACE) if before else rest
        if at < 0 or at > _LONGEST or not (value.startswith(before) or self._begins(value, before)):
            self._fail()
            return True
        if not value.startswith(before) or (marks.has_lines and not value):
            return False
        self._field, self._part, self._state = self._held[:at].strip(), "", "value"
        self._skip(len(self._held) - len(value) + len(before))
        if marks.has_lines:
            self._skip(len(self._held) - len(self._held.removeprefix("\n")))
        self._is_json = bool(marks.other) and end != ends[0]
        self._is_text = end == ends[0] if marks.other else self._kinds() == {"string"}
        self._emit(", " if self._num_fields else "{")
        self._num_fields += 1
        self._emit(json.dumps(self._field, ensure_ascii=False) + ": " + ('"' if self._is_text else ""))
        return True

    def _value(self) -> bool:
        marks = self._named.fields
        assert marks is not None
        mark = marks.after_value.strip()
        at = self._held.find(mark)
        ends = (mark, f"\n{mark}") if marks.has_lines else (mark,)
        end = at if at >= 0 else len(self._held) - partial_length(self._held, ends)
        piece = self._held[:end]
        if at >= 0 and marks.has_lines:
            piece = piece.removesuffix("\n")
        if self._is_text:
            self._emit(json.dumps(piece, ensure_ascii=False)[1:-1] + ('"' if at >= 0 else ""))
        else:
            self._part += piece
        self._skip(end + len(mark) if at >= 0 else end)
        if at < 0:
            return False
        if not self._is_text:
            self._emit(self._json_of(self._part))
        self._state = "fields"
        return True

    def _after(self) -> bool:
        text = self._held.lstrip(SPACE)
        if not text:
            return False
        ends = (self._closing, self._tail)
        mark = next((mark for mark in ends if mark and text.startswith(mark)), None)
        if mark is not None:
            self._held, self._state = text[len(mark) :], "text" if mark == self._closing else "after"
        elif self._before and self._named.is_section and text.startswith(self._before):
            self._held, self._raw, self._state = text, "", "head"
        elif self._begins(text, *ends, self._before if self._named.is_section else ""):
            return False
        else:
            self._state = "text"
        return True

    @staticmethod
    def _begins(text: str, *marks: str) -> bool:
        """Whether more text may make one of the marks of it."""
        return any(len(text) < len(mark) and mark.startswith(text) for mark in marks)

    def _begin(self) -> None:
        """What follows the name makes it a call."""
        self._is_begun = True
        if not self._holds_calls:
            self._show()

    def _show(self) -> None:
        if self._is_announced:
            return
        if self._named.has_ids:
            self._announce(self._called.removeprefix("functions.").partition(":")[0], self._called)
        else:
            self._announce(self._called)
        self._is_announced = True

    def _emit(self, text: str) -> None:
        if self._is_announced:
            self._add_arguments(text)
            self._raw = ""
        else:
            self._arguments += text

    def _end(self) -> None:
        self._show()
        self._add_arguments(self._arguments)
        self._arguments = self._raw = ""
        self._state = "after"

    def _fail(self) -> None:
        """Text within a call that is none of its marks."""
        if self._is_announced:
            self._raw, self._state = "", "broken" if self._closing else "after"
        else:
            self._reject()

    def _kinds(self) -> set[str] | None:
        schema = self._tools.get(self._called, {})
        return kinds_of(properties_of(schema).get(self._field), schema)

    def _json_of(self, text: str) -> str:
        """A value that may be other than text, as JSON."""
        kinds, shown = self._kinds(), text.strip()
        shown = {"True": "true", "False": "false", "None": "null"}.get(shown, shown)
        try:
            value = json.loads(shown, parse_constant=_no_json)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        if self._is_json:
            return shown
        kind = _kind_of(value)
        fits = kinds is None or "string" not in kinds or kind in kinds or (kind == "integer" and "number" in kinds)
        return shown if fits and kind != "string" else json.dumps(text, ensure_ascii=False)


def _no_json(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of the arguments by their names."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str] | None:
    """The JSON types that a schema allows, as far as its own keywords tell; None: any. root: what holds its $defs."""
    schema = followed(schema, root)
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return None
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    if isinstance(schema.get("enum"), list):
        return {_kind_of(value) for value in schema["enum"]}
    if "const" in schema:
        return {_kind_of(schema["const"])}
    for several in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(several, list):
            parts = [kinds_of(one, root, depth + 1) for one in several]
            return None if None in parts else {kind for part in parts for kind in part or ()}
    return None


def followed(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a reference into $defs or definitions names; others as they are."""
    for _ in range(_DEEPEST):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        _, where, name = (*str(reference).split("/", 2), "", "")[:3]
        found = root.get(where) if where in ("$defs", "definitions") else None
        if not isinstance(found, dict) or name not in found:
            break
        schema = found[name]
    return schema


def _kind_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return kinds.get(type(value), "null")

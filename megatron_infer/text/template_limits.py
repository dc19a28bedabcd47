"""Bounds on what one rendering of a chat template takes: the size of each value before it is made, and the time."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2

CHECK_EVERY = 64
"""Operations of a template between two readings of the clock."""
NUMBER_BITS = 4096
"""Most bits of a number, which templates need for counts."""
TOTAL_SIZES = 256
"""All values that one rendering makes together have at most so many times max_chars."""

_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """Bounds on one rendering: its output and what its operations make, and its time."""

    max_chars: int
    """Most characters of the output and of a text, and items of a list."""
    cpu_s: float
    """Most seconds of the thread's processor time, whatever else the machine does."""


class Budget:
    """What one rendering has left."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits, self._ends_at, self._count = limits, time.thread_time() + limits.cpu_s, 0
        self._made = 0

    def spend(self) -> None:
        """Before an operation. Raises TemplateError when the time is over."""
        self._count += 1
        if self._count % CHECK_EVERY == 0 and time.thread_time() > self._ends_at:
            text = f"it takes more than {self._limits.cpu_s:g} s (limit) for this conversation; shorten it"
            raise jinja2.TemplateError(text)

    def check_size(self, size: int, most: int | None = None) -> None:
        """Raises TemplateError beyond the limit, max_chars if it is not given."""
        most = self._limits.max_chars if most is None else most
        if size > most:
            text = (
                f"it makes {size:,} characters, items or bits of this conversation, the limit is {most:,}; shorten it"
            )
            raise jinja2.TemplateError(text)

    def make(self, size: int) -> None:
        """Before a value of this size is made. Raises TemplateError beyond the limits on one value and on all."""
        self.check_size(size)
        self._made += size
        self.check_size(self._made, TOTAL_SIZES * self._limits.max_chars)

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """Before `left operator right`."""
        self.spend()
        numbers = [_number(one) for one in (left, right)]
        if None not in numbers:
            bits = [int(one).bit_length() for one in (left, right)]
            self.check_size(bits[0] * max(1, right) if operator == "**" else sum(bits), NUMBER_BITS)
        elif operator == "+":
            self.make(size_of(left) + size_of(right))
        elif operator == "*":
            self.make(max(size_of(left) * max(0, numbers[1] or 0), size_of(right) * max(0, numbers[0] or 0)))
        elif operator == "%":
            self.check_call("format", (left, right), {})

    def check_call(self, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Before a filter or a method of a text is called: args begins with what it is called on."""
        self.spend()
        if name not in KEEPS_VALUES:
            for one in (*args, *options.values()):
                self.check_text(one)
        grows = GROWS.get(name)
        if grows is not None:
            try:
                size = grows(*args, **options)
            except (TypeError, ValueError, AttributeError, RecursionError):
                return  # of wrong arguments, for which the call has its own error
            self.make(size)

    def check_text(self, value: Any) -> None:
        """Before a value is written as text or compared: lists that hold one list many times are small in memory."""
        if isinstance(value, list | tuple | dict | set | frozenset):
            self.check_size(_text_size(value, {}))


class _Rendering(threading.local):
    budget: Budget | None = None


rendering = _Rendering()
"""What this thread renders."""


def size_of(value: Any) -> int:
    """Characters of a text, bytes, or items."""
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text_size(value: Any, known: dict[int, int]) -> int:
    """About the characters of str(value); `known`: by id of the containers inside."""
    if isinstance(value, str | bytes):
        return len(value) + 4
    if isinstance(value, int):
        return value.bit_length() // 3 + 5
    if not isinstance(value, list | tuple | dict | set | frozenset):
        return 24
    found = known.get(id(value))
    if found is None:
        known[id(value)] = 2
        parts: Iterable[Any] = value if not isinstance(value, dict) else (one for pair in value.items() for one in pair)
        found = known[id(value)] = 2 + sum([_text_size(part, known) + 2 for part in parts])
    return found


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes) else _text_size(value, {})


def _padded(text: Any, width: int = 80, *_: Any) -> int:
    return max(_length(text), width)


def _replaced(text: Any, old: str, new: str, count: int | None = None, *_: Any) -> int:
    found = str(text).count(str(old))
    times = found if count is None or count < 0 else min(found, count)
    return _length(text) + times * len(str(new))


def _joined(items: Collection[Any], separator: Any = "", *_: Any, **__: Any) -> int:
    if not isinstance(items, Collection):
        return _length(separator)  # one that is made item by item, each of them checked
    return _length(items) + len(items) * _length(separator)


def _indented(text: str, width: int | str = 4, *_: Any, **__: Any) -> int:
    wide = len(width) if isinstance(width, str) else max(0, width)
    return len(text) + (1 + len(text.splitlines())) * wide


def _wrapped(text: str, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, *_: Any) -> int:
    return len(text) + (len(text) // max(1, width) + len(text.split()) + 1) * len(wrapstring or "\n")


def _formatted(text: str, *args: Any, **named: Any) -> int:
    """Widths stand in the format or are arguments; each field shows one of these."""
    parts = [one for arg in args for one in (arg if isinstance(arg, tuple) else (arg,))] + list(named.values())
    sizes = [_length(one) for one in parts] + [abs(one) for one in parts if _number(one) is not None and "*" in text]
    sizes += [abs(one) for one in parts if _number(one) is not None and re.search(r"\{[^{}]*\{", text)]
    fields = text.count("%") + text.count("{")
    return len(text) + sum(int(digits[:18]) for digits in _NUMBERS.findall(text)) + fields * max(sizes, default=0)


def _as_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None, *_: Any, **__: Any) -> int:
    if indent is None:
        return _length(value)
    plain = json.dumps(value, ensure_ascii=ensure_ascii)
    wide = len(indent) if isinstance(indent, str) else max(0, indent)
    lines = plain.count(",") + 2 * (plain.count("{") + plain.count("["))
    return len(plain) + lines * (1 + wide * _depth(value))


def _depth(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return 1 + max(map(_depth, parts), default=0)


# Filters, and methods of a text, whose result may be larger than what they are given -> at least its size.
GROWS: dict[str, Callable[..., int]] = {
    "batch": lambda items, count, fill=None: size_of(items) + count,
    "center": _padded,
    "expandtabs": lambda text, size=8: len(text) + text.count("\t") * size,
    "format": _formatted,
    "format_map": lambda text, named: _formatted(text, **named),
    "indent": _indented,
    "join": _joined,
    "ljust": _padded,
    "replace": _replaced,
    "rjust": _padded,
    "round": lambda value, precision=0, method="common": 0 if abs(precision) <= 1000 else abs(precision) << 32,
    "str.join": lambda separator, items: _joined(items, separator),
    "slice": lambda items, count, fill=None: size_of(items) + count,
    "to_bytes": lambda number, length=1, *_, **__: length,
    "sum": lambda items, _=None, start=0: len(items) * _text_size(items, {}) if isinstance(start, list | tuple) else 0,
    "tojson": _as_json,
    "translate": lambda text, table: len(text) * max(1, *(size_of(one) for one in table.values())),
    "wordwrap": _wrapped,
    "zfill": _padded,
}
# Filters that neither write nor compare the values inside what they are given.
_FILTERS = (
    "attr batch count d default dictsort first items last length list map random reject rejectattr reverse safe select "
    "selectattr slice"
)
# Tests of what kind a value is.
_TESTS = (
    "boolean callable defined escaped false filter float integer iterable mapping none number sameas sequence string "
    "test true undefined"
)
KEEPS_VALUES = frozenset([*_FILTERS.split(), *(f"is {name}" for name in _TESTS.split())])


def bounded_filter(name: str, function: Callable[..., Any], first: tuple[Any, ...] = ()) -> Callable[..., Any]:
    """A filter, test or method that is checked before it runs. first: goes before its arguments."""
    skip = int(hasattr(function, "jinja_pass_arg"))  # jinja2's own argument: the context, or the environment

    def run(*args: Any, **options: Any) -> Any:
        args = (*first, *args)
        if rendering.budget is not None:
            rendering.budget.check_call(name, args[skip:], options)
        return function(*args, **options)

    if skip:
        run.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return run

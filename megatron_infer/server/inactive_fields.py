"""The policy for request fields that have no action here, the same for every route.

A field that acts is in the type of its body. Every other field that a client may send is in a `FieldTable`:

no effect   taken with any value, and listed in the reply's header x-ignored-fields; refused with `strict_fields`
refused     taken with a value that asks for nothing; any other value would change the answer and is a 400

A field that is in neither is a 400 with the nearest name: a `Body` forbids it, and `http_errors.of_validation` words
the error. A null field counts as not given, whatever its name.
The rows of all dialects are in `field_tables.py`; rows of one dialect are next to its body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from megatron_infer.server.http_errors import bad_request

MAX_DEFAULT_BYTES = 256
"""A longer JSON value is not compared with the values that ask for nothing."""


def _is_null(value: Raw) -> bool:
    return bytes(memoryview(value)[:4]) == b"null"


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of a field without an action."""

    reason: str
    """Why it has no effect, or why it is refused and what to do instead."""
    is_refused: bool
    unset: tuple[Any, ...] = ()
    """Values besides null that ask for nothing: taken, and not listed."""

    def asks_for_nothing(self, value: Raw) -> bool:
        if len(memoryview(value)) > MAX_DEFAULT_BYTES:
            return False
        decoded = msgspec.json.decode(value)
        return any(decoded == one and isinstance(decoded, bool) is isinstance(one, bool) for one in self.unset)


def no_effect(reason: str, *unset: Any) -> Rule:
    return Rule(reason, False, unset)


def refused(reason: str, *unset: Any) -> Rule:
    return Rule(reason, True, unset)


def rows(named: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules by field. named: by the names of all fields with the same rule, a space between two names."""
    return {name: rule for names, rule in named.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class FieldTable:
    """The rules of one body, and of objects within it."""

    rules: Mapping[str, Rule] = field(default_factory=dict)
    """By field; given as `rows` takes them."""
    nested: Mapping[str, FieldTable] = field(default_factory=dict)
    """Tables of fields that hold an object or a list of objects."""
    kinds: tuple[str, ...] = ()
    """For objects in a list: the values of `type` that act; (): all. Objects of other types are left out and listed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", rows(self.rules))

    def settle(self, data: bytes, acting: Iterable[str], *, strict: bool) -> tuple[bytes, list[str]]:
        """A body without the fields that ask for nothing -> (the rest, names of the fields without effect).

        acting: fields of the body's type, which have no rule here. Raises ApiError 400 for a refused field;
        msgspec.MsgspecError where the body is no JSON object.
        """
        found = msgspec.json.decode(data, type=dict[str, Raw])
        ignored: list[str] = []
        kept = self._kept(found, "", frozenset(acting), ignored, strict)
        return msgspec.json.encode(kept), list(dict.fromkeys(ignored))

    def _kept(
        self, found: dict[str, Raw], path: str, acting: frozenset[str], ignored: list[str], strict: bool
    ) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, value in found.items():
            where = f"{path}{name}"
            rule = None if name in acting else self.rules.get(name)
            if rule is not None:
                if not _is_null(value) and not rule.asks_for_nothing(value):
                    _take(where, rule, ignored, strict)
            elif name in self.nested:
                kept[name] = self.nested[name]._settled(value, where, ignored, strict)
            elif name in acting or not _is_null(value):
                kept[name] = value
        return kept

    def _settled(self, value: Raw, where: str, ignored: list[str], strict: bool) -> Any:
        """A nested object, or a list of some; what is neither is kept for the body's type to refuse."""
        none: frozenset[str] = frozenset()
        try:
            items = msgspec.json.decode(value, type=dict[str, Raw] | list[Raw])
        except msgspec.ValidationError:
            return value
        if isinstance(items, dict):
            return self._kept(items, f"{where}.", none, ignored, strict)
        kept: list[Any] = []
        for place, item in enumerate(items):
            if bytes(memoryview(item)[:1]) != b"{":
                kept.append(item)
                continue
            found = msgspec.json.decode(item, type=dict[str, Raw])
            if self._is_of_other_kind(found):
                _take(f"{where}[{place}]", no_effect(f"its type is none of {', '.join(self.kinds)}"), ignored, strict)
            else:
                kept.append(self._kept(found, f"{where}[].", none, ignored, strict))
        return kept

    def _is_of_other_kind(self, found: dict[str, Raw]) -> bool:
        kind = msgspec.json.decode(found["type"]) if self.kinds and "type" in found else None
        return isinstance(kind, str) and kind not in self.kinds


NO_FIELDS = FieldTable()


def _take(where: str, rule: Rule, ignored: list[str], strict: bool) -> None:
    if rule.is_refused:
        raise bad_request(f"{where}: {rule.reason}", where, "unsupported_field")
    if strict:
        text = f"{where} has no effect here: {rule.reason}; remove it (this server was started with --strict-fields)"
        raise bad_request(text, where, "unsupported_field")
    ignored.append(where)


def ignore(ignored: list[str], where: str, reason: str, *, strict: bool) -> None:
    """Take a field whose type acts, but which has no effect in this call. Raises ApiError 400 with `strict`."""
    _take(where, no_effect(reason), ignored, strict)


IGNORED_HEADER = "x-ignored-fields"


def ignored_header(ignored: Iterable[str]) -> dict[str, str]:
    """The reply's header for the fields that had no effect; {}: there were none."""
    names = ", ".join(dict.fromkeys(ignored))
    return {IGNORED_HEADER: names} if names else {}

"""Constraints on a request's text: a JSON schema, any JSON object, a regular expression, a grammar or a choice of
texts.

Only the form is checked here; `runner.sampling.grammar_matchers` finds out whether a schema or pattern can be compiled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import chain
from typing import Any

from megatron_infer.config.options import option, options_of
from megatron_infer.errors import RequestError, unknown_name

MAX_BYTES = 256 << 10
"""The most UTF-8 bytes of a schema, a pattern, a grammar, or all choices together."""
MAX_DEPTH = 64
"""The deepest nesting of objects and lists in a schema."""
MAX_CHOICES = 4096
MAX_MULTIPLE = 1 << 17
"""The largest common multiple of the multipleOf of a schema."""
MAX_JOINED = 8
"""The most patterns that one text has to match at once. llguidance 1.9.1 compares all of their states: of 12 within a
second, with each more three times as long."""
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""The values of `format` that llguidance 1.9.1 holds a text to; any other is an annotation."""
_REFUSED = (-(2.0**64), -(2.0**62))
_UNQUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
"""Texts and regular expressions of a grammar."""
_DEFINITIONS = ("$defs", "definitions")
_JOINING = frozenset({"pattern", "format", "$ref"})
"""Keys without which a text has no patterns to match."""
_KINDS = ("json_schema", "json_object", "regex", "grammar", "choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The language of the output text; exactly one of the first five fields is given.

    Checked at construction: an invalid value raises RequestError.
    """

    json_schema: str | Mapping[str, Any] | bool | None = option(None, is_file=True, is_common=True)
    """A JSON schema; stored as JSON text. Properties appear in the order in which the schema lists them."""
    json_object: bool = option(False, flag="json", is_common=True)
    """Any JSON object."""
    regex: str | None = option(None, is_common=True)
    """A regular expression, in the syntax of Rust's regex crate, that the whole text matches."""
    grammar: str | None = option(None, is_file=True, is_common=True)
    """A context-free grammar: llguidance's dialect of Lark, or GBNF (rules with ::=)."""
    choice: Sequence[str] | None = option(None, is_common=True)
    """The output is one of these texts; stored as a tuple."""
    compact: bool = option(False, is_common=True)
    """No white space between the parts of JSON."""

    def __post_init__(self) -> None:
        for name in ("json_object", "compact"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"structured.{name} is True or False, got a {type(getattr(self, name)).__name__}")
        given = [name for name in _KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if self.json_schema is False:  # a valid schema, which nothing matches
            given.insert(0, "json_schema")
        if len(given) != 1:
            got = ", ".join(given) if given else "none"
            raise RequestError(f"structured takes exactly one of {', '.join(_KINDS)}; got {got}")
        kind = given[0]
        if kind == "json_schema":
            object.__setattr__(self, kind, _schema_text(self.json_schema))
        elif kind == "choice":
            object.__setattr__(self, kind, _choices(self.choice))
        elif kind != "json_object":
            _text(kind, getattr(self, kind))
        if self.compact and kind not in ("json_schema", "json_object"):
            raise RequestError(f"structured.compact is about JSON, and has no meaning with {kind}; leave it out")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StructuredOutput:
        """From parsed JSON; an unknown key is refused, with the nearest known one."""
        known = options_of(cls)
        for name in values:
            if name not in known:
                raise RequestError(f"{unknown_name('field of structured', str(name), known)} ({', '.join(known)})")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The fields that were given, as JSON values; `from_dict` of it equals this."""
        values = {name: getattr(self, name) for name in options_of(StructuredOutput)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None and value is not False
        }

    @property
    def kind(self) -> str:
        """The name of the field that was given."""
        return next(name for name in _KINDS if getattr(self, name) is not None and getattr(self, name) is not False)


def structured_of(value: object) -> StructuredOutput | None:
    """A StructuredOutput from itself or from a mapping; None stays None. Raises RequestError."""
    if value is None or isinstance(value, StructuredOutput):
        return value
    if isinstance(value, Mapping):
        return StructuredOutput.from_dict(value)
    raise RequestError(f"structured is a StructuredOutput or a mapping of its fields, got a {type(value).__name__}")


def check_schema(schema: Any, *, max_depth: int = MAX_DEPTH) -> None:
    """Raise RequestError for parsed JSON that is not a schema or is nested deeper than max_depth."""
    if not isinstance(schema, dict | bool):
        raise RequestError(f"json_schema is a JSON object or a boolean, got a {type(schema).__name__}")
    layer: list[Any] = [schema]
    depth, multiples, joins = 0, [], False
    while layer:
        if depth > max_depth:
            raise RequestError(f"json_schema is nested deeper than {max_depth} levels; name its parts in $defs")
        objects = [one for one in layer if type(one) is dict]
        multiples += [one["multipleOf"] for one in objects if "multipleOf" in one]
        joins = joins or any(not _JOINING.isdisjoint(one) for one in objects)
        nested: Iterable[Iterable[Any]] = [one.values() for one in objects]
        lists = (one for one in layer if isinstance(one, list))
        layer, depth = list(chain.from_iterable(chain(nested, lists))), depth + 1
    _check_multiples(multiples)
    if not joins:
        return
    try:
        joined = _Joined(schema).of(schema)
    except RecursionError:
        raise RequestError("json_schema: its references lead from one to another too often; name fewer") from None
    if joined > MAX_JOINED:
        raise _joined_too_often("json_schema", "patterns (pattern, format) by allOf and $ref", joined)


class _Joined:
    """How many patterns the texts of a schema have to match at once, at most; references are looked up in `root`."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, int] = {}

    def of(self, node: Any) -> int:
        if isinstance(node, list):
            return max(map(self.of, node), default=0)
        if not isinstance(node, dict):
            return 0
        if id(node) not in self._known:
            self._known[id(node)] = 0  # while it is counted: a reference in a circle
            parts = node.get("allOf")
            joined = _num_patterns(node) + (sum(map(self.of, parts)) if isinstance(parts, list) else 0)
            joined += self._of_reference(node["$ref"]) if "$ref" in node else 0
            inside = [self.of(node[name]) for name in node if name not in ("allOf", *_DEFINITIONS)]
            beside = [self.of(value) for name in _DEFINITIONS for value in _values(node.get(name)).values()]
            self._known[id(node)] = max([joined + max(inside, default=0), *beside])
        return self._known[id(node)]

    def _of_reference(self, reference: Any) -> int:
        node = self._root
        for name in str(reference).removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            node = _values(node).get(name)
        if isinstance(reference, str) and reference.startswith("#/") and isinstance(node, dict):
            return self.of(node)
        return 0 if reference == "#" else self._all  # by a name: it may be any of them

    @cached_property
    def _all(self) -> int:
        count, layer = 0, [self._root]
        while layer:
            count += sum(_num_patterns(node) for node in layer if isinstance(node, dict))
            layer = [one for node in layer for one in (node if isinstance(node, list) else _values(node).values())]
        return count


def _num_patterns(node: dict[str, Any]) -> int:
    form = node.get("format")
    return isinstance(node.get("pattern"), str) + (isinstance(form, str) and form in FORMATS)


def _values(node: Any) -> dict[str, Any]:
    return node if isinstance(node, dict) else {}


def _joined_too_often(name: str, what: str, count: int) -> RequestError:
    return RequestError(f"{name} joins {count:,} {what}, the limit is {MAX_JOINED}; leave some out")


def check_size(name: str, text: str, *, max_bytes: int = MAX_BYTES) -> None:
    """Raise RequestError for a text of more than max_bytes, or one that UTF-8 cannot encode."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{name} is not valid Unicode: it holds half of a surrogate pair") from None
    if size > max_bytes:
        raise RequestError(f"{name} has {size:,} bytes, the limit is {max_bytes:,}; make it smaller")


def _number(text: str) -> float:
    """A number of a schema. Raises RequestError for one by which llguidance 1.9.1 ends the process: near -2**63."""
    number = float(text)
    if _REFUSED[0] <= number <= _REFUSED[1]:
        refused = f"the number {text[:40]} in a schema: those from -2**64 to -2**62 are not supported"
        raise RequestError(f"{refused}; take a smaller or a larger one")
    return number


_DECODER = json.JSONDecoder(parse_int=_number, parse_float=_number)


def _check_multiples(values: Sequence[Any]) -> None:
    """Raise RequestError where texts would be matched by an automaton with a state for each remainder of too large a
    number: the least common multiple, as allOf joins them. values: of multipleOf, wherever they stand."""
    given = [value for value in values if isinstance(value, int | float) and 0 < abs(value) < 1e300]
    numbers = [abs(Decimal(repr(float(value)))) for value in given]
    digits = max((-int(number.normalize().as_tuple().exponent) for number in numbers), default=0)
    whole = [int(number.scaleb(max(digits, 0))) for number in numbers]
    if whole and (common := math.lcm(*whole)) > MAX_MULTIPLE:
        text = f"multipleOf: the least common multiple, without its point, is {str(common)[:20]}"
        raise RequestError(f"{text}, the limit is {MAX_MULTIPLE:,}; leave one out")


def _schema_text(value: object) -> str:
    text = value
    if not isinstance(value, str):
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"json_schema is no JSON value: {error}") from None
    assert isinstance(text, str)
    check_size("json_schema", text)
    try:
        schema = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"json_schema is not JSON: {error}") from None
    except RecursionError:
        raise RequestError(f"json_schema is nested deeper than {MAX_DEPTH} levels; name its parts in $defs") from None
    check_schema(schema)
    return text


def _text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise RequestError(f"{name} is a text, got a {type(value).__name__}")
    if not value:
        raise RequestError(f"{name} is empty; leave it out to draw freely")
    check_size(name, value)
    if name == "grammar" and (count := _UNQUOTED.sub("", value).count("&")) >= MAX_JOINED:
        raise _joined_too_often(name, "terms by &", count + 1)
    for found in re.finditer(r"%json\s*", value) if name == "grammar" else ():
        try:
            schema, _ = _DECODER.raw_decode(value, found.end())
        except (json.JSONDecodeError, RecursionError) as error:
            raise RequestError(f"grammar: what follows %json at {found.start():,} is not JSON: {error}") from None
        check_schema(schema)


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        raise RequestError(f"choice is a list of texts, one at least; got a {type(value).__name__}")
    if len(value) > MAX_CHOICES:
        raise RequestError(f"choice has {len(value):,} texts, the limit is {MAX_CHOICES:,}; use regex or grammar")
    for text in value:
        if not isinstance(text, str) or not text:
            raise RequestError(f"choice holds texts that are not empty, got {text!r:.60}")
    check_size("choice", "".join(value))
    return tuple(value)

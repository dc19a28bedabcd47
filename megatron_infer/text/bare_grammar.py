"""Grammars of arguments with bare keys, and texts between two marks (`NamedFormat.quote`), that meet a schema."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from megatron_infer.errors import RequestError
from megatron_infer.text.grammar import inline_schema
from megatron_infer.text.json_schema import plain
from megatron_infer.text.named_calls import followed
from megatron_infer.text.tool_json import is_bare_key

_OBJECT_KEYS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_HELD: dict[str, Collection[str]] = {"array": {"items"}, "object": _OBJECT_KEYS}
_HELD |= dict.fromkeys(("integer", "number"), _NUMBERS) | dict.fromkeys(("string", "boolean", "null"), ())
"""Type -> the keywords that its values are held to."""
_DEEPEST = 8
"""Objects, lists and alternatives within each other."""
_MOST_RULES = 4096
"""Of one tool: a few references, each used several times within the next, make billions."""


def object_parts(schema: Any, root: Mapping[str, Any], name: str) -> tuple[dict[str, Any], list[str], bool]:
    """(properties, required names, whether there may be others) of the schema of an object.

    root: what holds its $defs. name: of the format. Raises RequestError for what marks cannot be held to.
    """
    schema = plain(followed(schema, root))
    if not isinstance(schema, dict):
        raise RequestError(f"parameters: {schema!r} is no schema of an object")
    if unknown := sorted(schema.keys() - _OBJECT_KEYS):
        raise RequestError(f"parameters: {unknown[0]}: the format {name} cannot be held to it")
    properties, required, more = (schema.get(key) for key in ("properties", "required", "additionalProperties"))
    if not isinstance(properties, dict | None) or not isinstance(required, list | None) or isinstance(more, dict):
        raise RequestError("parameters: properties is an object, required a list, additionalProperties true or false")
    known, names = properties or {}, [str(one) for one in required or []]
    return known | {one: True for one in names if one not in known}, names, more is not False


class BareRules:
    """The rules, in llguidance's Lark, of the arguments of one tool. `text`: the rules."""

    def __init__(self, name: str, root: Mapping[str, Any], mark: str, quote: str, format_name: str) -> None:
        """name: of the first rule. mark: around texts. quote: the mark as terms. Raises RequestError, as
        `object_parts`."""
        self._name = name
        self._root = root
        self._format_name = format_name
        self._mark = mark
        self._quote = quote
        self._num_rules, self.text = 0, ""
        first = self._object(root, 0)
        self.text += f"{name}: {first}\n"

    def _rule(self, body: str) -> str:
        """The name of a new rule."""
        self._num_rules += 1
        if self._num_rules > _MOST_RULES:
            raise RequestError(
                f"parameters: the schema makes more than {_MOST_RULES} rules in the format {self._format_name}; use "
                "references fewer times"
            )
        name = f"{self._name}_{self._num_rules}"
        self.text += f"{name}: {body}\n"
        return name

    def _object(self, schema: Any, depth: int) -> str:
        properties, required, has_others = object_parts(schema, self._root, self._format_name)
        if not properties:
            return '"{" (any_pair ("," any_pair)*)? "}"' if has_others else '"{" "}"'
        first, rest = "", ""  # what may follow where no pair has come, and where one has
        for key, one in reversed(properties.items()):
            if not is_bare_key(key):
                raise RequestError(
                    f"parameters: {key[:80]!r}: the format {self._format_name} has no marks around keys; take a name "
                    "without colons, commas, brackets and white space at its ends"
                )
            pair = f"{json.dumps(f'{key}:')} {self._value(key, one, depth + 1)}"
            if key in required:
                first, rest = f"{pair} {rest}", self._rule(f'"," {pair} {rest}')
            else:
                first = f"({pair} {rest} | {self._rule(first)})" if first else f"({pair} {rest})?"
                rest = self._rule(f'("," {pair})? {rest}')
        return f'"{{" {first} "}}"'

    def _value(self, key: str, schema: Any, depth: int) -> str:
        """The terms of a value. key: the argument that it is of."""
        schema = plain(followed(schema, self._root))
        if schema in ({}, True):
            return "any_value"
        if not isinstance(schema, dict) or depth > _DEEPEST:
            raise RequestError(f"{key}: the format {self._format_name} cannot be held to its schema")
        chosen = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(chosen, list) and not any(isinstance(one, dict | list) for one in chosen):
            return self._rule(" | ".join(map(self._written, chosen)))
        several = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(several, list) and len(schema) == 1:
            return self._rule(" | ".join(self._value(key, one, depth + 1) for one in several))
        given = schema.get("type", "object" if "properties" in schema else [])
        kinds = [str(kind) for kind in (given if isinstance(given, list) else [given])]
        held = {"type"}.union(*(_HELD.get(kind, ()) for kind in kinds))
        if not kinds or not held.issuperset(schema) or not _HELD.keys() >= set(kinds):
            raise RequestError(
                f"{key}: in the format {self._format_name} what may be text has no bounds but a choice, and a list none"
            )
        return self._rule(" | ".join(self._of_kind(key, kind, schema, depth) for kind in kinds))

    def _of_kind(self, key: str, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return f"{self._quote} value"
        own = {name: value for name, value in schema.items() if name in _HELD[kind]}
        if kind == "object":
            return self._object({**own, "type": kind}, depth)
        if kind == "array":
            item = self._value(key, own.get("items", True), depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        return inline_schema({**own, "type": kind})

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            if self._mark in value:
                raise RequestError(
                    f"parameters: {value[:80]!r}: a text has no {self._mark} in the format {self._format_name}"
                )
            return f"{self._quote} {json.dumps(value)} {self._quote}"
        return json.dumps(json.dumps(value))


def any_value(quote: str) -> str:
    """The rules of any value. quote: see `BareRules`; the rule `value` is text with the mark after it."""
    number = inline_schema({"type": "number"})
    value = f'{quote} value | {number} | "true" | "false" | "null"'
    value += ' | "[" (any_value ("," any_value)*)? "]" | "{" (any_pair ("," any_pair)*)? "}"'
    return f'any_value: {value}\nany_pair: /[A-Za-z0-9_.-]{{1,64}}/ ":" any_value\n'

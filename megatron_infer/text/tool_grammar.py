"""A grammar that only calls of given tools match, in the form that the model writes them: for calls that are forced."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_infer.text.tool_parsers import CallFormat

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As models write JSON, and no endless white space."""

NO_PARAMETERS = {"properties": {}, "additionalProperties": False}


def call_grammar(
    form: CallFormat, tools: Sequence[Mapping[str, Any]], *, only_one: bool, special: Mapping[str, int]
) -> str:
    """llguidance's Lark. tools: {"name", "parameters"} each. special: ids of marks that are special tokens."""

    def mark(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    opening, between = "", form.between
    if not form.is_marked:
        one, closing = "body", ""
    elif form.is_listed:
        opening, one, closing = (
            f'{mark(form.opening)} "["',
            "body",
            '"]"' + (mark(form.closing) if form.closing else ""),
        )
    else:
        one, closing = f'{mark(form.opening)} "\\n" body "\\n" {mark(form.closing)}', ""
    more = "" if only_one else f" ({json.dumps(between)} call)*"
    schema = json.dumps(_schema(form, tools)).replace("::=", "::\\u003d")  # which would be read as GBNF
    return f"start: {opening} call{more} {closing}\ncall: {one}\nbody: %json {schema}\n"


def _schema(form: CallFormat, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one call: of any of the tools. Every tool's schema is moved to $defs, its references with it."""
    kinds, definitions = [], {}
    for place, tool in enumerate(tools):
        name = f"tool_{place}"
        parameters = NO_PARAMETERS if tool.get("parameters") is None else tool["parameters"]
        definitions[name] = _moved({"type": "object", **parameters}, f"#/$defs/{name}")
        properties = {"name": {"const": tool["name"]}, form.key: {"$ref": f"#/$defs/{name}"}}
        required = ["name", form.key]
        kinds.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    return {"x-guidance": SPACING, "$defs": definitions, "anyOf": kinds}


def _moved(schema: Any, to: str) -> Any:
    """A schema whose root is at `to` from now on."""
    if isinstance(schema, dict):
        return {
            key: to + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, to)
            for key, value in schema.items()
        }
    return [_moved(item, to) for item in schema] if isinstance(schema, list) else schema

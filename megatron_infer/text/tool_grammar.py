"""Grammars that hold tool calls to their schemas, in the model's own format: calls only, calls or a form, or calls
within free text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.text.grammar import inline_schema, lark_of
from megatron_infer.text.json_schema import plain
from megatron_infer.text.tool_parsers import CallFormat

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as models write it, without unbounded white space."""
COMPACT = {"whitespace_flexible": False}

NO_PARAMETERS = {"properties": {}, "additionalProperties": False}


def call_grammar(
    call_format: CallFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    only_one: bool,
    special: Mapping[str, int],
    form: StructuredOutput | None = None,
) -> str:
    """The grammar in llguidance's Lark.

    tools: {"name", "parameters"} each. special: ids of marks that are special tokens. form: what the text may be
    instead of calls. JSON of the form and of calls has the same white space: where calls have no mark, the text
    becomes one or the other only after some of it.
    Raises RequestError for a form that no text meets.
    """

    def mark(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    opening, between = "", call_format.between
    if not call_format.is_marked:
        one, closing = "body", ""
    elif call_format.is_listed:
        opening, one, closing = (
            f'{mark(call_format.opening)} "["',
            "body",
            '"]"' + (mark(call_format.closing) if call_format.closing else ""),
        )
    else:
        one, closing = f'{mark(call_format.opening)} "\\n" body "\\n" {mark(call_format.closing)}', ""
    more = "" if only_one else f" ({json.dumps(between)} call)*"
    spacing = COMPACT if form is not None and form.compact else SPACING
    start = "" if form is None else f"start: calls | form\nform: %lark {{\n{lark_of(form, spacing)}\n}}\n"
    calls = f"{'start' if form is None else 'calls'}: {opening} call{more} {closing}\n"
    return f"{start}{calls}call: {one}\n{_body(call_format, tools, spacing)}"


def text_and_call_grammar(
    call_format: CallFormat, tools: Sequence[Mapping[str, Any]], *, special: Mapping[str, int]
) -> str:
    """The grammar of any text in which what follows the opening mark is a call of one of the tools.

    The format must be marked. tools, special: see `call_grammar`.
    """
    assert call_format.is_marked, call_format.name

    def mark(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    opening, closing = call_format.opening, mark(call_format.closing) if call_format.closing else ""
    listed = f'"[" body ({json.dumps(call_format.between)} body)* "]"'
    inner = listed if call_format.is_listed else '"\\n" body "\\n"'
    # Text ends lazily at the mark, so that the mark is never part of the text.
    head = f"call: TEXT {mark(opening)}" if opening in special else f"head[lazy]: TEXT {mark(opening)}\ncall: head"
    text = "start: call* TEXT\nTEXT: /(.|\\n)*/\n"
    return f"{text}{head} {inner} {closing}\n{_body(call_format, tools)}"


def _body(call_format: CallFormat, tools: Sequence[Mapping[str, Any]], spacing: Mapping[str, Any] = SPACING) -> str:
    """The rule of one call's JSON."""
    return f"body: {inline_schema({'x-guidance': spacing, **_schema(call_format, tools)})}\n"


def _schema(call_format: CallFormat, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON schema of one call of any tool. Each tool's schema is moved to $defs, with its references."""
    kinds, definitions = [], {}
    for place, tool in enumerate(tools):
        name = f"tool_{place}"
        definitions[name] = _moved(plain(arguments_schema(tool.get("parameters"))), f"#/$defs/{name}")
        properties = {"name": {"const": tool["name"]}, call_format.key: {"$ref": f"#/$defs/{name}"}}
        required = ["name", call_format.key]
        kinds.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    return {"$defs": definitions, "anyOf": kinds}


def arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The JSON schema of a tool's arguments; None: it takes none."""
    return {"type": "object", **(NO_PARAMETERS if parameters is None else parameters)}


def _moved(schema: Any, to: str) -> Any:
    """The schema with its references changed as if its root were at `to`."""
    if isinstance(schema, dict):
        return {
            key: to + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, to)
            for key, value in schema.items()
        }
    return [_moved(item, to) for item in schema] if isinstance(schema, list) else schema

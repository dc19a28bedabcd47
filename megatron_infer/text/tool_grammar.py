"""Grammars that hold tool calls to their schemas, in the model's own format: calls only, calls or a form, or calls
within free text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.errors import RequestError
from megatron_infer.text.bare_grammar import BareRules, any_value, object_parts
from megatron_infer.text.grammar import inline_schema, lark_of
from megatron_infer.text.json_schema import plain
from megatron_infer.text.named_calls import followed, kinds_of
from megatron_infer.text.tool_call_formats import CallFormat, FieldMarks, NamedFormat

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
    Raises RequestError for a form that no text meets, and for text within marks that cannot be held to its schema.
    """
    marks = _Marks(call_format, special)
    spacing = COMPACT if form is not None and form.compact else SPACING
    opening, one, closing = marks.around_calls()
    more = "" if only_one or marks.ends_turn else f" ({json.dumps(call_format.between)} call)*"
    start = "" if form is None else f"start: calls | form\nform: %lark {{\n{lark_of(form, spacing)}\n}}\n"
    calls = f"{'start' if form is None else 'calls'}: {opening} call{more} {closing}\n"
    return f"{start}{calls}call: {one}\n{marks.body(tools, spacing)}"


def text_and_call_grammar(
    call_format: CallFormat, tools: Sequence[Mapping[str, Any]], *, special: Mapping[str, int]
) -> str:
    """The grammar of any text in which what follows the opening mark is a call of one of the tools.

    The format must be marked. tools, special: see `call_grammar`.
    """
    assert call_format.holds_strict, call_format.name
    marks = _Marks(call_format, special)
    # Text ends lazily at the mark, so that the mark is never part of the text.
    text = "start: call* TEXT\nTEXT: /(.|\\n)*/\n"
    inner, closing = marks.after_opening()
    return f"{text}{marks.text_until(call_format.openings[0], 'head')}call: head {inner} {closing}\n{marks.body(tools)}"


class _Marks:
    """The rules of a format's marks, of which some are special tokens."""

    def __init__(self, call_format: CallFormat, special: Mapping[str, int]) -> None:
        self._format = call_format
        self._named = call_format if isinstance(call_format, NamedFormat) else None
        self._special = special
        self._split = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None

    @property
    def ends_turn(self) -> bool:
        return self._named is not None and self._named.ends_turn

    def _mark(self, text: str) -> str:
        """A mark as terms; "": nothing."""
        found = [] if self._split is None else list(self._split.finditer(text))
        terms, at = [], 0
        for one in found:
            terms += [json.dumps(text[at : one.start()])] * (one.start() > at) + [f"<[{self._special[one[0]]}]>"]
            at = one.end()
        return " ".join(terms + [json.dumps(text[at:])] * (at < len(text)))

    def text_until(self, mark: str, name: str) -> str:
        """The rule `name` of any text up to a mark and the mark."""
        if self._split is None or self._split.search(mark) is None:
            return f"{name}[lazy]: TEXT {json.dumps(mark)}\n"
        return f"{name}: TEXT {self._mark(mark)}\n"

    def around_calls(self) -> tuple[str, str, str]:
        """(before all calls, one call, after all calls) where nothing but calls comes."""
        one = self._format
        if not one.is_marked:
            return "", "body", ""
        opening, closing = self._mark(one.opening), self._mark(one.closing)
        if self._named is not None:
            return (opening, "body", closing) if self._named.is_section else ("", f"{opening} body {closing}", "")
        if one.is_listed:
            return f'{opening} "["', "body", f'"]" {closing}'
        return "", f'{opening} "\\n" body "\\n" {closing}', ""

    def after_opening(self) -> tuple[str, str]:
        """(calls, what closes them) after the opening mark."""
        one = self._format
        listed = f"body ({json.dumps(one.between)} body)*"
        if self._named is not None:
            _, _, space = one.opening.partition(one.openings[0])  # white space that follows the mark
            inner = f"{self._mark(space)} {listed if self._named.is_section else 'body'}"
        else:
            inner = f'"[" {listed} "]"' if one.is_listed else '"\\n" body "\\n"'
        return inner, self._mark(one.closing)

    def body(self, tools: Sequence[Mapping[str, Any]], spacing: Mapping[str, Any] = SPACING) -> str:
        """The rule `body` of one call of any tool."""
        if self._named is None:
            schema = _schema(self._format, tools)
            return f"body: {inline_schema({'x-guidance': spacing, **schema})}\n"
        named, rules, kinds = self._named, [], []
        tail = "" if named.ends_turn else self._mark(named.tail)
        for place, tool in enumerate(tools):
            name = f"functions.{tool['name']}:" if named.has_ids else tool["name"]
            number = " /[0-9]{1,4}/" if named.has_ids else ""
            head = f"{self._mark(named.before)} {json.dumps(name)}{number} {self._mark(named.after[0])}"
            rules.append(f"tool_{place}: {head} arguments_{place} {tail}\n")
            kinds.append(f"tool_{place}")
            schema = arguments_schema(tool.get("parameters"))
            if named.quote:
                mark = self._mark(named.quote)
                bare = BareRules(f"arguments_{place}", schema, named.quote, mark, named.name)
                rules.append(bare.text)
            elif named.fields is None:
                inner = inline_schema({"x-guidance": spacing, **plain(schema)})
                rules.append(f"arguments_{place}: {inner}\n")
            else:
                rules.append(self._fields(named.fields, schema, f"arguments_{place}"))
        return f"body: {' | '.join(kinds)}\n{''.join(rules)}{self._text_rules()}"

    def _text_rules(self) -> str:
        if self._named is not None and self._named.quote:
            text = "VALUE: /(.|\\n)*/\n" + self.text_until(self._named.quote, "value").replace("TEXT", "VALUE")
            return f"{text}{any_value(self._mark(self._named.quote))}"
        if self._named is None or self._named.fields is None:
            return ""
        marks, before = self._named.fields, f"{self._mark(self._named.fields.before)} /[A-Za-z0-9_.-]{{1,64}}/"
        kinds = [f"{before} {self._mark(marks.after_key)} {self._mark(marks.before_value)} value"]
        if marks.other:
            any_json = inline_schema({"x-guidance": SPACING})
            kinds.append(f"{before} {self._mark(marks.other)} {any_json} {self._mark(marks.after_value)}")
        text = "VALUE: /(.|\\n)*/\n" + self.text_until(marks.after_value, "value").replace("TEXT", "VALUE")
        return f"{text}any_field: {' | '.join(kinds)}\n"

    def _fields(self, marks: FieldMarks, root: Mapping[str, Any], name: str) -> str:
        """The rule of the arguments of one tool: its properties in their order, each that is not required or not.

        Raises RequestError for a schema that fields cannot be held to.
        """
        properties, required, more = object_parts(root, root, self._format.name)
        if not properties:
            return f"{name}: {'any_field*' if more is not False else ''}\n"
        held = plain(root)
        terms, shared = [], {key: held[key] for key in ("$defs", "definitions") if key in held}
        for key, one in properties.items():
            after_key, value = marks.after_key, self._value(key, one, root)
            if value is None:
                after_key = marks.other or after_key
                inner = {"x-guidance": SPACING, **shared, **one} if isinstance(one, dict) else {}
                value = f"{inline_schema(inner)} {self._mark(marks.after_value)}"
            term = f"{self._mark(marks.before)} {json.dumps(key)} {self._mark(after_key)} "
            term += f"{self._mark(marks.before_value)} {value}"
            terms.append(term if key in required else f"({term})?")
        return f"{name}: {' '.join(terms)}\n"

    def _value(self, key: str, schema: Any, root: Mapping[str, Any]) -> str | None:
        """The terms of a value that may be text; None: it is JSON. Raises RequestError for text with bounds."""
        assert self._named is not None and self._named.fields is not None
        kinds, schema = kinds_of(schema, root), plain(followed(schema, root))
        if kinds is not None and "string" not in kinds:
            return None
        chosen = (
            schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, dict) else None
        )
        if kinds == {"string"} and isinstance(chosen, list):
            texts = " | ".join(json.dumps(one) for one in chosen)
            return f"({texts}) {self._mark(self._named.fields.after_value)}"
        if not _has_no_bounds(schema):
            raise RequestError(f"{key}: in the format {self._format.name} what may be text has no bounds but a choice")
        return "value"


def _has_no_bounds(schema: Any) -> bool:
    """Whether a schema allows everything, or all values of its types."""
    if not isinstance(schema, dict):
        return schema is True
    several = schema.get("anyOf", schema.get("oneOf", []))
    return (
        schema.keys() <= {"type", "anyOf", "oneOf"} and isinstance(several, list) and all(map(_has_no_bounds, several))
    )


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

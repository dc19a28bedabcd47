"""How families of models write tool calls: one row a format.

Calls are JSON objects that hold their names (`CallFormat`), or a name between marks with arguments after it
(`NamedFormat`): one JSON object, or a field of marks for each argument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """Calls as JSON objects after a mark, or without one."""

    name: str
    opening: str
    """The mark before calls."""
    closing: str = ""
    """The mark after calls; "": there is none."""
    shown: tuple[str, ...] = ()
    """Texts that a chat template of the format has, all of them; (): its opening mark."""
    is_marked: bool = True
    """False: calls may also begin the text without a mark; then only the names of given tools make a call."""
    is_listed: bool = False
    """Calls are written as a JSON list."""
    key: str = "arguments"
    """The JSON key of the arguments."""
    takes_bare_names: bool = False
    """NAME{...} and NAME[ARGS]{...} after the mark are calls too."""
    id_length: int | None = None
    """Letters and digits of a call's id, where templates require a fixed number."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.opening, self.closing)

    @property
    def holds_strict(self) -> bool:
        """Whether a grammar can hold calls to their schemas where the text may have none."""
        return self.is_marked

    @property
    def openings(self) -> tuple[str, ...]:
        """Marks at which text ends and calls begin."""
        return (self.opening,)

    @property
    def between(self) -> str:
        """Text between two calls."""
        if self.is_listed:
            return ", "
        return "; " if self.key == "parameters" else "\n"

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """The text of calls, each given as (name, arguments)."""
        texts = [json.dumps({"name": name, self.key: values}, ensure_ascii=False) for name, values in calls]
        if self.is_listed:
            return f"{self.opening}[{self.between.join(texts)}]{self.closing}"
        if self.is_marked:
            texts = [f"{self.opening}\n{text}\n{self.closing}" for text in texts]
        return self.between.join(texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldMarks:
    """Marks around an argument's name and value, as they are written."""

    before: str
    after_key: str
    before_value: str = ""
    after_value: str
    has_lines: bool = False
    """A line break after the name and one before the last mark are no part of the value."""
    other: str = ""
    """The mark after the name of an argument that is JSON; "": the tool's schema tells what is text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFormat(CallFormat):
    """Calls that write their name between marks. White space around marks is free where calls are read."""

    before: str = ""
    """The mark before a call's name."""
    after: tuple[str, ...]
    """Marks after the name: the first is written, each is read."""
    fields: FieldMarks | None = None
    """None: the arguments are one JSON object."""
    quote: str = ""
    """Arguments are an object whose keys are bare and whose texts stand between two of this mark; "": see `fields`."""
    tail: str = ""
    """The mark after a call."""
    joint: str = "\n"
    is_section: bool = False
    """The opening and closing marks stand around all calls, not around each."""
    has_ids: bool = False
    """The name is written functions.NAME:NUMBER, which is also the call's id."""
    ends_turn: bool = False
    """The tail ends the model's turn."""
    other_openings: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    """Marks outside calls that are no content."""

    @property
    def marks(self) -> tuple[str, ...]:
        fields = self.fields
        inner = () if fields is None else (fields.before, fields.after_key, fields.before_value, fields.after_value)
        outer = (self.opening, *self.other_openings, self.closing, *self.dropped)
        return (*outer, self.before, *self.after, self.tail, self.quote, *inner)

    @property
    def holds_strict(self) -> bool:
        return not self.ends_turn  # its marks begin other texts, too

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(mark.strip() for mark in (self.opening, *self.other_openings))

    @property
    def between(self) -> str:
        return self.joint

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        texts = []
        for number, (name, values) in enumerate(calls):
            written = f"functions.{name}:{number}" if self.has_ids else name
            texts.append(f"{self.before}{written}{self.after[0]}{self._arguments(values)}{self.tail}")
        if self.is_section:
            return f"{self.opening}{self.joint.join(texts)}{self.closing}"
        return self.joint.join(f"{self.opening}{text}{self.closing}" for text in texts)

    def _arguments(self, values: Any) -> str:
        if self.quote:
            return bare_text(values, self.quote)
        if self.fields is None or not isinstance(values, Mapping):
            return json.dumps(values, ensure_ascii=False)
        written, marks = "", self.fields
        for key, value in values.items():
            is_text = isinstance(value, str)
            after_key = marks.other if marks.other and not is_text else marks.after_key
            text = value if is_text else json.dumps(value, ensure_ascii=False)
            written += f"{marks.before}{key}{after_key}{marks.before_value}{text}{marks.after_value}"
        return written


def bare_text(value: Any, quote: str) -> str:
    """JSON with bare keys, and texts between two `quote`."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{bare_text(one, quote)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(bare_text(one, quote) for one in value)}]"
    return json.dumps(value)


FORMATS: dict[str, CallFormat] = {}
"""Formats by name; `register` adds to them."""


def register(one: CallFormat) -> CallFormat:
    assert one.name not in FORMATS, f"a format {one.name} is registered already"
    FORMATS[one.name] = one
    return one


_ARGUMENTS = {
    "before": "<arg_key>",
    "after_key": "</arg_key>\n",
    "before_value": "<arg_value>",
    "after_value": "</arg_value>\n",
}
_DSML = "｜DSML｜"

# The order is that in which a chat template is asked: formats with more marks come before those with fewer.
for _row in (
    NamedFormat(
        name="qwen3_coder",
        shown=("<tool_call>", "<function="),
        opening="<tool_call>\n",
        before="<function=",
        after=(">\n",),
        fields=FieldMarks(before="<parameter=", after_key=">\n", after_value="\n</parameter>\n", has_lines=True),
        tail="</function>\n",
        closing="</tool_call>",
    ),
    NamedFormat(
        name="hunyuan",
        shown=("<tool_calls>", "<tool_sep>"),
        opening="<tool_calls>\n",
        before="<tool_call>",
        after=("<tool_sep>\n",),
        fields=FieldMarks(**_ARGUMENTS),
        tail="</tool_call>\n",
        joint="",
        closing="</tool_calls>",
        is_section=True,
    ),
    NamedFormat(
        name="glm45",
        shown=("<tool_call>", "<arg_key>"),
        opening="<tool_call>",
        after=("\n",),
        fields=FieldMarks(**_ARGUMENTS),
        closing="</tool_call>",
    ),
    NamedFormat(
        name="minimax_m2",
        shown=("minimax:tool_call",),
        opening="<minimax:tool_call>\n",
        before='<invoke name="',
        after=('">\n',),
        fields=FieldMarks(before='<parameter name="', after_key='">', after_value="</parameter>\n"),
        tail="</invoke>\n",
        joint="",
        closing="</minimax:tool_call>",
        is_section=True,
    ),
    *(
        NamedFormat(
            name=name,
            shown=(_DSML, section),
            opening=f"<{_DSML}{section}>\n",
            before=f'<{_DSML}invoke name="',
            after=('">\n',),
            fields=FieldMarks(
                before=f'<{_DSML}parameter name="',
                after_key='" string="true">',
                other='" string="false">',
                after_value=f"</{_DSML}parameter>\n",
            ),
            tail=f"</{_DSML}invoke>\n",
            joint="",
            closing=f"</{_DSML}{section}>",
            is_section=True,
        )
        for name, section in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    ),
    *(
        NamedFormat(name=name, opening=opening, before="call:", after=("",), quote=quote, joint="", closing=closing)
        for name, opening, quote, closing in (
            ("gemma4", "<|tool_call>", '<|"|>', "<tool_call|>"),
            ("functiongemma", "<start_function_call>", "<escape>", "<end_function_call>"),
        )
    ),
    NamedFormat(
        name="deepseek_v3",
        shown=("<｜tool▁calls▁begin｜>", "```json"),
        opening="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        after=("\n```json\n",),
        tail="\n```<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
        is_section=True,
    ),
    NamedFormat(
        name="deepseek_v31",
        shown=("<｜tool▁calls▁begin｜>",),
        opening="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>",
        after=("<｜tool▁sep｜>",),
        tail="<｜tool▁call▁end｜>",
        joint="",
        closing="<｜tool▁calls▁end｜>",
        is_section=True,
    ),
    NamedFormat(
        name="kimi_k2",
        opening="<|tool_calls_section_begin|>",
        before="<|tool_call_begin|>",
        after=("<|tool_call_argument_begin|>",),
        tail="<|tool_call_end|>",
        joint="",
        closing="<|tool_calls_section_end|>",
        is_section=True,
        has_ids=True,
    ),
    NamedFormat(
        name="gpt_oss",
        shown=("<|channel|>commentary",),
        opening="<|channel|>commentary to=functions.",
        other_openings=("to=functions.",),
        after=(
            " <|constrain|>json<|message|>",
            "json<|message|>",
            "<|message|>",
            "<|channel|>commentary <|constrain|>json<|message|>",
            "<|channel|>commentary json<|message|>",
            "<|channel|>commentary<|message|>",
        ),
        tail="<|call|>",
        ends_turn=True,
        dropped=("<|channel|>commentary<|message|>", "<|channel|>final<|message|>", "<|start|>assistant", "<|end|>"),
    ),
    CallFormat(name="hermes", opening="<tool_call>", closing="</tool_call>"),
    CallFormat(name="mistral", opening="[TOOL_CALLS]", is_listed=True, takes_bare_names=True, id_length=9),
    CallFormat(name="granite", opening="<|tool_call|>", is_listed=True),
    CallFormat(name="hunyuan_a13b", opening="<tool_calls>", closing="</tool_calls>", is_listed=True),
    CallFormat(name="nemotron", opening="<TOOLCALL>", closing="</TOOLCALL>", is_listed=True),
    CallFormat(name="llama3_json", opening="<|python_tag|>", is_marked=False, key="parameters"),
    CallFormat(name="json", opening="```json", closing="```", is_marked=False),
):
    register(_row)

HERMES = FORMATS["hermes"]


def format_of(template: str | None, *, knows_tools: bool) -> CallFormat | None:
    """The format that a chat template shows to the model; None: not one of FORMATS. HERMES if it has no tools."""
    if template is None or not knows_tools:
        return HERMES
    for one in FORMATS.values():
        if one.name != "json" and all(text in template for text in one.shown or (one.opening,)):
            return one
    return FORMATS["llama3_json"] if "ipython" in template and "parameters" in template else None

"""Tool calls in text: every way of cutting a text gives the same message, and content has no mark."""

from __future__ import annotations

import json
import random

import pytest

from megatron_infer.text.named_calls import call_parser
from megatron_infer.text.tool_call_formats import FORMATS, NamedFormat, format_of

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "near": {"type": ["string", "null"]},
    "share": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
    "on": {"enum": ["Monday", "Friday"]},
    "place": {"$ref": "#/$defs/place"},
}
TOOLS = {"get_weather": {"type": "object", "properties": PROPERTIES}, "add": {}, "f": {}}
VALUES = {"city": 'a "b"\n</c>\n', "days": 3, "near": "x", "share": True, "on": "Friday", "place": {"a": [1, "</d>"]}}


def message(name, pieces, tools=TOOLS, holds_calls=False):
    """(content, [(name, arguments), ...]) of a text that arrives in these pieces and ends."""
    parser = call_parser(FORMATS[name], tools, holds_calls=holds_calls)
    content, calls = "", []
    deltas = [piece for text in pieces for piece in parser.feed(text)] + parser.finish()
    for delta in deltas:
        if delta.call is None:
            assert delta.content and delta.name is None and not delta.arguments
            content += delta.content
        elif delta.name is not None:
            assert delta.call == len(calls), "calls begin in their order"
            calls.append([delta.name, delta.arguments])
        else:
            assert delta.call == len(calls) - 1 and delta.arguments, "arguments follow their name"
            calls[-1][1] += delta.arguments
    assert parser.num_calls == len(calls)
    assert not holds_calls or parser.num_whole == len(calls), "what was held back comes complete"
    return content, [tuple(call) for call in calls]


ADD = '{"name": "add", "arguments": {"a": 1,  "b": [2, {"c": "]}"}]}}'
ADD_ARGUMENTS = '{"a": 1,  "b": [2, {"c": "]}"}]}'
QUOTE = r'{"arguments": {"text": "say \"</tool_call>\" \\"}, "type": "function", "name": "f"}'
QUOTE_ARGUMENTS = r'{"text": "say \"</tool_call>\" \\"}'
CASES = [
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", "", [("add", ADD_ARGUMENTS)]),
    ("hermes", f"I look.\n\n<tool_call>{QUOTE}</tool_call> \n", "I look.", [("f", QUOTE_ARGUMENTS)]),
    ("hermes", f"<tool_call>{ADD}</tool_call>\n<tool_call>\n{QUOTE}\n</tool_call>\nSo it is. ", "So it is. ",
     [("add", ADD_ARGUMENTS), ("f", QUOTE_ARGUMENTS)]),
    ("hermes", f"<tool_call>[{ADD}, {QUOTE}]</tool_call>", "", [("add", ADD_ARGUMENTS), ("f", QUOTE_ARGUMENTS)]),
    ("hermes", f"<tool_call>{ADD}\n{QUOTE}</tool_call>", "", [("add", ADD_ARGUMENTS), ("f", QUOTE_ARGUMENTS)]),
    ("hermes", f"<tool_call>{ADD}}}\n<tool_call>{ADD}", "", [("add", ADD_ARGUMENTS)] * 2),
    ("hermes", "<tool_call>[]</tool_call>None fits.", "None fits.", []),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", r'<tool_call>{"name": "\u0066", "arguments": "{\"a\": \"\u00e9\"}"}</tool_call>', "",
     [("f", '{"a": "é"}')]),
    ("hermes", '<tool_call>{"name": "unheard.of", "parameters": {}}</tool_call>', "", [("unheard.of", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, {"b', "", [("f", '{"a": [1, {"b')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, oh}</tool_call> Yes', "Yes", [("f", "{}")]),
    ("hermes", "x < y, <tool> and <tool_cal", "x < y, <tool> and <tool_cal", []),
    ("hermes", "<tool_call>oh no</tool_call> ", "<tool_call>oh no</tool_call> ", []),
    ("hermes", "<tool_call>\n{}", "<tool_call>\n{}", []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
    ("hermes", '<tool_call> {"name": "f"', '<tool_call> {"name": "f"', []),
    ("hermes", f"{ADD}", ADD, []),
    ("hermes", "", "", []),
    ("hermes", " \n", " \n", []),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "f", "parameters": {"b": "}"}}', "",
     [("add", "{}"), ("f", '{"b": "}"}')]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3_json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    ("llama3_json", ' {"born": 1815} and more', ' {"born": 1815} and more', []),
    ("llama3_json", "Say {\"name\": \"f\"}", "Say {\"name\": \"f\"}", []),
    ("llama3_json", "<|python_tag|>print(5)", "<|python_tag|>print(5)", []),
    ("mistral", f"[TOOL_CALLS] [{ADD}, {QUOTE}]", "", [("add", ADD_ARGUMENTS), ("f", QUOTE_ARGUMENTS)]),
    ("mistral", 'Well. [TOOL_CALLS]get_weather[ARGS]{"city": "{"}[TOOL_CALLS]f{}', "Well.",
     [("get_weather", '{"city": "{"}'), ("f", "{}")]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": {}} ', "", [("f", '{"a": {}}')]),
    ("mistral", "[TOOL_CALLS] no, not [1] of {them}", "[TOOL_CALLS] no, not [1] of {them}", []),
    ("mistral", "[TOOL_CALLS]" + "a" * 300 + "{}", "[TOOL_CALLS]" + "a" * 300 + "{}", []),
    ("mistral", "[TOOL_CALLS]f" + " " * 500 + "{}", "[TOOL_CALLS]f" + " " * 500 + "{}", []),
    ("granite", f"<|tool_call|>[{ADD}]", "", [("add", ADD_ARGUMENTS)]),
    ("json", f"```json\n[{ADD}]\n```\n", "", [("add", ADD_ARGUMENTS)]),
    ("json", f"\n{ADD}\n{ADD}", "", [("add", ADD_ARGUMENTS)] * 2),
    ("json", 'As JSON:\n```json\n{"a": 1}\n```\n', 'As JSON:\n```json\n{"a": 1}\n```\n', []),
    ("json", "[1, 2]", "[1, 2]", []),
    ("nemotron", f"<TOOLCALL>[{ADD}]</TOOLCALL>", "", [("add", ADD_ARGUMENTS)]),
    ("qwen3_coder", "So:\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n\nYork\n</parameter>\n"
     "<parameter=days>\n 3 \n</parameter>\n</function>\n</tool_call>", "So:",
     [("get_weather", '{"city": "New\\n\\nYork", "days": 3}')]),
    ("qwen3_coder", "<tool_call><function=f></function></tool_call> \n<tool_call><function=f>"
     "<parameter=a>[1]</parameter></function></tool_call>", "", [("f", "{}"), ("f", '{"a": [1]}')]),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nBo</para", "",
     [("get_weather", '{"city": "Bo')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\noh</function></tool_call>Yes", "Yes",
     [("f", '{"a": 1')]),
    ("qwen3_coder", "<tool_call>oh</tool_call>", "<tool_call>oh</tool_call>", []),
    ("qwen3_coder", "<tool_call>\n<function=f g>\n", "<tool_call>\n<function=f g>\n", []),
    ("glm45", "<tool_call>get_weather\n<arg_key>near</arg_key>\n<arg_value>null</arg_value>\n<arg_key>share</arg_key>\n"
     "<arg_value>0.5</arg_value>\n</tool_call>", "", [("get_weather", '{"near": null, "share": 0.5}')]),
    ("glm45", "<tool_call>get_weather<arg_key>near</arg_key><arg_value>12</arg_value><arg_key>share</arg_key>"
     "<arg_value>True</arg_value></tool_call>", "", [("get_weather", '{"near": "12", "share": true}')]),
    ("glm45", "<tool_call>f</tool_call>", "", [("f", "{}")]),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>NaN</arg_value></tool_call>", "", [("f", '{"a": "NaN"}')]),
    ("deepseek_v32", '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">"b"'
     "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>", "", [("f", '{"a": "b"}')]),
    ("gpt_oss", " to=functions.fly<|message|>{}", " to=functions.fly<|message|>{}", []),
    ("glm45", "<tool_call>oh no</tool_call>", "<tool_call>oh no</tool_call>", []),
    ("hunyuan", "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>\n</tool_call>\n"
     "<tool_call>add<tool_sep></tool_call>\n</tool_calls> Yes", "Yes", [("f", '{"a": "b"}'), ("add", "{}")]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="on">Monday</parameter>\n'
     '<parameter name="place">{"x": "</y>"}</parameter>\n</invoke>\n<invoke name="f">\n</invoke>\n'
     "</minimax:tool_call>", "",
     [("get_weather", '{"on": "Monday", "place": {"x": "</y>"}}'), ("f", "{}")]),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">5'
     '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     "</｜DSML｜function_calls>", "", [("f", '{"a": "5", "b": 5}')]),
    ("deepseek_v3", "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```"
     "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     "Well.", [("f", '{"a": 1}'), ("add", "{}")]),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\nno",
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\nno", []),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
     '{"a": "<｜tool▁call▁end｜>"}<｜tool▁call▁end｜>'
     "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "",
     [("f", '{"a": "<｜tool▁call▁end｜>"}'), ("add", "{}")]),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f.g:0"
     "<|tool_call_argument_begin|>{}<|tool_call_end|>"
     "<|tool_call_begin|>add:1<|tool_call_argument_begin|> {\"a\":1} <|tool_call_end|><|tool_calls_section_end|>", "",
     [("f.g", "{}"), ("add", '{"a":1}')]),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>None.", "None.", []),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f"
     "<|tool_call_argument_begin|>{}", "", [("f", "{}")]),
    ("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">[5]'
     "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>", "", [("f", '{"a": [5]}')]),
    ("hunyuan_a13b", f"So.\n<tool_calls>[{ADD}, {QUOTE}]</tool_calls>", "So.",
     [("add", ADD_ARGUMENTS), ("f", QUOTE_ARGUMENTS)]),
    ("gemma4", 'I look.<|tool_call>call:get_weather{city:<|"|>New\n"York", {a:1}<|"|>,days:3,place:{a:[1,<|"|>b<|"|>,],'
     '<|"|>c d<|"|>:null}}<tool_call|><|tool_call>call:f{}<tool_call|>', "I look.",
     [("get_weather", r'{"city": "New\n\"York\", {a:1}", "days": 3, "place": {"a": [1, "b"], "c d": null}}'),
      ("f", "{}")]),
    ("gemma4", "<|tool_call>call:f{ a : New York , b : [ -1.5e3 , nan, 01,true ] ,}<tool_call|>Yes", "Yes",
     [("f", '{"a": "New York", "b": [-1.5e3, "nan", "01", true]}')]),
    ("gemma4", '<|tool_call>call:f{a:<|"|>b <|', "", [("f", '{"a": "b ')]),
    ("gemma4", "<|tool_call>call:f{a:tr", "", [("f", '{"a": ')]),
    ("gemma4", "<|tool_call>call:f{a:[1}}<tool_call|>Yes", "Yes", [("f", '{"a": [1')]),
    ("gemma4", "<|tool_call>call:f{a:}<tool_call|>Yes", "Yes", [("f", '{"a": ')]),
    ("gemma4", "<|tool_call>call:f{:1}<tool_call|>Yes", "Yes", [("f", "{")]),
    ("gemma4", "<|tool_call>call:f{" + "a" * 1001 + ":1}<tool_call|>Yes", "Yes", [("f", "{")]),
    ("gemma4", "<|tool_call>call:f a{}<tool_call|>", "<|tool_call>call:f a{}<tool_call|>", []),
    ("gemma4", "<|tool_call>f{}", "<|tool_call>f{}", []),
    ("functiongemma", "<start_function_call>call:get_weather{city:<escape>Bonn<escape>}<end_function_call>", "",
     [("get_weather", '{"city": "Bonn"}')]),
    ("gpt_oss", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
     '<|constrain|>json<|message|>{"a": 1}<|call|>', "I look.", [("f", '{"a": 1}')]),
    ("gpt_oss", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', "", [("f", '{"a": 1}')]),
    ("gpt_oss", "<|channel|>final<|message|>It rains to=day.", "It rains to=day.", []),
]  # fmt: skip


@pytest.mark.parametrize(("format_name", "text", "content", "calls"), CASES)
def test_every_way_of_cutting_a_text_gives_the_same_message(format_name, text, content, calls):
    assert message(format_name, [text]) == (content, calls)
    assert message(format_name, list(text)) == (content, calls)
    for at in range(len(text)):
        assert message(format_name, [text[:at], text[at:]]) == (content, calls), (text[:at], text[at:])
    draw = random.Random(text)
    for _ in range(30):
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(1, 8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert message(format_name, pieces) == (content, calls), pieces


@pytest.mark.parametrize("rounds", [25, pytest.param(400, marks=pytest.mark.long)])
def test_any_text_at_all_is_the_same_message_for_every_cut(rounds):
    """Texts of the formats' own marks and fragments in any order: mostly no calls, never an error."""
    draw = random.Random(rounds)
    marks = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json", "```"]
    named = [mark for one in FORMATS.values() if isinstance(one, NamedFormat) for mark in one.marks if mark]
    words = ["f", "add", "null", '"name"', '"arguments"', " ", "\n", ",", ":", "; ", "[", "]", "{", "}", '"', "\\"]
    fragments = [*marks, *words, ADD, QUOTE]
    num_calls = 0
    for _ in range(rounds):
        text = "".join(draw.choices(fragments, k=draw.randrange(1, 14)))
        text = text[: draw.randrange(len(text) + 1)] if draw.random() < 0.3 else text
        own = draw.choices([*named, *words], k=draw.randrange(1, 14))
        for name, one in FORMATS.items():
            if isinstance(one, NamedFormat):  # a call that is changed somewhere
                kept = own if draw.random() < 0.3 else one.write([("get_weather", VALUES)] * draw.randrange(1, 3))
                pieces = list(kept) if kept is own else list(_cut_up(kept, draw))
                text = "".join(draw.choice(named) if draw.random() < 0.1 else piece for piece in pieces)
            wanted = message(name, [text])
            num_calls += len(wanted[1])
            assert message(name, list(text)) == wanted, (name, text)
            at = draw.randrange(len(text) + 1)
            assert message(name, [text[:at], text[at:]]) == wanted, (name, text, at)
            held = message(name, [text], holds_calls=True)
            assert message(name, list(text), holds_calls=True) == held, (name, text)
            assert isinstance(one, NamedFormat) or len(held[1]) < len(wanted[1]) or held == wanted
            assert len(held[1]) <= len(wanted[1]) or isinstance(one, NamedFormat)
    assert num_calls > 100


def _cut_up(text, draw):
    while text:
        size = draw.randrange(1, 20)
        yield text[:size]
        text = text[size:]


def test_arguments_stream_as_they_are_written_and_content_does_not_wait():
    parser = call_parser(FORMATS["hermes"], TOOLS)
    assert [piece.content for piece in parser.feed("Let me see")] == ["Let me see"]
    assert [piece.content for piece in parser.feed(" now <")] == [" now"]
    assert parser.feed('tool_call>{"name": "add", "argu') == []
    (name,) = parser.feed('ments": {"a": 1')[:1]
    assert (name.call, name.name) == (0, "add")
    assert [piece.arguments for piece in parser.feed('234, "b"')] == ['234, "b"']


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": [1'),
        ("llama3_json", '{"name": "add", "parameters": {"a": "b}'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": {"b": 1}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1'),
    ],
)
def test_a_cut_call_that_is_held_back_is_text(name, text):
    for pieces in ([text], list(text)):
        assert message(name, pieces, holds_calls=True) == (text, [])
        assert len(message(name, pieces)[1]) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_written_calls_are_read_back_by_every_format(name):
    form, values = FORMATS[name], {"city": "Bonn", "days": 3, "near": None, **VALUES}
    calls = [("get_weather", values), ("add", {}), ("get_weather", {"city": "null"})]
    calls = calls[:1] if isinstance(form, NamedFormat) and form.ends_turn else calls
    content, found = message(name, [form.write(calls)])
    assert content == "" and [(function, json.loads(text)) for function, text in found] == calls


def test_text_within_marks_streams_and_calls_keep_the_ids_that_were_written():
    parser = call_parser(FORMATS["qwen3_coder"], TOOLS)
    parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\nNew")
    assert [piece.arguments for piece in parser.feed(" York\nand ")] == [" York\\nand "]
    parser = call_parser(FORMATS["kimi_k2"], TOOLS)
    (head, *_) = parser.feed(FORMATS["kimi_k2"].write([("f", {})]))
    assert (head.name, head.id) == ("f", "functions.f:0")


@pytest.mark.parametrize(
    ("template", "knows", "expected"),
    [
        (None, False, "hermes"),
        ("{{ messages }}", False, "hermes"),
        ("{{ tools }} within <tool_call></tool_call>", True, "hermes"),
        ("{{ tools }} [TOOL_CALLS]", True, "mistral"),
        ("{{ tools }} <|tool_call|>", True, "granite"),
        ("{{ tools }} <|tool_call>call:", True, "gemma4"),
        ("{{ tools }} <start_function_call>call:", True, "functiongemma"),
        ("{{ tools }} <tool_calls>[", True, "hunyuan_a13b"),
        ("{{ tools }} ｜DSML｜ function_calls, tool_calls", True, "deepseek_v32"),
        ("{{ tools }} ｜DSML｜ tool_calls", True, "deepseek_v4"),
        ("{{ tools }} <|python_tag|>", True, "llama3_json"),
        ('{{ tools }} ipython {"name": function name, "parameters": ...}', True, "llama3_json"),
        ("{{ tools }} <tool_call>\n<function=f>", True, "qwen3_coder"),
        ("{{ tools }} <tool_call>{name}\n<arg_key>", True, "glm45"),
        ("{{ tools }} <tool_calls><tool_call>{name}<tool_sep><arg_key>", True, "hunyuan"),
        ("{{ tools }} {% set toolcall_begin = '<minimax:tool_call>' %}", True, "minimax_m2"),
        ("{{ tools }} <｜tool▁calls▁begin｜> ```json", True, "deepseek_v3"),
        ("{{ tools }} <｜tool▁calls▁begin｜>", True, "deepseek_v31"),
        ("{{ tools }} <|tool_calls_section_begin|>", True, "kimi_k2"),
        ("{{ tools }} <|start|>assistant<|channel|>commentary", True, "gpt_oss"),
        ("{{ tools }} in words of its own", True, None),
    ],
)
def test_format_follows_the_template(template, knows, expected):
    form = format_of(template, knows_tools=knows)
    assert (None if form is None else form.name) == expected

"""Tool calls in text: every way of cutting a text gives the same message, and content has no mark."""

from __future__ import annotations

import json
import random

import pytest

from megatron_infer.text.tool_parsers import FORMATS, CallParser, format_of

TOOLS = frozenset({"get_weather", "add", "f"})


def message(name, pieces, tools=TOOLS, holds_calls=False):
    """(content, [(name, arguments), ...]) of a text that arrives in these pieces and ends."""
    parser = CallParser(FORMATS[name], tools, holds_calls=holds_calls)
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
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_every_way_of_cutting_a_text_gives_the_same_message(name, text, content, calls):
    assert message(name, [text]) == (content, calls)
    assert message(name, list(text)) == (content, calls)
    for at in range(len(text)):
        assert message(name, [text[:at], text[at:]]) == (content, calls), (text[:at], text[at:])
    draw = random.Random(text)
    for _ in range(30):
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(1, 8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert message(name, pieces) == (content, calls), pieces


def test_any_text_at_all_is_the_same_message_for_every_cut():
    """Texts of the formats' own marks and fragments in any order: mostly no calls, never an error."""
    draw = random.Random(7)
    marks = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json", "```"]
    words = ["f", "add", "null", '"name"', '"arguments"', " ", "\n", ",", ":", "; ", "[", "]", "{", "}", '"', "\\"]
    fragments = [*marks, *words, ADD, QUOTE]
    num_calls = 0
    for _ in range(600):
        text = "".join(draw.choices(fragments, k=draw.randrange(1, 14)))
        text = text[: draw.randrange(len(text) + 1)] if draw.random() < 0.3 else text
        for name in FORMATS:
            wanted = message(name, [text])
            num_calls += len(wanted[1])
            assert message(name, list(text)) == wanted, (name, text)
            at = draw.randrange(len(text) + 1)
            assert message(name, [text[:at], text[at:]]) == wanted, (name, text, at)
            held = message(name, [text], holds_calls=True)
            assert message(name, list(text), holds_calls=True) == held, (name, text)
            assert len(held[1]) <= len(wanted[1]) and (len(held[1]) < len(wanted[1]) or held == wanted)
    assert num_calls > 100


def test_arguments_stream_as_they_are_written_and_content_does_not_wait():
    parser = CallParser(FORMATS["hermes"], TOOLS)
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


def test_written_calls_are_read_back_by_every_format():
    calls = [json.dumps({"name": "add", form_key: {"a": 1}}) for form_key in ("arguments", "arguments")]
    for form in FORMATS.values():
        own = [call.replace("arguments", form.key) for call in calls]
        assert message(form.name, [form.write(own)]) == ("", [("add", '{"a": 1}')] * 2)


@pytest.mark.parametrize(
    ("template", "knows", "name"),
    [
        (None, False, "hermes"),
        ("{{ messages }}", False, "hermes"),
        ("{{ tools }} within <tool_call></tool_call>", True, "hermes"),
        ("{{ tools }} [TOOL_CALLS]", True, "mistral"),
        ("{{ tools }} <|tool_call|>", True, "granite"),
        ("{{ tools }} <|python_tag|>", True, "llama3_json"),
        ('{{ tools }} ipython {"name": function name, "parameters": ...}', True, "llama3_json"),
        ("{{ tools }} <tool_call>\n<function=f>", True, None),
        ("{{ tools }} in words of its own", True, None),
    ],
)
def test_format_follows_the_template(template, knows, name):
    form = format_of(template, knows_tools=knows)
    assert (None if form is None else form.name) == name

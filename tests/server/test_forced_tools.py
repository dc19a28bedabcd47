"""Forced tool calls: a model with random weights writes valid ones in every format, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest
from server_case import END, START, client_of, serving, tiny_engine, tokenizer

from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.errors import RequestError
from megatron_infer.server import tool_calls
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.text import tool_call_formats
from megatron_infer.text.grammar import GrammarCache
from megatron_infer.text.named_calls import call_parser
from megatron_infer.text.tool_grammar import call_grammar, text_and_call_grammar

pytest.importorskip("llguidance")

USER = {"role": "user", "content": "Go"}
TURN = {
    "type": "function",
    "function": {
        "name": "turn",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/side"}, "fast": {"type": "boolean"}},
            "required": ["to", "fast"],
            "additionalProperties": False,
            "$defs": {"side": {"enum": ["left", "right"]}},
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
ENDS = [str(END), str(tokenizer().encode("]")[0])]
"""What could end a list of calls."""
NAMED = [name for name, one in tool_call_formats.FORMATS.items() if isinstance(one, tool_call_formats.NamedFormat)]
SPECIAL = tool_call_formats.CallFormat(name="special_mark", opening="<|im_start|>", is_listed=True)


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(max_sequence_length=2048, max_requests=8)


def calls_of(client, **asked):
    """The calls of the whole reply, which must be those of the stream."""
    asked = {"model": "tiny", "messages": [USER], "max_tokens": 400, "seed": 4, **asked}
    choice = client.chat.completions.create(**asked).choices[0]
    found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    streamed: list[list[str]] = []
    for chunk in client.chat.completions.create(stream=True, **asked):
        delta = chunk.choices[0].delta
        assert not delta.content
        for call in delta.tool_calls or ():
            if call.id:
                streamed.append([call.function.name, ""])
            streamed[call.index][1] += call.function.arguments
    assert [tuple(call) for call in streamed] == found and choice.message.content is None
    return found, choice.finish_reason


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "json", "granite", "special_mark", *NAMED])
def test_forced_calls_meet_their_schemas_in_every_format(engine, name, monkeypatch):
    monkeypatch.setitem(tool_call_formats.FORMATS, "special_mark", SPECIAL)
    with (
        serving(engine, tool_call_parser=name, reasoning_parser="deepseek_r1") as case,
        client_of(case) as client,
    ):
        for seed in range(3):
            given = {"tools": [TURN, STOP], "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
            ((function, arguments),), reason = calls_of(client, **given)
            values = json.loads(arguments)
            assert reason == "tool_calls" and function in ("turn", "stop")
            assert function == "stop" or (values["to"] in ("left", "right") and isinstance(values["fast"], bool))
        named = {"type": "function", "function": {"name": "turn"}}
        ((function, arguments),), reason = calls_of(client, tools=[STOP, TURN], tool_choice=named)
        assert function == "turn" and set(json.loads(arguments)) == {"to", "fast"} and reason == "tool_calls"
        one = tool_call_formats.FORMATS[name]
        if isinstance(one, tool_call_formats.NamedFormat) and (one.is_section or one.ends_turn):
            return  # a model with random weights closes what it may
        asked = {"model": "tiny", "messages": [USER], "max_tokens": 600, "logit_bias": dict.fromkeys(ENDS, -100)}
        reply = client.chat.completions.create(tools=[TURN, STOP], tool_choice="required", **asked)
        several = [call.function for call in reply.choices[0].message.tool_calls]
        assert len(several) > 2 and all(json.loads(call.arguments) is not None for call in several[:-1])


def test_of_a_forced_call_that_is_cut_nothing_is_content(engine):
    with serving(engine) as case:

        def choices(**body):
            body |= {"messages": [USER], "tools": [TURN], "seed": 4, "tool_choice": "required"}
            reply = case.http.post("/v1/chat/completions", json={"max_tokens": 200, **body}).json()["choices"][0]
            return reply["message"]["content"], reply["message"].get("tool_calls", []), reply["finish_reason"]

        head = len('<tool_call>\n{"name": "turn", "arguments": ')
        for length in range(1, head + 3, 3):
            content, calls, reason = choices(max_tokens=length)
            assert not content and reason == "length" and bool(calls) == (length > head)
        assert choices(stop="fast") == ("", [], "stop")
        content, (call,), reason = choices(stop="</tool_call>")
        assert content is None and json.loads(call["function"]["arguments"]) and reason == "tool_calls"
        asked = {"logit_bias": dict.fromkeys(ENDS, -100), "stop": ["\n<tool_call>\n{"]}
        content, (call,), reason = choices(**asked)
        assert content is None and json.loads(call["function"]["arguments"]) and reason == "tool_calls"


@pytest.mark.long
def test_strict_tools_are_held_to_their_schemas_where_the_model_chooses_to_call(engine, monkeypatch):
    monkeypatch.setitem(tool_call_formats.FORMATS, "special_mark", SPECIAL)
    with serving(engine, tool_call_parser="special_mark", reasoning_parser="deepseek_r1") as case:

        def asked(bias, **body):
            body |= {"tools": [TURN, STOP], "max_tokens": 300, "seed": 3, "logit_bias": {str(START): bias}}
            reply = case.http.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200 and "x-ignored-fields" not in reply.headers, reply.text
            return reply.json()["choices"][0]["message"]

        free = asked(-100, messages=[USER])
        assert "tool_calls" not in free and free["reasoning"] == free["reasoning_content"], "any text may come"
        answer = [USER, {"role": "assistant", "content": "</think>I turn."}]
        for call in asked(100, messages=answer, continue_final_message=True)["tool_calls"][:-1]:
            values = json.loads(call["function"]["arguments"])
            name = call["function"]["name"]
            assert (name, set(values)) in (("turn", {"to", "fast"}), ("stop", set()))


@pytest.mark.parametrize("name", ["hermes", "granite", "mistral", *(name for name in NAMED if name != "gpt_oss")])
def test_text_and_calls_match_the_grammar_of_strict_tools_and_other_calls_do_not(name):
    call_format, grammars = tool_call_formats.FORMATS[name], GrammarCache(tokenizer(), 0)
    tools = [TURN["function"], {"name": "free", "parameters": {}}]
    grammar = StructuredOutput(grammar=text_and_call_grammar(call_format, tools, special={}))

    def matches(text):
        matcher = grammars.template(grammar).deep_copy()
        return all(matcher.consume_token(token) for token in tokenizer().encode(text)) and matcher.is_accepting()

    def call(function, arguments):
        return function, arguments

    turn = call("turn", {"to": "left", "fast": True})
    assert matches(f"I write {call_format.openings[0][:-1]} and no call")
    assert matches(f"I look. {call_format.write([turn])} Done.")
    assert matches(call_format.write([turn, call("free", {"any": [1]})]))
    for wrong in (call("turn", {"to": "up", "fast": True}), call("turn", {"to": "left"}), call("fly", {})):
        assert not matches(f"I look. {call_format.write([wrong])}")


FIELDS = [name for name in NAMED if tool_call_formats.FORMATS[name].fields or tool_call_formats.FORMATS[name].quote]


@pytest.mark.parametrize("name", FIELDS)
def test_grammar_and_parser_of_fields_agree(name):
    """What may be text is written as it is, and only calls that are held pass the opening mark."""
    form, grammars = tool_call_formats.FORMATS[name], GrammarCache(tokenizer(), 0)
    properties = {
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Maybe"},
        "any": {},
        "many": {"type": "array", "items": {"type": "string"}},
    }
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}

    def matches(text, grammar):
        matcher = grammars.template(StructuredOutput(grammar=grammar)).deep_copy()
        return all(matcher.consume_token(token) for token in tokenizer().encode(text)) and matcher.is_accepting()

    calls = [("f", {"maybe": "abc", "any": "x y", "many": ["a"]})]
    text = form.write(calls)
    assert matches(text, call_grammar(form, [tool], only_one=True, special={}))
    parser = call_parser(form, {"f": tool["parameters"]})
    deltas = parser.feed(text) + parser.finish()
    assert json.loads("".join(delta.arguments for delta in deltas)) == calls[0][1]
    held = text_and_call_grammar(form, [tool], special={})
    assert matches(f"I look. {text} Done.", held)
    evil = form.write([("evil", {})])
    assert not matches(evil, held) and not matches(evil.replace("\n", ""), held)
    undescribed = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["b"]}}
    asks = call_grammar(form, [undescribed], only_one=True, special={})
    assert matches(form.write([("f", {"a": 1, "b": "x"})]), asks) and not matches(form.write([("f", {"a": 1})]), asks)
    wrong = [{"required": 5}, {"properties": []}, {"$ref": "#/$defs/a", "$defs": {"a": {"minProperties": 1}}}]
    for parameters in [*wrong, {"additionalProperties": {"type": "string"}}, {"anyOf": [{"required": ["a"]}]}]:
        with pytest.raises(RequestError, match="parameters"):
            call_grammar(form, [{"name": "f", "parameters": parameters}], only_one=True, special={})


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
def test_references_that_multiply_and_what_marks_cannot_hold_are_refused_at_once(name):
    kinds = {
        f"k{i}": {"type": "object", "properties": {str(j): {"$ref": f"#/$defs/k{i + 1}"} for j in range(20)}}
        for i in range(6)
    }
    parameters = {"properties": {"a": {"$ref": "#/$defs/k0"}}, "$defs": {**kinds, "k6": {"type": "integer"}}}
    keys = [{"properties": {key: {"type": "integer"}}} for key in ("a:b", "a,b", "{", " a", "")]
    form = tool_call_formats.FORMATS[name]
    marked = {"properties": {"a": {"enum": [f"x{form.quote}y"]}}}
    for wrong, why in [(parameters, "rules"), (marked, "a text has no"), *((one, "marks around keys") for one in keys)]:
        with pytest.raises(RequestError, match=why):
            call_grammar(form, [{"name": "f", "parameters": wrong}], only_one=True, special={})


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_only_allowed_tools_are_called_and_all_are_shown(engine, name):
    """The same by chats and responses."""
    named = {"type": "function", "function": {"name": "right"}}
    tools = [{"type": "function", "function": {"name": "left"}}, named]
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    with serving(engine, tool_call_parser=name) as case:

        def called(mode, **body):
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
            body |= {"messages": [USER], "tools": tools, "tool_choice": choice, "max_tokens": 90}
            reply = case.http.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            shown = case.http.post("/v1/chat/completions", json={**body, "tool_choice": "auto", "max_tokens": 1})
            assert shown.json()["usage"]["prompt_tokens"] == reply.json()["usage"]["prompt_tokens"]
            return [call["function"]["name"] for call in reply.json()["choices"][0]["message"].get("tool_calls", ())]

        assert set(called("required")) == {"right"}
        head = {"<": 100, "\n": 0} if name == "hermes" else {"{": 100}
        bias = {str(tokenizer().encode(text)[0]): value for text, value in head.items()}
        assert set(called("auto", logit_bias=bias)) <= {"right"}
        choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "left"}]}
        body = {"input": "Go", "tools": flat, "max_output_tokens": 90}
        reply = case.http.post("/v1/responses", json={**body, "tool_choice": choice})
        assert {item["name"] for item in reply.json()["output"]} == {"left"}
        assert reply.json()["tool_choice"] == choice
        choice["tools"] = [{"type": "function", "name": "fly"}]
        error = case.http.post("/v1/responses", json={**body, "tool_choice": choice}).json()["error"]
        assert "there is no 'fly' among tools" in error["message"] and error["param"] == "tool_choice"


@pytest.mark.parametrize("name", ["hermes", "granite"])
def test_text_and_allowed_calls_match_the_grammar_and_others_do_not(name):
    call_format = tool_call_formats.FORMATS[name]
    tools, parsed = [{"name": "one"}, {"name": "two"}], SimpleNamespace(sampling={}, ignored=[])
    body = SimpleNamespace(
        tools=msgspec.convert([{"type": "function", "function": tool} for tool in tools], list[tool_calls.Tool]),
        parallel_tool_calls=None,
        tool_choice=msgspec.convert(
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "two"}}]},
            },
            tool_calls.Allowed,
        ),
    )
    rule = tool_calls.ToolRule(tokenizer(), ServerConfig(tool_call_parser=name))
    asyncio.run(rule.apply(body, parsed))
    template = GrammarCache(tokenizer(), 0).template(StructuredOutput(**parsed.structured[1]))
    for function, is_right in (("two", True), ("one", False)):
        matcher = template.deep_copy()
        text = "I call. " + call_format.write([(function, {})])
        assert all(matcher.consume_token(token) for token in tokenizer().encode(text)) is is_right


FORMS = [
    (
        {"json_schema": {"properties": {"name": {"type": "string"}}, "required": ["name"]}},
        '{"name": "Ann"}',
        '{"n": 1}',
    ),
    ({"json_schema": {"const": {"a": [1]}}, "compact": True}, '{"a":[1]}', '{"a": [1]}'),
    ({"json_schema": {"type": "string"}}, '"x <tool"', "x"),
    ({"json_schema": True}, "[null]", "[nul]"),
    ({"json_object": True}, '{"a": "::="}', "[]"),
    ({"regex": r"[a-z<{]{3,9}|\"/\n"}, '"/\n', "<TO"),
    ({"choice": ["yes", "<tool"]}, "<tool", "<tool_"),
    ({"grammar": 'start: "q" r\nr: /a+/ /a/ | "!"'}, "q!", "q"),
    ({"grammar": 'root ::= "p" "q"+ "."'}, "pqq.", "p."),
]


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "granite", "json"])
def test_one_grammar_has_the_form_and_the_calls(name):
    call_format, grammars = tool_call_formats.FORMATS[name], GrammarCache(tokenizer(), 0)
    tools = [TURN["function"], {"name": "free", "parameters": {}}]
    for given, good, bad in FORMS:
        form = StructuredOutput(**given)
        grammar = StructuredOutput(grammar=call_grammar(call_format, tools, only_one=True, special={}, form=form))

        def matches(text, grammar=grammar):
            matcher = grammars.template(grammar).deep_copy()
            return all(matcher.consume_token(token) for token in tokenizer().encode(text)) and matcher.is_accepting()

        assert matches(good) and not matches(bad) and not matches(""), given
        separators = (",", ":") if form.compact else None
        for function, arguments, is_right in (
            ("turn", {"to": "left", "fast": True}, True),
            ("free", {"any": [1]}, True),
            ("turn", {"to": "up", "fast": True}, False),
        ):
            written = call_format.write([(function, arguments)])
            plain = json.dumps({"name": function, call_format.key: arguments})
            written = written.replace(plain, json.dumps(json.loads(plain), separators=separators))
            is_form = not call_format.is_marked and given in [FORMS[place][0] for place in (0, 3, 4)]
            assert matches(written) == (is_right or is_form), given


ANSWER = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_tools_next_to_a_form_give_a_call_or_the_form_by_the_models_choice(engine, name):
    """The same by chats, responses and messages."""
    asked = {"messages": [USER], "max_tokens": 200}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}}
    flat = {"type": "function", **TURN["function"]}
    own = {name: value for name, value in TURN["function"].items() if name != "parameters"}
    messages = {
        "tools": [{**own, "input_schema": TURN["function"]["parameters"]}],
        "output_config": {"format": {"type": "json_schema", "schema": ANSWER}},
    }
    responses = {
        "input": "Go",
        "max_output_tokens": 200,
        "tools": [flat],
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER}},
    }
    with serving(engine, tool_call_parser=name) as case:

        def reply(path, **body):
            found = case.http.post(path, json=body)
            assert found.status_code == 200 and "x-ignored-fields" not in found.headers, found.text
            return found.json()

        def chat(**body):
            choice = reply("/v1/chat/completions", **asked, **form, tools=[TURN], **body)["choices"][0]
            return choice["message"]["content"], choice["message"].get("tool_calls"), choice["finish_reason"]

        def until_both(kinds, kind_of, ask):
            """Replies until there is one of each of two kinds, drawn by the model."""
            replies = []
            while {kind_of(one) for one in replies} != kinds:
                replies.append(ask(len(replies)))
                assert len(replies) < 20, replies
            return replies

        for content, calls, reason in until_both({True, False}, lambda one: bool(one[1]), lambda seed: chat(seed=seed)):
            if calls:
                assert content is None and set(json.loads(calls[0]["function"]["arguments"])) == {"to", "fast"}
                assert reason in ("tool_calls", "length")
            else:
                assert list(json.loads(content)) == ["yes"] and reason == "stop"
        for choice in ("required", {"type": "function", "function": {"name": "turn"}}):
            content, calls, _ = chat(tool_choice=choice, parallel_tool_calls=False)
            assert content is None and json.loads(calls[0]["function"]["arguments"])["to"] in ("left", "right")
        content, calls, _ = chat(tool_choice="none")
        assert calls is None and list(json.loads(content)) == ["yes"]

        blocks = until_both(
            {"text", "tool_use"},
            lambda one: one[0]["type"],
            lambda _: reply("/v1/messages", **asked, **messages)["content"],
        )
        assert all(list(json.loads(one[0]["text"])) == ["yes"] for one in blocks if one[0]["type"] == "text")
        until_both(
            {"message", "function_call"},
            lambda one: one[0]["type"],
            lambda _: reply("/v1/responses", **responses)["output"],
        )


def test_strict_tools_of_a_format_without_a_mark_are_taken_and_listed(engine):
    body = {"messages": [USER], "tools": [TURN], "max_tokens": 2}
    for strict_fields, status in ((False, 200), (True, 400)):
        with serving(engine, tool_call_parser="llama3_json", strict_fields=strict_fields) as case:
            reply = case.http.post("/v1/chat/completions", json=body)
            assert reply.status_code == status
            shown = reply.text if strict_fields else reply.headers["x-ignored-fields"]
            assert "tools[].function.strict" in shown
            assert case.http.post("/v1/chat/completions", json={**body, "tools": [STOP]}).status_code == 200


def test_options_allowed_and_refused_with_forced_calls(engine):
    with serving(engine) as case:

        def refused(**body):
            reply = case.http.post("/v1/chat/completions", json={"messages": [USER], **body})
            assert reply.status_code == 400, reply.text
            return reply.json()["error"]

        named = {"type": "function", "function": {"name": "fly"}}
        assert refused(tools=[TURN], tool_choice=named)["param"] == "tool_choice"
        answer = {"type": "json_object"}
        twice = refused(tools=[STOP], response_format=answer, guided_regex="a")
        assert "another field says" in twice["message"]
        wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}
        assert refused(tools=[wrong], tool_choice="required")["param"] == "tools"
        for part, keyword in (
            ({"type": "array", "uniqueItems": True}, "uniqueItems"),
            ({"not": {"type": "string"}}, "not"),
            ({"propertyNames": {"pattern": "a"}}, "propertyNames"),
        ):
            own = {"name": "unruly", "strict": True, "parameters": {"properties": {"a": part}}}
            for choice in ("required", "auto"):
                for form in ({}, {"response_format": answer}):
                    unruly = {"type": "function", "function": own}
                    error = refused(tools=[STOP, TURN, unruly], tool_choice=choice, **form)
                    wanted = f'tools: unruly: parameters: Unimplemented keys: ["{keyword}"]'
                    assert error["message"] == wanted and error["param"] == "tools"
        large = [
            {"type": "function", "function": {"name": f"f{i}", "parameters": {"enum": ["x" * 900]}}} for i in range(100)
        ]
        assert "tools: grammar has" in refused(tools=large, tool_choice="required")["message"]
        deep: dict = {}
        for _ in range(100):
            deep = {"properties": {"a": deep}}
        nested = {"type": "function", "function": {"name": "f", "parameters": deep}}
        assert "nested deeper" in refused(tools=[nested], tool_choice="required")["message"]
        body = {"messages": [USER], "tools": [TURN], "tool_choice": "none", "response_format": answer, "max_tokens": 5}
        assert case.http.post("/v1/chat/completions", json=body).status_code == 200

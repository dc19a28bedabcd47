"""Forced tool calls: a model with random weights writes valid ones in every format, whole and streamed."""

from __future__ import annotations

import json

import openai
import pytest
from server_case import END, START, serving, tokenizer

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.testing.tiny import tiny_gpt
from megatron_infer.text import tool_parsers
from megatron_infer.text.grammar import GrammarCache
from megatron_infer.text.tool_grammar import text_and_call_grammar

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
SPECIAL = tool_parsers.CallFormat(name="special_mark", opening="<|im_start|>", is_listed=True)


@pytest.fixture(scope="module")
def engine():
    model = tiny_gpt(vocab_size=320, max_sequence_length=1024, init_method_std=0.2)
    config = InferenceConfig(buffer_size_gb=0.02, block_size_tokens=16, max_sequence_length=1024, max_requests=8)
    return DynamicInferenceEngine(model, config, tokenizer=tokenizer())


def calls_of(client, **asked):
    """The calls of the whole reply, which must be those of the stream."""
    asked = {"model": "tiny", "messages": [USER], "max_tokens": 200, "seed": 4, **asked}
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "json", "granite", "special_mark"])
def test_forced_calls_meet_their_schemas_in_every_format(engine, name, monkeypatch):
    monkeypatch.setitem(tool_parsers.FORMATS, "special_mark", SPECIAL)
    with (
        serving(engine, tool_call_parser=name, reasoning_parser="deepseek_r1") as case,
        openai.OpenAI(base_url=f"{case.url}/v1", api_key="none", max_retries=0) as client,
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
        asked = {"model": "tiny", "messages": [USER], "max_tokens": 300, "logit_bias": dict.fromkeys(ENDS, -100)}
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


def test_strict_tools_are_held_to_their_schemas_where_the_model_chooses_to_call(engine, monkeypatch):
    monkeypatch.setitem(tool_parsers.FORMATS, "special_mark", SPECIAL)
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


@pytest.mark.parametrize("name", ["hermes", "granite", "mistral"])
def test_text_and_calls_match_the_grammar_of_strict_tools_and_other_calls_do_not(name):
    call_format, grammars = tool_parsers.FORMATS[name], GrammarCache(tokenizer(), 0)
    tools = [TURN["function"], {"name": "free", "parameters": {}}]
    grammar = StructuredOutput(grammar=text_and_call_grammar(call_format, tools, special={}))

    def matches(text):
        matcher = grammars.template(grammar).deep_copy()
        return all(matcher.consume_token(token) for token in tokenizer().encode(text)) and matcher.is_accepting()

    def call(function, arguments):
        return json.dumps({"name": function, "arguments": arguments})

    turn = call("turn", {"to": "left", "fast": True})
    assert matches(f"I write {call_format.opening[:-1]} and no call")
    assert matches(f"I look. {call_format.write([turn])} Done.")
    assert matches(call_format.write([turn, call("free", {"any": [1]})]))
    for wrong in (call("turn", {"to": "up", "fast": True}), call("turn", {"to": "left"}), call("fly", {})):
        assert not matches(f"I look. {call_format.write([wrong])}")


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
        assert "there are no calls" in refused(tools=[STOP], response_format=answer)["message"]
        both = refused(tools=[STOP], response_format=answer, tool_choice="required")
        assert "another field says" in both["message"]
        wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}
        assert refused(tools=[wrong], tool_choice="required")["param"] == "tools"
        deep: dict = {}
        for _ in range(100):
            deep = {"properties": {"a": deep}}
        nested = {"type": "function", "function": {"name": "f", "parameters": deep}}
        assert "nested deeper" in refused(tools=[nested], tool_choice="required")["message"]
        body = {"messages": [USER], "tools": [TURN], "tool_choice": "none", "response_format": answer, "max_tokens": 5}
        assert case.http.post("/v1/chat/completions", json=body).status_code == 200

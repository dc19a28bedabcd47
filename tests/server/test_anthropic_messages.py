"""/v1/messages: the chat's answers in Anthropic's form, whole and as named events."""

from __future__ import annotations

import json

import pytest
from server_case import post, serving, tokenizer
from test_responses import TEMPLATE

HI = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture(scope="module")
def case(engine):
    with serving(engine, encoder=tokenizer(TEMPLATE), reasoning_parser="qwen3") as one:
        yield one


def both(case, **asked):
    """The whole reply and the stream's events; the events, joined as clients do, are the reply."""
    asked = {"model": "tiny", "max_tokens": 200, "messages": HI, **asked}
    reply = post(case, "/v1/messages", **asked)
    assert reply.status_code == 200, reply.text
    with case.http.stream("POST", "/v1/messages", json={**asked, "stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events] == names, "every event has its type as its name"
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[delta["type"]]
            blocks[event["index"]][name] += delta.get("partial_json") or delta.get(name)
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block |= {"input": json.loads(arguments)}
    whole = reply.json()

    def known(content):
        return [{name: value for name, value in block.items() if name != "id"} for block in content]

    assert known(blocks) == known(whole["content"])
    assert events[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    return whole


def test_text_thoughts_and_calls_are_content_blocks(case, engine):
    engine.set_script("Hello there.", 3)
    whole = both(case, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    assert whole["content"] == [{"type": "text", "text": "Hello there."}] and whole["stop_reason"] == "end_turn"
    assert tokenizer().decode(engine.prompts[0]) == "system\nBe brief.user\nHi"
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(engine.prompts[0])
    engine.set_script(f"<think>It may rain.</think>I look.{CALL}", 7)
    whole = both(case, tools=[TOOL])
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"city": "Bonn"} and whole["stop_reason"] == "tool_use"
    engine.set_script("Hello there.", 3)
    assert both(case, max_tokens=2)["stop_reason"] == "max_tokens"


def test_blocks_of_a_reply_and_results_of_calls_are_the_next_prompt(case, engine):
    engine.set_script(f"<think>It may rain.</think>I look.{CALL}", 50)
    content = both(case, tools=[TOOL])["content"]
    result = {"type": "tool_result", "tool_use_id": content[2]["id"], "content": [{"type": "text", "text": "Yes."}]}
    turns = [*HI, {"role": "assistant", "content": content}]
    turns.append({"role": "user", "content": [result, {"type": "text", "text": "So?"}]})
    engine.set_script("It rains.", 50)
    assert both(case, messages=turns)["content"][0]["text"] == "It rains."
    prompt = tokenizer().decode(engine.prompts[0])
    assert prompt.startswith("user\nHiassistant\n(It may rain.)I look.") and '"Bonn"' in prompt
    assert prompt.endswith("tool\nYes.user\nSo?")
    count = post(case, "/v1/messages/count_tokens", messages=turns).json()["input_tokens"]
    assert count == len(engine.prompts[0])


def test_stop_texts_and_tool_choices_are_those_of_chats(case, engine):
    engine.set_script(CALL, 50)
    both(case, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}, stop_sequences=["x"], top_k=5)
    assert engine.params[0].stop == ("x",) and engine.params[0].top_k == 5
    assert "get_weather" in engine.params[0].structured.grammar
    both(case, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    engine.set_script(CALL[: CALL.index("Bonn")], 50)
    assert both(case, tools=[TOOL], stop_sequences=["Bonn"])["content"] == [{"type": "text", "text": engine.script}]


@pytest.mark.parametrize(
    "begun", ["It", " It rains and", [{"type": "text", "text": "It"}, {"type": "text", "text": "is"}]]
)
def test_a_last_turn_of_the_assistant_is_continued(case, engine, begun):
    engine.set_script(" rains.", 3)
    turns = [*HI, {"role": "assistant", "content": begun}]
    whole = both(case, messages=turns)
    assert whole["content"] == [{"type": "text", "text": " rains."}], "the reply has what is new"
    chat = [*HI, {"role": "assistant", "content": begun}]
    post(case, "/v1/chat/completions", messages=chat, continue_final_message=True, max_tokens=1)
    assert engine.prompts[-1] == engine.prompts[0]
    assert tokenizer().decode(engine.prompts[0]).endswith(begun if isinstance(begun, str) else "It\nis")
    count = post(case, "/v1/messages/count_tokens", messages=turns).json()["input_tokens"]
    assert count == len(engine.prompts[0]) == whole["usage"]["input_tokens"]


def test_key_comes_as_anthropics_clients_send_it():
    with serving(api_key="k") as case:
        body = {"messages": HI, "max_tokens": 1}
        for headers, status in (({"x-api-key": "k"}, 200), ({"x-api-key": "no"}, 401), ({}, 401)):
            assert case.http.post("/v1/messages", json=body, headers=headers).status_code == status

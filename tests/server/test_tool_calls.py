"""Tool calls and reasoning with the official client: the same whole and streamed, however the text is cut."""

from __future__ import annotations

import json

import openai
import pytest
from server_case import client_of, post, serving, tokenizer

from megatron_infer.text import tool_call_formats, tool_prompt
from megatron_infer.text.tool_call_formats import HERMES

KNOWS_TOOLS = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Calls go within <tool_call></tool_call>.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}\
{% endif %}"""
USER = {"role": "user", "content": "Is it raining in Bonn?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLS = (
    "I look.\n\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Bonn </tool_call>"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
)
WANTED = [("get_weather", '{"city": "Bonn </tool_call>"}'), ("add", '{"a": 1, "b": [2]}')]
ASK = {"model": "tiny", "messages": [USER], "max_tokens": 500, "temperature": 0}


@pytest.fixture(scope="module")
def case(engine):
    with serving(engine, encoder=tokenizer(KNOWS_TOOLS), reasoning_parser="qwen3") as one:
        yield one


def streamed(client, **asked):
    """A stream as a client joins it: (reasoning, content, calls by index, finish reason)."""
    reasoning = content = ""
    calls: dict[int, dict] = {}
    reason = None
    for chunk in client.chat.completions.create(stream=True, **asked):
        (choice,) = chunk.choices
        reasoning += choice.delta.model_dump().get("reasoning_content") or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.index not in calls:
                assert call.index == len(calls) and call.id and call.type == "function"
                calls[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
            else:
                assert call.id is None and call.function.name is None
            calls[call.index]["arguments"] += call.function.arguments
        reason = choice.finish_reason or reason
    return reasoning, content, [(one["name"], one["arguments"]) for one in calls.values()], reason


def whole(client, **asked):
    choice = client.chat.completions.create(**asked).choices[0]
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert len({call.id for call in message.tool_calls or ()}) == len(calls)
    reasoning = message.model_dump().get("reasoning_content") or ""
    return reasoning, message.content or "", calls, choice.finish_reason


@pytest.mark.parametrize("stride", [1, 3, 7, 400])
def test_streamed_calls_are_those_of_the_whole_reply(client, engine, stride):
    engine.set_script(CALLS, stride)
    asked = {**ASK, "tools": [WEATHER, ADD]}
    assert whole(client, **asked) == ("", "I look.", WANTED, "tool_calls")
    assert streamed(client, **asked) == ("", "I look.", WANTED, "tool_calls")


def test_template_gets_the_tools_and_none_means_that_no_call_is_read(client, engine):
    engine.set_script(CALLS, 50)
    whole(client, **ASK, tools=[WEATHER], tool_choice="auto")
    described = json.dumps(WEATHER)
    assert tokenizer().decode(engine.prompts[0]).startswith(f"system\n{described}\nCalls go within")
    for other, shown in (({"tools": [WEATHER], "tool_choice": "none"}, True), ({}, False)):
        _, content, calls, reason = whole(client, **ASK, **other)
        assert (content, calls, reason) == (CALLS, [], "stop")
        assert (described in tokenizer().decode(engine.prompts[-1])) is shown


def test_an_empty_list_of_tools_is_none(client, engine):
    engine.set_script("No tools.", 50)
    turns = [{"role": "user", "content": "Hi"}]
    for tools in ([], openai.omit):
        reply = client.chat.completions.create(model="tiny", messages=turns, tools=tools)
        assert reply.choices[0].message.content == "No tools."
    assert engine.prompts[0] == engine.prompts[1]


def test_calls_and_results_come_back_as_history(client, engine):
    engine.set_script(CALLS, 50)
    message = client.chat.completions.create(**ASK, tools=[WEATHER, ADD]).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {place}"}
        for place, call in enumerate(message.tool_calls)
    ]
    engine.set_script("It rains.", 50)
    turns = [USER, message.model_dump(exclude_none=True), *results]
    assert whole(client, **{**ASK, "messages": turns}, tools=[WEATHER])[1:] == ("It rains.", [], "stop")
    prompt = tokenizer().decode(engine.prompts[0])
    assert 'I look.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn </tool_call>"}}\n' in prompt
    assert "tool\nresult 0\ntool\nresult 1\nassistant\n" in prompt


def test_one_call_only_where_parallel_ones_are_off_and_a_cut_one_is_no_finished_call(client, engine):
    engine.set_script(CALLS, 5)
    asked = {**ASK, "tools": [WEATHER, ADD], "parallel_tool_calls": False}
    for read in (whole, streamed):
        assert read(client, **asked) == ("", "I look.", WANTED[:1], "tool_calls")
        begun = CALLS[CALLS.index('{"city') : 14 * 5]
        cut = read(client, **{**asked, "max_tokens": 14})
        assert begun and cut == ("", "I look.", [("get_weather", begun)], "length")


def test_a_call_that_a_stop_text_cuts_is_text_and_no_call(client, engine):
    first = CALLS[: CALLS.index("\n<tool_call>\n" + '{"name": "add"')]
    asked = {**ASK, "tools": [WEATHER, ADD]}
    for cut, calls in ((CALLS[: CALLS.index(" </tool_call>")], []), (CALLS[: CALLS.index(', "b"')], WANTED[:1])):
        engine.set_script(cut, 5)
        text = "I look." + (cut[len(first) :].lstrip() if calls else cut.removeprefix("I look."))
        for read in (whole, streamed):
            assert read(client, **asked, stop=["x"]) == ("", text, calls, "stop")
            assert read(client, **asked, extra_body={"stop_token_ids": [5]}) == ("", text, calls, "stop")
            one = read(client, **asked, stop=["x"], parallel_tool_calls=False)
            assert one == (("", "I look.", calls, "tool_calls") if calls else ("", text, [], "stop"))
            assert read(client, **asked)[3] == "stop", "the model itself ended within the call"
    for ending in (CALLS, CALLS.removesuffix("\n</tool_call>"), CALLS.removesuffix("}\n</tool_call>")):
        engine.set_script(ending, 5)
        for read in (whole, streamed):
            assert read(client, **asked, stop=["x"]) == ("", "I look.", WANTED, "tool_calls")


def test_reasoning_is_separated_before_calls(client, engine):
    thoughts = "Look at <tool_call>.\n\nSure."
    asked = {**ASK, "tools": [WEATHER, ADD]}
    for stride in (1, 5, 400):
        engine.set_script(f"<think>\n{thoughts}\n</think>\n\n{CALLS}", stride)
        for read in (whole, streamed):
            assert read(client, **asked) == (thoughts, "I look.", WANTED, "tool_calls")
        engine.set_script(f"{thoughts}\n</think>\n\nYes.", stride)
        thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
        for read in (whole, streamed):
            assert read(client, **ASK, **thinking) == (thoughts, "Yes.", [], "stop")
        engine.set_script("Yes. </think> No.", stride)
        thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
        for read in (whole, streamed):
            assert read(client, **ASK, **thinking) == ("", "Yes. </think> No.", [], "stop")
    prompt = tokenizer().decode(engine.prompts[-1])
    assert prompt.endswith("<think>\n\n</think>\n\n")


def test_continued_message_knows_whether_it_is_still_thinking(client, engine):
    engine.set_script("more", 400)
    body = {"add_generation_prompt": False, "continue_final_message": True}
    for content, wanted in (("<think>So", ("more", "")), ("<think>So</think>Yes", ("", "more"))):
        turns = [USER, {"role": "assistant", "content": content}]
        assert whole(client, **{**ASK, "messages": turns}, extra_body=body)[:2] == wanted


def test_each_sample_has_its_own_tool_calls(client, engine):
    engine.set_script(CALLS, 20)
    reply = client.chat.completions.create(**ASK, n=3, tools=[WEATHER])
    ids = [call.id for choice in reply.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 6 and reply.choices[2].message.content == "I look."
    chunks = list(client.chat.completions.create(**ASK, n=3, tools=[WEATHER], stream=True))
    firsts = [
        (chunk.choices[0].index, call.index)
        for chunk in chunks
        for call in chunk.choices[0].delta.tool_calls or ()
        if call.id
    ]
    assert sorted(firsts) == [(sample, call) for sample in range(3) for call in range(2)]


def test_chat_templates_that_cannot_be_used_are_named():
    for template, tools, why in (
        ("{% if %}", None, "chat template: line 1"),
        ("{{ tools[0].function.name.split('') }}<tool_call>", [WEATHER], "refused the messages"),
        ("{{ tools }} in words of its own", [WEATHER], "--tool-call-parser"),
    ):
        with serving(encoder=tokenizer(template)) as case:
            reply = post(case, "/v1/chat/completions", messages=[USER], tools=tools)
            assert reply.status_code == 400 and why in reply.json()["error"]["message"]
            assert post(case, "/v1/completions", prompt="a", max_tokens=1).status_code == 200


def test_tools_go_into_the_system_text_where_the_template_ignores_them(engine):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        {"role": "tool", "tool_call_id": "call_2", "content": "3"},
    ]
    engine.set_script(CALLS, 9)
    with serving(engine) as case, client_of(case) as client:
        asked = {**ASK, "messages": turns}
        assert whole(client, **asked, tools=[ADD]) == streamed(client, **asked, tools=[ADD])
        assert whole(client, **asked, tools=[ADD])[2] == WANTED
        whole(client, **asked)
    prompt = tokenizer().decode(engine.prompts[0])
    system = tool_prompt.system_text([ADD], HERMES)
    assert prompt.startswith(f"system\nBe brief.\n\n{system}\nuser\n") and json.dumps(ADD) in system
    history = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\nuser\n'
    results = "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>\nassistant\n"
    assert history + results in prompt
    without = tokenizer().decode(engine.prompts[-1])
    assert without.startswith("system\nBe brief.\nuser\n") and history + results in without


@pytest.mark.few
@pytest.mark.parametrize(
    ("shown", "thoughts", "text", "id"),
    [
        (
            "<|channel|>commentary",
            "gpt_oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1}',
            "call_",
        ),
        (
            "<|tool_calls_section_begin|>",
            "kimi_k2",
            "<think>Hm.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.add:7"
            '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
            "functions.add:7",
        ),
        (
            "<tool_call> <function=",
            "qwen3",
            "<think>\nHm.\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
            "</tool_call>",
            "call_",
        ),
        (
            "<|tool_call>",
            "gemma4",
            "<|channel>thought\nHm.\n<channel|><|tool_call>call:add{a:1}<tool_call|>",
            "call_",
        ),
    ],
)
def test_the_template_tells_the_format_and_its_calls_come_back_as_text(engine, shown, thoughts, text, id):
    """Templates that join arguments to text get them as they were written."""
    call = "{{ c.function.name + c.function.arguments }}"
    template = f"{shown}{{{{ tools }}}}{{% for m in messages %}}{{{{ m.content }}}}{{% for c in m.tool_calls %}}{call}"
    template += "{% endfor %}{% endfor %}"
    engine.set_script(text, 7)
    with serving(engine, encoder=tokenizer(template), reasoning_parser=thoughts) as case, client_of(case) as client:
        message = client.chat.completions.create(**ASK, tools=[ADD]).choices[0].message
        (found,) = message.tool_calls
        assert (found.function.name, found.function.arguments) == ("add", '{"a": 1}') and found.id.startswith(id)
        assert message.reasoning == "Hm." and message.content is None
        assert streamed(client, **ASK, tools=[ADD])[2] == [("add", '{"a": 1}')]
        turns = [USER, message.model_dump(exclude_none=True, exclude={"reasoning", "reasoning_content"})]
        turns[1]["tool_calls"][0]["function"]["arguments"] = '{"a":  1}'
        client.chat.completions.create(**{**ASK, "messages": turns}, tools=[ADD])
        assert 'add{"a":  1}' in tokenizer().decode(engine.prompts[-1])


def test_text_within_marks_has_no_bounds_but_a_choice(engine):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with serving(engine, tool_call_parser="qwen3_coder") as case:
        for bound, status in (({"pattern": "a+"}, 400), ({"enum": ["a", "b"]}, 200), ({"title": "A"}, 200)):
            tool["function"]["parameters"]["properties"]["a"] = {"type": "string", **bound}
            reply = post(case, "/v1/chat/completions", messages=[USER], tools=[tool], tool_choice="required")
            assert reply.status_code == status, reply.text
        tool["function"]["parameters"]["properties"]["a"] = {"type": "string", "maxLength": 3}
        refused = post(case, "/v1/chat/completions", messages=[USER], tools=[tool], tool_choice="required")
        assert "a: in the format qwen3_coder what may be text has no bounds" in refused.json()["error"]["message"]


def test_marks_that_are_special_tokens_are_kept_in_the_text(engine):
    """The byte tokenizer's mark stands for a model's [TOOL_CALLS]."""
    engine.set_script("", 1)
    template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %} <|im_start|>"
    encoder = tokenizer(template)
    form = tool_call_formats.CallFormat(name="of_a_test", opening="<|im_start|>", is_listed=True, id_length=9)
    tool_call_formats.FORMATS["of_a_test"] = form
    try:
        with serving(engine, encoder=encoder, tool_call_parser="of_a_test") as case:
            engine.set_script('<|im_start|>[{"name": "add", "arguments": {}}]', 6)
            body = {"messages": [USER], "tools": [ADD]}
            reply = post(case, "/v1/chat/completions", **body).json()["choices"][0]
            (call,) = reply["message"]["tool_calls"]
            assert call["function"] == {"name": "add", "arguments": "{}"} and reply["message"]["content"] is None
            assert len(call["id"]) == 9 and engine.params[-1].skip_special_tokens is False
            refused = post(case, "/v1/chat/completions", **body, skip_special_tokens=True)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "skip_special_tokens"
            post(case, "/v1/chat/completions", messages=[USER])
            assert engine.params[-1].skip_special_tokens is True
    finally:
        del tool_call_formats.FORMATS["of_a_test"]

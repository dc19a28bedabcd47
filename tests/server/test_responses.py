"""/v1/responses with the official client: the chat's own answers, as items and as events."""

from __future__ import annotations

import json

import openai
import pydantic
import pytest
from scripted import ScriptedEngine
from server_case import client_of, serving, tokenizer

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning %}({{ m.reasoning }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if tools %}<tool_call>{% endif %}"
)


@pytest.fixture(scope="module")
def case(engine):
    with serving(engine, encoder=tokenizer(TEMPLATE), reasoning_parser="qwen3") as one:
        yield one


def both(client, **asked):
    """The whole reply, which must be that of the stream's last event, and the stream's events."""
    whole = client.responses.create(model="tiny", **asked)
    events = list(client.responses.create(model="tiny", stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response

    def shown(response):
        ids = {"id", "created_at", "completed_at", "call_id", "item_id", "cached_tokens"}
        text = json.dumps(response.to_dict(), sort_keys=True)
        return json.loads(text, object_hook=lambda one: {k: v for k, v in one.items() if k not in ids})

    assert shown(last) == shown(whole)
    return whole, events


@pytest.mark.long
def test_text_comes_whole_and_in_events(client, engine):
    engine.set_script("Hello there.", 3)
    whole, events = both(client, input="Hi", instructions="Be brief.")
    assert whole.output_text == "Hello there." and whole.status == "completed" and whole.store is False
    assert whole.usage.input_tokens == len(engine.prompts[0]) and whole.usage.output_tokens == 4
    assert tokenizer().decode(engine.prompts[0]) == "system\nBe brief.user\nHi"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Hello there."
    kinds = [event.type.removeprefix("response.") for event in events if "delta" not in event.type]
    item = ["output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *item, "completed"]


def test_reasoning_and_calls_are_items_of_their_own(client, engine):
    engine.set_script(f"<think>It may rain.</think>I look.{CALL}", 7)
    whole, events = both(client, input="Rain?", tools=[WEATHER])
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = whole.output
    assert reasoning.content[0].text == "It may rain." and message.content[0].text == "I look."
    assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Bonn"} and call.call_id
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thought) == "It may rain."
    assert engine.params[0].structured is not None, "a strict function is held to its schema"


def test_output_of_a_reply_is_the_input_of_the_next(client, engine):
    engine.set_script(f"<think>It may rain.</think>I look.{CALL}", 50)
    first = client.responses.create(model="tiny", input="Rain?", tools=[WEATHER])
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "Yes."}
    engine.set_script("It rains.", 50)
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}, *first.output, result]
    second = client.responses.create(model="tiny", input=turns)
    assert second.output_text == "It rains."
    prompt = tokenizer().decode(engine.prompts[0])
    assert prompt.startswith("user\nRain?assistant\n(It may rain.)I look.") and "get_weather" in prompt
    assert prompt.endswith("tool\nYes.")


def test_cut_answers_say_so_and_logprobs_come_where_asked_for(client, engine):
    engine.set_script("Hello there.", 3)
    whole, events = both(client, input="Hi", max_output_tokens=2)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output_text == "Hello " and events[-1].type == "response.incomplete"
    whole = client.responses.create(
        model="tiny", input="Hi", include=["message.output_text.logprobs"], top_logprobs=1, temperature=0
    )
    assert len(whole.output[0].content[0].logprobs) == 4


@pytest.mark.parametrize("rest", ["It may rain in Bonn.", CALL], ids=["text", "call"])
def test_of_a_cut_answer_only_the_last_item_is_incomplete(client, engine, rest):
    """Also in the events: an agent must not run a call whose arguments were cut."""
    engine.set_script(f"<think>Hm.</think>{rest}", 4)
    for num_tokens in (6, 8, 14, 17):
        whole, events = both(client, input="Rain?", tools=[WEATHER], max_output_tokens=num_tokens)
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [one.status for one in done] == [one.status for one in whole.output]
        if whole.status == "incomplete":
            assert [one.status for one in done] == [*["completed"] * (len(done) - 1), "incomplete"]
    engine.set_script(f"<think>Hm.</think>{rest}", 50)
    whole, events = both(client, input="Rain?", tools=[WEATHER])
    assert whole.status == "completed" and {one.status for one in whole.output} == {"completed"}


def test_form_of_the_answer_is_held_as_in_chats(client, engine):
    class Person(pydantic.BaseModel):
        name: str

    engine.set_script('{"name": "Ada"}', 50)
    parsed = client.responses.parse(model="tiny", input="Who?", text_format=Person).output_parsed
    assert parsed == Person(name="Ada") and '"name"' in engine.params[0].structured.json_schema
    client.responses.create(model="tiny", input="Who?", text={"format": {"type": "json_object"}, "verbosity": "low"})
    assert engine.params[-1].structured.json_object


def test_tool_choice_is_that_of_chats(client, engine):
    engine.set_script(CALL, 50)
    chosen = {"type": "function", "name": "get_weather"}
    client.responses.create(model="tiny", input="Rain?", tools=[WEATHER], tool_choice=chosen)
    assert "get_weather" in engine.params[0].structured.grammar
    with pytest.raises(openai.BadRequestError, match="tool_choice goes with tools"):
        client.responses.create(model="tiny", input="Rain?", tool_choice="required")


def test_error_of_a_stream_reaches_the_client():
    with (
        serving(ScriptedEngine(step_s=0.05), request_timeout_s=0.3) as case,
        client_of(case) as client,
    ):
        case.engines[0].set_script("a" * 500, 1)
        with pytest.raises(openai.APIError, match="time allowed"):
            list(client.responses.create(model="tiny", input="Hi", stream=True))

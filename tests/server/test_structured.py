"""Structured outputs by OpenAI's response_format and vLLM's fields; a schema that cannot be followed is a 400."""

from __future__ import annotations

import json
import re
import threading
import time

import httpx
import pydantic
import pytest
from server_case import Background, post, serving, tiny_engine, tokenizer, wait_for

from megatron_infer.text.grammar import GrammarCache

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Person(pydantic.BaseModel, extra="forbid", strict=True):
    name: str
    age: int


@pytest.fixture(scope="module")
def case():
    with serving(tiny_engine(overlap=True), control=True) as one:
        yield one


def schema_format(schema=SCHEMA):
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}


def test_every_sample_follows_the_json_schema_whole_and_streamed(client):
    ask = {"model": "tiny", "messages": HI, "max_tokens": 150, "n": 2, "response_format": schema_format()}
    ask["extra_body"] = {"frequency_penalty": 0.2}
    for seed in range(3):
        whole = client.chat.completions.create(seed=seed, **ask)
        for choice in whole.choices:
            Person.model_validate_json(choice.message.content)
            assert choice.finish_reason == "stop"
        texts = ["", ""]
        for chunk in client.chat.completions.create(seed=seed, stream=True, **ask):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in whole.choices]


def test_the_clients_own_parsing_of_answers_works(client):
    reply = client.chat.completions.parse(model="tiny", messages=HI, max_tokens=200, response_format=Short, seed=3)
    assert isinstance(reply.choices[0].message.parsed, Short)


class Short(pydantic.BaseModel):
    yes: bool
    kind: int


FORMS = [
    ({"response_format": {"type": "regex", "regex": "[0-9]{3}-[a-f]+!"}}, "[0-9]{3}-[a-f]+!"),
    ({"response_format": {"type": "grammar", "grammar": 'start: "x" start | "y"'}}, "x*y"),
    ({"response_format": {"type": "choice", "choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_regex": "a{3}"}, "aaa"),
    ({"guided_choice": ["é", "🙂"]}, "é|🙂"),
    ({"guided_grammar": 'root ::= "p" "q"+ "."'}, "pq+\\."),
    ({"guided_json": {"enum": [1, "b"]}}, '1|"b"'),
    ({"guided_json": '{"const": [null]}'}, r"\[\s*null\s*\]"),
    ({"structured_outputs": {"json": {"const": {"a": 1}}, "disable_any_whitespace": True}}, r'\{"a":1\}'),
    ({"structured_outputs": {"choice": ["up", "down"]}}, "up|down"),
    ({"response_format": {"type": "text"}, "guided_choice": ["one"]}, "one"),
]


@pytest.mark.parametrize("fields, pattern", FORMS, ids=[json.dumps(fields)[:50] for fields, _ in FORMS])
def test_every_field_acts_on_both_routes(case, fields, pattern):
    ask = {"max_tokens": 60, "logit_bias": {str(ord(".")): 6, str(ord("!")): 6, str(ord("y")): 6}, "seed": 1, **fields}
    reply = post(case, COMPLETIONS, prompt="Say", **ask)
    assert reply.status_code == 200, reply.text
    assert re.fullmatch(pattern, reply.json()["choices"][0]["text"])
    reply = post(case, CHAT, messages=HI, **ask)
    assert re.fullmatch(pattern, reply.json()["choices"][0]["message"]["content"])


def test_json_object_is_an_object(case):
    ask = {"max_tokens": 100, "response_format": {"type": "json_object"}, "logit_bias": {str(ord("}")): 50}}
    for text in (post(case, CHAT, messages=HI, seed=seed, **ask).json() for seed in range(4)):
        assert isinstance(json.loads(text["choices"][0]["message"]["content"]), dict)


def test_a_model_that_prefers_white_space_ends_its_json(case):
    schema = {
        "type": "object",
        "properties": {"a": {"const": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    ask = {"max_tokens": 200, "logit_bias": {str(ord(" ")): 100, str(ord("\n")): 100}}
    for fields in ({"response_format": schema_format(schema)}, {"guided_json": schema}):
        choice = post(case, CHAT, messages=HI, **fields, **ask).json()["choices"][0]
        assert json.loads(choice["message"]["content"]) == {"a": [1, 2]} and choice["finish_reason"] == "stop"


def test_max_tokens_cuts_with_length(case):
    choice = post(case, COMPLETIONS, prompt="Say", max_tokens=3, guided_regex="a{9}").json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("aaa", "length")


def test_a_grammar_that_takes_long_to_compile_delays_no_other_request(case, monkeypatch):
    whole, begun, go = GrammarCache._compile, threading.Event(), threading.Event()

    def slow(self, wanted):
        if wanted.regex == "slow{3}":
            begun.set()
            assert go.wait(30)
        return whole(self, wanted)

    monkeypatch.setattr(GrammarCache, "_compile", slow)
    late = Background(case, COMPLETIONS, {"prompt": "x", "max_tokens": 9, "guided_regex": "slow{3}"})
    assert begun.wait(20)
    assert post(case, COMPLETIONS, prompt="x", max_tokens=5).status_code == 200
    go.set()
    assert late.result().json()["choices"][0]["text"] == "slowww"


def test_an_engine_serves_others_and_takes_aborts_while_a_grammar_compiles(case, monkeypatch):
    """The server has compiled the grammar; the engine has not."""
    engine = case.engines[0]
    grammars = engine.input_processor.grammars.cache
    go, whole = threading.Event(), grammars._compile

    def slow(wanted):
        assert go.wait(30)
        return whole(wanted)

    monkeypatch.setattr(grammars, "_compile", slow)
    late = Background(case, COMPLETIONS, {"prompt": "x", "max_tokens": 9, "guided_regex": "late"})
    time.sleep(0.3)
    assert post(case, COMPLETIONS, prompt="x", max_tokens=5).status_code == 200 and not late.is_done
    with pytest.raises(httpx.ReadTimeout):  # a client that disconnects
        gone = {"prompt": "x", "max_tokens": 200, "guided_regex": "gone*", "ignore_eos": True}
        httpx.post(f"{case.url}{COMPLETIONS}", json=gone, timeout=0.5)
    time.sleep(0.3)
    go.set()
    assert late.result().json()["choices"][0]["text"] == "late"
    (replica,) = case.replicas
    wait_for(lambda: not (len(engine.output_processor) or replica._preparing or replica._requests))


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("regex", "[a-c]{3}x", "[a-c]{3}x"),
        ("ebnf", 'root ::= "no" | "yes" word\nword ::= [a-c] [a-c]', "no|yes[a-c]{2}"),
        ("json_schema", '{"type": "integer", "minimum": 10, "maximum": 12}', "1[0-2]"),
    ],
)
def test_sglang_s_fields_apply_to_each_prompt(case, field, value, pattern):
    sampling = {"max_new_tokens": 30, field: value}
    replies = post(case, "/generate", text=["a", "b"], sampling_params=sampling).json()
    many = [sampling | {"sampling_seed": 3}, {"max_new_tokens": 4}]
    replies += post(case, "/generate", text=["a", "b"], sampling_params=many).json()[:1]
    for reply in replies:
        assert re.fullmatch(pattern, reply["text"]), reply
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": "[a-c]{3}x"}, "[a-c]{3}x"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'root ::= "no" | "yes"'}, "no|yes"),
        ({"json": {"const": "é"}, "disable_any_whitespace": True}, '"é"'),
    ],
)
def test_tokens_follow_vllm_s_structured_outputs(case, given, pattern):
    sampling = {"max_tokens": 30, "n": 2, "structured_outputs": given}
    reply = post(case, "/inference/v1/generate", token_ids=[5, 6], sampling_params=sampling)
    for choice in reply.json()["choices"]:
        assert re.fullmatch(pattern, tokenizer().decode(choice["token_ids"])), choice

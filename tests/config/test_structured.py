"""What an output must be is said in one form, survives JSON, and is refused by name where it cannot be meant."""

from __future__ import annotations

import json

import pytest

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.structured_output import MAX_DEPTH, StructuredOutput, check_schema, check_size
from megatron_infer.errors import RequestError

GOOD = [
    {"json_schema": {"type": "object", "properties": {"z": {}, "a": {}}}},
    {"json_schema": '{"type": "string"}', "compact": True},
    {"json_schema": True},
    {"json_object": True},
    {"regex": "é+"},
    {"grammar": 'start: "a"'},
    {"choice": ["a", "b"]},
]


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


WRONG = [
    ({}, "takes exactly one of json_schema, json_object, regex, grammar, choice; got none"),
    ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
    ({"json_schema": False, "regex": "a"}, "got json_schema, regex"),
    ({"json_object": "yes"}, "structured.json_object is True or False, got a str"),
    ({"json_schema": "{"}, "json_schema is not JSON"),
    ({"json_schema": "[1]"}, "json_schema is a JSON object or a boolean, got a list"),
    ({"json_schema": {"a": {1, 2}}}, "json_schema is no JSON value"),
    ({"json_schema": nested(MAX_DEPTH + 1)}, f"deeper than {MAX_DEPTH} levels"),
    ({"json_schema": "[" * 100_000}, "json_schema"),
    ({"json_schema": {"description": "x" * (1 << 19)}}, "json_schema has 524,"),
    ({"regex": 5}, "regex is a text, got a int"),
    ({"regex": ""}, "regex is empty"),
    ({"regex": "\ud800"}, "half of a surrogate pair"),
    ({"choice": "abc"}, "choice is a list of texts"),
    ({"choice": []}, "choice is a list of texts"),
    ({"choice": ["a", ""]}, "choice holds texts that are not empty"),
    ({"choice": ["a", 3]}, "got 3"),
    ({"choice": ["a"] * 5000}, "choice has 5,000 texts"),
    ({"regex": "a", "compact": True}, "structured.compact is about JSON"),
    ({"regexp": "a"}, "did you mean 'regex'"),
]


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_what_is_asked_survives_json(values):
    params = SamplingParams(structured=StructuredOutput(**values))
    again = SamplingParams.from_dict(json.loads(json.dumps(params.to_dict())))
    assert again == params and again.structured is not None and again.structured.kind in values
    assert SamplingParams(structured=values) == params
    assert hash(again.structured) == hash(params.structured)


def test_properties_keep_their_order():
    structured = StructuredOutput(json_schema={"properties": {"z": {}, "a": {}}})
    assert list(json.loads(str(structured.json_schema))["properties"]) == ["z", "a"]


@pytest.mark.parametrize("values, message", WRONG, ids=[str(values)[:40] for values, _ in WRONG])
def test_what_cannot_be_meant_is_refused_by_name(values, message):
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_dict({"structured": values})
    assert message in str(caught.value)


def test_structured_is_a_mapping_or_none():
    with pytest.raises(RequestError, match="structured is a StructuredOutput or a mapping of its fields, got a str"):
        SamplingParams(structured="json")


def test_limits_are_the_callers():
    with pytest.raises(RequestError, match="deeper than 3 levels"):
        check_schema(nested(4), max_depth=3)
    check_schema(nested(3), max_depth=3)
    with pytest.raises(RequestError, match="regex has 5 bytes, the limit is 4"):
        check_size("regex", "aaé!", max_bytes=4)

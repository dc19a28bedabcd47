"""A byte-level vocabulary, a tiny random model and requests of structured output, for tests that need an engine."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

import engines
import regex
from model_kinds import make_model
from vocabularies import byte_level

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.engine.engine import DynamicInferenceEngine

VOCAB = 288
"""More than the tokenizer has: ids without a token are never drawn by structured output."""
SIZES = {"max_sequence_length": 224, "max_requests": 32}
BASE: dict[str, Any] = engines.BASE | SIZES | {"buffer_size_gb": engines.BUFFER_GIB}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: list[Any] = [
    PERSON,
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["red", "green", 12, None, {"deep": [1]}]},
    {"const": {"k": "v"}},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "string", "pattern": "^[a-f]{2,6}$"},
    {"type": "string", "maxLength": 5},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
    {"type": "object", "properties": {"at": {"$ref": "#/$defs/p"}}, "required": ["at"], "additionalProperties": False,
     "$defs": {"p": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}}},
]  # fmt: skip
LANGUAGES: list[dict[str, Any]] = [
    *({"json_schema": schema, "compact": True} for schema in SCHEMAS),
    {"regex": "[a-z]{3,9}@[a-z]{2,5}\\.(com|org)"},
    {"regex": "(0x[0-9a-f]{1,4}|none)"},
    {"regex": "[α-ω🙂]{2,5}"},
    {"regex": "a{20}b?"},
    {"grammar": 'start: pair ("," pair){0,2}\npair: /[a-c]/ "=" /[0-9]{1,3}/'},
    {"grammar": 'root ::= "<" item{1,3} ">"\nitem ::= "x" | "yy"'},
    {"choice": ["yes", "no", "yes, but", '日本\n"quoted" \\ 🙂']},
    {"choice": ["one"]},
    {"choice": [str(number) for number in range(0, 3000, 7)]},
]


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    return byte_level()


@lru_cache(maxsize=1)
def model() -> Any:
    return make_model("attention", vocab_size=VOCAB)


def make_engine(**settings: Any) -> DynamicInferenceEngine:
    return engines.make_engine(model(), tokenizer=tokenizer(), **SIZES | settings)


def workload() -> list[tuple[list[int], SamplingParams]]:
    """Every language, drawn in all ways, with free requests in between."""
    rng = random.Random(3)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.8},
        {"top_k": 3, "return_support": True},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"logprobs": 2, "return_sampled_logprobs": True},
        {"n": 3},
    ]
    work = []
    for place, language in enumerate(LANGUAGES):
        how = {"seed": place, "max_tokens": 120, **kinds[place % len(kinds)]}
        structured = StructuredOutput(**language)
        work.append((prompt(rng), SamplingParams(structured=structured, **how)))
        if place % 3 == 0:
            work.append((prompt(rng), SamplingParams(**{**how, "max_tokens": 24}, ignore_eos=True)))
    return work


def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(32, 127) for _ in range(rng.randint(2, 40))]


def told(output: Any) -> list[Any]:
    return [
        (one.token_ids, one.text, one.finish_reason, repr(one.logprobs), one.raw_logprobs) for one in output.outputs
    ]


def run(engine: DynamicInferenceEngine, work: list[tuple[list[int], SamplingParams]]) -> list[list[Any]]:
    return [told(one) for one in engine.generate([p for p, _ in work], [q for _, q in work])]


def check(structured: StructuredOutput, text: str) -> None:
    """`text` is of the language; raises what is wrong."""
    if structured.choice is not None:
        assert text in structured.choice
    elif structured.regex is not None:
        assert regex.fullmatch(structured.regex, text), text
    elif structured.grammar is not None:
        pattern = r"[a-c]=\d{1,3}(,[a-c]=\d{1,3}){0,2}|<(x|yy){1,3}>"
        assert regex.fullmatch(pattern, text), text
    elif structured.json_object:
        assert isinstance(json.loads(text), dict)
    else:
        meets(json.loads(str(structured.json_schema)), json.loads(text))


def meets(schema: Any, value: Any, whole: Any = None) -> None:
    """The keywords that SCHEMAS use."""
    whole = schema if whole is None else whole
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema:
        found = []
        for one in schema["anyOf"]:
            try:
                meets(one, value, whole)
                found.append(one)
            except AssertionError:
                continue
        assert found, value
        return
    if "enum" in schema or "const" in schema:
        assert value in schema.get("enum", [schema.get("const")]), value
        return
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}
    assert type(value) is kinds[schema["type"]], value
    if schema["type"] == "object":
        assert set(schema.get("required", ())) <= set(value)
        assert schema.get("additionalProperties") is not False or set(value) <= set(schema["properties"]), value
        for name, item in value.items():
            meets(schema["properties"][name], item, whole)
    elif schema["type"] == "array":
        assert schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)), value
        for item in value:
            meets(schema["items"], item, whole)
    elif schema["type"] == "string":
        assert len(value) <= schema.get("maxLength", len(value)), value
        assert regex.search(schema.get("pattern", ""), value), value
    elif schema["type"] == "integer":
        assert schema["minimum"] <= value <= schema["maximum"], value

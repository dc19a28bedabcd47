"""Chat templates, schemas, patterns and grammars: whatever they hold, an answer or an error of the package, in time."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
from mutations import HOSTILE, Rounds, altered, damaged, rounds, shown, within
from vocabularies import byte_level

from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.errors import InferenceError, InvalidPrompt, RequestError
from megatron_infer.text import chat_template
from megatron_infer.text.grammar import GrammarCache
from megatron_infer.text.tokenizer import Tokenizer

__all__ = ["rounds"]
pytestmark = pytest.mark.security

PARTS = (
    "{% for m in messages %}",
    "{% endfor %}",
    "{{ m.role }}",
    "{{ m['content'] | trim }}",
    "{{ m }}",
    "{{ messages | tojson }}",
    "{% if tools %}",
    "{% elif add_generation_prompt %}",
    "{% else %}",
    "{% endif %}",
    "{% set x = messages[0] %}",
    "{{ x }}",
    "{{ x.content.split('a')[-1] }}",
    "{% macro f(a) %}",
    "{% endmacro %}",
    "{{ f(f(1)) }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{{ 2 ** 900 }}",
    "{{ strftime_now('%Y') }}",
    "{% break %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{% raw %}",
    "{% endraw %}",
    "{{ namespace(a=1).a }}",
    "{{ '%s' | format(m) }}",
    "{{ '{0.__class__}'.format(m) }}",
    "{# a #}",
    "{{ x[::0] }}",
    "{{ -x }}",
    "{{ y // z }}",
    "{{ (" * 3,
    "{{ [" + "(" * 400,
    "{% include 'a' %}",
    "{% import 'a' as b %}",
    "{% extends 'a' %}",
    "text",
    "{{ 'a' | attr('__class__') }}",
    "{{ range(10 ** 9) | list }}",
    "{{ messages | map('upper') | list }}",
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
]


def test_templates_of_any_kind_render_or_are_refused(rounds: Rounds) -> None:
    for rng in rounds(long=150):
        if rng.random() < 0.2:
            template = damaged(CHATML.encode(), rng).decode("utf-8", "replace")
        else:
            template = "".join(rng.choice(PARTS) for _ in range(rng.randrange(1, 8)))
        messages = altered(MESSAGES, rng) if rng.random() < 0.3 else MESSAGES
        variables = {rng.choice(("y", "z", "tools", "range", "raise_exception", "loop")): rng.choice(HOSTILE)}
        tokenizer = Tokenizer(byte_level().backend, template=template)
        with shown((template, messages, variables)), within(3.0), contextlib.suppress(InferenceError):
            variables.pop("tools", None)
            tokenizer.apply_chat_template(messages, variables=variables)


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[a-z]{1,9}$", "maxLength": 9},
        "b": {"type": "array", "items": {"$ref": "#/$defs/c"}, "minItems": 1, "maxItems": 4},
        "d": {"anyOf": [{"type": "integer", "minimum": -5, "multipleOf": 5}, {"enum": ["x", None, 1.5]}]},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"c": {"type": "object", "properties": {"n": {"$ref": "#/$defs/c"}}, "format": "date"}},
}
PATTERNS = (
    r"(a+)+$",
    r"(a|a)*b",
    r"(.*){10}",
    r"[a-z]{1,1000}",
    r"((a{0,100}){0,100}){0,100}",
    r"\p{L}+",
    r"(?i)x",
    r"a{4294967296}",
    r"[^\x00-\x{10FFFF}]",
    r"(?=a)",
    r"\1",
    r"(?P<n>a)(?P=n)",
    r"[[:alpha:]&&[^a]]",
    r"(",
    r"[",
    r"*",
    r"\u{110000}",
    r"(?R)",
    r".{0,65535}.{0,65535}",
    r"\b\B",
    r"(a?){64}a{64}",
)
GRAMMARS = (
    'start: a | b\na: "x" a | "x"\nb: /[0-9]{1,9}/',
    "start: start start | start",
    'root ::= "a" root | [0-9]+',
    "start: @1",
    "x: y",
    'start: "a"~1..1000000',
    "%import common.WORD\nstart: WORD",
    'start: (((("a"*)*)*)*)*',
    "start: %json {}",
    'start[x: 1]: "a"',
    "start: /(a+)+/",
    "root ::= ::= ",
    "start: <|im_end|>",
    'start: a\na: b\nb: a | "c"',
)


@pytest.fixture(scope="module")
def grammars() -> GrammarCache:
    tokenizer = byte_level()
    cache = GrammarCache(tokenizer, tokenizer.vocab_size)
    cache.check(StructuredOutput(json_object=True))
    return cache


def constraint(rng: random.Random) -> dict[str, object]:
    kind = rng.randrange(5)
    if kind <= 1:
        value = altered(SCHEMA, rng)
        return {"json_schema": value if rng.random() < 0.5 else json.dumps(value)}
    if kind == 2:
        text = rng.choice(PATTERNS)
        return {"regex": text if rng.random() < 0.5 else damaged(text.encode(), rng).decode("utf-8", "replace")}
    if kind == 3:
        text = rng.choice(GRAMMARS)
        return {"grammar": text if rng.random() < 0.5 else damaged(text.encode(), rng).decode("utf-8", "replace")}
    return {"choice": altered(["a", "b" * 50, "日本"], rng)}


def test_constraints_of_any_kind_compile_or_are_refused_in_time(rounds: Rounds, grammars: GrammarCache) -> None:
    for rng in rounds(long=60):
        given = constraint(rng)
        with shown(given), within(6.0), contextlib.suppress(RequestError):
            matcher = grammars.template(StructuredOutput.from_dict(given)).deep_copy()
            for token in rng.choices(range(300), k=8):
                with within(2.0):
                    matcher.compute_bitmask()
                if matcher.validate_tokens([token]):
                    matcher.consume_token(token)


@pytest.mark.parametrize("own", ["", '%llguidance {"no_forcing": false}\n'])
@pytest.mark.parametrize("grammar", ["start: /a+/ /a/", "start: /(a+)+/ /(a+)+/", "start: /[bc]/ /a+/ /a/"])
def test_grammar_whose_text_never_ends_holds_no_thread(grammars: GrammarCache, grammar: str, own: str) -> None:
    """llguidance would look for the end of the forced text for ever, in a step of the engine at worst."""
    matcher = grammars.template(StructuredOutput(grammar=own + grammar)).deep_copy()
    for text in "baaaa" if "[bc]" in grammar else "aaaa":
        assert matcher.consume_token(byte_level().encode(text, add_special=False)[0])
        matcher.compute_bitmask()


@pytest.mark.parametrize("number", ["-9223372036854775808", "-9223372036854775799", "-9.223372036854775e18"])
@pytest.mark.parametrize(
    "where", ['{"const": %s}', '{"type": "integer", "minimum": %s, "maximum": -9223372036854775800}']
)
def test_number_that_would_end_the_process_is_refused(where: str, number: str) -> None:
    schema = where % number
    grammar = f"start: %json {schema}"
    tricked = '{"const": 1, "x": ' + schema + "}"
    for given in (
        {"json_schema": schema},
        {"json_schema": json.loads(schema)},
        {"grammar": grammar},
        {"json_schema": tricked},
    ):
        with pytest.raises(RequestError, match="in a schema: those from"):
            StructuredOutput.from_dict(given)
    StructuredOutput(json_schema={"const": -(2**61), "description": f"not {number}"})


@pytest.mark.parametrize("values", [[1048581], [1009, 10007], [100000.01], [2147483647, 0.01]])
def test_multiples_that_need_millions_of_states_are_refused(values: list[float]) -> None:
    schema = {"allOf": [{"type": "number", "multipleOf": value} for value in values]}
    for given in ({"json_schema": schema}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        with pytest.raises(RequestError, match=r"multipleOf: .* the limit is 131,072"):
            StructuredOutput.from_dict(given)
    StructuredOutput(json_schema={"allOf": [{"multipleOf": 0.01}, {"multipleOf": 5}, {"multipleOf": 0}]})


def test_patterns_that_are_compared_for_minutes_are_refused() -> None:
    patterns = [{"pattern": f"(.*a.{{{count}}}b.*)"} for count in range(3, 19)]
    defs = {f"p{place}": one for place, one in enumerate(patterns)}
    refused = [
        {"allOf": patterns},
        {"$defs": defs, "allOf": [{"$ref": f"#/$defs/{name}"} for name in defs]},
        {"$defs": {"a b": defs["p0"]}, "allOf": [{"$ref": "#/$defs/a%20b"}] * 9},
        {"allOf": [{"properties": {"x": one}} for one in patterns]},
        {"allOf": [{"allOf": patterns[:5]}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"allOf": patterns[:5]}}},
    ]
    for schema in refused:
        for given in ({"json_schema": schema}, {"grammar": f"start: %json {json.dumps(schema)}"}):
            with pytest.raises(RequestError, match=r"json_schema joins .* patterns .* the limit is 8"):
                StructuredOutput.from_dict(given)
    with pytest.raises(RequestError, match="grammar joins 9 terms by &"):
        StructuredOutput(grammar="start: A\nA: " + " & ".join(f"/.*a.{{{count}}}b/" for count in range(9)))
    for schema in (
        {"allOf": patterns[:8]},
        {"properties": {f"x{place}": one for place, one in enumerate(patterns)}, "allOf": [{"required": ["x1"]}]},
        {"anyOf": patterns, "$defs": defs},
        {"$ref": "#", "pattern": "a"},
    ):
        StructuredOutput(json_schema=schema)
    StructuredOutput(grammar='start: "&&&&&&&&&&" /&&&&&&&&&/')


def test_division_by_a_callers_variable_is_the_callers_error() -> None:
    with pytest.raises(InvalidPrompt, match="division"):
        chat_template.render("{{ 1 / y }}", MESSAGES, add_generation_prompt=True, variables={"y": 0})

"""A row of structured output draws what its language allows: exactly that, beside any other rows."""

from __future__ import annotations

import json
import re
import sys
import threading

import numpy as np
import pytest
import regex
import torch
from sampling_oracle import make_request
from vocabularies import byte_level, sentencepiece

from megatron_infer.config.structured_output import FORMATS, StructuredOutput
from megatron_infer.errors import RequestError
from megatron_infer.runner.sampling import grammar_matchers as grammar
from megatron_infer.runner.sampling.grammar_matchers import Grammars
from megatron_infer.runner.sampling.row_params import RowParams
from megatron_infer.runner.sampling.sampler import Sampler, SamplerInput
from megatron_infer.runner.sampling.token_masks import TokenMasks, forbid
from megatron_infer.text.grammar import GrammarCache

LANGUAGES = {
    "finite": ({"choice": ["hello", "hell", "he said", "日本", "é"]}, None),
    "digits": ({"regex": r"-?[0-9]+(\.[0-9]{1,2})?"}, None),
    "words": ({"regex": "(he|ll|é|🙂)+!"}, None),
    "lark": ({"grammar": 'start: "he" start | "lo"'}, "(he)*lo"),
    "gbnf": ({"grammar": 'root ::= "h" ("e" | "é")* "l"'}, "h(e|é)*l"),
    "enum": ({"json_schema": {"enum": ["he", 12, None]}, "compact": True}, '"he"|12|null'),
}
"""Name -> (language, the same as a regular expression: None takes its own)."""


def pattern_of(language: dict, pattern: str | None) -> str:
    if pattern is not None:
        return pattern
    return language["regex"] if "regex" in language else "|".join(map(re.escape, language["choice"]))


def request_of(tokenizer, language: dict, **params):
    params = {"structured": StructuredOutput(**language), **params}
    return make_request([1, 2], stop_ids=frozenset(tokenizer.eos_ids), **params)


def allowed(masks: TokenMasks, row: int = 0) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(masks.bits_GW[row].view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=lambda one: one.name)
@pytest.mark.parametrize("name", LANGUAGES)
def test_a_token_is_allowed_exactly_where_the_text_stays_a_prefix_of_the_language(name, tokenizer):
    language, pattern = LANGUAGES[name]
    pattern = pattern_of(language, pattern).encode()
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    rng = np.random.default_rng(0)
    token_bytes = {i: bytes_of(tokenizer, i) for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids}
    steps = 0
    for _ in range(12):
        request, text = request_of(tokenizer, language), b""
        for _ in range(4):
            got = allowed(grammars.masks([request]))
            want = {i for i, one in token_bytes.items() if one and is_prefix(text + one, pattern)}
            ends = regex.fullmatch(pattern, text) is not None
            assert got & set(tokenizer.eos_ids) == (set(tokenizer.eos_ids) if ends else set()), text
            got -= set(tokenizer.eos_ids)
            assert got <= want and bool(got) == bool(want), text
            if got != want:  # one text must follow: it is spelled in one way
                spellings = sorted({token_bytes[i] for i in want}, key=len)
                assert all(longer.startswith(one) for one, longer in zip(spellings, spellings[1:], strict=False)), text
            if not want:
                break
            drawn = int(rng.choice(sorted(got)))
            request.tokens.append(drawn)
            text, steps = text + token_bytes[drawn], steps + 1
            if grammars.advance(request):
                assert regex.fullmatch(pattern, text), text
                break
    assert steps > 12


def bytes_of(tokenizer, token: int) -> bytes:
    """What a token stands for, from the tokenizer's own spelling."""
    from megatron_infer.text.detokenizer import byte_level_alphabet

    spelled = tokenizer.token_str(token)
    if tokenizer.name == "sentencepiece":
        byte = re.fullmatch("<0x([0-9A-F]{2})>", spelled)
        return bytes([int(byte[1], 16)]) if byte else spelled.replace("▁", " ").encode()
    if " " in spelled:  # an added token is spelled as it is
        return spelled.encode()
    values = {character: byte for byte, character in enumerate(byte_level_alphabet_in_order(byte_level_alphabet()))}
    return bytes(values[character] for character in spelled)


def byte_level_alphabet_in_order(alphabet: dict[str, int]) -> list[str]:
    return sorted(alphabet, key=alphabet.get)


def is_prefix(text: bytes, pattern: bytes) -> bool:
    """Whether some text of the language begins with `text`."""
    return regex.fullmatch(pattern, text, partial=True) is not None


def sampler_of(vocab: int, requests, **options) -> Sampler:
    params = RowParams(len(requests), vocab)
    for row, request in enumerate(requests):
        params.set(row, request)
    return Sampler(params, padded_vocab_size=vocab, **options)


def draw(requests, logits, masks, **options):
    sampler = sampler_of(logits.shape[1], requests, **options)
    positions = np.array([len(request.tokens) for request in requests])
    pool = torch.zeros(len(requests), 64, dtype=torch.int32)
    rows = np.arange(len(requests), dtype=np.int32)
    return sampler.sample(logits, SamplerInput(rows=rows, positions=positions, token_pool=pool, masks=masks))


def test_rows_without_structure_draw_what_they_draw_alone_and_the_others_within_their_masks():
    tokenizer = byte_level()
    vocab = tokenizer.vocab_size
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, vocab)
    how = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"repetition_penalty": 1.3}, {"min_p": 0.2}]
    for turn in range(2):
        requests = [
            request_of(tokenizer, {"regex": "[a-f]+"}, seed=7 + row, **one)
            if row % 2 == turn
            else make_request([1, 2], seed=7 + row, **one)
            for row, one in enumerate(how)
        ]
        masks = Grammars(tokenizer, vocab).masks(requests)
        together = draw(requests, logits, masks).tokens_S.tolist()
        for row, request in enumerate(requests):
            own = masks.take(np.array([row])) if row % 2 == turn else None
            assert draw([request], logits[row : row + 1], own).tokens_S.tolist() == [together[row]]
            if row % 2 == turn:
                assert bytes_of(tokenizer, together[row]) in (b"a", b"b", b"c", b"d", b"e", b"f")


def test_processed_logprobs_and_support_are_those_of_the_masked_distribution_and_raw_ones_the_models():
    tokenizer = byte_level()
    torch.manual_seed(1)
    logits = torch.randn(2, tokenizer.vocab_size)
    asked = {"return_support": True, "return_sampled_logprobs": True, "logprobs": 0, "seed": 3}
    requests = [request_of(tokenizer, {"regex": "[a-d]"}, **asked), make_request([1], **asked)]
    masks = Grammars(tokenizer, tokenizer.vocab_size).masks(requests)
    out = draw(requests, logits, masks, logprobs_mode="processed")
    token, ids = int(out.tokens_S[0]), sorted(allowed(masks))
    among = logits[0, ids].log_softmax(-1)[ids.index(token)]
    assert torch.allclose(out.logprobs.token_logprob[0], among, atol=1e-6)
    assert torch.allclose(out.token_details.values["processed"][0], among, atol=1e-6)
    assert torch.allclose(out.token_details.values["raw"][0], logits[0].log_softmax(-1)[token], atol=1e-6)
    bits = np.unpackbits(out.token_details.values["support"][0].numpy(), bitorder="little")
    assert np.flatnonzero(bits).tolist() == ids and out.token_details.places["support"].tolist() == [0, -1]


def test_bits_beyond_the_vocabulary_count_for_nothing():
    bits = np.full((1, 2), -1, dtype=np.int32)
    bits[0, 0] = 0b101
    values = torch.zeros(1, 40)
    forbid(values, torch.from_numpy(bits), None)
    assert (values[0] == 0).nonzero().flatten().tolist() == [0, 2, *range(32, 40)]


def test_a_stop_id_is_drawn_only_where_the_text_may_end():
    tokenizer = byte_level()
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    end = tokenizer.eos_ids[0]
    request = request_of(tokenizer, {"regex": "ab*"})
    request.stop_ids = frozenset({b})  # as with ignore_eos and stop_token_ids
    assert allowed(grammars.masks([request])) == {a}
    request.tokens.append(a)
    assert not grammars.advance(request)
    assert allowed(grammars.masks([request])) == {b}, "the end of sequence is no stop id here"
    request.stop_ids = frozenset({end, a})
    assert allowed(grammars.masks([request])) == {b, end, a}


def test_tokens_that_leave_the_language_are_an_error_and_no_endless_text():
    tokenizer = byte_level()
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    request = request_of(tokenizer, {"regex": "ab"})
    request.tokens += tokenizer.encode("x")
    with pytest.raises(RequestError, match="structured output: "):
        grammars.advance(request)
    assert allowed(grammars.masks([request])) == set()


def test_a_request_that_comes_back_is_matched_from_its_first_token():
    tokenizer = byte_level()
    request = request_of(tokenizer, {"regex": "abc+"})
    request.tokens += tokenizer.encode("ab")
    again = Grammars(tokenizer, tokenizer.vocab_size).masks([request])
    assert allowed(again) == set(tokenizer.encode("c"))


REFUSED = [
    ({"json_schema": {"type": "thing"}}, "json_schema: Invalid type: thing"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, 'json_schema: Unimplemented keys: ."uniqueItems"'),
    ({"json_schema": {"x-guidance": {"lenient": True}, "not": {"type": "string"}}}, "Unimplemented keys"),
    ({"json_schema": {"propertyNames": {"pattern": "a"}}}, "propertyNames"),
    (
        {"json_schema": {"oneOf": [{"type": "string"}, {"minLength": 3}]}},
        "oneOf constraints are not supported; use anyOf",
    ),
    ({"json_schema": {"not": {"description": "nothing", "format": "password"}}}, "allows no value"),
    ({"json_schema": {"$ref": "#/nowhere"}}, "/nowhere"),
    ({"json_schema": False}, "allows no value"),
    ({"regex": "[a-z"}, "regex: .*unclosed character class"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"grammar": "start: x"}, 'grammar: .*unknown name: "x"'),
    ({"grammar": "x"}, "grammar: "),
]


@pytest.mark.parametrize("language, message", REFUSED, ids=[json.dumps(one)[:40] for one, _ in REFUSED])
def test_what_cannot_be_enforced_is_refused_by_name(language, message):
    grammars = GrammarCache(byte_level(), 0)
    for _ in range(2):  # a refusal is kept, too
        with pytest.raises(RequestError, match=message):
            grammars.check(StructuredOutput(**language))


def matches(grammars, language, text):
    matcher = grammars.template(StructuredOutput(**language)).deep_copy()
    return all(matcher.consume_token(token) for token in byte_level().encode(text)) and matcher.is_accepting()


KNOWN_FORMATS = """date-time time date duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri
iri-reference uuid uri-template json-pointer relative-json-pointer regex int32 int64 float double decimal password byte
binary char color html phone currency url""".split()
"""Of JSON Schema 2020-12 and of OpenAPI's registry."""


def test_formats_that_the_library_does_not_know_are_annotations_and_the_others_are_held():
    import llguidance

    grammars = GrammarCache(byte_level(), 0)
    for name in {*KNOWN_FORMATS, *FORMATS, "of_a_caller"}:
        raw = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
        assert ("Unknown format" in llguidance.LLMatcher.validate_grammar(raw)) is (name not in FORMATS), name
        language = {"json_schema": {"properties": {"a": {"type": "string", "format": name}}, "required": ["a"]}}
        is_free = name == "unknown" or name not in FORMATS
        assert matches(grammars, language, '{"a": "any ~ text"}') is is_free, name
    language = {"json_schema": {"type": "string", "format": "date"}}
    assert matches(grammars, language, '"2026-11-28"') and not matches(grammars, language, '"2026-13-28"')
    many = {"allOf": [{"type": "string", "format": "password"}] * 30}
    assert matches(grammars, {"json_schema": many}, '"x"'), "they are no patterns to match at once"


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "object", "propertyNames": {"type": "string", "title": "Key"}}, '{"a": 1}', "[1]"),
        ({"type": "array", "uniqueItems": False, "items": {"type": "integer"}}, "[1, 1]", '["a"]'),
        ({"anyOf": [{"not": {}}, {"type": "integer"}]}, "5", '"a"'),
        ({"properties": {"a": {}}, "additionalProperties": {"not": True}}, '{"a": 5}', '{"b": 5}'),
        ({"not": False, "type": "boolean"}, "true", "1"),
        (
            {"properties": {"not": {"const": 1}, "format": {"type": "integer"}, "title": {"enum": [2]}}},
            '{"not": 1, "format": 5, "title": 2}',
            '{"not": 2}',
        ),
        ({"const": {"not": {}, "format": "password"}}, '{"not": {}, "format": "password"}', "{}"),
        ({"$defs": {"a": {"format": "iri", "type": "string"}}, "items": {"$ref": "#/$defs/a"}}, '["a"]', "[1]"),
    ],
)
def test_keywords_that_ask_for_nothing_change_no_language(schema, right, wrong):
    grammars = GrammarCache(byte_level(), 0)
    assert matches(grammars, {"json_schema": schema}, right) and not matches(grammars, {"json_schema": schema}, wrong)


def test_white_space_between_the_parts_of_json_is_bounded():
    grammars, value = GrammarCache(byte_level(), 0), {"a": [1, {"b": None}], "c": {}}
    schema = {"properties": {"a": {}, "c": {}}}
    for language in ({"json_schema": schema}, {"json_schema": True}, {"json_object": True}):
        for indent in (None, 0, 2, 4, "\t"):
            assert matches(grammars, language, json.dumps(value, indent=indent))
        assert matches(grammars, language, '{"a":1}') and matches(grammars, language, '{\n\n  "a" : 1 }')
        for space in ("  ", "\n" * 3, "\n" + " " * 21, "\n  \n", " \n"):
            assert not matches(grammars, language, f'{{"a":{space}1}}'), repr(space)
    escaped = {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": "[ ]+"}}}
    assert not matches(grammars, escaped, '{"a":     1}')


def test_a_grammar_that_takes_too_long_and_a_missing_library_are_refusals(monkeypatch):
    cache, go = GrammarCache(byte_level(), 0), threading.Event()
    whole = cache._compile
    monkeypatch.setattr(cache, "_compile", lambda wanted: go.wait(20) and whole(wanted))
    monkeypatch.setattr("megatron_infer.text.grammar.COMPILE_TIMEOUT_S", 0.05)
    with pytest.raises(RequestError, match=r"regex: not compiled within 0.05 s; make it smaller"):
        cache.check(StructuredOutput(regex="a"))
    go.set()
    monkeypatch.setattr("megatron_infer.text.grammar.COMPILE_TIMEOUT_S", 20.0)
    cache.check(StructuredOutput(regex="a"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'megatron-infer\[structured\]'"):
        GrammarCache(byte_level(), 0).check(StructuredOutput(regex="a"))


def test_compiled_grammars_are_kept_and_the_least_used_go(monkeypatch):
    monkeypatch.setattr("megatron_infer.text.grammar.MAX_KEPT", 2)
    cache = GrammarCache(byte_level(), 0)
    first, second, third = (StructuredOutput(regex=text) for text in "abc")
    one = cache.template(first)
    cache.check(second)
    assert cache.template(first) is one
    cache.check(third)
    assert cache.template(first) is one and set(cache._compiled) == {first, third}


@pytest.mark.security
def test_what_a_grammar_costs_stays_known_while_another_caller_has_many_compiled(monkeypatch):
    """Without it, requests of a slow grammar keep a lock in common, for which steps wait."""
    monkeypatch.setattr("megatron_infer.text.grammar.MAX_KEPT", 2)
    cache, used = GrammarCache(byte_level(), 0), StructuredOutput(regex="a")
    cache.check(used)
    known = cache.costs(used).compile_s
    for text in "bcde":
        cache.check(StructuredOutput(regex=text))
        cache.took(used, 1.0)
    assert cache.costs(used).compile_s == known < 1.0 == cache.costs(used).longest_mask_s and used in cache.slow
    assert cache.costs(StructuredOutput(regex="b")).longest_mask_s < 1.0


def test_without_a_tokenizer_it_is_refused():
    with pytest.raises(RequestError, match="needs a tokenizer"):
        GrammarCache(None, 100).check(StructuredOutput(json_object=True))


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_threads_make_the_same_masks(patience, monkeypatch):
    monkeypatch.setattr(grammar, "PARALLEL_S", patience)
    tokenizer = byte_level()
    languages = [{"regex": f"[a-{last}]+"} for last in "bcdefghijklm"]
    requests = [request_of(tokenizer, language) for language in languages]
    for row, request in enumerate(requests):
        request.id = str(row)
    masks = Grammars(tokenizer, tokenizer.vocab_size).masks([make_request([1]), *requests])
    assert masks.index.tolist() == list(range(1, 13))
    for row, last in enumerate("bcdefghijklm"):
        spelled = "".join(tokenizer.token_str(i) for i in sorted(allowed(masks, row)))
        assert set(spelled) == {chr(one) for one in range(ord("a"), ord(last) + 1)}

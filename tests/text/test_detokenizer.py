"""Text comes in pieces that join to the whole and never cut a character."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import byte_level, sentencepiece

from megatron_infer.text.detokenizer import IncrementalDetokenizer, token_bytes
from megatron_infer.text.stop_strings import StopStrings

BYTES = byte_level()
PIECES = sentencepiece()
TEXT = st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("hello é日😀👩‍👧 \n")), max_size=40)


def run(tokenizer, ids, *, prompt=(), skip_special=True, cuts=None):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special=skip_special)
    pieces, start = [], 0
    for cut in cuts or [1] * len(ids):
        pieces.append(detokenizer.push(ids[start : start + cut]))
        start += cut
    return [*pieces, detokenizer.push(ids[start:]), detokenizer.flush()]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, BYTES.vocab_size + 3), max_size=40),
    st.booleans(),
    st.lists(st.integers(1, 4), max_size=8),
)
def test_any_ids_join_to_the_whole_decode(ids, skip_special, cuts):
    """Random ids: invalid UTF-8, special tokens, ids beyond the vocabulary; any batching of the pushes."""
    expected = BYTES.decode(ids, skip_special=skip_special)
    assert "".join(run(BYTES, ids, skip_special=skip_special, cuts=cuts)) == expected


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([BYTES, PIECES]), TEXT)
def test_valid_text_comes_back_and_no_piece_holds_half_a_character(tokenizer, text):
    if "\ufffd" in text:
        return
    ids = tokenizer.encode(text, add_special=False)
    pieces = run(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([BYTES, PIECES]), TEXT, TEXT)
def test_output_continues_the_prompt(tokenizer, prompt, text):
    """The output is the whole text without the prompt's text: leading spaces and cut characters included."""
    if "\ufffd" in prompt + text:
        return
    prompt_ids = tokenizer.encode("h" + prompt, add_special=False)
    ids = tokenizer.encode(text, add_special=False)
    whole = tokenizer.decode(prompt_ids + ids)
    assert tokenizer.decode(prompt_ids) + "".join(run(tokenizer, ids, prompt=prompt_ids)) == whole


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@pytest.mark.parametrize("text", ["hé日 🧬 ok", "🧬🧬🧬ok", "é" * 9 + "hello", "日本🧬é", "h�🧬 ok"])
def test_a_prompt_of_ids_that_ends_within_a_character_loses_no_text(tokenizer, text):
    """The output holds every character that the prompt does not hold whole, wherever the ids are cut."""
    ids = tokenizer.encode(text, add_special=False)
    ends, size = [], 0  # bytes of the text after each id
    for id in ids:
        ends.append(size := size + len(token_bytes(tokenizer, id)))
    data = (" " * (ends[-1] - len(text.encode())) + text).encode()
    for cut in range(1, len(ids)):
        whole = data[: ends[cut - 1]].decode("utf-8", "ignore")
        assert "".join(run(tokenizer, ids[cut:], prompt=ids[:cut])) == data.decode().removeprefix(whole)


def test_a_stop_text_is_found_in_a_character_that_the_prompt_begins():
    ids = PIECES.encode("h🧬 ok", add_special=False)
    cut = ids.index(PIECES.token_id("<0x9F>"))
    detokenizer, stops = IncrementalDetokenizer(PIECES, ids[:cut]), StopStrings(["🧬"], include=True)
    assert [stops.feed(detokenizer.push([id]))[1] for id in ids[cut:]] == [
        None,
        None,
        "🧬",
        *["🧬"] * (len(ids) - cut - 3),
    ]


def test_a_character_appears_with_its_last_token():
    ids = BYTES.encode("日", add_special=False)
    assert run(BYTES, ids) == ["", "", "日", "", ""]


def test_unfinished_character_is_shown_at_the_end_only():
    ids = BYTES.encode("é", add_special=False)
    assert len(ids) == 1
    half = BYTES.encode("日", add_special=False)[:2]
    assert run(BYTES, half) == ["", "", "", "\ufffd"]


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_special_tokens_are_shown_only_on_request(tokenizer):
    ids = [
        *tokenizer.encode("hello", add_special=False),
        tokenizer.eos_ids[0],
        *tokenizer.encode("he", add_special=False),
    ]
    assert tokenizer.token_str(tokenizer.eos_ids[0]) not in "".join(run(tokenizer, ids))
    assert tokenizer.token_str(tokenizer.eos_ids[0]) in "".join(run(tokenizer, ids, skip_special=False))


def test_invalid_bytes_do_not_hold_text_back_for_ever():
    bad = PIECES.token_id("<0xFF>")
    pieces = run(PIECES, [bad] * 50)
    assert sum(bool(piece) for piece in pieces) > 5


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_cost_of_a_token_does_not_grow_with_the_output(tokenizer):
    ids = tokenizer.encode("hello é日 " * 40, add_special=False)

    def seconds(count):
        detokenizer = IncrementalDetokenizer(tokenizer)
        for _ in range(count):
            detokenizer.push(ids)
        best = float("inf")
        for _ in range(5):
            start = time.process_time()
            detokenizer.push(ids)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(30) < 5 * seconds(1) + 0.002

"""Stop strings end the text where they first complete, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_infer.text.stop_strings import StopStrings

ALPHABET = "ab\n"
WORD = st.text(alphabet=ALPHABET, min_size=1, max_size=4)


def oracle(text, stops, include, passed=0):
    """Look at every prefix of the whole text that is longer than `passed`."""
    for end in range(passed + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=ALPHABET, max_size=24), st.lists(WORD, max_size=4), st.booleans(), st.integers(0, 9), st.data())
def test_any_cutting_gives_what_the_whole_text_gives(text, stops, include, passed, data):
    """passed: characters of the text within which no stop string counts."""
    watcher = StopStrings(stops, include=include)
    shown, matched, rest = "", None, text
    passed = min(passed, len(text))
    while rest:
        early = len(text) - len(rest) < passed
        most = passed - (len(text) - len(rest)) if early else len(rest)
        size = data.draw(st.integers(1, most))
        piece, matched = watcher.feed(rest[:size], counts=not early)
        rest = rest[size:]
        shown += piece
        expected_so_far, _ = oracle(text, stops, include, passed)
        assert expected_so_far.startswith(shown), "shown text cannot be taken back"
        if matched is not None:
            break
    if matched is None:
        piece, matched = watcher.feed("", finished=True)
        shown += piece
    assert (shown, matched) == oracle(text, stops, include, passed)


def test_only_a_possible_beginning_is_held_back():
    watcher = StopStrings(["STOP"], include=False)
    assert watcher.feed("go ST") == ("go ", None)
    assert watcher.feed("AR") == ("STAR", None)


def test_text_after_a_match_is_swallowed():
    watcher = StopStrings(["\n\n"], include=True)
    assert watcher.feed("a\n\nb") == ("a\n\n", "\n\n")
    assert watcher.feed("more", finished=True) == ("", "\n\n")


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty string"):
        StopStrings(["a", ""], include=False)

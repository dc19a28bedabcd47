"""Blocks of an answer: which tokens each window holds, whatever the schedule, the buffer, the voice and the end."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_infer.errors import ConfigError
from megatron_infer.server.audio.blocks import BlockSchedule, PrependPromptSpeechTokens, SpeechBlocks, Window
from megatron_infer.server.audio.layout import FrameReader, Layout, SpeechFormat

NEVER, ONCE, ROLLING = PrependPromptSpeechTokens
tokens = st.lists(st.integers(0, 999), max_size=40)


@st.composite
def schedules(draw) -> BlockSchedule:
    return BlockSchedule(
        chunk_size=draw(st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)),
        buffer=draw(st.integers(0, 12)),
        prepend=draw(st.sampled_from(PrependPromptSpeechTokens)),
        block_causal=draw(st.booleans()),
        prompt_causal=draw(st.booleans()),
        right_context=draw(st.integers(0, 5)),
    )


def run(blocks: SpeechBlocks, answer: list[int], pieces: list[int]) -> list[Window]:
    """Windows of an answer that arrives in pieces."""
    windows, at = [], 0

    def drain() -> None:
        while (window := blocks.next_window()) is not None:
            windows.append(window)
            blocks.advance(window)

    for size in [*pieces, len(answer)]:
        blocks.add(answer[at : at + size])
        at += size
        drain()
    blocks.end()
    drain()
    return windows


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(schedules(), tokens, tokens, tokens, st.lists(st.integers(1, 7), max_size=8))
def test_each_token_is_heard_once_with_the_context_that_was_asked_for(schedule, answer, prompt, carried, pieces):
    blocks = SpeechBlocks(schedule, prompt=prompt, buffer_speech_tokens=carried)
    windows = run(blocks, answer, pieces)
    assert blocks.is_done and blocks.next_window() is None
    heard = [window.tokens[window.num_before : window.num_before + window.num_new] for window in windows]
    assert [token for one in heard for token in one] == answer
    assert [window.is_last for window in windows[:-1]] == [False] * (len(windows) - 1)
    whole, at = carried + answer, len(carried)
    for number, window in enumerate(windows):
        size = schedule.size(number)
        assert window.num_new == size or at + window.num_new == len(whole)
        assert window.num_left == min(schedule.buffer, at)
        first = prompt if number == 0 else []
        room = schedule.buffer - window.num_left
        before = {NEVER: [], ONCE: first}
        before[ROLLING] = prompt if number == 0 or room > len(prompt) else prompt[len(prompt) - room :]
        assert list(window.tokens[: window.num_prompt]) == before[schedule.prepend]
        if number and schedule.prepend is ROLLING:
            assert window.num_before == min(schedule.buffer, len(prompt) + at)
        behind = len(window.tokens) - window.num_before - window.num_new
        assert behind == min(schedule.right_context, len(whole) - at - window.num_new)
        assert list(window.tokens[window.num_prompt :]) == whole[at - window.num_left : at + window.num_new + behind]
        at += window.num_new
    assert list(blocks.carry()) == (whole[-schedule.buffer :] if schedule.buffer else [])


def test_a_block_waits_for_its_tokens_and_those_behind_it():
    blocks = SpeechBlocks(BlockSchedule(chunk_size=(2, 3), right_context=1))
    blocks.add([1, 2])
    assert blocks.num_missing == 1 and blocks.next_window() is None
    blocks.add([3])
    window = blocks.next_window()
    assert window is not None and window.tokens == (1, 2, 3) and window.num_new == 2 and not window.is_last
    blocks.advance(window)
    assert (blocks.decoded_index, blocks.block_counter, blocks.num_missing) == (2, 1, 3)
    blocks.end()
    window = blocks.next_window()
    assert window is not None and window.tokens == (3,) and window.is_last


def test_an_answer_without_a_token_has_no_window():
    blocks = SpeechBlocks(BlockSchedule(chunk_size=(4,), prepend=ONCE), prompt=[1, 2])
    assert blocks.next_window() is None
    blocks.end()
    assert blocks.next_window() is None and blocks.is_done


def test_without_a_schedule_one_block_waits_for_the_end():
    blocks = SpeechBlocks(BlockSchedule())
    blocks.add(range(50))
    assert blocks.next_window() is None and blocks.num_missing is None
    blocks.end()
    window = blocks.next_window()
    assert window is not None and window.num_new == 50 and window.is_last


@pytest.mark.parametrize("block_causal", [False, True])
@pytest.mark.parametrize("prompt_causal", [False, True])
def test_masks_hide_the_block_from_what_lies_before_it_unless_told_otherwise(block_causal, prompt_causal):
    window = Window(
        tokens=(0,) * 6, num_prompt=2, num_left=2, num_new=2, block=1, is_last=False,
        block_causal=block_causal, prompt_causal=prompt_causal,
    )  # fmt: skip
    for query in range(6):
        for key in range(6):
            ahead = prompt_causal if query < 2 else block_causal if query < 4 else True
            assert window.sees(query, key) == (key < 4 or ahead)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.booleans(), st.integers(0, 8), st.lists(st.integers(1, 7), max_size=8), st.integers(0, 4))
def test_frames_come_back_from_what_was_drawn_in_any_pieces(codebooks, delay, num_frames, pieces, surplus):
    layout = Layout(codebooks=codebooks, delay=delay)
    frames = list(range(100, 100 + num_frames * codebooks))
    drawn = layout.drawn(frames, filler=7)
    assert layout.frames(drawn) == frames
    if frames:
        drawn += [9] * min(surplus, codebooks - 1)  # a frame that is not complete is not heard
    reader, found, at = FrameReader(layout), [], 0
    for size in [*pieces, len(drawn)]:
        found += reader.add(drawn[at : at + size])
        at += size
    assert found == frames


def test_delayed_codebooks_lie_as_in_the_picture():
    assert Layout(codebooks=2, delay=True).drawn([1, 2, 3, 4, 5, 6], filler=0) == [1, 0, 3, 2, 5, 4, 0, 6]


def test_speech_format_is_checked():
    assert SpeechFormat(vocab_size=8, codebooks=2, frame_rate=Fraction(25)).tokens_per_second == 50
    with pytest.raises(ConfigError, match="codebooks of the speech format is 0"):
        SpeechFormat(vocab_size=8, codebooks=0)

"""Which speech tokens an audio decoder gets, and when: an answer is decoded in blocks while it is drawn.

    voice's tokens | decoded before | new tokens | tokens behind them
    <---------- dropped ----------->  <- heard ->  <--- dropped ---->

A window holds all four parts, so it can be decoded by any decoder process, any number of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class PrependPromptSpeechTokens(str, Enum):
    """Whether the audio decoder sees the speech tokens of the voice."""

    NEVER = "never"
    """It does not."""
    ONCE = "once"
    """All of them, before the first block."""
    ROLLING = "rolling"
    """All of them before the first block; before later ones as many of the last as fill `buffer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSchedule:
    """How an answer is cut into blocks, and what is decoded with each. Lengths are speech tokens."""

    chunk_size: tuple[int, ...] | None = None
    """New tokens of each block; the last entry repeats. None: one block, at the end."""
    buffer: int = 0
    """Tokens decoded before that are decoded again, at most."""
    prepend: PrependPromptSpeechTokens = PrependPromptSpeechTokens.NEVER
    block_causal: bool = False
    """Whether the tokens of `buffer` see the block behind them."""
    prompt_causal: bool = False
    """Whether the voice's tokens see the block behind them."""
    right_context: int = 0
    """Tokens behind a block that its sound depends on: a block waits for them, or for the end."""

    def size(self, block: int) -> int | None:
        """New tokens of block number `block`; None: all that there are at the end."""
        if self.chunk_size is None:
            return None
        return self.chunk_size[min(block, len(self.chunk_size) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What the decoder gets for one block."""

    tokens: tuple[int, ...]
    num_prompt: int
    """Tokens of the voice, at the beginning of `tokens`."""
    num_left: int
    """Tokens behind them that were decoded before; their sound is dropped."""
    num_new: int
    """Tokens behind these whose sound is kept. The rest of `tokens` is right context."""
    block: int
    is_last: bool
    block_causal: bool = False
    prompt_causal: bool = False

    @property
    def num_before(self) -> int:
        """Tokens in front whose sound is dropped."""
        return self.num_prompt + self.num_left

    def sees(self, query: int, key: int) -> bool:
        """The mask: whether the token at `query` may look at the one at `key`. New tokens see all of the window."""
        if query >= self.num_before or key < self.num_before:
            return True
        return self.prompt_causal if query < self.num_prompt else self.block_causal


class SpeechBlocks:
    """The speech tokens of one request, and how far they are decoded.

    Example: chunk_size (4,), buffer 2, 9 tokens -> windows of 4, 2 + 4 and 2 + 1 tokens, of which 4, 4 and 1 are heard.
    """

    def __init__(
        self, schedule: BlockSchedule, *, prompt: Sequence[int] = (), buffer_speech_tokens: Sequence[int] = ()
    ) -> None:
        """prompt: the voice's tokens. buffer_speech_tokens: the last of an earlier answer, which this one goes on from:
        they count as decoded."""
        self.schedule, self.prompt = schedule, tuple(prompt)
        self.tokens: list[int] = list(buffer_speech_tokens)
        self.num_carried = len(self.tokens)
        """Tokens at the beginning of `tokens` that an earlier answer ended with."""
        self.decoded_index = self.num_carried
        """Tokens whose sound has been heard."""
        self.block_counter = 0
        self.has_ended = False

    def add(self, tokens: Iterable[int]) -> None:
        """Tokens that were drawn."""
        assert not self.has_ended, "tokens behind the end of an answer"
        self.tokens += tokens

    def end(self) -> None:
        """No token follows."""
        self.has_ended = True

    @property
    def is_done(self) -> bool:
        """Whether all that will ever be drawn is decoded."""
        return self.has_ended and self.decoded_index == len(self.tokens)

    @property
    def num_missing(self) -> int | None:
        """Tokens that the next block still waits for; None: it waits for the end."""
        size = self.schedule.size(self.block_counter)
        if size is None:
            return None
        return max(0, self.decoded_index + size + self.schedule.right_context - len(self.tokens))

    def next_window(self) -> Window | None:
        """The next block, if its tokens are there; None: not yet, or nothing is left. It does not advance."""
        if not self.has_ended and self.num_missing != 0:
            return None
        begin, schedule, total = self.decoded_index, self.schedule, len(self.tokens)
        end = min(total, begin + (schedule.size(self.block_counter) or total))
        if end == begin:
            return None
        num_left = min(schedule.buffer, begin)
        prompt = self._prompt_part(num_left)
        behind = min(total, end + schedule.right_context)
        return Window(
            tokens=(*prompt, *self.tokens[begin - num_left : behind]),
            num_prompt=len(prompt),
            num_left=num_left,
            num_new=end - begin,
            block=self.block_counter,
            is_last=self.has_ended and end == total,
            block_causal=schedule.block_causal,
            prompt_causal=schedule.prompt_causal,
        )

    def advance(self, window: Window) -> None:
        """The block of `window` has been decoded."""
        assert window.block == self.block_counter, f"block {window.block} is decoded, {self.block_counter} is next"
        self.decoded_index += window.num_new
        self.block_counter += 1

    def carry(self) -> tuple[int, ...]:
        """The last `buffer` tokens: the `buffer_speech_tokens` of an answer that goes on from this one."""
        return tuple(self.tokens[max(0, len(self.tokens) - self.schedule.buffer) :])

    def _prompt_part(self, num_left: int) -> tuple[int, ...]:
        """The voice's tokens that the next block gets."""
        prepend = self.schedule.prepend
        if prepend is PrependPromptSpeechTokens.NEVER:
            return ()
        if self.block_counter == 0:
            return self.prompt
        if prepend is PrependPromptSpeechTokens.ONCE:
            return ()
        return self.prompt[max(0, len(self.prompt) - (self.schedule.buffer - num_left)) :]

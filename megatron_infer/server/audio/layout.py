"""Speech tokens and the codes of a codec: several codebooks in one sequence, flat or with a delay.

flat    a0 b0 a1 b1 a2 b2           frame after frame, one code of each codebook
delay   a0 -  a1 b0 a2 b1 -  b2     codebook q lies q frames later; - is ignored
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_infer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechFormat:
    """What speech tokens are. A model that draws them and a decoder that reads them must agree on all of it."""

    vocab_size: int
    """Codes of a codebook; a token's place says which codebook it is of."""
    codebooks: int = 1
    """Tokens of a frame."""
    frame_rate: Fraction = Fraction(50)
    """Frames of a second."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "codebooks", "frame_rate"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} of the speech format is {getattr(self, name)}, it must be above 0")

    @property
    def tokens_per_second(self) -> Fraction:
        return self.frame_rate * self.codebooks


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The order in which a model draws the codes of a frame."""

    codebooks: int = 1
    delay: bool = False

    @property
    def num_late(self) -> int:
        """Frames by which the last code of a frame is drawn later than its first."""
        return self.codebooks - 1 if self.delay else 0

    def frames(self, drawn: Sequence[int]) -> list[int]:
        """Tokens in the order they were drawn -> those of complete frames, frame after frame."""
        steps, books = len(drawn) // self.codebooks, range(self.codebooks)
        late = 1 if self.delay else 0
        return [drawn[(frame + q * late) * len(books) + q] for frame in range(steps - self.num_late) for q in books]

    def drawn(self, frames: Sequence[int], *, filler: int = 0) -> list[int]:
        """The inverse of `frames`: what a model is to draw. filler: the token of places that are ignored."""
        books = self.codebooks
        assert len(frames) % books == 0, f"{len(frames)} tokens are no whole frames of {books}"
        if not self.delay or not frames:
            return list(frames)
        count = len(frames) // books
        steps = range(count + self.num_late)
        return [
            frames[(step - q) * books + q] if 0 <= step - q < count else filler for step in steps for q in range(books)
        ]


class FrameReader:
    """`Layout.frames` of an answer that grows."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._drawn = layout, list[int]()

    def add(self, drawn: Sequence[int]) -> list[int]:
        """New tokens -> the tokens of the frames that they complete."""
        self._drawn += drawn
        ready = self._layout.frames(self._drawn)
        del self._drawn[: len(ready)]
        return ready

"""What steps cost in time, by their tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of steps without prompts, by their tokens: (tokens, seconds), ascending in tokens."""

    plain: Sequence[Sequence[float]] = ()
    """Steps without drafts."""
    verifying: Sequence[Sequence[float]] = ()
    """Steps with drafts."""

    def seconds(self, num_tokens: float, *, verifying: bool) -> float:
        """Between two measured points on the line through them, beyond the last one as `assumed_s` grows."""
        points = self.verifying if verifying and self.verifying else self.plain or self.verifying
        if not points:
            return assumed_s(num_tokens)
        above = bisect_left(points, num_tokens, key=lambda point: point[0])
        if above == len(points) or (above == 0 and points[0][0] > num_tokens):
            tokens, seconds = points[min(above, len(points) - 1)]
            return seconds * assumed_s(num_tokens) / assumed_s(tokens)
        tokens, seconds = points[above]
        if above == 0:
            return seconds
        fewer, faster = points[above - 1]
        return faster + (seconds - faster) * (num_tokens - fewer) / (tokens - fewer)


def assumed_s(num_tokens: float) -> float:
    """Seconds of a step before any is measured, in an unknown unit: a step costs as much as eight of its tokens."""
    return 8.0 + num_tokens


def size_class(num_tokens: int) -> int:
    """Steps of one class are taken as equal in size: two classes to each doubling of tokens."""
    return round(2 * log2(num_tokens))

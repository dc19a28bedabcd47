"""Stop strings, matched in text and not in tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds stop strings in the growing text of one sequence, across token boundaries.

    Text that may begin a stop string is held back until that is decided. The first stop string to be complete wins (the
    longer of two that end at the same character), so the result does not depend on how the text is split into pieces.
    """

    __slots__ = ("_held", "_include", "_matched", "_num_passed", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        if any(not stop for stop in stops):
            raise ValueError("stop: got an empty string; a stop string needs at least one character")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._held = ""
        self._num_passed = 0
        """Leading characters of `_held` within which no stop string ends the output."""
        self._matched: str | None = None

    def feed(self, new_text: str, finished: bool = False, *, counts: bool = True) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string that ended the output or None).

        After a match all further text is dropped. `finished` releases the text that was held back. counts: whether a
        stop string that is complete within the new text ends the output; one that only begins there may.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return new_text, None
        text = self._held + new_text
        if not counts:
            self._num_passed = len(text)
        start, matched = self._first_match(text, self._num_passed)
        if matched is not None:
            self._held, self._matched = "", matched
            return text[: start + len(matched)] if self._include else text[:start], matched
        keep = 0 if finished else partial_length(text, self._stops)
        cut = len(text) - keep
        self._held, self._num_passed = text[cut:], max(0, self._num_passed - cut)
        return text[:cut], None

    def _first_match(self, text: str, passed: int) -> tuple[int, str | None]:
        """The first stop string to be complete after the first `passed` characters, and where it begins."""
        best_end, best_start, best = len(text) + 1, 0, None
        for stop in self._stops:  # longest first: a tie keeps the longer
            start = text.find(stop, max(0, passed - len(stop) + 1))
            if start >= 0 and start + len(stop) < best_end:
                best_end, best_start, best = start + len(stop), start, stop
        return best_start, best


def partial_length(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a mark; shorter than the longest mark."""
    longest = max(map(len, marks)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) for mark in marks):
            return length
    return 0

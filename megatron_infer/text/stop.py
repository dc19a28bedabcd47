"""Stop strings, matched on text and not on tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one output's text for stop strings that may begin and end anywhere, across token boundaries.

    Text that could be the beginning of a stop string is held back until it is decided. The first stop string to be
    complete wins (the longer of two that end at the same character), so the result does not depend on how the text
    is cut into pieces.
    """

    __slots__ = ("_held", "_include", "_longest", "_matched", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        if any(not stop for stop in stops):
            raise ValueError("stop: got an empty string; a stop string needs at least one character")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def feed(self, new_text: str, finished: bool = False) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string that ended the output or None).

        After a match all further text is swallowed. `finished` releases what is held.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return new_text, None
        text = self._held + new_text
        start, matched = self._first_match(text)
        if matched is not None:
            self._held, self._matched = "", matched
            return text[: start + len(matched)] if self._include else text[:start], matched
        keep = 0 if finished else self._undecided(text)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], None

    def _first_match(self, text: str) -> tuple[int, str | None]:
        best_end, best_start, best = len(text) + 1, 0, None
        for stop in self._stops:  # longest first: a tie keeps the longer
            start = text.find(stop)
            if start >= 0 and start + len(stop) < best_end:
                best_end, best_start, best = start + len(stop), start, stop
        return best_start, best

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

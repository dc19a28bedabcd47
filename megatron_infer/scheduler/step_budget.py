"""How many tokens a step may take, while there may be less memory than was planned for."""

from __future__ import annotations

GROWTH_STEPS = 64
MAX_GROWTH_STEPS = 4096
"""Committed steps after which a halved budget is doubled again, at first and at most: the number doubles each time that
it was too small."""


class StepBudget:
    """Halved when a step runs out of memory, doubled in time; deterministic in its calls, as the scheduler is."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = self.tokens = max_tokens
        """The most, and what a step may take now."""
        self.num_retracted = 0
        """Steps that ran out of memory."""
        self._interval, self._left, self._has_grown = GROWTH_STEPS, 0, False

    def halve(self, num_tokens: int) -> None:
        """A step of `num_tokens` ran out of memory."""
        self.num_retracted += 1
        if self._has_grown:
            self._interval, self._has_grown = min(2 * self._interval, MAX_GROWTH_STEPS), False
        self.tokens, self._left = max(1, num_tokens // 2), self._interval

    def step_committed(self) -> None:
        """A step had memory."""
        if self.tokens < self.max_tokens:
            self._left -= 1
            if not self._left:
                self.tokens, self._left = min(2 * self.tokens, self.max_tokens), self._interval
                self._has_grown = True

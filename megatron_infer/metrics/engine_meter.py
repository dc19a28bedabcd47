"""Counts what an engine's requests live through: first tokens, gaps between tokens, ends; suspends and resumes."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable
from typing import Any

from megatron_infer.metrics.core import Histogram, Registry
from megatron_infer.metrics.engine_snapshot import BucketCounts, Reading

TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
ITL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10, 60)
E2E_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
OUTCOMES = ("stop", "length", "abort", "error")


class EngineMeter:
    """An engine's counts; its owner tells it what happens. Every count only grows."""

    def __init__(self) -> None:
        self.born = time.time()
        self.ttft = Histogram("ttft", TTFT_BOUNDS)
        self.itl = Histogram("itl", ITL_BOUNDS)
        self.e2e = Histogram("e2e", E2E_BOUNDS)
        self.prompt_tokens = self.cached_prompt_tokens = self.output_tokens = 0
        self.ended: Tally[str] = Tally(dict.fromkeys(OUTCOMES, 0))
        self.transitions: Tally[str] = Tally(suspend=0, resume=0)
        self.transition_seconds = {"suspend": 0.0, "resume": 0.0}
        self.registry = Registry()
        """For who looks at the engine from beside, as a mismatch meter does: shown with the engine's own."""
        self._last: dict[str, float] = {}
        """When each sequence drew last, but those of the last step."""
        self._together: list[str] = []
        self._together_at = 0.0

    def first_token(self, seconds: float, *, prompt: int, cached: int) -> None:
        """A request has drawn its first token, `seconds` after it came."""
        self.ttft.observe(seconds)
        self.prompt_tokens += prompt
        self.cached_prompt_tokens += cached

    def tokens(self, sequence_ids: list[str], now: float) -> None:
        """Each of these sequences has drawn a token."""
        self.output_tokens += len(sequence_ids)
        if sequence_ids and sequence_ids == self._together:  # most steps are: the same ones again
            self.itl.observe(now - self._together_at, len(sequence_ids))
        else:
            self._part()
            last = self._last
            since = Tally(last[one] for one in sequence_ids if one in last)
            for before, number in since.items():
                self.itl.observe(now - before, number)
            self._together = sequence_ids
        self._together_at = now

    def _part(self) -> None:
        """Every sequence of the last step has its time by itself."""
        self._last.update(dict.fromkeys(self._together, self._together_at))
        self._together = []

    def end(self, outcome: str, seconds: float, sequence_ids: Iterable[str]) -> None:
        """A request has ended, `seconds` after it came; what was aborted or failed has no latency."""
        self.ended[outcome] += 1
        if outcome in ("stop", "length"):
            self.e2e.observe(seconds)
        self._part()
        for one in sequence_ids:
            self._last.pop(one, None)

    def transition(self, command: str, seconds: float) -> None:
        self.transitions[command] += 1
        self.transition_seconds[command] += seconds

    def as_figures(self) -> dict[str, Any]:
        """Its part of `EngineSnapshot`."""
        return {
            "born": self.born,
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_prompt_tokens,
            "output_tokens": self.output_tokens,
            "ended": dict(self.ended),
            "transitions": dict(self.transitions),
            "transition_seconds": dict(self.transition_seconds),
            "ttft": BucketCounts.of(self.ttft),
            "itl": BucketCounts.of(self.itl),
            "e2e": BucketCounts.of(self.e2e),
            "beside": Reading.all_of(self.registry),
        }


def outcome_of(reasons: Iterable[str | None]) -> str:
    """A request's outcome from its samples' finish reasons: the worst one."""
    given = {reason if reason in OUTCOMES else "stop" for reason in reasons if reason is not None}
    return next(name for name in ("error", "abort", "length", "stop") if name in given or name == "stop")

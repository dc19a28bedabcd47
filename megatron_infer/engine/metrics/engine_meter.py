"""Measures an engine's requests: first tokens, gaps between tokens, ends; and suspends and resumes."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megatron_infer.engine.metrics.registry import Histogram, Registry, copied

TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
ITL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10, 60)
E2E_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
MOVED = "moved"
"""Another engine goes on with the request."""
OUTCOMES = ("stop", "length", "abort", "error", MOVED)


MOST_ADAPTERS, OTHER_ADAPTERS = 256, "others"
"""Names of LoRA adapters that are counted apart, the first of an engine's life, and the name for all later ones."""


class EngineMeter:
    """An engine's counts, which only grow; its owner calls a method for each event."""

    def __init__(self) -> None:
        self.born = time.time()
        self.ttft = Histogram("ttft", TTFT_BOUNDS)
        self.itl = Histogram("itl", ITL_BOUNDS)
        self.e2e = Histogram("e2e", E2E_BOUNDS)
        self.prompt_tokens = self.cached_prompt_tokens = self.output_tokens = 0
        self.ended: Tally[str] = Tally(dict.fromkeys(OUTCOMES, 0))
        self.adapter_requests: Tally[str] = Tally()
        self.adapter_tokens: Tally[str] = Tally()
        self.transitions: Tally[str] = Tally(suspend=0, resume=0)
        self.transition_seconds = {"suspend": 0.0, "resume": 0.0}
        self.registry = Registry()
        """Metrics of others, such as the mismatch meter's, that are exported with the engine's own."""
        self._last: dict[str, float] = {}
        """Time of the last token of each sequence, except those of the last step."""
        self._step_ids: list[str] = []
        self._step_time = 0.0

    def first_token(self, seconds: float, *, prompt: int, cached: int) -> None:
        """A request has sampled its first token, `seconds` after its arrival."""
        self.ttft.observe(seconds)
        self.prompt_tokens += prompt
        self.cached_prompt_tokens += cached

    def tokens(self, sequence_ids: list[str], now: float) -> None:
        """Each of these sequences has sampled a token."""
        self.output_tokens += len(sequence_ids)
        if sequence_ids and sequence_ids == self._step_ids:  # most steps have the sequences of the step before
            self.itl.observe(now - self._step_time, len(sequence_ids))
        else:
            self._store_step()
            last = self._last
            since = Tally(last[one] for one in sequence_ids if one in last)
            for before, number in since.items():
                self.itl.observe(now - before, number)
            self._step_ids = sequence_ids
        self._step_time = now

    def _store_step(self) -> None:
        """Move the time of the last step to each of its sequences."""
        self._last.update(dict.fromkeys(self._step_ids, self._step_time))
        self._step_ids = []

    def end(self, outcome: str, seconds: float, sequence_ids: Iterable[str]) -> None:
        """A request has ended, `seconds` after its arrival; aborted and failed requests have no latency."""
        self.ended[outcome] += 1
        if outcome in ("stop", "length"):
            self.e2e.observe(seconds)
        self._store_step()
        for one in sequence_ids:
            self._last.pop(one, None)

    def adapter_ended(self, adapter: str, num_tokens: int) -> None:
        """A request of a LoRA adapter has ended, having drawn so many tokens."""
        if adapter not in self.adapter_requests and len(self.adapter_requests) >= MOST_ADAPTERS:
            adapter = OTHER_ADAPTERS
        self.adapter_requests[adapter] += 1
        self.adapter_tokens[adapter] += num_tokens

    def transition(self, command: str, seconds: float) -> None:
        self.transitions[command] += 1
        self.transition_seconds[command] += seconds

    def as_figures(self) -> dict[str, Any]:
        """The fields of `EngineSnapshot` that are counted here."""
        return {
            "born": self.born,
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_prompt_tokens,
            "output_tokens": self.output_tokens,
            "ended": dict(self.ended),
            "adapter_requests": dict(self.adapter_requests),
            "adapter_tokens": dict(self.adapter_tokens),
            "transitions": dict(self.transitions),
            "transition_seconds": dict(self.transition_seconds),
            "ttft": replace(self.ttft),
            "itl": replace(self.itl),
            "e2e": replace(self.e2e),
            "beside": tuple(copied(self.registry.collect())),
        }


def outcome_of(reasons: Iterable[str | None]) -> str:
    """A request's outcome: the worst of its sequences' finish reasons."""
    given = {reason if reason in OUTCOMES else "stop" for reason in reasons if reason is not None}
    return next(name for name in ("error", "abort", "length", "stop") if name in given or name == "stop")

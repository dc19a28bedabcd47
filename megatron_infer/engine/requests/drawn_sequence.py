"""What one engine passes on of a request for another one to continue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSequence:
    """What another engine drew of one sequence and handed out."""

    token_ids: list[int]
    num_chars: int
    """Characters of its text."""
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

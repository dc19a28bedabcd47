"""Requests that are requeued again and again, and still come to their next token."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_infer.scheduler.request import Request, Status, sort_key_of


class RecomputeProgress:
    """Which request must draw a token before all are requeued once more.

    A caller that has all requests recomputed after every step (a suspend in mode "recompute", say) would never get a
    token of a prompt that takes several steps. So the oldest request that was requeued twice without a token between
    is computed to its next one within one call of the engine's step, in as many steps as that takes.
    """

    def __init__(self) -> None:
        self._oldest: Request | None = None
        self._num_tokens = 0
        """Tokens that `_oldest` had when it was requeued last."""
        self._is_stuck = False

    def requeue(self, live: Iterable[Request]) -> None:
        """All of `live` are requeued now."""
        oldest = min((request for request in live if request.scheduled), key=sort_key_of, default=None)
        if oldest is not None:
            self._is_stuck = oldest is self._oldest and len(oldest.tokens) == self._num_tokens
            self._oldest, self._num_tokens = oldest, len(oldest.tokens)

    @property
    def num_left(self) -> int:
        """Tokens of the stuck request that no step has taken yet; 0 if none is stuck."""
        request = self._oldest
        if request is None or not self._is_stuck or request.status is Status.FINISHED:
            return 0
        return 0 if len(request.tokens) > self._num_tokens else max(0, self._num_tokens - request.scheduled)

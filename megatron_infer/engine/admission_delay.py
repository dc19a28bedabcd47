"""`ce_delay_ms`: prompts that arrive within it are admitted together."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_infer.scheduler.step_plan import StepPlan
from megatron_infer.scheduler.waiting_queue import WaitingQueue

POLL_S = 0.001
"""A step without work waits this long at most, so that its caller can take in what arrives meanwhile."""


class AdmissionDelay:
    """Releases new requests once the oldest of them has waited; on the leader, whose clock decides for all ranks."""

    def __init__(self, delay_s: float, queue: WaitingQueue, release: Callable[[int], None]) -> None:
        """release: called with an arrival: requests before it may be admitted, those from it on wait."""
        self._delay_s, self._queue, self._release = delay_s, queue, release
        self._since: float | None = None
        """When a step first saw a request that is not released; None: there is none."""
        self._released = 0

    def after_step(self, plan: StepPlan, seconds: float, step: int) -> None:
        """Release what has waited long enough; a step that planned nothing waits for a moment."""
        if self._queue.num_arrivals == self._released:
            return
        now = time.monotonic()
        if self._since is None:
            self._since = now - seconds
        left = self._since + self._delay_s - now
        if left > 0 and not plan.num_tokens:
            time.sleep(min(left, POLL_S))
            left -= POLL_S
        if left <= 0:
            self._released, self._since = self._queue.num_arrivals, None
            self._release(self._released)

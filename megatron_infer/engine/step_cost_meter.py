"""What steps cost on this machine, with and without drafts, measured while the engine runs: how many drafts pay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_infer.scheduler.draft_depth import StepCosts, size_class
from megatron_infer.scheduler.step_plan import StepPlan

SMOOTHING = 0.05
"""Weight of a new reading."""
REPORT_STEPS = 16
"""Steps between two reports of new costs; the first ones are reported each."""
OUTLIER = 1.5
"""A step that takes this many times the mean of its size counts as taking so much."""


@dataclass(slots=True)
class _Mean:
    """Mean tokens and seconds of steps of about one size; the old ones count less."""

    tokens: float = 0.0
    seconds: float = 0.0
    count: int = 0

    def take(self, tokens: int, seconds: float) -> None:
        if self.count:
            seconds = min(seconds, OUTLIER * self.seconds)
        self.count += 1
        weight = max(SMOOTHING, 1 / self.count)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)


class StepCostMeter:
    """Mean seconds of steps without prompts, by their tokens and by whether they verify drafts."""

    def __init__(self, set_costs: Callable[[StepCosts], None]) -> None:
        """set_costs: called with new costs."""
        self._set_costs = set_costs
        self._num_readings = 0
        self._plain: dict[int, _Mean] = {}
        self._verifying: dict[int, _Mean] = {}

    @property
    def costs(self) -> StepCosts:
        return StepCosts(plain=_points(self._plain), verifying=_points(self._verifying))

    def after_step(self, plan: StepPlan, seconds: float, step: int) -> None:
        """A step that took `seconds` changes the costs if it computes no prompt."""
        if not plan.num_tokens or plan.num_prompt_tokens:
            return
        means = self._verifying if plan.prefill else self._plain
        means.setdefault(size_class(plan.num_tokens), _Mean()).take(plan.num_tokens, seconds)
        self._num_readings += 1
        if self._num_readings <= REPORT_STEPS or self._num_readings % REPORT_STEPS == 0:
            self._set_costs(self.costs)


def _points(means: dict[int, _Mean]) -> tuple[tuple[float, float], ...]:
    return tuple(sorted((mean.tokens, mean.seconds) for mean in means.values()))

"""What steps cost on this machine, with and without drafts, measured while the engine runs: how many drafts pay.

A machine that does other work changes its pace from one minute to the next. Steps of one size may all be of a slow
minute and those of another size of a quick one. So a step is taken as (cost of its size) x (pace), where the pace is
that of the latest steps of any size: sizes are compared with each other as if they had run side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_infer.scheduler.step_costs import StepCosts, size_class
from megatron_infer.scheduler.step_plan import StepPlan

SMOOTHING = 0.05
"""Weight of a new reading."""
REPORT_STEPS = 16
"""Steps between two reports of new costs; the first ones are reported each."""
PACE_SMOOTHING = 0.2
"""The same for the pace, which a few steps tell."""
OUTLIER = 1.5
"""A step that takes this many times what is expected of its size counts as taking so much."""


@dataclass(slots=True)
class _Mean:
    """Mean tokens and cost of steps of about one size; the old ones count less."""

    tokens: float = 0.0
    cost: float = 0.0
    """Seconds at a pace of 1."""
    count: int = 0

    def take(self, tokens: int, cost: float) -> None:
        self.count += 1
        weight = max(SMOOTHING, 1 / self.count)
        self.tokens += weight * (tokens - self.tokens)
        self.cost += weight * (cost - self.cost)


class StepCostMeter:
    """Mean seconds of steps without prompts, by their tokens and by whether they verify drafts."""

    def __init__(self, set_costs: Callable[[StepCosts], None]) -> None:
        """set_costs: called with new costs."""
        self._set_costs = set_costs
        self._num_readings = 0
        self._pace = 1.0
        """Seconds that a step takes now, beside the cost of its size."""
        self._plain: dict[int, _Mean] = {}
        self._verifying: dict[int, _Mean] = {}

    @property
    def costs(self) -> StepCosts:
        """In seconds at the present pace."""
        return StepCosts(plain=self._points(self._plain), verifying=self._points(self._verifying))

    def after_step(self, plan: StepPlan, seconds: float, step: int) -> None:
        """A step that took `seconds` changes the costs if it computes no prompt and the clock saw it take time."""
        if not plan.num_tokens or plan.num_prompt_tokens or seconds <= 0:
            return
        means = self._verifying if plan.prefill else self._plain
        mean, cost = means.setdefault(size_class(plan.num_tokens), _Mean()), seconds / self._pace
        if mean.count == 1 and cost < mean.cost:
            mean.count = 0  # the first step of a size has more to do
        if mean.count:
            cost = min(cost, OUTLIER * mean.cost)
            self._pace *= 1.0 + PACE_SMOOTHING * (cost / mean.cost - 1.0)
        mean.take(plan.num_tokens, cost)
        self._num_readings += 1
        if self._num_readings <= REPORT_STEPS or self._num_readings % REPORT_STEPS == 0:
            self._set_costs(self.costs)

    def _points(self, means: dict[int, _Mean]) -> tuple[tuple[float, float], ...]:
        return tuple(sorted((mean.tokens, mean.cost * self._pace) for mean in means.values()))

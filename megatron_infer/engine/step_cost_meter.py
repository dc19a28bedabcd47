"""What a step and each of its tokens cost on this machine, measured while the engine runs: how many drafts pay."""

from __future__ import annotations

from collections.abc import Callable

from megatron_infer.scheduler.draft_depth import StepCosts
from megatron_infer.scheduler.step_plan import StepPlan

SMOOTHING = 0.02
"""Weight of a new reading."""
REPORT_STEPS = 16
"""Steps between two reports of new costs."""
OUTLIER = 3.0
"""A step that takes this many times what was expected of it counts as taking so much."""
PRIOR_SPREAD = 0.1
"""Spread of the numbers of tokens, as a share of their mean, at which what was measured counts as much as the default:
steps that are all of one size do not tell the price of a token."""


class StepCostMeter:
    """A line through the seconds of steps without prompts over their tokens; earlier steps count less and less."""

    def __init__(self, set_costs: Callable[[StepCosts], None]) -> None:
        """set_costs: called with new costs."""
        self._set_costs = set_costs
        self._num_readings = 0
        self._tokens = self._seconds = self._squares = self._products = 0.0
        """Means: of tokens, of seconds, of tokens squared, of tokens times seconds."""

    @property
    def costs(self) -> StepCosts:
        """The default's before the first step."""
        default = StepCosts()
        if not self._num_readings:
            return default
        tokens, seconds = self._tokens, self._seconds
        assumed_s = seconds / (tokens + default.step_s / default.token_s)
        prior = (PRIOR_SPREAD * tokens) ** 2
        variance, covariance = self._squares - tokens**2, self._products - tokens * seconds
        token_s = (covariance + prior * assumed_s) / (max(variance, 0.0) + prior)
        token_s = min(max(token_s, 0.01 * seconds / tokens), seconds / tokens)
        return StepCosts(step_s=seconds - token_s * tokens, token_s=token_s)

    def after_step(self, plan: StepPlan, seconds: float, step: int) -> None:
        """A step that took `seconds` changes the costs if it computes no prompt."""
        if not plan.num_tokens or plan.num_prompt_tokens:
            return
        costs, tokens = self.costs, plan.num_tokens
        if self._num_readings:
            seconds = min(seconds, OUTLIER * (costs.step_s + costs.token_s * tokens))
        self._num_readings += 1
        weight = max(SMOOTHING, 1 / self._num_readings)
        self._tokens += weight * (tokens - self._tokens)
        self._seconds += weight * (seconds - self._seconds)
        self._squares += weight * (tokens**2 - self._squares)
        self._products += weight * (tokens * seconds - self._products)
        if self._num_readings % REPORT_STEPS == 0:
            self._set_costs(self.costs)

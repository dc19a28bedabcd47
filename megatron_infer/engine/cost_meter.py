"""What computing and copying cost on this machine, measured while the engine runs: the prices of evictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.memory.store import CacheStore
from megatron_infer.scheduler.policy import CostModel
from megatron_infer.scheduler.step_plan import StepPlan

SMOOTHING = 0.2
"""Weight of a new reading."""
MIN_PREFILL_TOKENS = 16
"""A step is a reading of the price of prefill only if it computes this many prompt tokens, and they are most of it."""


def agreed_costs(store: CacheStore, rank_group: RankGroup) -> CostModel:
    """Prices before the first step, the leader's on all ranks: copies as measured on unused places, prefill as the
    default has it."""
    costs = CostModel()
    if rank_group.groups.is_leader:
        store.measure_copies()
        costs = CostModel(copy_s_per_block=store.copy_s_per_block, copy_s_per_state=store.copy_s_per_state)
    return CostModel(**rank_group.from_leader("prices of evictions", asdict(costs)))


class CostMeter:
    """Seconds per prompt token, from steps that prefill, and per block or state copied between pool and host.

    The price of prefill is the default's until the first reading. Copies are measured by the store wherever they
    happen: into fresh memory they take several times as long as into memory that is in use.
    """

    def __init__(self, store: CacheStore, set_costs: Callable[[CostModel], None]) -> None:
        """set_costs: called with new prices."""
        self._store, self._set_costs = store, set_costs
        self._prefill_s_per_token = CostModel().prefill_s_per_token
        self._num_readings = 0

    @property
    def costs(self) -> CostModel:
        return CostModel(
            prefill_s_per_token=self._prefill_s_per_token,
            copy_s_per_block=self._store.copy_s_per_block,
            copy_s_per_state=self._store.copy_s_per_state,
        )

    def after_step(self, plan: StepPlan, seconds: float, step: int) -> None:
        """A step that took `seconds` changes the prices if it mostly prefills."""
        num_prefill = plan.num_prompt_tokens
        if num_prefill < MIN_PREFILL_TOKENS or num_prefill < 3 * (plan.num_tokens - num_prefill):
            return
        reading = seconds / plan.num_tokens
        self._num_readings += 1
        weight = max(SMOOTHING, 1 / self._num_readings)
        self._prefill_s_per_token += weight * (reading - self._prefill_s_per_token)
        self._set_costs(self.costs)

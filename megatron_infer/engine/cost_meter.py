"""What computing and copying cost on this machine, measured while the engine runs: prices for evictions."""

from __future__ import annotations

from megatron_infer.memory.store import StateStore
from megatron_infer.scheduler.policy import CostModel
from megatron_infer.scheduler.step_plan import StepPlan

SMOOTHING = 0.2
"""Weight of a new reading."""
MIN_PREFILL_TOKENS = 16
"""A step tells the price of prefill only if it computes so many prompt tokens, and they are most of it."""


class CostMeter:
    """Seconds for a prompt token, from the steps that prefill, and for a block or a state between pool and host.

    Until a step has told, the price of prefill is the default's. Copies are measured once on idle places at the
    start and then wherever they really happen: fresh memory costs several times what a warm block does.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._prefill_s_per_token = CostModel().prefill_s_per_token
        self._num_readings = 0
        store.measure_copies()

    @property
    def costs(self) -> CostModel:
        return CostModel(
            prefill_s_per_token=self._prefill_s_per_token,
            copy_s_per_block=self._store.copy_s_per_block,
            copy_s_per_state=self._store.copy_s_per_state,
        )

    def take(self, plan: StepPlan, seconds: float) -> bool:
        """A step took so long -> whether prices changed."""
        num_prefill = plan.num_tokens - len(plan.decode)
        if num_prefill < MIN_PREFILL_TOKENS or num_prefill < 3 * len(plan.decode):
            return False
        reading = seconds / plan.num_tokens
        self._num_readings += 1
        weight = max(SMOOTHING, 1 / self._num_readings)
        self._prefill_s_per_token += weight * (reading - self._prefill_s_per_token)
        return True

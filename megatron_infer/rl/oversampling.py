"""Over-sampling: where the prompts come from, how many groups are under way, and what it means to run out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.rl.group_tracker import Call, GroupTracker
from megatron_infer.rl.prompts import ask_of, carrying
from megatron_infer.rl.samples import RolloutGroup


class RolloutShortage(InferenceError):
    """The prompts ran out before enough groups were accepted; `accepted` are those that were."""

    def __init__(self, wanted: int, accepted: list[RolloutGroup], num_rejected: int) -> None:
        super().__init__(
            f"{len(accepted)} of {wanted} groups accepted and {num_rejected} refused when the prompts ran out; give "
            "more prompts (an endless iterator), or a filter that takes more"
        )
        self.wanted, self.accepted, self.num_rejected = wanted, accepted, num_rejected


class PromptSource:
    """Prompts of one collect(), submitted as they are needed."""

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        prompts: Iterable[Any],
        params: SamplingParams,
        num_groups: int,
        oversample: float,
        max_in_flight: int | None,
    ) -> None:
        if not isinstance(num_groups, int) or num_groups < 1:
            raise ConfigError(f"num_groups is {num_groups!r}, it must be an integer of 1 or more")
        if not 1.0 <= oversample < math.inf:
            raise ConfigError(f"oversample is {oversample!r}, it must be 1.0 (no more than wanted) or more")
        if max_in_flight is not None and max_in_flight < 1:
            raise ConfigError(f"max_in_flight is {max_in_flight!r}, it must be 1 or more, or None for no limit")
        self._engine, self._prompts, self._params = engine, iter(prompts), carrying(params)
        self._wanted, self._oversample = num_groups, oversample
        self._limit = math.inf if max_in_flight is None else max_in_flight
        self._num_read = 0

    def fill(self, flow: GroupTracker, call: Call, num_accepted: int) -> None:
        """Submit until as many groups are under way as should be, or the prompts run out."""
        target = min(self._limit, math.ceil((self._wanted - num_accepted) * self._oversample))
        while len(call.tickets) + len(call.ready) < target:
            try:
                prompt = next(self._prompts)
            except StopIteration:
                return
            index, self._num_read = self._num_read, self._num_read + 1
            try:
                ask = ask_of(self._engine, prompt, self._params)
            except ValueError as error:
                error.args = (f"prompt {index}: {error}",)
                raise
            flow.add(call, ask, index)

"""Over-sampling: how prompts are read and submitted, how many groups are in flight, and what happens at their end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.given_prompts import GivenPrompts
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.rl.group_tracker import GroupTracker, PendingGroup, RolloutCall
from megatron_infer.rl.prompts import group_request_of
from megatron_infer.rl.samples import RolloutGroup


class RolloutShortage(InferenceError):
    """The prompts ran out before enough groups were accepted; `accepted` are those that were."""

    def __init__(self, wanted: int, accepted: list[RolloutGroup], num_rejected: int) -> None:
        super().__init__(
            f"{len(accepted)} of {wanted} groups accepted and {num_rejected} refused or failed when the prompts ran "
            "out; give more prompts (an endless iterator), or a filter that takes more"
        )
        self.wanted, self.accepted, self.num_rejected = wanted, accepted, num_rejected


class PromptFeed:
    """Submits prompts one at a time, reading them no further than needed."""

    def __init__(self, tracker: GroupTracker, prompts: Iterable[Any] | None, params: SamplingParams) -> None:
        prompts = () if prompts is None else prompts
        self._tracker, self._prompts, self._params = tracker, enumerate(prompts), params
        self.given = GivenPrompts(prompts, params)
        """The same prompts, for a rank that does not submit them."""

    def submit(self, call: RolloutCall) -> PendingGroup | None:
        """Submit the next prompt; None when the prompts have run out. An error names the prompt's index."""
        index, prompt = next(self._prompts, (-1, None))
        if index < 0:
            return None
        engine = self._tracker.engine
        engine.relay.read([prompt], self._params, is_all=False)
        try:
            request = group_request_of(engine, prompt, self._params)
        except ValueError as error:
            error.args = (f"prompt {index}: {error}",)
            raise
        return self._tracker.add(call, request, index)


class Oversampler:
    """Keeps `oversample` times as many groups in flight as are still wanted."""

    def __init__(self, feed: PromptFeed, num_groups: int, *, oversample: float, max_in_flight: int | None) -> None:
        if not isinstance(num_groups, int) or num_groups < 1:
            raise ConfigError(f"num_groups is {num_groups!r}, it must be an integer of 1 or more")
        if not 1.0 <= oversample < math.inf:
            raise ConfigError(f"oversample is {oversample!r}, it must be 1.0 (no more than wanted) or more")
        if max_in_flight is not None and max_in_flight < 1:
            raise ConfigError(f"max_in_flight is {max_in_flight!r}, it must be 1 or more, or None for no limit")
        self._feed, self._wanted, self._oversample = feed, num_groups, oversample
        self._limit = math.inf if max_in_flight is None else max_in_flight

    def fill(self, call: RolloutCall, num_accepted: int) -> None:
        """Submit until as many groups are in flight as should be, or the prompts run out."""
        target = min(self._limit, math.ceil((self._wanted - num_accepted) * self._oversample))
        while len(call.pending) + len(call.ready) < target and self._feed.submit(call) is not None:
            pass

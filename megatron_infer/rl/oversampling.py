"""Over-sampling: how prompts are read and submitted, how many groups are in flight, and what happens at their end."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.given_prompts import GivenPrompts
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.rl.group_tracker import GroupTracker, PendingGroup, RolloutCall
from megatron_infer.rl.prompts import group_request_of
from megatron_infer.rl.samples import RolloutGroup

END = object()


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

    def __init__(
        self,
        tracker: GroupTracker,
        prompts: Iterable[Any] | None,
        params: SamplingParams,
        *,
        before: PromptFeed | None = None,
    ) -> None:
        """before: of an earlier call; if it has read further in the same iterator than it submitted, this goes on."""
        self._tracker, self.params, self._given = tracker, params, prompts
        self._prompts = iter(() if prompts is None else prompts)
        is_same = before is not None and before._given is prompts and self._prompts is prompts
        self._ahead: deque[Any] = before._ahead if before is not None and is_same else deque()
        """Read and not submitted."""
        self._num_read = 0
        self._compared: GivenPrompts | None = None

    def look_ahead(self, count: int) -> list[Any] | None:
        """The next `count` prompts, or those that there are, which stay to be submitted; None where none are given.

        An engine of one rank has nothing to compare, and reads none.
        """
        if self._tracker.ranks.size == 1:
            return None
        self._ahead.extend(itertools.islice(self._prompts, max(0, count - len(self._ahead))))
        return None if self._given is None else list(itertools.islice(self._ahead, count))

    def _unread(self) -> Iterator[Any]:
        while True:
            try:
                yield self._ahead.popleft() if self._ahead else next(self._prompts)
            except StopIteration:
                return

    def comparing(self, source: int) -> AbstractContextManager[None]:
        """Around a call that shares the prompts of rank `source`: see `CommandRelay.comparing`."""
        if self._compared is None:
            self._compared = GivenPrompts(self._unread(), self.params)
        return self._tracker.engine.relay.comparing(source, self._compared)

    def submit(self, call: RolloutCall) -> PendingGroup | None:
        """Submit the next prompt; None when the prompts have run out. An error names the prompt's index."""
        prompt = next(self._unread(), END)
        if prompt is END:
            return None
        engine, index = self._tracker.engine, self._num_read
        self._num_read += 1
        if call.shares.readers:
            engine.relay.outbox.read(prompt, self.params)
        try:
            request = group_request_of(engine, prompt, self.params)
            self._tracker.ranks.check(call.shares, request.info)
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

    @property
    def num_at_first(self) -> int:
        """Prompts that a call begins with, if no groups are left from an earlier one."""
        return int(min(self._limit, math.ceil(self._wanted * self._oversample)))

    def fill(self, call: RolloutCall, num_accepted: int) -> None:
        """Submit until as many groups are in flight as should be, or the prompts run out."""
        target = min(self._limit, math.ceil((self._wanted - num_accepted) * self._oversample))
        while len(call.pending) + len(call.ready) < target and self._feed.submit(call) is not None:
            pass

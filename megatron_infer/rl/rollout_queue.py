"""RolloutQueue: batches for training steps from an engine that generates ahead of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError
from megatron_infer.outputs.request_output import check_on_error
from megatron_infer.rl.group_tracker import RolloutCall
from megatron_infer.rl.multi_rank import Shares
from megatron_infer.rl.oversampling import PromptFeed, RolloutShortage
from megatron_infer.rl.rollout import Rollout
from megatron_infer.rl.samples import RolloutGroup, checked_groups
from megatron_infer.rl.staleness import Granularity, RolloutLag, automatic_lag
from megatron_infer.rl.stats import RolloutStats, stats_of


class RolloutQueue:
    """Gives a batch of groups for every training step, begun at most `lag` steps before it.

        queue = RolloutQueue(roll, prompts, params, groups_per_step=16, lag="auto")
        with session.generating(): batch = queue.next_batch()       # unfinished groups stay in the engine
        with session.training(): ...
        session.update_weights()

    lag "auto": see `automatic_lag`; where requests wait for rows or blocks, the rows that the engine was seen to hold
    take the place of max_requests. `stats` has the lag of each batch. max_staleness: a group with a token drawn by
    weights more versions old than that is not delivered: it is aborted as soon as that is certain, and another prompt
    begins in its place. A group that failed is dropped with a RolloutError that has it, or with on_error "replace"
    silently; finished groups stay in the queue, and the next call goes on. With several ranks every rank has a queue of
    its own prompts, and calls next_batch() and close(). Ranks whose prompts begin alike, as many as a queue begins
    with, share one queue and its batches: iterators that differ further on raise PromptsDiffer.
    """

    def __init__(
        self,
        roll: Rollout,
        prompts: Iterable[Any] | None,
        params: SamplingParams,
        *,
        groups_per_step: int,
        lag: int | Literal["auto"] = 0,
        max_staleness: int | None = None,
        submission: Granularity | str = Granularity.GROUP,
        consumption: Granularity | str = Granularity.GROUP,
        data_parallel: int = 1,
        on_error: Literal["raise", "replace"] = "raise",
    ) -> None:
        """data_parallel: engines that share the batch; used by lag "auto" only. Queues of several ranks' own prompts
        have equal parts of their engine."""
        check_on_error(on_error, ("raise", "replace"))
        self._wanted, groups_per_step = groups_per_step, roll.part_of_batch(groups_per_step)
        self._prompts = roll.own_prompts(prompts, params)
        self._lag_of: Callable[..., int] | None = None
        """With lag "auto": number of queues that share the engine -> the lag of each."""
        self._most_running = (0, False)
        """Most rows that ran in a step of the batch, and whether requests waited for others then."""
        if lag == "auto":
            self._lag_of = partial(
                _lag_of,
                max_requests=roll.engine.sizes.max_requests,
                data_parallel=data_parallel,
                samples_per_group=params.n,
                groups_per_step=groups_per_step,
            )
            lag = self._lag_of(1)
        if max_staleness is not None and max_staleness < 0:
            raise ConfigError(f"max_staleness is {max_staleness}, it must be 0 or more, or None for no limit")
        self.lag = RolloutLag(lag, groups_per_step=groups_per_step, submission=submission, consumption=consumption)
        self.max_staleness = max_staleness
        self.num_dropped = 0
        """Groups dropped so far because they were too stale or failed."""
        self.stats: RolloutStats | None = None
        """Figures of the latest batch."""
        self._roll, self._feed = roll, PromptFeed(roll.tracker, self._prompts, params)
        self._raises = on_error == "raise"
        self._call: RolloutCall | None = None
        self._shares = Shares()
        self._finished: dict[str, RolloutGroup] = {}

    def next_batch(self) -> list[RolloutGroup]:
        """Generate until the next training step has its groups -> those, oldest first.

        Raises RolloutShortage when the prompts have run out, with the remaining groups in `accepted`; RolloutError with
        the groups that failed since the last call.
        """
        return self._roll.united(self._next_batch, self._prompts, wanted=self._wanted)

    def _next_batch(self) -> list[RolloutGroup]:
        """This engine's part of a batch."""
        ranks, tracker = self._roll.ranks, self._roll.tracker
        failure: BaseException | None = None
        figures: dict[str, Any] = {}
        is_first, self._shares = self._call is None, self._shares.again()
        ranks.start(self._shares)
        try:
            if is_first:
                self._call = RolloutCall()
                tracker.begin(self._call, [], carry=False)
                self._call.shares = self._share()
            assert self._call is not None
            if ranks.is_own(self._shares):
                batch, figures = self._draw_batch(self._call)
            else:
                batch = self._roll.read_shared(self._shares, self._feed)
                figures = self._shares.figures
        except BaseException as error:
            failure = error
            raise
        finally:
            ranks.end(self._shares, failure, tracker, figures)
        if figures:
            self.stats = stats_of(batch, version=self._roll.engine.weight_version, **figures)
        return checked_groups(batch)

    def _share(self) -> Shares:
        """Compare this rank's prompts with those of the other ranks."""
        self._shares = Shares(self._roll.ranks.rank)
        self._shares = self._roll.shares_of(self._feed, self.lag.room())
        if self._lag_of is not None:
            self.lag.lag = self._lag_of(self._shares.num_sources)
        return self._shares

    def __iter__(self) -> Iterator[list[RolloutGroup]]:
        """Batches until the prompts have run out; with several ranks call next_batch()."""
        while True:
            try:
                yield self.next_batch()
            except RolloutShortage:
                return

    def close(self) -> None:
        """Abort the groups in flight and drop those that were not consumed."""
        ranks, tracker = self._roll.ranks, self._roll.tracker
        self._shares = self._shares.again()
        ranks.start(self._shares)
        try:
            if self._call is not None:
                tracker.end(self._call)
                tracker.release(self._finished)
            self._call, self._finished = None, {}
        finally:
            ranks.end(self._shares, None, tracker)

    # ------------------------------------------------------------------ one batch
    def _draw_batch(self, call: RolloutCall) -> tuple[list[RolloutGroup], dict[str, Any]]:
        """The groups of a step with the figures for `stats_of`, or those that failed without."""
        tracker, tokens, started = self._roll.tracker, self._roll.tracker.num_tokens(call), time.perf_counter()
        dropped = self.num_dropped
        while True:
            if failed := self._take_finished(call):
                return self._deliver(failed), {}
            self._drop_stale(call)
            self._submit(call)
            chosen = self.lag.take()
            if chosen is not None:
                break
            if not call.pending:
                raise RolloutShortage(self.lag.groups_per_step, list(self._finished.values()), self.num_dropped)
            tracker.step()
            self._note_running()
        batch = [self._finished.pop(group_id) for group_id in chosen]
        figures = {
            "seconds": time.perf_counter() - started,
            "num_tokens": tracker.num_tokens(call) - tokens,
            "num_aborted": self.num_dropped - dropped,
            "lag": self.lag.lag,
            "lags_used": self.lag.ages,
        }
        self._adjust_lag()
        return self._deliver(batch), figures

    def _note_running(self) -> None:
        if self._lag_of is not None:
            now = self._roll.engine.stats()
            self._most_running = max(self._most_running, (now.num_running, now.num_waiting + now.num_paused > 0))

    def _adjust_lag(self) -> None:
        """With lag "auto": no more groups ahead than the engine holds; one step more where none had to wait."""
        if self._lag_of is None:
            return
        (running, is_full), self._most_running = self._most_running, (0, False)
        most = self._lag_of(self._shares.num_sources)
        held = self._lag_of(self._shares.num_sources, max_requests=running) if is_full else self.lag.lag + 1
        self.lag.lag = min(most, held)

    def _deliver(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        tracker = self._roll.tracker
        if self._roll.ranks.deliver(groups, whole=tracker.aborted, shares=self._shares):
            tracker.step()
        tracker.release(group.group_id for group in groups)
        return groups

    def _take_finished(self, call: RolloutCall) -> list[RolloutGroup]:
        """Take in finished groups and drop those that failed -> these, where they are an error."""
        failed = []
        while call.ready:
            group = call.ready.popleft()
            if group.error is None:
                self._finished[group.group_id] = group
                self.lag.finish(group.group_id)
            else:
                self._drop(group.group_id)
                failed.append(group)
        return failed if self._raises else []

    def _drop_stale(self, call: RolloutCall) -> None:
        if self.max_staleness is None:
            return
        version, tracker = self._roll.engine.weight_version, self._roll.tracker
        for group_id, group in list(self._finished.items()):
            if group.staleness(version) > self.max_staleness:
                del self._finished[group_id]
                self._drop(group_id)
        for pending in list(call.pending.values()):
            oldest = tracker.oldest_policy(pending)
            if oldest is not None and version - oldest > self.max_staleness:
                tracker.drop(call, pending)
                self._drop(pending.id)

    def _drop(self, group_id: str) -> None:
        self._roll.tracker.release([group_id])
        self.lag.drop(group_id)
        self.num_dropped += 1

    def _submit(self, call: RolloutCall) -> None:
        """Begin as many groups as the lag allows, unless the prompts run out."""
        for _ in range(self.lag.room()):
            pending = self._feed.submit(call)
            if pending is None:
                return
            self.lag.begin(pending.id)


def _lag_of(num_queues: int, *, max_requests: int, **how: int) -> int:
    return automatic_lag(max_requests=max(1, max_requests // num_queues), **how)

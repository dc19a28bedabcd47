"""Rollout: groups of samples from a live engine, as a list, an iterator or an asynchronous stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import RequestError
from megatron_infer.outputs.request_output import OnError, check_on_error
from megatron_infer.rl.group_tracker import Budget, GroupTracker, PendingGroup, RolloutCall
from megatron_infer.rl.multi_rank import RolloutRanks, Shares, source_of
from megatron_infer.rl.oversampling import Oversampler, PromptFeed, RolloutShortage
from megatron_infer.rl.prompts import GroupRequest, given_batch, group_requests_of
from megatron_infer.rl.rollout_thread import RolloutThread
from megatron_infer.rl.samples import RolloutGroup, checked_groups, checked_stream
from megatron_infer.rl.stats import RolloutStats, stats_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProgress:
    """How far a call has come."""

    num_groups: int
    num_done: int
    num_tokens: int
    """Tokens drawn since the call began, those of unfinished groups too."""
    seconds: float


Progress = Callable[[RolloutProgress], None]
Params = SamplingParams | Sequence[SamplingParams]


class Rollout:
    """Draws groups of samples from an engine. A prompt with `SamplingParams(n=8)` is one request of the engine: its
    prompt is computed once and shared, and its samples end or are aborted together.

    prompts: text, ids, chat messages or mappings (see `prompts.RolloutPrompt`); params: one, or one for each prompt.
    Groups whose request failed have cut-off samples: once the call's other groups are done it raises RolloutError,
    which has all of them. on_error "return": the call gives failed groups like others, with `error`.
    A call that is left early (an error, a `break`, Ctrl-C) aborts what it submitted: none of its groups reaches a later
    call. A call that stopped at a budget (`pause_at`) leaves its groups in the engine, where they outlive suspends and
    weight updates; the next call continues them and delivers them beside its own.
    With several ranks every rank makes the same calls, each with its own prompts, params, filters, callbacks and
    budgets, and has its own groups. Ranks with equal prompts and params share groups, for which those of the first of
    them count; see `given_prompts.sources_of`. A call returns once the calls of all ranks have ended. Or the leader
    alone calls, while the others are in `engine.follow()`.
    """

    def __init__(
        self, engine: DynamicInferenceEngine, *, on_delivered: Callable[[Sequence[RolloutGroup]], None] | None = None
    ) -> None:
        """on_delivered: called with groups as they are given to a caller, by any call, queue or conversation; on the
        rank that began them."""
        self.engine = engine
        self.ranks = RolloutRanks(engine, on_delivered=on_delivered)
        self.tracker = GroupTracker(engine, self.ranks)
        self.thread = RolloutThread(self.tracker)
        self._budget: Budget | None = None
        self._feed: PromptFeed | None = None
        """Of the latest collect()."""
        self._surplus: list[RolloutGroup] = []
        """Groups that a collect() accepted for the next one."""
        self.stats: RolloutStats | None = None
        """Figures of the latest call that has ended, of the groups that this rank has."""

    # ------------------------------------------------------------------ drawing
    def generate(
        self,
        prompts: Any,
        params: Params,
        *,
        on_group: Callable[[RolloutGroup], None] | None = None,
        on_progress: Progress | None = None,
        on_error: OnError = "raise",
    ) -> list[RolloutGroup]:
        """Draw all -> groups in the order of their prompts, after those that earlier calls had left unfinished.

        on_group is called as each finishes, on_progress after each step, on ranks that share prompts by their source.
        """
        check_on_error(on_error)
        groups = []
        for group in self._groups(prompts, params, on_progress):
            groups.append(group)
            if on_group is not None and (group.error is None or on_error == "return"):
                on_group(group)
        return checked_groups(sorted(groups, key=_submission_number), on_error)

    def iterate(
        self, prompts: Any, params: Params, *, on_progress: Progress | None = None, on_error: OnError = "raise"
    ) -> Iterator[RolloutGroup]:
        """Groups as they finish, each with its `index` and `info`. The engine steps while the next is awaited."""
        check_on_error(on_error)
        found = []
        with closing(self._groups(prompts, params, on_progress)) as groups:
            for group in groups:
                found.append(group)
                if group.error is None or on_error == "return":
                    yield group
        checked_groups(found, on_error)

    def _groups(self, prompts: Any, params: Params, on_progress: Progress | None) -> Generator[RolloutGroup]:
        """Groups as they finish, those that failed too."""
        failure, call = None, RolloutCall()
        self.ranks.start(call.shares)
        try:
            self._begin(call, prompts, params)
            while (group := self._next(call, on_progress)) is not None:
                self.deliver(call, [group])
                yield group
        except BaseException as error:
            failure = error
            raise
        finally:
            self._end(call, failure)

    def stream(
        self, prompts: Any, params: Params, *, on_progress: Progress | None = None, on_error: OnError = "raise"
    ) -> AsyncIterator[RolloutGroup]:
        """`async for group in roll.stream(...)`: as `iterate`, in any event loop and beside other streams.

        The engine steps on a thread of its own, so the loop stays free; callbacks run in the loop. Leave it early with
        `aclosing(...)` or a finished loop, which aborts what it submitted. With several ranks: one stream at a time.
        """
        return checked_stream(self._stream(prompts, params, on_progress), on_error)

    async def _stream(
        self, prompts: Any, params: Params, on_progress: Progress | None, *, carry: bool = True
    ) -> AsyncGenerator[RolloutGroup]:
        run = self.thread.run
        failure, call = None, RolloutCall()
        await run(lambda: self.ranks.start(call.shares))
        try:
            await run(lambda: self._begin(call, prompts, params, carry=carry))
            while (group := await self._anext(call, on_progress)) is not None:
                await run(lambda group=group: self.deliver(call, [group]))  # type: ignore[misc]
                yield group
        except BaseException as error:
            failure = error
            raise
        finally:
            await run(lambda: self._end(call, failure))

    def stream_alone(self, request: GroupRequest) -> AsyncGenerator[RolloutGroup]:
        """The group of one checked prompt, failed or not; groups that earlier calls left unfinished stay so."""
        return self._stream([request.prompt], request.params, None, carry=False)

    def collect(
        self,
        num_groups: int,
        prompts: Iterable[Any],
        params: SamplingParams,
        *,
        accept: Callable[[RolloutGroup], bool] | None = None,
        oversample: float = 1.5,
        max_in_flight: int | None = None,
        carry: bool = False,
        keep_in_flight: bool = False,
        on_progress: Progress | None = None,
        on_error: Literal["raise", "replace"] = "raise",
    ) -> list[RolloutGroup]:
        """Draw until `accept` has taken `num_groups`, then abort the groups in flight -> the accepted, in that order.

        prompts: an iterator is read as far as needed, here and by the next call; oversample times as many groups as
        are still wanted are in flight, at most max_in_flight. accept: called for each finished group (None takes all),
        by the source of ranks that share prompts. A group that failed ends the call with RolloutError, which has it and
        the accepted ones; on_error "replace": it counts as refused, and another prompt is drawn. Groups accepted beyond
        num_groups, which finished in the same step, are returned too, or with `carry` come first in the next collect().
        keep_in_flight: leave the groups in flight in the engine for the next call, as at a budget (`pause_at`), which
        ends this one with fewer groups.
        Raises RolloutShortage, with what was accepted, when the prompts run out. After another error the next collect()
        begins with the groups that an earlier one carried.
        """
        check_on_error(on_error, ("raise", "replace"))
        failure: BaseException | None = None
        call, accepted, surplus = RolloutCall(), list(self._surplus), self._surplus
        failed: list[RolloutGroup] = []
        self.ranks.start(call.shares)
        try:
            feed = self._feed = PromptFeed(self.tracker, prompts, params, before=self._feed)
            oversampler = Oversampler(feed, num_groups, oversample=oversample, max_in_flight=max_in_flight)
            call.shares = self.shares_of(feed, oversampler.num_at_first)
            if not self.ranks.is_own(call.shares):
                call.delivered = self.read_shared(call.shares, feed)
                return checked_groups(call.delivered)
            self._surplus = []
            self.tracker.begin(call, [])
            while len(accepted) < num_groups and not failed:
                oversampler.fill(call, len(accepted))
                group = self._next(call, on_progress)
                if group is None:
                    break
                self._filter(call, group, accept, accepted, failed if on_error == "raise" else None)
            while call.ready:
                self._filter(call, call.ready.popleft(), accept, accepted, failed if on_error == "raise" else None)
            if len(accepted) < num_groups and not failed and not call.paused:
                raise RolloutShortage(num_groups, accepted, call.num_rejected)
            if not failed:
                call.paused = call.paused or keep_in_flight
                if carry:
                    accepted, self._surplus = accepted[:num_groups], accepted[num_groups:]
            accepted += failed
            self.deliver(call, accepted)
        except BaseException as error:
            failure = error
            self._surplus = [] if isinstance(failure, RolloutShortage) else surplus
            kept = {group.group_id for group in self._surplus}
            self.tracker.release(group.group_id for group in [*accepted, *failed] if group.group_id not in kept)
            raise
        finally:
            if not call.paused:
                call.carried_over = ()  # groups of earlier calls are aborted, too
            self._end(call, failure)
        return checked_groups(accepted)

    def shares_of(self, feed: PromptFeed, count: int) -> Shares:
        """Compare the first `count` prompts of a call with those of the other ranks."""
        return self.ranks.exchange(lambda: feed.look_ahead(count), feed.params)[0]

    def read_shared(self, shares: Shares, feed: PromptFeed) -> list[RolloutGroup]:
        """The groups that the source of this rank's prompts has, in a call that reads its prompts from `feed`."""
        groups, call = [], RolloutCall(shares)
        with feed.comparing(shares.source):
            while (group := self._next(call, None)) is not None:
                groups.append(group)
        return groups

    def _filter(
        self,
        call: RolloutCall,
        group: RolloutGroup,
        accept: Callable[[RolloutGroup], bool] | None,
        accepted: list[RolloutGroup],
        failed: list[RolloutGroup] | None,
    ) -> None:
        """failed: gets a group that failed; None: it is refused."""
        if group.error is not None and failed is not None:
            failed.append(group)
            return
        is_accepted = False
        try:
            is_accepted = group.error is None and (accept is None or accept(group))
        finally:
            if not is_accepted:
                self.tracker.release([group.group_id])
        if is_accepted:
            accepted.append(group)
        else:
            call.num_rejected += 1

    # ------------------------------------------------------------------ control
    def pause_at(self, budget: Budget | None) -> None:
        """The present call, or the next one, stops at `budget` and leaves its unfinished groups in the engine.

        May be called from a callback. None cancels it. It holds for one call, and for the groups of this rank.
        """
        self._budget = budget

    @property
    def unfinished(self) -> list[PendingGroup]:
        """Groups of this rank that paused calls have left in the engine."""
        return list(self.tracker.unfinished.values())

    @property
    def in_flight(self) -> list[PendingGroup]:
        """Groups of this rank in flight, of any call, and those unfinished."""
        return self.tracker.in_flight

    def abort(self, group_id: str) -> RolloutGroup:
        """Abort a group of this rank in flight, all its samples -> what it has.

        A call that waits for it delivers it as it is, with finish_reason "abort"; may be called from a callback.
        """
        return self.tracker.abort(group_id)

    def abort_all(self) -> list[RolloutGroup]:
        """Abort all groups of this rank that paused calls left unfinished -> what they have."""
        return [self.abort(group_id) for group_id in list(self.tracker.unfinished)]

    # ------------------------------------------------------------------ several engines, see `ContextRollout`
    def own_prompts(self, prompts: Iterable[Any] | None, params: SamplingParams) -> Iterable[Any] | None:
        """Those of a queue's prompts that this engine draws."""
        return prompts

    def part_of_batch(self, groups: int) -> int:
        """How many of a queue's groups this engine draws for a batch."""
        return groups

    def united(self, draw: Callable[[], list[RolloutGroup]], own: Any, *, wanted: int) -> list[RolloutGroup]:
        """The groups of all engines. draw: draws this one's, of the prompts `own`. wanted: groups of all engines."""
        return draw()

    def divided(
        self, prompts: Any, params: Params, draw: Callable[[Any, Params], AsyncGenerator[RolloutGroup]]
    ) -> AsyncGenerator[RolloutGroup]:
        """The groups of all engines. draw: draws those of this one's prompts, with one SamplingParams or one each."""
        return draw(prompts, params)

    # ------------------------------------------------------------------ one call
    def _begin(self, call: RolloutCall, prompts: Any, params: Params, *, carry: bool = True) -> None:
        call.shares, batch = self.ranks.exchange(lambda: given_batch(prompts), params)
        requests = []
        if self.ranks.is_own(call.shares) and (batch or self.ranks.size == 1):
            requests = group_requests_of(self.engine, batch or [], params)
            for request in requests:
                self.ranks.check(call.shares, request.info)
        self.tracker.begin(call, requests, carry=carry)
        call.gives_all = True

    def _next(self, call: RolloutCall, on_progress: Progress | None) -> RolloutGroup | None:
        """The next finished group; None when there is none left or the budget is reached."""
        while self._must_step(call):
            self.tracker.step()
            self._report_progress(call, on_progress)
        return self._ready(call)

    async def _anext(self, call: RolloutCall, on_progress: Progress | None) -> RolloutGroup | None:
        while self._must_step(call):
            await self.thread.step()
            self._report_progress(call, on_progress)
        return self._ready(call)

    def _ready(self, call: RolloutCall) -> RolloutGroup | None:
        """Raises RequestError for an error of the rank that this one shares prompts with."""
        for groups in (call.ready, call.shares.received):
            if groups:
                return groups.popleft()
        if call.shares.error:
            raise RequestError(f"rank {call.shares.source}: {call.shares.error}")
        return None

    def _must_step(self, call: RolloutCall) -> bool:
        """Whether a call has to wait for a group; at its budget it pauses instead."""
        if call.ready or call.shares.received:
            return False
        if call.pending and not call.paused:
            call.paused = self.tracker.is_over(call, self._budget)
        if call.pending and not call.paused:
            return True
        if call.gives_all:
            self.ranks.announce(call.shares, None, self.tracker, self.tracker.figures(call))
        return self.ranks.waits(call.shares, for_all=call.gives_all)

    def _report_progress(self, call: RolloutCall, on_progress: Progress | None) -> None:
        if on_progress is not None and self.ranks.is_own(call.shares):
            on_progress(
                RolloutProgress(
                    num_groups=call.num_groups,
                    num_done=call.num_done,
                    num_tokens=self.tracker.num_tokens(call),
                    seconds=call.seconds,
                )
            )

    def deliver(self, call: RolloutCall, groups: list[RolloutGroup], *, whole: Collection[str] = ()) -> None:
        """The caller has these groups: those of this rank are delivered to the ranks that share them, too.

        whole: ids of groups that are no requests of the engine.
        """
        call.delivered += groups
        own = [group for group in groups if source_of(group.group_id) == self.ranks.rank]
        if own and self.ranks.deliver(own, whole={*whole, *self.tracker.aborted}, shares=call.shares):
            self.tracker.step()
        self.tracker.release(group.group_id for group in own)

    async def next_shared(self, call: RolloutCall) -> RolloutGroup | None:
        """The next group of a call whose prompts have their source on another rank; None when there is none left."""
        return await self._anext(call, None)

    def _end(self, call: RolloutCall, failure: BaseException | None) -> None:
        figures: dict[str, Any] = {}
        try:
            self._budget = None
            self.tracker.end(call)
            figures = self.tracker.figures(call)
        finally:
            self.ranks.end(call.shares, failure, self.tracker, figures)
        self.stats = stats_of(call.delivered, version=self.engine.weight_version, **(call.shares.figures or figures))


def _submission_number(group: RolloutGroup) -> int:
    """Groups are numbered as they are submitted."""
    return int(group.group_id.rpartition("/")[2])

"""Rollout: groups of samples from a live engine, as a list, an iterator or an asynchronous stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.rl.group_tracker import Budget, Call, GroupTracker, Ticket
from megatron_infer.rl.multi_rank import Ranks
from megatron_infer.rl.oversampling import PromptSource, RolloutShortage
from megatron_infer.rl.prompts import asks_of
from megatron_infer.rl.rollout_thread import RolloutThread
from megatron_infer.rl.samples import RolloutGroup
from megatron_infer.rl.stats import RolloutStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProgress:
    """How far a call has come."""

    num_groups: int
    num_done: int
    num_tokens: int
    """Drawn since the call began, those of unfinished groups too."""
    seconds: float


Progress = Callable[[RolloutProgress], None]
Params = SamplingParams | Sequence[SamplingParams]


class Rollout:
    """Draws groups of samples from an engine. A prompt with `SamplingParams(n=8)` is one request of the engine: its
    prompt is computed once and shared, and it ends or is aborted as a whole.

    prompts: text, ids, chat messages or mappings (see `prompts.RolloutPrompt`); params: one, or one for each prompt.
    A call that is left early (an error, a `break`, Ctrl-C) aborts what it submitted: nothing of it reaches a later
    call. A call that stopped at a budget (`pause_at`) leaves its groups in the engine, where they outlive suspends and
    weight updates; the next call goes on with them and hands them out beside its own.
    With several ranks every rank makes the same calls and has the groups, and the leader's prompts count; or the leader
    alone calls, while the others are in `engine.follow()`.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.engine = engine
        self.flow = GroupTracker(engine)
        self.ranks = Ranks(engine)
        self.pump = RolloutThread(self.flow)
        self._budget: Budget | None = None
        self._surplus: list[RolloutGroup] = []
        """Accepted by a collect(), for the next one."""
        self.stats: RolloutStats | None = None
        """Of the latest call that has ended. On the leader."""

    # ------------------------------------------------------------------ drawing
    def generate(
        self,
        prompts: Any,
        params: Params,
        *,
        on_group: Callable[[RolloutGroup], None] | None = None,
        on_progress: Progress | None = None,
    ) -> list[RolloutGroup]:
        """Draw all -> groups in the order of their prompts, after those that earlier calls had left unfinished.

        on_group is called as each finishes, on_progress after each step (on the leader). A request that failed is a
        group with `error`.
        """
        groups = []
        for group in self.iterate(prompts, params, on_progress=on_progress):
            groups.append(group)
            if on_group is not None:
                on_group(group)
        return sorted(groups, key=_order)

    def iterate(self, prompts: Any, params: Params, *, on_progress: Progress | None = None) -> Iterator[RolloutGroup]:
        """Groups as they finish; `index` and `info` tell which is which. The engine steps while the next is awaited."""
        if not self.ranks.is_leader:
            yield from self.ranks.hear()
            return
        error, call = "", Call()
        try:
            self.flow.begin(call, asks_of(self.engine, prompts, params))
            while (group := self._next(call, on_progress)) is not None:
                self._give(call, [group])
                yield group
        except BaseException as failure:
            error = "" if isinstance(failure, GeneratorExit) else f"{type(failure).__name__}: {failure}"
            raise
        finally:
            self._end(call, error)

    async def stream(
        self, prompts: Any, params: Params, *, on_progress: Progress | None = None
    ) -> AsyncIterator[RolloutGroup]:
        """`async for group in roll.stream(...)`: as `iterate`, in any event loop and beside other streams.

        The engine steps on a thread of its own, so the loop stays free; callbacks run in the loop. Leave it early with
        `aclosing(...)` or a finished loop: what it submitted is aborted then. With several ranks: one stream at a time.
        """
        if not self.ranks.is_leader:
            heard = self.ranks.hear()
            try:
                while (told := await self.pump.run(lambda: next(heard, None))) is not None:
                    yield told
            finally:
                await self.pump.run(heard.close)
            return
        error, call = "", Call()
        try:
            await self.pump.run(lambda: self.flow.begin(call, asks_of(self.engine, prompts, params)))
            while (group := await self._anext(call, on_progress)) is not None:
                await self.pump.run(lambda group=group: self._give(call, [group]))  # type: ignore[misc]
                yield group
        except BaseException as failure:
            error = "" if isinstance(failure, GeneratorExit) else f"{type(failure).__name__}: {failure}"
            raise
        finally:
            await self.pump.run(lambda: self._end(call, error))

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
    ) -> list[RolloutGroup]:
        """Draw until `accept` has taken `num_groups`, then abort whatever is under way -> the accepted, as they came.

        prompts: an iterator is read as far as needed, here and by the next call; oversample times as many groups as
        are still wanted are under way, at most max_in_flight. accept: called on the leader for each finished group
        (None takes all); failed groups are never taken. Groups accepted beyond num_groups, which finished in the same
        step, are returned too, or with `carry` come first in the next collect(). keep_in_flight: leave what is under
        way in the engine for the next call, as at a budget (`pause_at`), which ends this one with fewer groups.
        Raises RolloutShortage, with what was accepted, when the prompts run out. After another error the next collect()
        begins with what an earlier one had carried.
        """
        if not self.ranks.is_leader:
            return list(self.ranks.hear())
        error, call, accepted, surplus = "", Call(), list(self._surplus), self._surplus
        try:
            source = PromptSource(self.engine, prompts, params, num_groups, oversample, max_in_flight)
            self._surplus = []
            self.flow.begin(call, [])
            while len(accepted) < num_groups:
                source.fill(self.flow, call, len(accepted))
                group = self._next(call, on_progress)
                if group is None:
                    break
                self._judge(call, group, accept, accepted)
            while call.ready:
                self._judge(call, call.ready.popleft(), accept, accepted)
            if len(accepted) < num_groups and not call.paused:
                raise RolloutShortage(num_groups, accepted, call.num_rejected)
            call.paused = call.paused or keep_in_flight
            if carry:
                accepted, self._surplus = accepted[:num_groups], accepted[num_groups:]
            self._give(call, accepted)
            return accepted
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}"
            self._surplus = [] if isinstance(failure, RolloutShortage) else surplus
            kept = {group.group_id for group in self._surplus}
            self.flow.release(group.group_id for group in accepted if group.group_id not in kept)
            raise
        finally:
            if not call.paused:
                call.token_details = ()  # those of earlier calls are aborted, too
            self._end(call, error)

    def _judge(
        self,
        call: Call,
        group: RolloutGroup,
        accept: Callable[[RolloutGroup], bool] | None,
        accepted: list[RolloutGroup],
    ) -> None:
        is_taken = False
        try:
            is_taken = group.error is None and (accept is None or accept(group))
        finally:
            if not is_taken:
                self.flow.release([group.group_id])
        if is_taken:
            accepted.append(group)
        else:
            call.num_rejected += 1

    # ------------------------------------------------------------------ control
    def pause_at(self, budget: Budget | None) -> None:
        """The call under way, or the next one, stops at `budget` and leaves what is unfinished in the engine.

        May be called from a callback. None takes it back. It holds for one call. On the leader.
        """
        self._budget = budget

    @property
    def unfinished(self) -> list[Ticket]:
        """Groups that paused calls have left in the engine. On the leader."""
        return list(self.flow.loose.values())

    @property
    def in_flight(self) -> list[Ticket]:
        """Groups under way, of any call, and those unfinished. On the leader."""
        return self.flow.in_flight

    def abort(self, group_id: str) -> RolloutGroup:
        """End a group under way, all its samples -> what it has. On the leader.

        A call that waits for it hands it out as it is, with finish_reason "abort"; may be called from a callback.
        """
        return self.flow.abort(group_id)

    def abort_all(self) -> list[RolloutGroup]:
        """End all that paused calls left unfinished -> what they have. On the leader."""
        return [self.abort(group_id) for group_id in list(self.flow.loose)]

    # ------------------------------------------------------------------ one call
    def _next(self, call: Call, on_progress: Progress | None) -> RolloutGroup | None:
        """The next finished group; None when there is none left or the budget is reached."""
        while not call.ready:
            if not call.tickets:
                return None
            if self.flow.reached(call, self._budget):
                call.paused = True
                return None
            self.flow.step()
            if on_progress is not None:
                on_progress(self._progress(call))
        return call.ready.popleft()

    async def _anext(self, call: Call, on_progress: Progress | None) -> RolloutGroup | None:
        while not call.ready:
            if not call.tickets:
                return None
            if self.flow.reached(call, self._budget):
                call.paused = True
                return None
            await self.pump.step()
            if on_progress is not None:
                on_progress(self._progress(call))
        return call.ready.popleft()

    def _give(self, call: Call, groups: list[RolloutGroup]) -> None:
        """Hand groups out, on every rank."""
        call.given += groups
        self.ranks.tell(groups, cut=self.flow.cut)
        self.flow.release(group.group_id for group in groups)

    def _end(self, call: Call, error: str) -> None:
        try:
            self._budget = None
            self.flow.end(call)
            self.stats = self.flow.stats(call)
        finally:
            self.end_turn(error)

    def end_turn(self, error: str) -> None:
        """On the leader: the other ranks' call ends, with an error if there was one; what is held they keep."""
        self.ranks.tell([], end=True, keep=sorted(self.flow.held), error=error)

    def _progress(self, call: Call) -> RolloutProgress:
        return RolloutProgress(
            num_groups=call.num_groups,
            num_done=call.num_done,
            num_tokens=self.flow.num_tokens(call),
            seconds=call.seconds,
        )


def _order(group: RolloutGroup) -> int:
    """Groups are numbered as they are submitted."""
    return int(group.group_id.rpartition("/")[2])

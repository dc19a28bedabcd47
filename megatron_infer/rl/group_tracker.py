"""Groups in flight: which requests of the engine belong to which call, and how a step's outputs reach them.

GroupRequest -> RolloutCall.pending -> engine requests -> step() -> finished groups -> RolloutCall.ready
                     |
                     +-- a call that pauses leaves its pending groups in `unfinished`; the next call takes them over
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.states import EngineState
from megatron_infer.errors import ConfigError, InferenceError, UnknownRequest
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.rl.prompts import GroupRequest
from megatron_infer.rl.samples import RolloutGroup, group_of
from megatron_infer.rl.stats import RolloutStats, stats_of

PREFIX = "rollout/"
"""Begins the ids of the engine's requests that are groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When a call stops although groups are unfinished: at the first limit that is reached. None: no limit."""

    groups: int | None = None
    """Groups finished."""
    tokens: int | None = None
    """Tokens drawn since the call began; the step that reaches it is the last."""
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("groups", "tokens", "seconds"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value >= 0):
                raise ConfigError(f"Budget: {name} is a number of 0 or more, or None for no limit; got {value!r}")


@dataclass(slots=True, eq=False, kw_only=True)
class PendingGroup:
    id: str
    index: int
    info: dict[str, Any]
    begun_version: int
    tokens_before: int = 0
    """Tokens drawn before the call that waits for it began."""

    def group(self, output: RequestOutput) -> RolloutGroup:
        return group_of(output, index=self.index, info=self.info, begun_version=self.begun_version)


@dataclass(slots=True, eq=False)
class RolloutCall:
    """The groups of one caller."""

    carried_over: tuple[str, ...] = ()
    """Ids of groups that an earlier call left unfinished."""
    pending: dict[str, PendingGroup] = field(default_factory=dict)
    """In flight, in the order of submission."""
    ready: deque[RolloutGroup] = field(default_factory=deque)
    delivered: list[RolloutGroup] = field(default_factory=list)
    num_groups: int = 0
    num_done: int = 0
    num_rejected: int = 0
    num_aborted: int = 0
    tokens_done: int = 0
    """Tokens drawn during the call in groups that have left `pending`."""
    started: float = field(default_factory=time.perf_counter)
    paused: bool = False

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


class GroupTracker:
    """The engine's requests that are groups. Thread-safe; calls of several threads share the engine's steps."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.engine = engine
        self.unfinished: dict[str, PendingGroup] = {}
        """Left in the engine by calls that paused."""
        self.undelivered: set[str] = set()
        """Ids of groups that have finished and were neither delivered nor dropped."""
        self.aborted: set[str] = set()
        """Ids of aborted groups that were not delivered: other ranks have no output of them."""
        self.seeds: Callable[[], int] | None = None
        """Gives seeds to requests that have none; None: the engine does."""
        self._owners: dict[str, RolloutCall] = {}
        self._finished_outputs: dict[str, RequestOutput] = {}
        """Outputs of groups in `unfinished` that finished while another call stepped the engine."""
        self._other_outputs: list[RequestOutput] = []
        """Outputs of requests that are no groups."""
        self._lock = threading.RLock()

    def begin(self, call: RolloutCall, requests: Iterable[GroupRequest], *, carry: bool = True) -> None:
        """Start a call with `requests` and, with `carry`, all unfinished groups; even if it raises, call `end`."""
        with self._lock:
            call.carried_over = tuple(self.unfinished) if carry else ()
            for name in call.carried_over:
                pending = self.unfinished.pop(name)
                if name in self._finished_outputs:
                    call.num_groups += 1
                    call.num_done += 1
                    call.ready.append(pending.group(self._finished_outputs.pop(name)))
                    continue
                pending.tokens_before = self._num_drawn(pending)
                self._enter(call, pending)
            for index, request in enumerate(requests):
                self.add(call, request, index)

    def add(self, call: RolloutCall, request: GroupRequest, index: int) -> PendingGroup:
        """Submit one more group of a call."""
        with self._lock:
            name = PREFIX + self.engine.input_processor.new_id(
                lambda name: PREFIX + name in self.engine.output_processor
            )
            params = request.params
            if self.seeds is not None and params.seed is None:
                params = replace(params, seed=self.seeds())
            self.engine.add_request(request.prompt, params, request_id=name, stream="final")
            pending = PendingGroup(
                id=name,
                index=index,
                info=request.info,
                begun_version=self.engine.weight_version,
            )
            self._enter(call, pending)
            return pending

    def _enter(self, call: RolloutCall, pending: PendingGroup) -> None:
        call.pending[pending.id] = pending
        call.num_groups += 1
        self._owners[pending.id] = call

    def step(self) -> None:
        """One step of the engine; finished groups go to the calls that wait for them."""
        with self._lock:
            for output in self.engine.step():
                call = self._owners.pop(output.request_id, None) if output.finished else None
                if call is not None:
                    pending = call.pending.pop(output.request_id)
                    call.tokens_done += output.metrics.num_output_tokens - pending.tokens_before
                    call.num_done += 1
                    call.ready.append(pending.group(output))
                    self.undelivered.add(pending.id)
                elif output.request_id in self.unfinished and output.finished:
                    self._finished_outputs[output.request_id] = output
                    self.undelivered.add(output.request_id)
                elif output.request_id not in self._owners:
                    self._other_outputs.append(output)
            loop = self.engine.loop
            if self._owners and loop.is_idle and not loop.backlog:
                lost = ", ".join(self._owners)
                raise InferenceError(
                    f"groups {lost} are no longer in the engine: another caller of engine.step() took their outputs; "
                    "leave stepping to the rollout while it has groups"
                )

    def drop(self, call: RolloutCall, pending: PendingGroup) -> RolloutGroup:
        """Abort a group of a call -> what it has so far."""
        with self._lock:
            del call.pending[pending.id], self._owners[pending.id]
            call.num_groups -= 1
            call.num_aborted += 1
            call.tokens_done += self._num_drawn(pending) - pending.tokens_before
            return pending.group(self.engine.abort(pending.id))

    def end(self, call: RolloutCall) -> None:
        """End a call: unless it paused, its own groups are aborted; those that it carried over stay unfinished."""
        with self._lock:
            self.release(group.group_id for group in call.ready)
            for pending in list(call.pending.values()):
                if call.paused or pending.id in call.carried_over:
                    call.tokens_done += self._num_drawn(pending) - pending.tokens_before
                    del call.pending[pending.id], self._owners[pending.id]
                    self.unfinished[pending.id] = pending
                elif pending.id in self.engine.output_processor:
                    self.drop(call, pending)
                else:
                    # Its output waits in the backlog (an interrupt), or the engine dropped all requests.
                    del call.pending[pending.id], self._owners[pending.id]
                    self._remove_from_backlog(pending.id)
            self._drain()
            self.return_other_outputs()

    def return_other_outputs(self) -> None:
        """The engine's next step returns the outputs of requests that are no groups."""
        with self._lock:
            self.engine.loop.backlog[:0] = self._other_outputs
            self._other_outputs = []

    @property
    def in_flight(self) -> list[PendingGroup]:
        """All groups in flight, unfinished ones of paused calls included."""
        with self._lock:
            return [*self.unfinished.values(), *(call.pending[name] for name, call in self._owners.items())]

    def abort(self, group_id: str) -> RolloutGroup:
        """Abort a group -> what it has; a call that waits for it gets it too. Raises UnknownRequest."""
        with self._lock:
            call = self._owners.pop(group_id, None)
            if call is None and group_id not in self.unfinished:
                known = ", ".join(pending.id for pending in self.in_flight) or "none"
                raise UnknownRequest(f"no group {group_id!r} in flight; in flight: {known}")
            pending = self.unfinished.pop(group_id) if call is None else call.pending.pop(group_id)
            if group_id in self._finished_outputs:
                self.release([group_id])
                return pending.group(self._finished_outputs.pop(group_id))
            drawn = self._num_drawn(pending)
            group = pending.group(self.engine.abort(group_id))
            if call is not None:
                call.tokens_done += drawn - pending.tokens_before
                call.num_done += 1
                call.ready.append(group)
                self.aborted.add(group_id)
                return group
            if self.engine.rank_group.size == 1:  # with several ranks the next call, which all ranks make, drains
                self._drain()
            return group

    def release(self, group_ids: Iterable[str]) -> None:
        """These groups were delivered or dropped."""
        gone = set(group_ids)
        self.undelivered -= gone
        self.aborted -= gone

    def _drain(self) -> None:
        """Finish steps that were launched for requests that are gone."""
        while (
            self.engine.state is EngineState.RUNNING
            and not len(self.engine.output_processor)
            and not self.engine.loop.is_idle
        ):
            self.step()

    def _remove_from_backlog(self, request_id: str) -> None:
        backlog = self.engine.loop.backlog
        backlog[:] = [output for output in backlog if output.request_id != request_id]

    def num_tokens(self, call: RolloutCall) -> int:
        """Tokens drawn since the call began."""
        with self._lock:
            pending = sum(self._num_drawn(group) - group.tokens_before for group in call.pending.values())
            return call.tokens_done + pending

    def stats(self, call: RolloutCall) -> RolloutStats:
        """Figures of the groups that the call has delivered so far."""
        return stats_of(
            call.delivered,
            version=self.engine.weight_version,
            seconds=call.seconds,
            num_tokens=self.num_tokens(call),
            num_rejected=call.num_rejected,
            num_aborted=call.num_aborted,
            num_carried=len(call.carried_over),
        )

    def oldest_policy(self, pending: PendingGroup) -> int | None:
        """Version of the oldest weights that drew one of its tokens; None before the first token."""
        group = self.engine.output_processor.get(pending.id)
        drawn = [] if group is None else [one.request for one in group.sequences if one.request.num_output]
        return min((request.history.spans[0].policy_version for request in drawn), default=None)

    def _num_drawn(self, pending: PendingGroup) -> int:
        group = self.engine.output_processor.get(pending.id)
        return 0 if group is None else sum(one.request.num_output for one in group.sequences)

    def is_over(self, call: RolloutCall, budget: Budget | None) -> bool:
        if budget is None:
            return False
        return (
            (budget.groups is not None and call.num_done >= budget.groups)
            or (budget.seconds is not None and call.seconds >= budget.seconds)
            or (budget.tokens is not None and self.num_tokens(call) >= budget.tokens)
        )

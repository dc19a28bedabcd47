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
from megatron_infer.rl.multi_rank import RolloutRanks, Shares
from megatron_infer.rl.prompts import GroupRequest
from megatron_infer.rl.samples import RolloutGroup, RolloutSample, group_of


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
    request: GroupRequest
    begun_version: int
    tokens_before: int = 0
    """Tokens drawn before the call that waits for it began."""

    @property
    def info(self) -> dict[str, Any]:
        return self.request.info

    def group(self, output: RequestOutput | None) -> RolloutGroup:
        """output: None for one that was aborted before the engine had it."""
        info = self.info
        if output is not None:
            return group_of(output, index=self.index, info=info, begun_version=self.begun_version)
        ids = list(self.request.ids)
        none = [
            RolloutSample(prompt_ids=ids, token_ids=[], finish_reason="abort") for _ in range(self.request.params.n)
        ]
        return RolloutGroup(
            group_id=self.id,
            prompt_ids=ids,
            samples=none,
            info=dict(info),
            index=self.index,
            begun_version=self.begun_version,
        )


@dataclass(slots=True, eq=False)
class RolloutCall:
    """The groups of one caller."""

    shares: Shares = field(default_factory=Shares)
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
    gives_all: bool = False
    """The caller gets every group that was begun."""

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


class GroupTracker:
    """The engine's requests that are groups. Thread-safe; calls of several threads share the engine's steps."""

    def __init__(self, engine: DynamicInferenceEngine, ranks: RolloutRanks) -> None:
        self.engine, self.ranks = engine, ranks
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
            engine, ranks = self.engine, self.ranks
            name = ranks.name(engine.input_processor.new_id(lambda one: ranks.name(one) in engine.output_processor))
            params = request.params
            if self.seeds is not None and params.seed is None:
                params = replace(params, seed=self.seeds())
            if engine.relay.is_leader:
                engine.add_request(request.prompt, params, request_id=name, stream="final")
            else:
                engine.relay.submit(name, request.ids, params, salt=request.salt)
            ranks.share(name, call.shares)
            pending = PendingGroup(id=name, index=index, request=request, begun_version=engine.weight_version)
            self._enter(call, pending)
            return pending

    def _enter(self, call: RolloutCall, pending: PendingGroup) -> None:
        call.pending[pending.id] = pending
        call.num_groups += 1
        self._owners[pending.id] = call

    def step(self) -> None:
        """One step of the engine, as `RolloutRanks` does it; finished groups go to the calls that wait for them."""
        with self._lock:
            self.take(self.ranks.step(has_groups=bool(self._owners)))
            loop = self.engine.loop
            if self._owners and loop.is_idle and not loop.backlog:
                lost = ", ".join(self._owners)
                raise InferenceError(
                    f"groups {lost} are no longer in the engine: another caller of engine.step() took their outputs; "
                    "leave stepping to the rollout while it has groups"
                )

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        """Finished groups go to the calls that wait for them."""
        with self._lock:
            for output in outputs:
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

    def drop(self, call: RolloutCall, pending: PendingGroup) -> RolloutGroup:
        """Abort a group of a call -> what it has so far."""
        with self._lock:
            del call.pending[pending.id], self._owners[pending.id]
            call.num_groups -= 1
            call.num_aborted += 1
            call.tokens_done += self._num_drawn(pending) - pending.tokens_before
            return pending.group(self._abort(pending.id))

    def _abort(self, group_id: str) -> RequestOutput | None:
        """End a request -> what it has so far; None: the engine does not have it yet."""
        engine = self.engine
        return engine.abort(group_id) if engine.relay.is_leader else engine.relay.abort_later(group_id)

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
                    if not self.engine.relay.is_leader:
                        self.engine.relay.abort_later(pending.id)  # one that no other rank has yet
            if self.ranks.size == 1:  # else `RolloutRanks.end` does it, together with all
                self.drain()
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
            group = pending.group(self._abort(group_id))
            if call is not None:
                call.tokens_done += drawn - pending.tokens_before
                call.num_done += 1
                call.ready.append(group)
                self.aborted.add(group_id)
                return group
            if self.ranks.size == 1:  # with several ranks the next call, which all ranks make, drains
                self.drain()
            return group

    def release(self, group_ids: Iterable[str]) -> None:
        """These groups were delivered or dropped."""
        gone = set(group_ids)
        self.undelivered -= gone
        self.aborted -= gone

    @property
    def live(self) -> set[str]:
        """Ids of groups that are in flight, or finished and not delivered."""
        with self._lock:
            return {*self._owners, *self.unfinished, *self.undelivered, *self.aborted}

    def drain(self) -> None:
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

    def figures(self, call: RolloutCall) -> dict[str, Any]:
        """Arguments of `stats_of` for the groups that the call has delivered so far."""
        return {
            "seconds": call.seconds,
            "num_tokens": self.num_tokens(call),
            "num_rejected": call.num_rejected,
            "num_aborted": call.num_aborted,
            "num_carried": len(call.carried_over),
        }

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

"""Groups under way: which requests of the engine belong to which caller, and how a step's outputs reach them.

prompts -> Call (tickets) -> engine requests -> step() -> finished groups -> Call.ready
                |
                +-- a call that pauses leaves its tickets loose; the next call takes them over
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.states import EngineState
from megatron_infer.errors import ConfigError, InferenceError, UnknownRequest
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.rl.prompts import Ask
from megatron_infer.rl.samples import RolloutGroup, group_of
from megatron_infer.rl.stats import RolloutStats, stats_of

PREFIX = "rollout/"
"""Of the engine's requests that are groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Where generating stops although groups are unfinished: what comes first of these. None: no limit."""

    groups: int | None = None
    """Groups finished."""
    tokens: int | None = None
    """Tokens drawn since the call began; a step that reaches it is the last."""
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("groups", "tokens", "seconds"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value >= 0):
                raise ConfigError(f"Budget: {name} is a number of 0 or more, or None for no limit; got {value!r}")


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """A group under way."""

    id: str
    index: int
    info: dict[str, Any]
    begun_version: int
    num_samples: int
    num_prompt_tokens: int
    tokens_before: int = 0
    """Drawn before the call that waits for it began."""

    def group(self, output: RequestOutput) -> RolloutGroup:
        return group_of(output, index=self.index, info=self.info, begun_version=self.begun_version)


@dataclass(slots=True, eq=False)
class Call:
    """What one caller waits for."""

    token_details: tuple[str, ...] = ()
    """Ids of groups that an earlier call left unfinished."""
    tickets: dict[str, Ticket] = field(default_factory=dict)
    """Under way, in the order they were submitted."""
    ready: deque[RolloutGroup] = field(default_factory=deque)
    num_groups: int = 0
    num_done: int = 0
    tokens_done: int = 0
    """Drawn during the call, of groups that have finished."""
    started: float = field(default_factory=time.perf_counter)
    paused: bool = False
    given: list[RolloutGroup] = field(default_factory=list)
    """Handed out."""
    num_rejected: int = 0
    num_aborted: int = 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


class GroupTracker:
    """The engine's requests that are groups. Calls of several threads take turns."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.engine = engine
        self.loose: dict[str, Ticket] = {}
        """Left unfinished by calls that paused."""
        self.held: set[str] = set()
        """Finished, and neither handed out nor thrown away."""
        self.cut: set[str] = set()
        """Aborted and not handed out: other ranks have no output of them."""
        self._owners: dict[str, Call] = {}
        self._ended: dict[str, RequestOutput] = {}
        """Of those in `loose`: they ended while another call stepped."""
        self._foreign: list[RequestOutput] = []
        self._lock = threading.RLock()

    def begin(self, call: Call, asks: Iterable[Ask], *, carry: bool = True) -> None:
        """Start a call with `asks` and, if it carries, what is loose; whatever comes of it, `end` it."""
        with self._lock:
            call.token_details = tuple(self.loose) if carry else ()
            for name in call.token_details:
                ticket = self.loose.pop(name)
                if name in self._ended:
                    call.num_groups += 1
                    call.num_done += 1
                    call.ready.append(ticket.group(self._ended.pop(name)))
                    continue
                ticket.tokens_before = self._num_drawn(ticket)
                self._enter(call, ticket)
            for index, ask in enumerate(asks):
                self.add(call, ask, index)

    def add(self, call: Call, ask: Ask, index: int) -> Ticket:
        """Submit one more group of a call."""
        with self._lock:
            name = PREFIX + self.engine.input_processor.new_id(
                lambda name: PREFIX + name in self.engine.output_processor
            )
            self.engine.add_request(ask.prompt, ask.params, request_id=name, stream="final")
            ticket = Ticket(
                id=name,
                index=index,
                info=ask.info,
                begun_version=self.engine.weight_version,
                num_samples=ask.params.n,
                num_prompt_tokens=len(ask.ids),
            )
            self._enter(call, ticket)
            return ticket

    def _enter(self, call: Call, ticket: Ticket) -> None:
        call.tickets[ticket.id] = ticket
        call.num_groups += 1
        self._owners[ticket.id] = call

    def step(self) -> None:
        """One step of the engine; finished groups go to the calls that wait for them."""
        with self._lock:
            for output in self.engine.step():
                call = self._owners.pop(output.request_id, None) if output.finished else None
                if call is not None:
                    group = call.tickets.pop(output.request_id)
                    call.tokens_done += output.metrics.num_output_tokens - group.tokens_before
                    call.num_done += 1
                    call.ready.append(group.group(output))
                    self.held.add(group.id)
                elif output.request_id in self.loose and output.finished:
                    self._ended[output.request_id] = output
                    self.held.add(output.request_id)
                elif output.request_id not in self._owners:
                    self._foreign.append(output)
            loop = self.engine.loop
            if self._owners and loop.is_idle and not loop.backlog:
                lost = ", ".join(self._owners)
                raise InferenceError(
                    f"groups {lost} are no longer in the engine: another caller of engine.step() took their outputs; "
                    "leave stepping to the rollout while it has groups"
                )

    def drop(self, call: Call, ticket: Ticket) -> RolloutGroup:
        """Abort a group -> what it has so far."""
        with self._lock:
            del call.tickets[ticket.id], self._owners[ticket.id]
            call.num_groups -= 1
            call.num_aborted += 1
            call.tokens_done += self._num_drawn(ticket) - ticket.tokens_before
            return ticket.group(self.engine.abort(ticket.id))

    def end(self, call: Call) -> None:
        """The caller waits no longer. Without a pause its own groups are aborted and those carried over are loose."""
        with self._lock:
            self.release(group.group_id for group in call.ready)
            for ticket in list(call.tickets.values()):
                if call.paused or ticket.id in call.token_details:
                    call.tokens_done += self._num_drawn(ticket) - ticket.tokens_before
                    del call.tickets[ticket.id], self._owners[ticket.id]
                    self.loose[ticket.id] = ticket
                elif ticket.id in self.engine.output_processor:
                    self.drop(call, ticket)
                else:
                    # Its output waits in the backlog (an interrupt), or the engine dropped everything.
                    del call.tickets[ticket.id], self._owners[ticket.id]
                    self._forget(ticket.id)
            self._settle()
            self.give_back()

    def give_back(self) -> None:
        """What others than rollouts wait for comes with the engine's next step."""
        with self._lock:
            self.engine.loop.backlog[:0] = self._foreign
            self._foreign = []

    @property
    def in_flight(self) -> list[Ticket]:
        """Everything that is under way, what is loose included."""
        with self._lock:
            return [*self.loose.values(), *(call.tickets[name] for name, call in self._owners.items())]

    def abort(self, group_id: str) -> RolloutGroup:
        """End a group -> what it has; a caller that waits for it has that, too. Raises UnknownRequest."""
        with self._lock:
            call = self._owners.pop(group_id, None)
            if call is None and group_id not in self.loose:
                known = ", ".join(ticket.id for ticket in self.in_flight) or "none"
                raise UnknownRequest(f"no group {group_id!r} under way; under way: {known}")
            ticket = self.loose.pop(group_id) if call is None else call.tickets.pop(group_id)
            if group_id in self._ended:
                self.release([group_id])
                return ticket.group(self._ended.pop(group_id))
            drawn = self._num_drawn(ticket)
            group = ticket.group(self.engine.abort(group_id))
            if call is not None:
                call.tokens_done += drawn - ticket.tokens_before
                call.num_done += 1
                call.ready.append(group)
                self.cut.add(group_id)
                return group
            if self.engine.rank_group.size == 1:  # with several ranks the next call of all of them does it
                self._settle()
            return group

    def release(self, group_ids: Iterable[str]) -> None:
        """These groups were handed out or thrown away."""
        gone = set(group_ids)
        self.held -= gone
        self.cut -= gone

    def _settle(self) -> None:
        """Let go of what was launched for requests that are gone."""
        while (
            self.engine.state is EngineState.RUNNING
            and not len(self.engine.output_processor)
            and not self.engine.loop.is_idle
        ):
            self.step()

    def _forget(self, request_id: str) -> None:
        backlog = self.engine.loop.backlog
        backlog[:] = [output for output in backlog if output.request_id != request_id]

    def num_tokens(self, call: Call) -> int:
        """Drawn since the call began."""
        with self._lock:
            alive = sum(self._num_drawn(ticket) - ticket.tokens_before for ticket in call.tickets.values())
            return call.tokens_done + alive

    def stats(self, call: Call) -> RolloutStats:
        """Of what the call has handed out so far."""
        return stats_of(
            call.given,
            version=self.engine.weight_version,
            seconds=call.seconds,
            num_tokens=self.num_tokens(call),
            num_rejected=call.num_rejected,
            num_aborted=call.num_aborted,
            num_carried=len(call.token_details),
        )

    def oldest_policy(self, ticket: Ticket) -> int | None:
        """Version of the oldest weights that drew a token of it; None: none is drawn."""
        state = self.engine.output_processor.get(ticket.id)
        drawn = [] if state is None else [one.request for one in state.sequences if one.request.num_output]
        return min((request.history.spans[0].policy_version for request in drawn), default=None)

    def _num_drawn(self, ticket: Ticket) -> int:
        state = self.engine.output_processor.get(ticket.id)
        return 0 if state is None else sum(one.request.num_output for one in state.sequences)

    def reached(self, call: Call, budget: Budget | None) -> bool:
        """Whether a call is to stop."""
        if budget is None:
            return False
        return (
            (budget.groups is not None and call.num_done >= budget.groups)
            or (budget.seconds is not None and call.seconds >= budget.seconds)
            or (budget.tokens is not None and self.num_tokens(call) >= budget.tokens)
        )

"""The states of an engine as one table, and the one way to change between them.

                 pause                        suspend
    RUNNING --PAUSING--> PAUSED    RUNNING, PAUSED, SUSPENDED --SUSPENDING--> SUSPENDED
       ^                   |           ^                                         |
       +----UNPAUSING------+           +-- RESUMING: to where suspend began -----+   (SUSPENDED while tags are left)

    update: RUNNING, PAUSED or SUSPENDED --UPDATING--> the same

A transition that fails (error, deadline, interrupt) undoes what it did and leaves the state that it began in. Ctrl-C
takes effect at the next tick, where everything can be undone, or once the transition is complete.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_infer.errors import (
    InferenceError,
    LockstepError,
    RankFailure,
    TransitionFailed,
    TransitionTimeout,
    WrongState,
)


class EngineState(str, Enum):
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    """Requests wait, memory is untouched."""
    UNPAUSING = "unpausing"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    """Requests wait, memory is freed as far as the caller asked."""
    RESUMING = "resuming"
    UPDATING = "updating"


_RUNNING, _PAUSED, _SUSPENDED = EngineState.RUNNING, EngineState.PAUSED, EngineState.SUSPENDED


@dataclass(frozen=True, slots=True)
class Rule:
    """A transition: the state during it, and the state after it for each state that it may begin in."""

    via: EngineState
    targets: dict[EngineState, EngineState]


TRANSITIONS: dict[str, Rule] = {
    "pause": Rule(EngineState.PAUSING, {_RUNNING: _PAUSED}),
    "unpause": Rule(EngineState.UNPAUSING, {_PAUSED: _RUNNING}),
    "suspend": Rule(EngineState.SUSPENDING, {_RUNNING: _SUSPENDED, _PAUSED: _SUSPENDED, _SUSPENDED: _SUSPENDED}),
    "resume": Rule(EngineState.RESUMING, {_SUSPENDED: _RUNNING}),
    "update": Rule(EngineState.UPDATING, {_RUNNING: _RUNNING, _PAUSED: _PAUSED, _SUSPENDED: _SUSPENDED}),
}
"""Command -> rule. A suspend that began in PAUSED resumes to PAUSED; a resume that leaves tags, to SUSPENDED."""

WAY_OUT: dict[EngineState, str] = {
    EngineState.PAUSED: "call unpause() first",
    EngineState.SUSPENDED: "call resume() first",
    EngineState.RUNNING: "call pause() or suspend() first",
}

DEFAULT_TIMEOUT_S = 300.0

Observer = Callable[[str], None]
"""Called with what a transition does or waits for next; if it raises, the transition fails there."""


class HeldInterrupt:
    """Delays SIGINT, so that it cannot separate two pieces of work, such as freeing memory and recording that."""

    def __init__(self) -> None:
        self._handler: Callable[[int, Any], Any] | None = None
        self._pending: tuple[int, Any] | None = None

    def hold(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):  # other threads get no signals
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)

    def deliver(self) -> None:
        """Call the handler that `hold` found with a signal that came since; it may raise."""
        pending, self._pending = self._pending, None
        if pending is not None and self._handler is not None:
            self._handler(*pending)

    def release(self) -> None:
        """End `hold`."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        self.deliver()

    def _note(self, number: int, frame: Any) -> None:
        self._pending = number, frame


@dataclass(slots=True)
class Transition:
    command: str
    source: EngineState
    target: EngineState
    deadline: float
    timeout_s: float
    clock: Callable[[], float]
    observers: list[Observer]
    interrupt: HeldInterrupt = field(default_factory=HeldInterrupt)
    waits_for: str = "its turn"
    _undo: list[tuple[str, Callable[[], None]]] = field(default_factory=list)

    def tick(self, what: str) -> None:
        """Before each piece of work `what`: raises if the time is up or Ctrl-C was pressed."""
        self.interrupt.deliver()
        if self.clock() > self.deadline:
            raise TransitionTimeout(
                f"{self.command} took longer than {self.timeout_s:g} s; it was at: {self.waits_for}; next was: {what}"
            )
        self.waits_for = what
        for observer in self.observers:
            observer(what)

    def undo(self, what: str, action: Callable[[], None]) -> None:
        """Run `action` if the transition fails later on; actions run last first."""
        self._undo.append((what, action))

    def roll_back(self, error: BaseException) -> None:
        while self._undo:
            what, action = self._undo.pop()
            try:
                action()
            except BaseException as second:  # the other actions still run, and the first error is the one raised
                error.add_note(f"undoing {what} failed as well: {type(second).__name__}: {second}")


class Lifecycle:
    """The state of one engine. One thread drives it."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = EngineState.RUNNING
        self.observers: list[Observer] = []
        self.incomplete_reason: str | None = None
        """Why the weights are not whole: an update is in progress or has ended half-way; None: they are."""
        self._clock = clock
        self._transition: Transition | None = None

    @property
    def waits_for(self) -> str | None:
        """What the transition in progress is doing; None without one."""
        return None if self._transition is None else self._transition.waits_for

    def require(self, call: str, *states: EngineState) -> None:
        """Raise WrongState, with the state and what to call, unless the engine is in one of `states`."""
        if self.state in states:
            return
        busy = self._transition
        way_out = (
            f"it waits for {busy.waits_for}" if busy is not None else WAY_OUT.get(self.state, "wait for it to end")
        )
        raise WrongState(f"{call} while the engine is {self.state.name}; {way_out}", state=self.state.value)

    def require_whole_weights(self, call: str) -> None:
        """Raise WrongState during a weight update, and after one that ended half-way."""
        if self.incomplete_reason is not None:
            raise WrongState(
                f"{call} with weights that are not whole: {self.incomplete_reason}", state=self.state.value
            )

    def require_able(self, call: str) -> None:
        """Raise WrongState unless the engine is RUNNING, with whole weights."""
        self.require(call, EngineState.RUNNING)
        self.require_whole_weights(call)

    @contextmanager
    def transition(self, command: str, *, timeout_s: float | None = None) -> Iterator[Transition]:
        """Run the body as one transition: it ends in its `target`, or fails and leaves the state as it was.

        timeout_s: None takes DEFAULT_TIMEOUT_S. Raises WrongState before anything is done; TransitionTimeout or
        TransitionFailed afterwards, with the cause and what was being done. An interrupt is undone as well.
        """
        rule = TRANSITIONS[command]
        timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, it must be above 0")
        self.require(f"{command}()", *rule.targets)
        source = self.state
        transition = Transition(
            command=command,
            source=source,
            target=rule.targets[source],
            deadline=self._clock() + timeout_s,
            timeout_s=timeout_s,
            clock=self._clock,
            observers=self.observers,
        )
        transition.interrupt.hold()
        try:
            self.state, self._transition = rule.via, transition
            try:
                yield transition
            except BaseException as error:
                transition.roll_back(error)
                self.state, self._transition = source, None
                _explain(transition, error)
                raise
            self.state, self._transition = transition.target, None
        finally:
            transition.interrupt.release()


def _explain(transition: Transition, error: BaseException) -> None:
    """Raise TransitionFailed with where it failed and that nothing has changed, or add that to a TransitionTimeout.

    Returns for WrongState, interrupts, and errors that end an engine of several ranks.
    """
    if isinstance(error, WrongState | LockstepError | RankFailure) or not isinstance(error, Exception):
        return
    again = f"the engine is {transition.source.name} again, as before the call"
    if isinstance(error, TransitionTimeout):
        error.args = (f"{error}; {again}",)
        return
    detail = str(error) if isinstance(error, InferenceError) else f"{type(error).__name__}: {error}"
    raise TransitionFailed(f"{transition.command}() failed at: {transition.waits_for}; {again}: {detail}") from error

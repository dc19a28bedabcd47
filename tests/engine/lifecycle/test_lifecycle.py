"""The states of an engine: every call in every state is allowed or named, and nothing leaves it half-way."""

from __future__ import annotations

import itertools
import signal

import pytest

from megatron_infer.engine.states import TRANSITIONS, EngineState, Lifecycle
from megatron_infer.errors import TransitionFailed, TransitionTimeout, WrongState

STANDING = (EngineState.RUNNING, EngineState.PAUSED, EngineState.SUSPENDED)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def life(clock):
    return Lifecycle(clock=clock)


def bring_to(life, state):
    commands = {EngineState.RUNNING: [], EngineState.PAUSED: ["pause"], EngineState.SUSPENDED: ["suspend"]}[state]
    for command in commands:
        with life.transition(command):
            pass
    assert life.state is state


@pytest.mark.parametrize(("command", "state"), list(itertools.product(TRANSITIONS, STANDING)))
def test_every_command_in_every_state_is_carried_out_or_refused_by_name(life, command, state):
    bring_to(life, state)
    rule = TRANSITIONS[command]
    if state in rule.targets:
        with life.transition(command):
            assert life.state is rule.via
        assert life.state is rule.targets[state]
        return
    with pytest.raises(WrongState, match=state.name) as caught, life.transition(command):
        raise AssertionError("a refused transition must not begin")
    assert command in str(caught.value) and caught.value.state == state.value
    assert "call " in str(caught.value), "it must say the way out"
    assert life.state is state


def test_table_reaches_every_state_and_leads_back_to_running():
    targets = {target for rule in TRANSITIONS.values() for target in rule.targets.values()}
    assert targets == set(STANDING)
    vias = [rule.via for rule in TRANSITIONS.values()]
    assert len(set(vias)) == len(vias) and set(vias).isdisjoint(STANDING)
    assert set(vias) | set(STANDING) == set(EngineState)
    for state in STANDING[1:]:
        assert any(EngineState.RUNNING is rule.targets.get(state) for rule in TRANSITIONS.values())


@pytest.mark.parametrize("state", STANDING)
def test_a_failure_undoes_in_reverse_and_leaves_the_state_it_began_in(life, state):
    bring_to(life, state)
    undone = []
    with pytest.raises(TransitionFailed, match="copying") as caught, life.transition("update") as transition:
        transition.undo("one", lambda: undone.append(1))
        transition.undo("two", lambda: undone.append(2))
        transition.tick("copying blocks 3 of 7")
        raise MemoryError("no room")
    assert undone == [2, 1] and life.state is state
    assert "no room" in str(caught.value) and state.name in str(caught.value)
    assert isinstance(caught.value.__cause__, MemoryError)
    with life.transition("update"):
        pass  # a retry works


def test_a_failing_undo_does_not_keep_the_others_from_running(life):
    undone = []
    with pytest.raises(TransitionFailed) as caught, life.transition("suspend") as transition:
        transition.undo("first", lambda: undone.append("first"))
        transition.undo("second", lambda: 1 / 0)
        raise ValueError("the reason")
    assert undone == ["first"] and life.state is EngineState.RUNNING
    assert any("second" in note and "ZeroDivisionError" in note for note in caught.value.__cause__.__notes__)


def test_an_interrupt_passes_through_and_is_undone(life):
    undone = []
    with pytest.raises(KeyboardInterrupt), life.transition("suspend") as transition:
        transition.undo("it", lambda: undone.append(1))
        raise KeyboardInterrupt
    assert undone == [1] and life.state is EngineState.RUNNING


def test_ctrl_c_waits_for_a_place_where_it_can_be_undone(life):
    did = []
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), life.transition("suspend") as transition:
        signal.raise_signal(signal.SIGINT)
        transition.undo("it", lambda: did.append("undone"))
        did.append("done")
        transition.tick("more")
        did.append("more")
    assert did == ["done", "undone"] and life.state is EngineState.RUNNING
    with pytest.raises(KeyboardInterrupt), life.transition("suspend") as transition:
        transition.tick("the last piece")
        signal.raise_signal(signal.SIGINT)
        did.append("complete")
    assert did[2:] == ["complete"] and life.state is EngineState.SUSPENDED
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_deadline_says_what_was_waited_for(life, clock):
    told = r"longer than 5 s.*blocks 1 of 2.*blocks 2 of 2"
    with pytest.raises(TransitionTimeout, match=told) as caught, life.transition("suspend", timeout_s=5) as transition:
        transition.tick("blocks 1 of 2")
        assert life.waits_for == "blocks 1 of 2"
        clock.now += 6
        transition.tick("blocks 2 of 2")
    assert "RUNNING" in str(caught.value) and life.state is EngineState.RUNNING and life.waits_for is None
    with pytest.raises(ValueError, match="above 0"), life.transition("suspend", timeout_s=0):
        pass


def test_a_command_from_within_a_transition_is_refused_and_says_what_goes_on(life):
    with life.transition("suspend") as transition:
        transition.tick("the step in flight")
        with pytest.raises(WrongState, match="SUSPENDING; it waits for the step in flight"), life.transition("resume"):
            pass
    assert life.state is EngineState.SUSPENDED


def test_observers_see_every_tick_and_can_make_it_fail(life):
    seen = []
    life.observers.append(seen.append)
    with life.transition("pause") as transition:
        transition.tick("a")
        transition.tick("b")
    assert seen == ["a", "b"]
    life.observers.append(lambda what: (_ for _ in ()).throw(RuntimeError("planted")))
    with pytest.raises(TransitionFailed, match="planted"), life.transition("unpause") as transition:
        transition.tick("c")
    assert life.state is EngineState.PAUSED

"""Ctrl-C, as a real signal, in the middle of a switch between training and inference."""

from __future__ import annotations

import signal
from contextlib import contextmanager

import pytest
from session_case import make_session
from test_session import answers_in, state_of

from megatron_infer.rl import train_mode
from megatron_infer.testing.tiny import tiny_gpt


def interrupting(name: str, monkeypatch, *, on_the_way_in: bool) -> list[int]:
    """Raise Ctrl-C in one of the switch's context managers -> number of times raised."""
    original, count = getattr(train_mode, name), [0]

    @contextmanager
    def interrupted(*args):
        with original(*args):
            if on_the_way_in and not count[0]:
                count[0] += 1
                signal.raise_signal(signal.SIGINT)
            yield
        if not on_the_way_in and not count[0]:
            count[0] += 1
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train_mode, name, interrupted)
    return count


@pytest.mark.parametrize("on_the_way_in", [True, False], ids=["in", "out"])
@pytest.mark.parametrize("name", ["whole_parameters", "inference_attributes", "evaluation", "inference_flag"])
def test_an_interrupted_switch_restores_everything(name, on_the_way_in, monkeypatch):
    model = tiny_gpt(init_method_std=0.2).train()
    session = make_session(model)
    want = answers_in(session)
    before = state_of(model)
    count = interrupting(name, monkeypatch, on_the_way_in=on_the_way_in)
    reached = False
    with pytest.raises(KeyboardInterrupt), session.generating():
        reached = True
    assert count == [1] and reached is not on_the_way_in
    assert state_of(model) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert answers_in(session) == want


def test_an_interrupted_suspend_or_resume_ends_the_block_with_everything_restored():
    model = tiny_gpt(init_method_std=0.2).train()
    session = make_session(model, suspend_mode="recompute")
    want = answers_in(session)
    before = state_of(model)
    for mode, what in ((session.training, "release the cache"), (session.generating, "allocate the cache")):

        def press(happening, what=what):
            if what in happening:
                session.engine.lifecycle.observers.clear()
                signal.raise_signal(signal.SIGINT)

        session.engine.lifecycle.observers.append(press)
        with pytest.raises(KeyboardInterrupt), mode():
            pass
        assert state_of(model) == before
        with session.training():
            pass
    assert answers_in(session) == want

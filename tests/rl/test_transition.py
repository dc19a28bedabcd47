"""Suspend, update and resume as one: after any failure the engine is as before and draws the right tokens."""

from __future__ import annotations

import pytest
import torch
from engines import finish
from session_case import PARAMS, answers_in, copied, fresh_answers, make_session, prompts, train_step
from test_session import failing_at

from megatron_infer.errors import StaleCache, SwitchFailed, WrongState
from megatron_infer.models.weights.derived import DerivedCache
from megatron_infer.rl.session import RolloutSession
from megatron_infer.testing.tiny import tiny_gpt

BIG = {"init_method_std": 0.2}
MODES = ("persist", "offload", "recompute")


def pair() -> tuple[RolloutSession, torch.nn.Module]:
    """A session, and another model whose weights it is given."""
    return make_session(tiny_gpt(**BIG)), tiny_gpt(**BIG, seed=7)


def failing_cache(session: RolloutSession, times: int) -> None:
    """Register a derived copy whose rebuild fails `times` times."""
    left = [0]

    def refresh() -> None:
        if left[0]:
            left[0] -= 1
            raise MemoryError("no room for a copy")

    session.engine.weights.derived.register(DerivedCache(name="planted", refresh=refresh, differs=lambda: None))
    left[0] = times


@pytest.mark.parametrize("mode", MODES)
def test_a_transition_that_succeeds_has_the_weights_of_its_source(mode):
    session, other = pair()
    want = fresh_answers(other)
    report = session.transition(other.state_dict(), mode=mode, version=9)
    assert report.suspend.mode == mode and report.update.version == 9 == session.weight_version
    assert report.update.bytes_copied == sum(p.nbytes for p in other.parameters())
    assert session.engine.state == "running"
    assert answers_in(session) == want


def test_a_transition_without_a_source_copies_nothing():
    model = tiny_gpt(**BIG).train()
    session = make_session(model)
    answers_in(session)
    train_step(model, 0)
    report = session.transition(mode="recompute")
    assert (report.update.version, report.update.bytes_copied) == (1, 0)
    assert answers_in(session) == fresh_answers(model)


FAULTS = {
    "suspend": ("suspend", "step in flight"),
    "leaving": ("suspend", "release the cache"),
    "derived": ("update", "rebuilding rotary"),
    "checksums": ("update", "the weights' checksums"),
    "room": ("resume", "allocate the cache"),
    "look": ("resume", "checking whether weights changed"),
}


@pytest.mark.parametrize("running", [False, True], ids=["idle", "unfinished requests"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_any_phase_leaves_the_old_weights_and_every_request(name, running):
    phase, what = FAULTS[name]
    session, other = pair()
    engine, before, done = session.engine, copied(session.model), {}
    want = fresh_answers(session.model)
    with session.generating():
        if running:
            for i, prompt in enumerate(prompts()):
                engine.add_request(prompt, PARAMS, request_id=str(i), stream="final")
            for _ in range(3):
                engine.step()
        engine.lifecycle.observers.append(failing_at(what, MemoryError("no room")))
        with pytest.raises(SwitchFailed, match="no room") as caught:
            session.transition(other.state_dict(), mode="recompute")
        assert (caught.value.rank, caught.value.phase) == (0, phase)
        assert "rolled back: the engine is RUNNING with weights of version 0" in str(caught.value)
        assert all(map(torch.equal, session.model.parameters(), before.parameters()))
        engine.verify_weights()
        done |= finish(engine)
    assert not running or [done[str(i)].outputs[0].token_ids for i in range(3)] == want
    assert answers_in(session) == want
    assert session.weight_version == 0
    session.transition(other.state_dict())
    assert answers_in(session) == fresh_answers(other) and session.weight_version == 1


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
def test_a_fault_leaves_the_engine_in_the_state_that_it_had(state):
    session, other = pair()
    if state == "SUSPENDED":
        session.engine.suspend("recompute")
    session.engine.lifecycle.observers.append(failing_at("the weights' checksums", MemoryError("no room")))
    with pytest.raises(SwitchFailed, match=f"rolled back: the engine is {state} with weights of version 0"):
        session.transition(other.state_dict(), mode="recompute")


@pytest.mark.parametrize("fault", ["shape", "source"])
def test_an_error_of_a_stream_names_the_tensor_or_the_last_one_before_it(fault):
    session, other = pair()
    want = fresh_answers(session.model)
    names = [name for name, _ in other.named_parameters()]

    def stream():
        for place, (name, tensor) in enumerate(other.named_parameters()):
            if place == 4 and fault == "source":
                raise ConnectionError("the sender is gone")
            yield name, tensor[:1] if place == 5 else tensor

    words = names[5] if fault == "shape" else f"sender is gone.*{names[3]}"
    with pytest.raises(SwitchFailed, match=words.replace(".weight", r"\.weight")) as caught:
        session.transition(stream())
    assert (caught.value.phase, caught.value.tensor) == ("update", names[5] if fault == "shape" else "")
    assert answers_in(session) == want and session.weight_version == 0


def test_the_trainers_own_weights_stay_when_a_derived_copy_cannot_be_rebuilt():
    model = tiny_gpt(**BIG).train()
    session = make_session(model)
    answers_in(session)
    train_step(model, 0)
    failing_cache(session, 1)
    with pytest.raises(SwitchFailed, match="no room for a copy") as caught:
        session.transition()
    assert caught.value.phase == "update"
    session.engine.verify_weights()
    assert answers_in(session) == fresh_answers(model)


def test_if_the_rollback_fails_too_the_engine_stays_suspended_and_the_error_says_so():
    session, other = pair()
    want = fresh_answers(session.model)
    session.engine.lifecycle.observers.append(failing_at("allocate the cache", MemoryError("no room"), 2))
    with pytest.raises(SwitchFailed, match="the engine is SUSPENDED with weights of version 0") as caught:
        session.transition(other.state_dict(), mode="recompute")
    assert "resuming the engine again failed as well" in " ".join(caught.value.__notes__)
    assert answers_in(session) == want


def test_an_interrupt_is_raised_from_the_transition_that_it_ends():
    session, other = pair()
    want = fresh_answers(session.model)
    session.engine.lifecycle.observers.append(failing_at("checksums", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt) as caught:
        session.transition(other.state_dict())
    assert "rolled back" in " ".join(caught.value.__notes__)
    assert answers_in(session) == want and session.weight_version == 0


def test_within_training_a_transition_is_refused():
    session, other = pair()
    with session.training():
        with pytest.raises(WrongState, match=r"take update_weights\(\) here"):
            session.transition(other.state_dict())
        assert session.update_weights(other.state_dict(), checksum=True).checksum
    assert answers_in(session) == fresh_answers(other)


def test_copies_derived_from_the_weights_are_compared_with_them():
    """Without this the tests above would not detect a copy that is not rebuilt."""
    session, other = pair()
    with torch.no_grad():
        for parameter, expected in zip(session.model.parameters(), other.parameters(), strict=True):
            parameter.copy_(expected)
    with pytest.raises(StaleCache):
        session.engine.verify_weights()

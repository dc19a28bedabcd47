"""What a training loop relies on: tokens of the weights it has, rollouts that outlive updates, gradients untouched.

Further promises have files of their own: ratios that are one (`test_scoring_exact.py`), memory that does not grow
(`test_session_cycles.py`), spans of a partial rollout (`test_rollout_session.py`).
"""

from __future__ import annotations

import pytest
import torch
from session_case import PARAMS, answers_in, fresh_answers, make_session, prompts, train_step

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("make", [tiny_gpt, lambda **how: tiny_hybrid("M*-", **how)], ids=["attention", "hybrid"])
def test_tokens_after_each_training_step_are_those_of_a_fresh_engine(make):
    model = make(init_method_std=0.2).train()
    session = make_session(model)
    seen = []
    for step in range(3):
        seen.append(answers_in(session))
        assert seen[-1] == fresh_answers(model)
        with session.training():
            train_step(model, step)
        report = session.update_weights()
        assert (report.version, report.bytes_copied) == (step + 1, 0) == (session.weight_version, 0)
    assert seen[0] != seen[1] != seen[2]


def test_weights_changed_without_an_update_are_detected():
    model = tiny_gpt(init_method_std=0.2).train()
    session = make_session(model)
    answers_in(session)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(1.3)  # as mixed-precision optimizers write: no version counter moves
    assert answers_in(session) == fresh_answers(model)
    assert session.weight_version == 1


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_unfinished_requests_continue_after_training(mode):
    model = tiny_gpt(init_method_std=0.2).train()
    session = make_session(model, suspend_mode=mode)
    want = answers_in(session)
    done = {}
    with session.generating():
        for i, prompt in enumerate(prompts()):
            session.engine.add_request(prompt, PARAMS, request_id=str(i), stream="final")
        for _ in range(4):
            session.engine.step()
        assert session.engine.stats().num_running == 3
    assert session.engine.state == "paused" and model.training
    with session.training() as report:
        assert report.num_requests == 3 and report.mode == mode
    with session.generating():
        while session.engine.has_unfinished():
            done |= {out.request_id: out for out in session.engine.step() if out.finished}
    assert [done[str(i)].outputs[0].token_ids for i in range(3)] == want
    assert session.weight_version == 0


@pytest.mark.parametrize("mode", ["persist", "recompute"])
def test_a_paused_rollout_continues_after_a_weight_update(mode):
    model = tiny_gpt(init_method_std=0.2).train()
    session = make_session(model, suspend_mode=mode)
    with session.generating() as roll:
        roll.pause_at(Budget(tokens=12))
        assert roll.generate(prompts(), PARAMS) == []
        assert len(roll.unfinished) == 3
    with session.training():
        train_step(model, 0)
    session.update_weights()
    with session.generating() as roll:
        groups = roll.generate([], PARAMS)
    assert len(groups) == 3
    for group in groups:
        versions = [span.policy_version for span in group.samples[0].spans]
        assert sorted(set(versions)) == [0, 1] and len(group.samples[0].token_ids) == 10


def test_weights_can_change_under_running_requests_and_scores_change_no_token():
    model = tiny_gpt(init_method_std=0.2).train()
    session = make_session(model)
    engine = session.engine
    with session.generating():
        for i, prompt in enumerate(prompts()):
            engine.add_request(prompt, PARAMS, request_id=str(i))
        for _ in range(4):
            engine.step()
            session.score(prompts())
            drawn = {out.request_id: out.outputs[0].token_ids for out in engine.step()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
        assert session.update_weights(version=40, running="recompute").version == 40
        done = {}
        while engine.has_unfinished():
            done |= {out.request_id: out.outputs[0] for out in engine.step() if out.finished}
        for i, prompt in enumerate(prompts()):
            first, spans = drawn[str(i)], done[str(i)].spans
            rest = SamplingParams(temperature=0.0, max_tokens=10 - len(first), ignore_eos=True)
            (again,) = engine.generate([prompt + first], rest)
            assert done[str(i)].token_ids == first + again.outputs[0].token_ids
            assert [(span.first_token, span.policy_version) for span in spans] == [(0, 0), (len(first), 40)]


@pytest.mark.parametrize("make", [tiny_gpt, lambda **how: tiny_hybrid("M*-", **how)], ids=["attention", "hybrid"])
def test_gradients_are_those_of_a_loop_that_never_generates(make):
    """Bitwise, with dropout: nothing is drawn from the trainer's generators."""
    found = []
    for generates in (False, True):
        model = make(**DROPOUT).train()
        session = make_session(model) if generates else None
        torch.manual_seed(11)
        grads = []
        for step in range(2):
            if session is not None:
                with session.generating():
                    session.engine.generate(prompts(), DRAWN)
                with session.training():
                    train_step(model, step, grads=grads)
            else:
                train_step(model, step, grads=grads)
        found.append(grads)
    assert len(found[0]) == len(found[1]) > 0
    assert all(map(torch.equal, *found))

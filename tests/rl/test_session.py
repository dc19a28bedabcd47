"""A session between trainer and engine: right tokens after every step, and the trainer's state restored."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from session_case import PARAMS, fresh_answers, make_session, prompts, train_step

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import AdoptionError, ConfigError, TransitionFailed
from megatron_infer.models import mcore_compat
from megatron_infer.models.trainer_state import GRAPH_MANAGER
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)


def answers_in(session) -> list[list[int]]:
    with session.generating() as roll:
        return [group.samples[0].token_ids for group in roll.generate(prompts(), PARAMS)]


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


def test_existing_gradients_are_not_touched():
    model = tiny_gpt().train()
    session = make_session(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
        parameter.main_grad = torch.full_like(parameter, 4.0)
    kept = [(parameter, parameter.grad, parameter.main_grad) for parameter in model.parameters()]
    answers_in(session)
    for parameter, grad, main_grad in kept:
        assert parameter.grad is grad and parameter.main_grad is main_grad
        assert bool((grad == 3.0).all()) and bool((main_grad == 4.0).all())


def global_states() -> tuple[object, ...]:
    """States of torch's, Python's and NumPy's generators."""
    numpy = np.random.get_state()[1].tolist()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), numpy


def test_global_generators_keep_their_state(caplog):
    session = make_session(tiny_gpt())
    before = global_states()
    with session.generating():
        session.engine.generate(prompts(), DRAWN)
        assert global_states() == before
        with caplog.at_level(logging.WARNING, "megatron_infer"):
            torch.rand(3)
            assert not caplog.records
    assert global_states() == before, "the body's draws are taken back"
    assert "restore_rng=False" in caplog.text
    with session.generating(restore_rng=False):
        torch.rand(3)
    assert global_states() != before


def test_training_within_generating_continues_the_trainers_draws():
    session = make_session(tiny_gpt())
    torch.manual_seed(5)
    wanted = [torch.rand(3) for _ in range(3)]
    torch.manual_seed(5)
    drawn = []
    with session.generating():
        torch.rand(7)
        for _ in range(2):
            with session.training():
                drawn.append(torch.rand(3))
                with session.generating():
                    torch.rand(7)
            torch.rand(7)
    drawn.append(torch.rand(3))
    assert all(map(torch.equal, drawn, wanted))


class Flag:
    """Stands for megatron-core's InferenceMode (from 0.19 on)."""

    active = False

    @classmethod
    def is_active(cls):
        return cls.active

    @classmethod
    def set_active(cls):
        cls.active = True

    @classmethod
    def unset_active(cls):
        cls.active = False


def state_of(model) -> dict[str, object]:
    """All state that generating() changes."""
    found: dict[str, object] = {"grad": torch.is_grad_enabled(), "flag": Flag.active}
    for name, module in model.named_modules():
        found[f"{name}.training"] = module.training
        found[f"{name}.children"] = list(module._modules)
        for holder in (module, getattr(module, "config", None), getattr(module, "token_dispatcher", None)):
            for key, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
                if any(word in key for word in ("parallel", "graph", "flash", "expert", "drop", "padding")):
                    found[f"{name}.{type(holder).__name__}.{key}"] = repr(value)
    return found


def prepared_model():
    """A model with mixed train modes, sequence-parallel flags, and graph managers of two kinds."""
    model = tiny_gpt(
        num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=48, moe_router_load_balancing_type="none"
    )
    model.train()
    model.decoder.layers[0].eval()
    model.decoder.layers[1].mlp.eval()
    model.config.cuda_graph_impl = "local"
    model.config.sequence_parallel = True
    model.embedding.scatter_to_sequence_parallel = True
    model.decoder.layers[0].self_attention.linear_qkv.sequence_parallel = True
    object.__setattr__(model.decoder.layers[1], GRAPH_MANAGER, "a manager")
    setattr(model.decoder.layers[0], GRAPH_MANAGER, torch.nn.Identity())
    model.decoder.layers[0].later = torch.nn.Identity()
    return model


def test_modes_flags_and_autograd_are_restored(monkeypatch):
    monkeypatch.setattr(mcore_compat, "inference_mode", lambda: Flag)
    model = prepared_model()
    before = state_of(model)
    session = make_session(model)
    assert state_of(model) == before, "by the constructor"
    with session.generating():
        inside = state_of(model)
        assert not model.config.sequence_parallel and model.config.cuda_graph_impl == "none"
        assert not any(module.training for module in model.modules())
        assert not hasattr(model.decoder.layers[0], GRAPH_MANAGER)
        assert not hasattr(model.decoder.layers[1], GRAPH_MANAGER)
        assert Flag.active and not torch.is_grad_enabled()
        session.engine.generate(prompts(), PARAMS)
        for layer in model.decoder.layers:  # as after megatron-core's own decoding
            layer.mlp.token_dispatcher.drop_and_pad = True
            layer.mlp.config.moe_pad_expert_input_to_capacity = True
        with session.training():
            assert state_of(model) == before, "training within generating"
        assert state_of(model) == inside
        with session.generating():
            assert state_of(model) == inside
        assert state_of(model) == inside
    assert state_of(model) == before
    with session.training():
        assert state_of(model) == before
        with session.generating():
            assert state_of(model) == inside
            session.engine.generate(prompts(), PARAMS)
        assert state_of(model) == before and session.engine.state == "suspended"
    assert state_of(model) == before


def test_a_score_within_generating_sees_the_model_as_the_trainer_has_it(monkeypatch):
    """In eval mode with the trainer's flags: sequence parallelism needs them for gradients."""
    monkeypatch.setattr(mcore_compat, "inference_mode", lambda: Flag)
    model = prepared_model()
    session = make_session(model)
    seen = []

    def forward(ids, positions, mask):
        config, layer = model.config, model.decoder.layers[0]
        seen.append((config.sequence_parallel, config.cuda_graph_impl, hasattr(layer, GRAPH_MANAGER)))
        assert not Flag.active and not any(module.training for module in model.modules())
        return torch.zeros(*ids.shape, 128)

    with session.generating():
        inside = state_of(model)
        model.forward = forward
        session.score([[1, 2, 3]])
        assert state_of(model) == inside
    assert seen == [(True, "local", True)]


class Unplanned(Exception):
    pass


@pytest.mark.parametrize("error", [Unplanned, KeyboardInterrupt])
def test_an_error_of_the_body_is_raised_and_everything_is_restored(error):
    model = tiny_gpt(init_method_std=0.2).train()
    session = make_session(model)
    want = answers_in(session)
    before = state_of(model)
    for mode in (session.generating, session.training):
        with pytest.raises(error, match="from the body"), mode():
            raise error("from the body")
        assert state_of(model) == before
    with pytest.raises(error, match="from within"), session.generating():
        session.engine.add_request(prompts()[0], PARAMS)
        session.engine.step()
        with session.training():
            raise error("from within")
    assert state_of(model) == before
    with session.generating():
        assert len(session.engine.step()) == 1, "the request goes on"
        while session.engine.has_unfinished():
            session.engine.step()
    assert answers_in(session) == want


def failing_at(what: str, error: BaseException, times: int = 1):
    """Observer of transitions that raises at their step `what`."""
    left = [times]

    def observe(happening: str) -> None:
        if what in happening and left[0]:
            left[0] -= 1
            raise error

    return observe


def test_a_resume_that_fails_restores_the_trainers_state_and_can_be_repeated():
    model = tiny_gpt(init_method_std=0.2).train()
    session = make_session(model, suspend_mode="recompute")
    want = answers_in(session)
    before = state_of(model)
    with session.training():
        pass
    session.engine.lifecycle.observers.append(failing_at("allocate the cache", MemoryError("no room"), 2))
    for _ in range(2):
        with pytest.raises(TransitionFailed, match="no room"), session.generating():
            raise AssertionError("never reached")
        assert state_of(model) == before and session.engine.state == "suspended"
    assert answers_in(session) == want


def test_a_failure_on_the_way_back_is_noted_on_the_error_of_the_body():
    model = tiny_gpt(init_method_std=0.2).train()
    session = make_session(model, suspend_mode="recompute")
    want = answers_in(session)
    before = state_of(model)
    with pytest.raises(Unplanned) as caught, session.generating(), session.training():
        session.engine.lifecycle.observers.append(failing_at("allocate the cache", MemoryError("no room")))
        raise Unplanned
    assert "no room" in " ".join(caught.value.__notes__)
    assert state_of(model) == before
    assert answers_in(session) == want


def test_a_suspend_that_fails_does_not_begin_training():
    model = tiny_gpt(init_method_std=0.2).train()
    session = make_session(model, suspend_mode="offload")
    want = answers_in(session)
    with session.generating():
        session.engine.lifecycle.observers.append(failing_at("step in flight", MemoryError("no room")))
        with pytest.raises(TransitionFailed, match="no room"), session.training():
            raise AssertionError("never reached")
        outputs = session.engine.generate(prompts(), PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == want
    assert model.training


def test_invalid_sessions_are_refused_by_name():
    with pytest.raises(AdoptionError, match="2 model chunks: virtual pipeline stages"):
        make_session([tiny_gpt(), tiny_gpt()])
    with pytest.raises(ConfigError, match="did you mean 'offload'"):
        make_session(tiny_gpt(), suspend_mode="ofload")
    with pytest.raises(ConfigError, match="offload_optimizer=True without an optimizer"):
        make_session(tiny_gpt(), offload_optimizer=True)

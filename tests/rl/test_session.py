"""A session between trainer and engine restores the trainer's state, also when something fails on the way."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from engines import tokens_of
from session_case import PARAMS, answers_in, make_session, prompts

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import AdoptionError, ConfigError, TransitionFailed
from megatron_infer.models import mcore_compat
from megatron_infer.models.trainer_state import GRAPH_MANAGER
from megatron_infer.testing.tiny import tiny_gpt

DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)


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
        return torch.zeros(len(ids), ids.shape[1] - 1, 128)  # of the positions that are scored

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
        assert tokens_of(outputs) == want
    assert model.training


def test_invalid_sessions_are_refused_by_name():
    with pytest.raises(AdoptionError, match="2 model chunks are given; give all chunks"):
        make_session([tiny_gpt(), tiny_gpt()])
    with pytest.raises(ConfigError, match="did you mean 'offload'"):
        make_session(tiny_gpt(), suspend_mode="ofload")
    with pytest.raises(ConfigError, match="offload_optimizer=True without an optimizer"):
        make_session(tiny_gpt(), offload_optimizer=True)

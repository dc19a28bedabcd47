"""A session over a model with MTP layers: scores and gradients are the model's, and the layers have no part in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from session_case import make_session
from trainers import MegatronTrainer, TorchTrainer
from training_case import assert_equal, gradients, loss_over, sequences_of

from megatron_infer.errors import ConfigError
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_gpt

EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
SEQUENCES = sequences_of([14, 14, 9, 9, 9, 5])


@pytest.mark.parametrize("settings", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("how", ["score(grad=True)", "score_and_backward"])
def test_scores_and_gradients_of_a_model_with_an_mtp_layer_are_those_of_the_model_without_it(how, settings):
    model, twin = tiny_gpt(**settings, mtp_num_layers=1).train(), tiny_gpt(**settings).train()
    assert twin.load_state_dict(model.state_dict(), strict=False).missing_keys == []
    found, config = [], model.config
    for one in (model, twin):
        session = make_session(one)
        with cpu_shim(4), session.training():
            if how == "score_and_backward":
                found.append(session.score_and_backward(SEQUENCES, loss_over(SEQUENCES)).scores)
            else:
                found.append(session.score(SEQUENCES, grad=True))
                loss_over(SEQUENCES)(found[-1], list(range(len(SEQUENCES)))).backward()
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, atol=0, rtol=0)
    own = {name: grad for name, grad in gradients(model).items() if not name.startswith("mtp.")}
    assert_equal(own, gradients(twin), tolerance=1e-6)
    assert all(weight.grad is None for weight in model.mtp.parameters())
    assert model.mtp_process and model.config is config and config.mtp_num_layers == 1


WAITING = {
    "overlap_grad_reduce=True": lambda model: MegatronTrainer(model, distributed=True, overlap=True),
    "find_unused_parameters": lambda model: TorchTrainer(model, ddp=True),
}


@pytest.mark.parametrize("name", WAITING)
def test_ddp_that_waits_for_gradients_of_an_mtp_layer_is_refused_unless_the_layer_is_frozen(name):
    for is_frozen in (False, True):
        model = tiny_gpt(mtp_num_layers=1).train()
        model.mtp.requires_grad_(not is_frozen)
        trainer = WAITING[name](model)
        session = make_session([trainer.model])
        before = {name: weight.detach().clone() for name, weight in model.mtp.named_parameters()}
        for _ in range(2):
            with cpu_shim(4), session.training():
                if not is_frozen:
                    with pytest.raises(ConfigError, match=name):
                        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
                    with pytest.raises(ConfigError, match=name):
                        session.score(SEQUENCES, grad=True)
                    continue
                session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
                session.step(trainer.optimizer)
        assert_equal({name: weight.detach() for name, weight in model.mtp.named_parameters()}, before, tolerance=0)

"""Sessions over a training script's real objects: wrappers, optimizers, lists of chunks."""

from __future__ import annotations

import pytest
import torch
from session_case import PARAMS, fresh_answers, make_session, prompts
from trainers import MegatronTrainer, TorchTrainer

from megatron_infer.models.adoption_checks import unwrap
from megatron_infer.models.weights.change_guard import OffloadedWeights
from megatron_infer.rl.train_mode import OptimizerOffload, torch_optimizers
from megatron_infer.testing.tiny import tiny_gpt

pytestmark = pytest.mark.filterwarnings("ignore:.*leaf Tensor:UserWarning", "ignore:.*deprecated:FutureWarning")
BIG = {"init_method_std": 0.2}
TRAINERS = {
    "plain": lambda: TorchTrainer(tiny_gpt(**BIG)),
    "torch DDP": lambda: TorchTrainer(tiny_gpt(**BIG), ddp=True),
    "Megatron DDP": lambda: MegatronTrainer(tiny_gpt(**BIG), distributed=False),
    "distributed optimizer": lambda: MegatronTrainer(tiny_gpt(**BIG), distributed=True),
    "parameters gathered late": lambda: MegatronTrainer(tiny_gpt(**BIG), distributed=True, overlap=True),
    "Float16Module in DDP": lambda: MegatronTrainer(
        tiny_gpt(params_dtype=torch.bfloat16, **BIG), distributed=True, half=True
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_wrapped_model_generates_between_steps_without_changing_training(name):
    alone, ours = TRAINERS[name](), TRAINERS[name]()
    losses = [alone.step(step) for step in range(3)]
    model = unwrap(ours.model)
    session = make_session([ours.model], ours.optimizer)
    assert session.model is model
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    assert (hooks > 0) == (name == "parameters gathered late")
    got, seen = [], []
    for step in range(3):
        with session.training():
            got.append(ours.step(step))
        report = session.update_weights()
        assert report.version == step + 1
        with session.generating() as roll:
            groups = roll.generate(prompts(), PARAMS)
            scores = session.score([group.prompt_ids + group.samples[0].token_ids for group in groups])
        assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooks
        for group, score in zip(groups, scores, strict=True):
            want = torch.tensor(group.samples[0].raw_logprobs)
            torch.testing.assert_close(score[-len(want) :], want, atol=0.15 if "16" in name else 2e-5, rtol=0)
        seen.append([group.samples[0].token_ids for group in groups])
        with torch.no_grad():
            twin = tiny_gpt(params_dtype=model.config.params_dtype, **BIG)
            twin.load_state_dict(model.state_dict())
        assert seen[-1] == fresh_answers(twin)
        assert ours.model.training
    assert got == losses, "generation changed what training does"
    assert seen[0] != seen[2]


@pytest.mark.parametrize("name", ["plain", "distributed optimizer", "Float16Module in DDP"])
def test_optimizer_state_is_on_the_host_while_generating(name, monkeypatch):
    """Every tensor counts as on a device here: storages are empty while generating, with the same bytes afterwards."""
    monkeypatch.setattr(OptimizerOffload, "is_on_device", staticmethod(lambda tensor: True))
    alone, ours = TRAINERS[name](), TRAINERS[name]()
    session = make_session(ours.model, ours.optimizer, offload_optimizer=True)
    for step in range(3):
        assert alone.step(step) == ours.step(step)
        state = [
            value
            for part in torch_optimizers(ours.optimizer)
            for held in part.state.values()
            for value in held.values()
        ]
        masters = [
            p for part in torch_optimizers(ours.optimizer) for group in part.param_groups for p in group["params"]
        ]
        moments = [value for value in state if torch.is_tensor(value) and value.ndim]
        assert moments
        with session.generating() as roll:
            assert all(value.untyped_storage().nbytes() == 0 for value in moments)
            assert all((p.untyped_storage().nbytes() == 0) == ("16" in name) for p in masters)
            assert session.optimizer_bytes > 0
            roll.generate(prompts(), PARAMS)
        assert session.optimizer_bytes == 0 and session.engine.state == "suspended"
    assert alone.step(3) == ours.step(3)


def test_optimizer_state_that_finds_no_memory_is_reloaded_by_the_next_training_block(monkeypatch):
    monkeypatch.setattr(OptimizerOffload, "is_on_device", staticmethod(lambda tensor: True))
    alone, ours = TRAINERS["plain"](), TRAINERS["plain"]()
    session = make_session(ours.model, ours.optimizer, offload_optimizer=True)
    assert alone.step(0) == ours.step(0)
    with pytest.raises(MemoryError, match="no room"), session.generating():
        monkeypatch.setattr(OffloadedWeights, "reload", no_room)
    assert session.optimizer_bytes > 0 and ours.model.training
    monkeypatch.undo()
    with session.training():
        assert session.optimizer_bytes == 0
        assert alone.step(1) == ours.step(1)


def no_room(self, tick):
    raise MemoryError("no room")


def test_optimizer_state_on_the_host_is_not_offloaded():
    trainer = TRAINERS["plain"]()
    trainer.step(0)
    session = make_session(trainer.model, trainer.optimizer, offload_optimizer=True)
    with session.generating():
        assert session.optimizer_bytes == 0

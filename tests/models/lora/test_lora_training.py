"""An adapter's gradients and steps are those of the formula, of Megatron's trainers, and of PEFT's."""

from __future__ import annotations

import math

import pytest
import torch
from hf_models import random_model
from lora_cases import randomise, with_lora
from session_case import copied, make_session
from trainers import MegatronTrainer
from training_case import loss_over, sequences_of

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import sync_strategy
from megatron_infer.models.loading.sources import open_source
from megatron_infer.models.lora.attach import attach_lora
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

pytestmark = pytest.mark.filterwarnings("ignore:.*leaf Tensor:UserWarning", "ignore:.*deprecated:FutureWarning")
SEQUENCES = sequences_of([14, 9, 9])
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODELS = {
    "dense": lambda **how: tiny_gpt(init_method_std=0.2, **how),
    "recompute": lambda **how: tiny_gpt(init_method_std=0.2, **FULL, **how),
    "hybrid": lambda **how: tiny_hybrid("M*-", init_method_std=0.2, **how),
}


def formula(model, adapter) -> dict[str, torch.Tensor]:
    """Gradients by the chain rule from those of the merged weights: W + s b a, so da = s b' dW and db = s dW a'."""
    whole = copied(model).train()
    pairs = {}
    with torch.no_grad():
        for name, linear in list(whole.named_modules()):
            if (pair := getattr(linear, "lora", None)) is not None:
                pairs[name] = (pair.a.clone(), pair.b.clone())
                linear.weight += adapter.scale * pair.b @ pair.a
                pair.b.zero_()
                pair.a.zero_()
    for name in pairs:
        whole.get_submodule(name).weight.requires_grad_()
    session = make_session(whole)
    with session.training(), cpu_shim(4):
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
    found = {}
    for name, (a, b) in pairs.items():
        grad = whole.get_submodule(name).weight.grad
        found |= {f"{name}.lora.a": adapter.scale * b.T @ grad, f"{name}.lora.b": adapter.scale * grad @ a.T}
    return found


@pytest.mark.parametrize("exact", [False, True], ids=["stock", "exact"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_formula(name, exact):
    model = MODELS[name]()
    adapter = with_lora(model)
    want = formula(model, adapter)
    session = make_session(model, settings={"batch_invariant": exact})
    with session.training(), cpu_shim(4):
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
    got = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(got) == set(want)
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name not in got), "the base's"
    for name, grad in got.items():
        assert grad is not None and grad.any(), name
        torch.testing.assert_close(grad, want[name], atol=2e-5 * want[name].abs().max().item(), rtol=1e-3, msg=name)


@pytest.mark.parametrize("how", ["ddp", "distributed", "half", "overlap"])
def test_megatrons_optimizers_train_the_adapter_alone(how):
    half = how == "half"
    model = tiny_gpt(init_method_std=0.2, **({"bf16": True, "params_dtype": torch.bfloat16} if half else {}))
    adapter = with_lora(model)
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer = MegatronTrainer(model, distributed=how in ("distributed", "overlap"), half=half, overlap=how == "overlap")
    session = make_session(trainer.model, settings={"enable_prefix_caching": True})
    assert model is session.model
    with session.training(), cpu_shim(4):
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
        report = session.step(trainer.optimizer)
    assert report.update_successful and report.grad_norm > 0
    for name, value in model.named_parameters():
        assert value.requires_grad == (".lora." in name)
        assert torch.equal(value, before[name]) != value.requires_grad, name
    states = [state for part in _inner(trainer.optimizer) for state in part.state.values()]
    moments = sum(state["exp_avg"].numel() for state in states)
    assert moments == adapter.num_parameters, "optimizer state is the adapter's alone"


def _inner(optimizer):
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts]


@pytest.mark.parametrize("distributed", [False, True], ids=["one optimizer", "distributed optimizer"])
def test_a_run_goes_on_from_a_torch_dist_checkpoint(distributed, monkeypatch, tmp_path):
    """With torch's Adam, which it takes where Apex and Transformer Engine are missing, megatron-core's distributed
    optimizer has no state to load into before a first step, then takes Adam's count of steps for a tensor of the
    checkpoint (KeyError: 'step'), and gives all parameters one count: with any model, adapter or none. Here a step is
    made, the count is put in, and what has been loaded is compared."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    how = {"metadata": {"distrib_optim_sharding_type": "fully_reshardable"}} if distributed else {}
    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def put_all_but_the_count(self, parameter, tensors):
        known = self._get_main_param_and_optimizer_states(parameter)
        put(self, parameter, tensors | {"step": known["step"].clone()})

    monkeypatch.setattr(DistributedOptimizer, "_set_main_param_and_optimizer_states", put_all_but_the_count)

    def begun():
        model = tiny_gpt(init_method_std=0.2, bf16=True, params_dtype=torch.bfloat16)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.linspace(-0.2, 0.2, weight.numel()).view(weight.shape).sin())
        adapter = with_lora(model)
        trainer = MegatronTrainer(model, distributed=distributed, half=True)
        return adapter, trainer.optimizer, make_session(trainer.model)

    def step(session, optimizer):
        with session.training(), cpu_shim(4):
            session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
            session.step(optimizer)

    adapter, optimizer, session = begun()
    again, other, resumed = begun()
    step(session, optimizer)
    if distributed:
        step(resumed, other)
        for parameter in again.parameters():
            parameter.data.zero_()
    with cpu_shim(4):
        own = adapter.sharded_state_dict()
        state = {"lora": own, "optimizer": optimizer.sharded_state_dict(own, **how)}
        dist_checkpointing.save(state, str(tmp_path), sharded_strategy=sync_strategy())
        own = again.sharded_state_dict()
        wanted = {"lora": own, "optimizer": other.sharded_state_dict(own, is_loading=True, **how)}
        loaded = dist_checkpointing.load(wanted, str(tmp_path))
        again.load_state_dict(loaded["lora"])
        other.load_state_dict(loaded["optimizer"])
    resumed.update_weights()
    for one, its in ((session, optimizer), (resumed, other)) if not distributed else ():
        step(one, its)
    assert all(map(torch.equal, adapter.parameters(), again.parameters()))
    for saved, loaded in zip(_inner(optimizer), _inner(other), strict=True):
        pairs = list(zip(saved.state.items(), loaded.state.items(), strict=True))
        assert len(pairs) == len(adapter.parameters()), "the state is the adapter's alone"
        for (weight, state), (own, its) in pairs:
            assert torch.equal(weight, own) and state["exp_avg"].any()
            assert state.keys() == its.keys() and all(torch.equal(state[key], its[key]) for key in state)


def test_dropout_acts_in_training_only():
    model = tiny_gpt()
    with_lora(model, dropout=0.5)
    ids = torch.tensor(SEQUENCES[:1])
    run = lambda: model(ids, torch.arange(ids.shape[1])[None], None)  # noqa: E731
    assert torch.equal(run(), run()) and not model.training
    model.train()
    assert not torch.equal(run(), run())


@pytest.mark.filterwarnings("ignore")
def test_three_steps_are_those_of_peft_under_transformers(tmp_path):
    """Phi-3, whose linears are fused as megatron-core's are, so that both have the same pairs."""
    peft = pytest.importorskip("peft")
    random_model("phi3").save_pretrained(tmp_path / "base")
    model = build_model(open_source(tmp_path / "base"))
    adapter = randomise(attach_lora(model, rank=4, alpha=8), std=0.05)
    adapter.save(tmp_path / "start")
    theirs = peft.PeftModel.from_pretrained(random_model("phi3"), tmp_path / "start", is_trainable=True)
    prompts, rewards = [[5, 17, 90], [44, 8, 101, 3]], [1.0, -0.7]
    session = make_session(model)
    optimizers = [torch.optim.AdamW(one, lr=0.01) for one in (adapter.parameters(), theirs.parameters())]
    for _ in range(3):
        with session.generating() as roll:
            params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
            samples = [group.samples[0] for group in roll.generate(prompts, params)]
        for prompt, sample in zip(prompts, samples, strict=True):
            ids = torch.tensor([prompt])
            found = theirs.generate(
                input_ids=ids, attention_mask=ids * 0 + 1, max_new_tokens=6, min_new_tokens=6, do_sample=False
            )
            assert found[0].tolist() == sample.ids, "both generate the same"
        with session.training():
            ids, starts = [sample.ids for sample in samples], [len(prompt) for prompt in prompts]
            loss = lambda scores, at: -sum(rewards[i] * s.sum() for i, s in zip(at, scores, strict=True))  # noqa: E731
            report = session.score_and_backward(ids, loss, start=starts)
            session.step(optimizers[0])
        total = 0.0
        for one, start, reward in zip(ids, starts, rewards, strict=True):
            logits = theirs(torch.tensor([one])).logits[0, :-1].float()
            scores = logits.log_softmax(-1).gather(1, torch.tensor(one[1:])[:, None])[start - 1 :, 0]
            total = total - reward * scores.sum()
        assert math.isclose(report.loss, total.item(), rel_tol=1e-4)
        total.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    adapter.save(tmp_path / "end")
    from safetensors.torch import load_file

    ours, state = load_file(tmp_path / "end" / "adapter_model.safetensors"), peft.get_peft_model_state_dict(theirs)
    assert ours.keys() == state.keys()
    start = load_file(tmp_path / "start" / "adapter_model.safetensors")
    for name, value in ours.items():
        torch.testing.assert_close(value, state[name], atol=1e-4, rtol=0, msg=name)
        assert (value - start[name]).abs().max() > 0.01, "three steps of 0.01"

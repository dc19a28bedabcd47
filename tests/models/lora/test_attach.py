"""An adapter attached to a live model trains alone, and the base model is left as it was."""

from __future__ import annotations

import pytest
import torch
from hf_models import logits_of, random_model
from lora_cases import TARGETS, randomise
from plain_forward import full_logits

from megatron_infer.errors import AdoptionError, ConfigError, WrongState
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source
from megatron_infer.models.lora.attach import attach_lora
from megatron_infer.models.lora.peft import read_adapter
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

IDS = torch.randint(0, 131, (2, 24), generator=torch.Generator().manual_seed(1))


def built(tmp_path, kind="llama", **options):
    random_model(kind).save_pretrained(tmp_path / "base")
    return build_model(open_source(tmp_path / "base"), **options)


def backward(model, ids=IDS):
    positions = torch.arange(ids.shape[1])[None].expand(len(ids), -1)
    loss = model(ids, positions, None, labels=ids.roll(-1, 1)).mean()
    loss.backward()
    return loss.item()


def test_the_base_is_frozen_and_its_state_dict_is_as_before(tmp_path):
    model = built(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items() if value is not None}
    logits = full_logits(model, IDS[0].tolist())
    adapter = attach_lora(model, rank=4)
    assert torch.equal(full_logits(model, IDS[0].tolist()), logits), "b is zero"
    randomise(adapter)
    model.train()
    backward(model)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in adapter.parameters())
    trained = set(map(id, adapter.parameters()))
    assert all(p.grad is None and not p.requires_grad for p in model.parameters() if id(p) not in trained)
    after = model.state_dict()
    assert [name for name, value in after.items() if value is not None] == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    model.load_state_dict(after)
    assert (full_logits(model.eval(), IDS[0].tolist()) - logits).abs().max() > 0.05
    adapter.detach()
    assert torch.equal(full_logits(model, IDS[0].tolist()), logits)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "qwen3",
        "phi3",
        "gpt2",
        "nemotron_h_experts",
        "bamba",
        "granite_factors",
        "deepseek_v3",
        "qwen3_5",
        "mimo_v2_flash",
    ],
)
def test_a_saved_adapter_is_the_trained_one_in_peft(kind, tmp_path):
    peft = pytest.importorskip("peft")
    model = built(tmp_path, kind)
    targets = TARGETS if kind != "nemotron_h_experts" else TARGETS[:-1]  # PEFT refuses this family's out_proj
    if kind == "deepseek_v3":
        targets = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_proj"]
    adapter = attach_lora(model, rank=4, alpha=6, targets=targets, rslora=kind == "qwen3")
    randomise(adapter)
    adapter.save(tmp_path / "out")
    got = full_logits(model, IDS[0].tolist())
    again = read_adapter("again", tmp_path / "out", model)
    if "factors" in kind:  # of weights, which b is divided by and multiplied with again
        for path, pair in adapter.to_adapter().pairs.items():
            torch.testing.assert_close(again.pairs[path].b, pair.b, atol=1e-7, rtol=1e-6)
    else:
        assert again.digest == adapter.to_adapter().digest, "our own reader"
    wrapped = peft.PeftModel.from_pretrained(random_model(kind), tmp_path / "out").eval()
    expected = logits_of(wrapped, IDS[0].tolist())
    assert (got - expected).abs().max() < 1e-5 * max(1, expected.abs().max())


def test_pairs_of_shared_experts_without_a_name_are_refused_before_they_train(tmp_path):
    """A live model's own description has Llama's names, which has no experts."""
    peft = pytest.importorskip("peft")
    model = built(tmp_path, "qwen2_moe")
    description = model.source_description
    del model.source_description
    with pytest.raises(ConfigError, match=r"shared_experts\.linear_fc1: no Hugging Face name is known"):
        attach_lora(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    for targets, given in ((["linear_qkv", "linear_proj"], None), (TARGETS[:4], description)):
        adapter = attach_lora(model, rank=4, targets=targets, description=given)
        randomise(adapter)
        adapter.save(tmp_path / "out")
        got = full_logits(model, IDS[0].tolist())
        wrapped = peft.PeftModel.from_pretrained(random_model("qwen2_moe"), tmp_path / "out").eval()
        expected = logits_of(wrapped, IDS[0].tolist())
        assert (got - expected).abs().max() < 1e-5 * max(1, expected.abs().max())
        adapter.detach()


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"rank": 2.5}, "rank is 2.5"),
        ({"alpha": 0}, "alpha is 0, it must be a finite number above 0"),
        ({"alpha": float("inf")}, "alpha is inf"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"targets": "linear_qkv"}, "targets is 'linear_qkv', it must be a list"),
        ({"targets": ()}, "must be a list of names"),
        ({"targets": ("linear_qvk",)}, "did you mean 'linear_qkv'"),
        ({"targets": ("output_layer",)}, "one of in_proj, linear_fc1"),
        ({"targets": ("in_proj",)}, "no layer has such a linear"),
    ],
)
def test_options_that_mean_nothing_are_refused(how, match):
    model = tiny_gpt()
    with pytest.raises(ConfigError, match=match):
        attach_lora(model, **how)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_models_that_cannot_take_an_adapter_are_refused():
    model = tiny_gpt()
    adapter = attach_lora(model)
    with pytest.raises(ConfigError, match="has an adapter already: detach"):
        attach_lora(model)
    adapter.detach()
    with pytest.raises(ConfigError, match=r"within DistributedDataParallel.*before DDP and the optimizer"):
        attach_lora(torch.nn.parallel.DistributedDataParallel(model))

    class OwnLinear(mcore.ColumnParallelLinear):
        pass

    model.decoder.layers[1].mlp.linear_fc1.__class__ = OwnLinear
    with pytest.raises(AdoptionError, match=r"decoder\.layers\.1\.mlp\.linear_fc1.*OwnLinear"):
        attach_lora(model)
    assert not any("lora" in name for name, _ in model.named_modules())
    experts = tiny_hybrid("ME", moe_shared_expert_intermediate_size=None)
    with pytest.raises(ConfigError, match="outside of its routed experts"):
        attach_lora(experts, targets=("linear_fc1", "linear_fc2"))


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    adapter, other = attach_lora(tiny_gpt(), rank=2), attach_lora(tiny_gpt(), rank=3)
    state = {name: value.clone() for name, value in adapter.state_dict().items()}
    first = next(iter(state))
    for wrong, match in (
        (other.state_dict(), r"is \[3, 64\], the adapter's is \[2, 64\]"),
        ({}, "tensors of the adapter are missing"),
        (state | {"else": torch.ones(1)}, "not of this adapter, the first is else"),
    ):
        with pytest.raises(ConfigError, match=match):
            adapter.load_state_dict(wrong)
    assert all(torch.equal(value, state[name]) for name, value in adapter.state_dict().items())
    adapter.load_state_dict({name: value + 1 for name, value in state.items()})
    assert torch.equal(adapter.state_dict()[first], state[first] + 1)


def test_merged_weights_are_those_of_the_sum_and_come_back_exactly():
    bare = tiny_gpt(bf16=True, params_dtype=torch.bfloat16)
    model = mcore.Float16Module(bare.config, bare)
    adapter = randomise(attach_lora(model, rank=4, alpha=3, rslora=True))
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(WrongState, match="not merged"):
        adapter.unmerge()
    pairs = adapter.to_adapter().pairs
    adapter.merge()
    for path, pair in pairs.items():
        weight = before[f"module.{path}.weight"].float() + pair.scale * pair.b.float() @ pair.a.float()
        assert torch.equal(adapter.model.get_submodule(path).weight, weight.bfloat16())
    for call in (adapter.merge, adapter.detach, lambda: adapter.load_state_dict({})):
        with pytest.raises(WrongState, match="call unmerge"):
            call()
    adapter.unmerge()
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())

"""An adapter attached to a live model trains alone, and the base model is left as it was."""

from __future__ import annotations

import pytest
import torch
from peft_cases import base_model, logits_of
from plain_forward import full_logits

from megatron_infer.lora.attach import attach_lora
from megatron_infer.lora.peft import read_adapter
from megatron_infer.model_loader.build import build_model
from megatron_infer.model_loader.sources import open_source

IDS = torch.randint(0, 131, (2, 24), generator=torch.Generator().manual_seed(1))
EVERY = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj")


def built(tmp_path, kind="llama", **options):
    base_model(kind).save_pretrained(tmp_path / "base")
    return build_model(open_source(tmp_path / "base"), **options)


def randomise(adapter, std=0.1):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))


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


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "gpt2", "nemotron_h_experts", "bamba", "granite_factors"])
def test_a_saved_adapter_is_the_trained_one_in_peft(kind, tmp_path):
    peft = pytest.importorskip("peft")
    model = built(tmp_path, kind)
    targets = EVERY if kind != "nemotron_h_experts" else EVERY[:-1]  # PEFT refuses this family's out_proj
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
    wrapped = peft.PeftModel.from_pretrained(base_model(kind), tmp_path / "out").eval()
    expected = logits_of(wrapped, IDS[0].tolist())
    assert (got - expected).abs().max() < 1e-5 * max(1, expected.abs().max())

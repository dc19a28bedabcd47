"""A hybrid model takes optimizer steps on a CPU and generates from the weights it has, before and after."""

from __future__ import annotations

import paged_step
import pytest
import torch
from test_adopt_training import batch, loss_of

from megatron_infer.models.adopt import adopt
from megatron_infer.testing.tiny import tiny_hybrid, tiny_mamba


def transformers_mamba2(ours, **settings):
    """transformers' Mamba2 with the weights of a tiny Mamba model."""
    transformers = pytest.importorskip("transformers")
    layers = len(ours.decoder.layers)
    sizes = {"num_heads": 16, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 8, "conv_kernel": 4}
    config = transformers.Mamba2Config(
        hidden_size=64, num_hidden_layers=layers, vocab_size=128, bos_token_id=0, pad_token_id=0, **sizes | settings
    )
    theirs = transformers.Mamba2ForCausalLM(config)
    names = {
        "backbone.embeddings.weight": "embedding.word_embeddings.weight",
        "backbone.norm_f.weight": "decoder.final_norm.weight",
        "lm_head.weight": "output_layer.weight",
    }
    state = ours.state_dict()
    theirs.load_state_dict(
        {name: state[names.get(name, name.replace("backbone.", "decoder."))].clone() for name in theirs.state_dict()}
    )
    return theirs, {name: names.get(name, name.replace("backbone.", "decoder.")) for name in theirs.state_dict()}


@pytest.mark.parametrize("groups", [1, 2])
def test_loss_and_gradients_of_a_mamba_model_are_those_of_transformers(groups):
    ours = tiny_mamba(mamba_num_groups=groups).train()
    theirs, names = transformers_mamba2(ours, n_groups=groups)
    theirs.train()
    ids = batch()[0]
    expected = theirs(ids).logits
    logits = ours(ids, batch()[1], None)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    labels = ids.roll(-1, 1)
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    loss_of(ours).backward()
    for name, parameter in theirs.named_parameters():
        mine = ours.get_parameter(names[name]).grad
        assert (mine - parameter.grad).norm() < 1e-5 * parameter.grad.norm(), name


def test_training_learns_to_repeat_a_sequence():
    model = tiny_hybrid("M*M-").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(loss_of(model))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]
    adopted, (ids, _, labels) = adopt(model.eval()), batch()
    with torch.inference_mode():
        step = paged_step.Cache(adopted).step([(0, ids[0].tolist())])
        drawn = adopted.logits(adopted.hidden(step), step.ops).argmax(-1)
    assert (drawn == labels[0]).float().mean() > 0.9

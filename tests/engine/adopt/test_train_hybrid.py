"""A hybrid model takes optimizer steps on a CPU and generates from the weights it has, before and after."""

from __future__ import annotations

import paged_step
import pytest
import torch

from megatron_infer.errors import ModelError
from megatron_infer.models.adopt import adopt
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_hybrid, tiny_mamba

MODELS = {
    "mamba": ("MMM", {}),
    "hybrid": ("M*-M", {"position_embedding_type": "rope"}),
    "experts": ("M*ME", {}),
    "tied": ("M-", {"share_embeddings_and_output_weights": True}),
}


def batch(step: int = 0):
    ids = torch.randint(0, 128, (2, 21), generator=torch.Generator().manual_seed(step))
    return ids, torch.arange(21)[None].expand(2, -1), ids.roll(-1, 1)


def loss_of(model, step: int = 0) -> torch.Tensor:
    ids, positions, labels = batch(step)
    return model(ids, positions, None, labels=labels).mean()


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


@pytest.mark.parametrize("name", MODELS)
def test_adopting_and_generating_leave_training_alone_and_follow_it(name):
    pattern, settings = MODELS[name]
    with_us, without = (tiny_hybrid(pattern, **settings) for _ in range(2))
    adopted = adopt(with_us)
    checkpoint = with_us.sharded_state_dict().keys()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (with_us, without)]
    for step in range(3):
        adopted.refresh_scan_weights()
        assert paged_step.worst_difference(with_us, adopted) < 1e-5
        losses = []
        for model, optimizer in zip((with_us, without), optimizers, strict=True):
            model.train()
            optimizer.zero_grad()
            losses.append(loss_of(model, step))
            losses[-1].backward()
            optimizer.step()
            model.eval()
        assert torch.equal(*losses)
        assert adopted.scan_weights_differ() == "decoder.layers.0.mixer.A_log"
    for ours, theirs in zip(with_us.parameters(), without.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    adopted.refresh_scan_weights()
    assert paged_step.worst_difference(with_us, adopted) < 1e-5
    assert with_us.sharded_state_dict().keys() == checkpoint


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without CUDA")
def test_megatron_ddp_and_distributed_optimizer_train_an_adopted_hybrid():
    """Parameters are re-pointed into DDP's buffer after adoption: the scans must follow them there."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with cpu_shim(level=4):
        model = tiny_hybrid("M*-M")
        adopted = adopt(model)
        ddp = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False),
            model,
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, clip_grad=1.0, bf16=False), [ddp]
        )
        for step in range(2):
            ddp.train()
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            ddp.finish_grad_sync()
            assert optimizer.step()[0]
            model.eval()
            assert adopted.scan_weights_differ() is not None
            adopted.refresh_scan_weights()
            assert paged_step.worst_difference(model, adopted) < 1e-5
        assert paged_step.worst_difference(model, adopt([ddp])) < 1e-5


def test_a_step_in_training_mode_or_before_adoption_is_refused_clearly():
    model = tiny_hybrid("MM")
    adopted = adopt(model)
    step = paged_step.Cache(adopted).step([(0, [1, 2, 3])])
    mixer = model.decoder.layers[0].mixer
    with pytest.raises(ModelError, match="autograd is recording"):
        mixer(torch.zeros(3, 1, 64), step)
    model.train()
    with torch.inference_mode(), pytest.raises(ModelError, match="training mode"):
        mixer(torch.zeros(3, 1, 64), step)
    fresh = tiny_hybrid("MM").decoder.layers[0].mixer
    with torch.inference_mode(), pytest.raises(ModelError, match=r"before megatron_infer\.models\.adopt\.adopt"):
        fresh(torch.zeros(3, 1, 64), step)

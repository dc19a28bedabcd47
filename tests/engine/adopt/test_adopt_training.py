"""An adopted model is the model that trains: same parameters, loss, gradients and keys, whatever was generated."""

from __future__ import annotations

import copy
import functools

import paged_step
import pytest
import torch
from model_kinds import LATENT, PARALLEL, SOFTCAPPED

from megatron_infer.errors import ModelError
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.adopt import adopt
from megatron_infer.models.mcore_compat import Float16Module, SelfAttention, TransformerLayer
from megatron_infer.models.paged_layers import PAGED_ATTENTION, PagedPart, PagedTransformerLayer
from megatron_infer.models.rotary import DeviceAgnosticRotary, DeviceAgnosticYarn
from megatron_infer.models.specs import with_inference
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import (
    EXPERTS,
    gpt_spec,
    randomize_vectors,
    stock_spec,
    tiny_config,
    tiny_delta,
    tiny_gpt,
    tiny_hybrid,
)


def unpaged_spec(config):
    """gpt_spec with the stock attention and layer: what a training script without us would use on a CPU."""
    spec = gpt_spec(config)
    for layer in spec.layer_specs:
        layer.module = TransformerLayer
        attention = layer.submodules.self_attention
        classes = [kind for kind in attention.module.__mro__ if not issubclass(kind, PagedPart)]
        attention.module = classes[0]
    return spec


GPT = {
    "plain": {},
    "biases": {"add_bias_linear": True, "qk_layernorm": True},
    "tied": {"share_embeddings_and_output_weights": True, "position_embedding_type": "learned_absolute"},
    "moe": EXPERTS,
    "softcapped": SOFTCAPPED,
}


def latent_gpt():
    """megatron-core's own class of latent attention, which asks for CUDA when it is built as it is."""
    with mcore.latent_attention_on_cpu(DeviceAgnosticRotary, DeviceAgnosticYarn):
        return tiny_gpt(spec=unpaged_spec, **LATENT)


MODELS = {name: functools.partial(tiny_gpt, spec=unpaged_spec, **settings) for name, settings in GPT.items()} | {
    "delta": tiny_delta,
    "parallel": functools.partial(tiny_hybrid, "P-P-", **PARALLEL),
    "latent": latent_gpt,
    "mamba": functools.partial(tiny_hybrid, "MMM"),
    "hybrid": functools.partial(tiny_hybrid, "M*-M", position_embedding_type="rope"),
    "hybrid experts": functools.partial(tiny_hybrid, "M*ME"),
    "hybrid tied": functools.partial(tiny_hybrid, "M-", share_embeddings_and_output_weights=True),
}


def batch(step: int = 0):
    ids = torch.randint(0, 128, (2, 21), generator=torch.Generator().manual_seed(step))
    return ids, torch.arange(21)[None].expand(2, -1), ids.roll(-1, 1)


def loss_of(model, step: int = 0) -> torch.Tensor:
    ids, positions, labels = batch(step)
    return model(ids, positions, None, labels=labels).mean()


def generate(adopted) -> torch.Tensor:
    cache = paged_step.Cache(adopted)
    with torch.inference_mode():
        cache.step([(0, [])])
        first = cache.step([(0, [1, 2, 3, 4]), (1, [5, 6])])
        adopted.hidden(first)
        second = cache.step([(1, [7]), (0, [8, 9])])
        return adopted.logits(adopted.hidden(second), second.ops)


@pytest.mark.parametrize("name", GPT)
def test_loss_and_gradients_are_those_of_the_stock_modules(name):
    stock, adopted_model = (MODELS[name]().train() for _ in range(2))
    adopted = adopt(adopted_model.eval())
    assert type(adopted_model.decoder.layers[0]) is PagedTransformerLayer
    assert type(stock.decoder.layers[0]) is TransformerLayer
    generate(adopted)
    adopted_model.train()
    losses = [loss_of(model) for model in (stock, adopted_model)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (key, theirs), ours in zip(stock.named_parameters(), adopted_model.parameters(), strict=True):
        assert torch.equal(theirs.grad, ours.grad), key


def test_adoption_changes_no_parameter_buffer_or_key():
    model = tiny_gpt(spec=unpaged_spec, add_bias_linear=True)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    state = {name: tensor.clone() for name, tensor in model.state_dict(keep_vars=False).items() if tensor is not None}
    optimizer = torch.optim.Adam(model.parameters())
    modules = [id(module) for module in model.modules()]
    checkpoint = model.sharded_state_dict().keys()
    generate(adopt(model))
    assert model.sharded_state_dict().keys() == checkpoint
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers
    assert [id(module) for module in model.modules()] == modules
    after = {name: tensor for name, tensor in model.state_dict().items() if tensor is not None}
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(parameters.values())


@pytest.mark.parametrize("name", MODELS)
def test_generation_between_optimizer_steps_follows_the_weights_and_leaves_training_alone(name):
    with_us, without = (MODELS[name]() for _ in range(2))
    adopted, checkpoint = adopt(with_us), with_us.sharded_state_dict().keys()
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
        part = "self_attention" if name == "delta" else "mixer"
        assert adopted.scan_weights_differ() == (f"decoder.layers.0.{part}.A_log" if adopted.ssm_specs else None)
    for ours, theirs in zip(with_us.parameters(), without.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    adopted.refresh_scan_weights()
    assert paged_step.worst_difference(with_us, adopted) < 1e-5
    assert with_us.sharded_state_dict().keys() == checkpoint


def test_a_parameter_that_training_replaces_is_seen():
    model = tiny_gpt()
    adopted = adopt(model)
    before = generate(adopted)
    linear = model.decoder.layers[0].self_attention.linear_qkv
    linear.weight = torch.nn.Parameter(linear.weight.detach() * 2)
    model.decoder.layers[1].mlp.linear_fc2.weight.data = model.decoder.layers[1].mlp.linear_fc2.weight.data * -1
    assert not torch.allclose(generate(adopted), before)
    assert paged_step.worst_difference(model, adopted) < 1e-5


def test_adopting_twice_is_the_same_as_once():
    model = tiny_gpt(spec=unpaged_spec)
    first = generate(adopt(model))
    classes = [type(module) for module in model.modules()]
    again = adopt(model)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(generate(again), first)


@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_a_copy_of_an_adopted_model_reads_its_own_weights(name):
    model = MODELS[name]()
    adopted = adopt(model)
    before = generate(adopted)
    # Process groups cannot be copied; a job that copies a model shares them.
    groups = {id(group): group for group in vars(model.pg_collection).values()}
    groups |= {id(group): group for group in (getattr(one, "tp_group", None) for one in model.modules())}
    twin = copy.deepcopy(model, groups)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)  # logits stay in the range whose rounding the limit below is for
    assert torch.equal(generate(adopted), before)
    step = paged_step.Cache(adopted).step([(0, [1, 2, 3])])
    with torch.inference_mode():
        hidden = twin.decoder(hidden_states=adopted.embed(step), attention_mask=None, inference_context=step)
    assert not torch.allclose(hidden.squeeze(1), _hidden(adopted, [1, 2, 3]))
    for layer in twin.decoder.layers:
        if hasattr(layer, "mixer"):
            layer.mixer.fused.scan_weights.refresh()
            weights = layer.mixer.fused.scan_weights.weights
            torch.testing.assert_close(weights.decay_H, -layer.mixer.A_log.exp().detach())
    assert paged_step.worst_difference(twin, adopt(twin)) < 1e-5


def _hidden(adopted, tokens):
    with torch.inference_mode():
        return adopted.hidden(paged_step.Cache(adopted).step([(0, tokens)]))


@pytest.mark.parametrize("name", ["plain", "mamba"])
def test_a_step_in_training_mode_or_under_autograd_or_before_adoption_is_refused_clearly(name):
    model = MODELS[name]()
    adopted = adopt(model)
    step = paged_step.Cache(adopted).step([(0, [1, 2, 3])])
    layer = model.decoder.layers[0]
    part = getattr(layer, "mixer", None) or layer.self_attention
    hidden = {"hidden_states": torch.zeros(3, 1, 64), "inference_context": step}
    hidden |= {"attention_mask": None} if name == "plain" else {}
    for call in (lambda: adopted.hidden(step), lambda: part(**hidden)):
        with pytest.raises(ModelError, match=r"autograd is recording; call model.eval\(\) and run under"):
            call()
    model.train()
    for call in (lambda: model.decoder(adopted.embed(step), None, inference_context=step), lambda: part(**hidden)):
        with torch.inference_mode(), pytest.raises(ModelError, match="training mode"):
            call()
    model.eval()
    with torch.no_grad():
        assert torch.isfinite(adopted.hidden(step)).all()
    fresh = tiny_gpt() if name == "plain" else tiny_hybrid("MMM")
    with torch.inference_mode(), pytest.raises(ModelError, match=r"before megatron_infer\.models\.adopt\.adopt"):
        fresh.decoder(torch.zeros(3, 1, 64), None, inference_context=step)


def test_wrapped_models_are_unwrapped():
    model = tiny_gpt(spec=unpaged_spec)
    expected = generate(adopt(model))
    config = tiny_config()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    assert torch.equal(generate(adopt([wrapped])), expected)
    half = Float16Module(tiny_config(params_dtype=torch.bfloat16), tiny_gpt(params_dtype=torch.bfloat16))
    assert adopt(half).shape.dtype == "bfloat16"
    assert config.params_dtype == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without CUDA")
@pytest.mark.parametrize("is_hybrid", [False, True], ids=["gpt", "hybrid"])
def test_megatron_ddp_and_distributed_optimizer_train_an_adopted_model(is_hybrid):
    """The training stack a job uses: bf16-style main parameters live in DDP's buffer, and parameters are re-pointed.

    Scans of a hybrid that was adopted before follow their parameters into the buffer.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with cpu_shim(level=4):
        model = tiny_hybrid("M*-M") if is_hybrid else tiny_gpt(spec=stock_spec)
        randomize_vectors(model)
        early = [adopt(model)] if is_hybrid else []
        ddp = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False),
            model,
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, clip_grad=1.0, bf16=False), [ddp]
        )
        adopted = adopt([ddp])
        assert adopted.live is model
        logits = []
        for step in range(3):
            model.eval()
            assert paged_step.worst_difference(model, adopted) < 1e-5
            logits.append(generate(adopted))
            ddp.train()
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            ddp.finish_grad_sync()
            assert optimizer.step()[0]
            for one in (adopted, *early) if is_hybrid else ():
                assert one.scan_weights_differ() is not None
                one.refresh_scan_weights()
        model.eval()
        for one in (adopted, *early):
            assert paged_step.worst_difference(model, one) < 1e-5
        assert not torch.allclose(logits[0], logits[-1])


def test_with_inference_copies_the_spec_and_equals_adoption():
    config = tiny_config()
    spec = stock_spec(config)
    paged = with_inference(spec)
    assert spec.module is TransformerLayer and paged.module is PagedTransformerLayer
    assert paged.submodules.self_attention.module is PAGED_ATTENTION[SelfAttention]
    assert torch.equal(generate(adopt(tiny_gpt(spec=paged))), generate(adopt(tiny_gpt(spec=spec))))
    block = with_inference(unpaged_spec(config))
    assert all(layer.module is PagedTransformerLayer for layer in block.layer_specs)

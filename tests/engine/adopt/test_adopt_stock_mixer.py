"""megatron-core's own MambaMixer, found in a live model, is adopted as it is; ours holds the same weights and keys.

Its module needs triton, mamba_ssm and einops to be imported. Here stand-ins take their place, just good enough for its
constructor and its training forward; the scan behind them is the recurrence, one position after the other.
"""

from __future__ import annotations

import importlib
import sys
import types

import paged_step
import pytest
import torch
import torch.nn.functional as F

from megatron_infer.errors import AdoptionError
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.adopt import adopt
from megatron_infer.models.hybrid import hybrid_spec
from megatron_infer.models.mamba_mixer import SlottedMambaMixer
from megatron_infer.models.paged_layers import PagedPart, paged_class
from megatron_infer.models.specs import with_inference
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_hybrid

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without CUDA"),
    pytest.mark.skipif(mcore.version() >= (0, 19), reason="the stand-ins are for the imports of 0.16"),
]
FRESH = ("ssm.mamba_mixer", "ssm.mamba_context_parallel", "inference.contexts.attention_context.triton.tensor_ops")


class RMSNormGated(torch.nn.Module):
    """mamba_ssm's, by its documentation."""

    def __init__(self, width, eps, group_size, norm_before_gate, device, dtype):
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x, z=None):
        x = x if z is None else x * F.silu(z)
        groups = x.unflatten(-1, (-1, self.group_size))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight


def split_conv1d_scan(zxbcdt, conv_weight, conv_bias, dt_bias, A, D, headdim, ngroups, **_):
    """mamba_ssm's fused training kernel by definition: [b, l, ...] -> y * silu(z)."""
    heads, length = A.shape[0], zxbcdt.shape[1]
    width = heads * D.shape[-1] if D.ndim == 2 else heads * headdim
    z, xBC, dt = zxbcdt.split([width, conv_weight.shape[0], heads], -1)
    padded = F.conv1d(xBC.transpose(1, 2), conv_weight[:, None], conv_bias, padding=3, groups=len(conv_weight))
    x, b, c = F.silu(padded[..., :length].transpose(1, 2)).split(
        [width] + [(conv_weight.shape[0] - width) // 2] * 2, -1
    )
    x = x.unflatten(-1, (heads, -1))
    b, c = (part.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for part in (b, c))
    dt = F.softplus(dt + dt_bias)
    state, out = x.new_zeros(len(x), heads, x.shape[-1], b.shape[-1]), []
    for t in range(length):
        state = state * torch.exp(dt[:, t] * A)[..., None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        out.append((state * c[:, t, :, None]).sum(-1) + D.view(heads, -1) * x[:, t])
    return torch.stack(out, 1).flatten(2) * F.silu(z)


def rearrange(x, pattern, **sizes):
    """The three of einops' patterns that the training forward uses."""
    if pattern in ("l b d -> b l d", "b l d -> l b d"):
        return x.transpose(0, 1)
    if pattern == "(h p) -> h p":
        return x.view(-1, sizes["p"])
    assert pattern == "d 1 w -> d w", pattern
    return x[:, 0]


def stand_ins():
    """Module name -> stand-in."""

    def module(name, **names):
        found = types.ModuleType(name)
        vars(found).update(names)
        return found

    return {
        "triton": module("triton", jit=lambda function: function),
        "triton.language": module("triton.language", constexpr=int),
        "mamba_ssm": module("mamba_ssm"),
        "mamba_ssm.ops": module("mamba_ssm.ops"),
        "mamba_ssm.ops.triton": module("mamba_ssm.ops.triton"),
        "mamba_ssm.ops.triton.selective_state_update": module("update", selective_state_update=None),
        "mamba_ssm.ops.triton.layernorm_gated": module("gated", RMSNorm=RMSNormGated),
        "mamba_ssm.ops.triton.ssd_combined": module(
            "combined", mamba_chunk_scan_combined=None, mamba_split_conv1d_scan_combined=split_conv1d_scan
        ),
        "einops": module("einops", rearrange=rearrange, repeat=None),
    }


@pytest.fixture
def stock_mixer(monkeypatch):
    """The class, in modules that are forgotten afterwards."""
    for name in FRESH:
        monkeypatch.delitem(sys.modules, f"megatron.core.{name}", raising=False)
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module("megatron.core.ssm.mamba_mixer").MambaMixer
    for name in FRESH:
        sys.modules.pop(f"megatron.core.{name}", None)
    for name in ("mamba_mixer", "mamba_context_parallel"):
        vars(sys.modules["megatron.core.ssm"]).pop(name, None)


def with_mixer(cls, pattern="M*-M", *, wrap=lambda spec: spec, params=None, **settings):
    """A tiny hybrid whose mixers are of `cls`, the rest as hybrid_spec has it."""

    def spec(config):
        stack = hybrid_spec(config)
        mixer = stack.submodules.mamba_layer.submodules.mixer
        mixer.module, mixer.params = cls, params or {}
        return wrap(stack)

    with cpu_shim(1):
        return tiny_hybrid(pattern, spec=spec, **settings)


def full(model, length=20):
    ids, positions = torch.arange(length)[None], torch.arange(length)[None]
    return model(ids, positions, None)


def test_equal_seeds_give_equal_weights_under_equal_names(stock_mixer):
    stock, ours = with_mixer(stock_mixer), tiny_hybrid("M*-M")
    assert type(stock.decoder.layers[0].mixer) is stock_mixer
    assert type(ours.decoder.layers[0].mixer) is SlottedMambaMixer
    theirs = dict(stock.named_parameters())
    mine = dict(ours.named_parameters())
    assert list(theirs) == list(mine)
    for name, parameter in theirs.items():
        assert torch.equal(mine[name], parameter) and mine[name].dtype == parameter.dtype, name
        flags = [getattr(p, "tensor_model_parallel", False) for p in (mine[name], parameter)]
        assert flags[0] == flags[1], name
    assert set(stock.state_dict()) == set(ours.state_dict())


def checkpoint(model):
    """Key -> (global shape, offset, dtype) of everything a distributed checkpoint would hold."""
    found = {}
    for value in model.sharded_state_dict().values():
        for part in value.build() if hasattr(value, "build") else [value]:
            if hasattr(part, "global_shape") and getattr(part, "dtype", None) is not None:
                found[part.key] = (part.global_shape, part.global_offset, part.dtype, part.replica_id)
    return found


def test_distributed_checkpoints_have_the_same_keys_shapes_and_parts(stock_mixer):
    stock, ours = with_mixer(stock_mixer, params_dtype=torch.bfloat16), tiny_hybrid("M*-M", params_dtype=torch.bfloat16)
    assert checkpoint(ours) == checkpoint(stock)
    assert "decoder.layers.0.mixer.in_proj.weight.dt" in checkpoint(ours)
    assert "decoder.layers.0.mixer.in_proj.layer_norm_weight" in checkpoint(ours)
    factory = ours.sharded_state_dict()["decoder.layers.0.mixer.in_proj.weight"]
    merged = factory.merge_fn([part.data for part in factory.build()])
    assert torch.equal(merged, ours.decoder.layers[0].mixer.in_proj.weight)


@pytest.mark.parametrize("params", [{}, {"D_has_hdim": True}, {"rmsnorm": False}], ids=str)
def test_training_forward_and_gradients_are_those_of_the_stock_mixer(stock_mixer, params):
    stock = with_mixer(stock_mixer, params=params)
    ours = with_mixer(SlottedMambaMixer, params=params)
    for a, b in zip(stock.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)
    outputs = [full(model.train()) for model in (stock, ours)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    for output in outputs:
        output.square().mean().backward()
    for (name, a), b in zip(stock.named_parameters(), ours.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-5 * a.grad.norm(), name


@pytest.mark.parametrize("params", [{}, {"D_has_hdim": True}, {"rmsnorm": False}], ids=str)
def test_a_stock_mixer_is_adopted_in_place(stock_mixer, params):
    model = with_mixer(stock_mixer, params=params)
    state, before = {name: id(p) for name, p in model.named_parameters()}, full(model)
    keys, buffers = set(model.state_dict()), [name for name, _ in model.named_buffers()]
    adopted = adopt(model)
    mixer = model.decoder.layers[0].mixer
    assert type(mixer) is paged_class(PagedPart, stock_mixer)
    assert isinstance(mixer, PagedPart) and isinstance(mixer, stock_mixer)
    assert {name: id(p) for name, p in model.named_parameters()} == state
    assert set(model.state_dict()) == keys and [name for name, _ in model.named_buffers()] == buffers
    assert torch.equal(full(model), before), "training is the stock forward"
    assert paged_step.worst_difference(model, adopted) < 1e-5
    again = adopt(model)
    assert type(model.decoder.layers[0].mixer) is type(mixer)
    assert paged_step.worst_difference(model, again) < 1e-5


def test_a_stock_mixer_that_divides_heads_over_context_parallel_ranks_is_refused(stock_mixer):
    model = with_mixer(stock_mixer)
    model.config.context_parallel_size = 2
    with pytest.raises(AdoptionError, match=r"decoder\.layers\.0: context_parallel_size=2 with a recurrent layer"):
        adopt(model)


def test_a_subclass_of_the_stock_mixer_needs_a_word_from_its_owner(stock_mixer):
    class TheirMixer(stock_mixer):
        """Theirs."""

    with pytest.raises(AdoptionError, match=r"layers.0.mixer: mixer class .*TheirMixer .*with_inference"):
        adopt(with_mixer(TheirMixer))
    model = with_mixer(TheirMixer, wrap=with_inference)
    assert type(model.decoder.layers[0].mixer).__name__ == "PagedTheirMixer"
    assert paged_step.worst_difference(model, adopt(model)) < 1e-5


def test_a_stock_mixer_whose_convolution_is_its_own_parameter_is_read_as_in_019(stock_mixer):
    """0.19 holds conv1d_weight and conv1d_bias itself."""
    model = with_mixer(stock_mixer)
    expected = paged_step.full_logits(model, list(range(9)))
    for layer in model.decoder.layers:
        if hasattr(layer, "mixer"):
            conv = layer.mixer.conv1d
            layer.mixer.conv1d_weight, layer.mixer.conv1d_bias = conv.weight, conv.bias
            del layer.mixer.conv1d
    adopted = adopt(model)
    with torch.inference_mode():
        step = paged_step.Cache(adopted).step([(0, list(range(9)))])
        logits = adopted.logits(adopted.hidden(step), step.ops)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        conv.weight.data = conv.weight.data * 2
    assert adopted.scan_weights_differ() == "decoder.layers.3.mixer.conv1d_weight"

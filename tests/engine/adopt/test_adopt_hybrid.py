"""Hybrid decoders: variants of mixers, what scans derive from the weights, shapes, patterns and specs."""

from __future__ import annotations

import paged_step
import pytest
import torch

from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.model_shape import StateShape
from megatron_infer.errors import AdoptionError, ConfigError
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.adopt import adopt
from megatron_infer.models.hybrid import check_hybrid_pattern, hybrid_spec
from megatron_infer.models.paged_layers import PagedMambaLayer, PagedTransformerLayer
from megatron_infer.models.specs import with_inference
from megatron_infer.testing.tiny import tiny_config, tiny_gpt, tiny_hybrid, tiny_mamba


def mixer_of(model, layer: int = 0):
    return model.decoder.layers[layer].mixer


def changed_mixer(**params):
    """A hybrid spec whose mixers are built with more arguments."""

    def spec(config):
        stack = hybrid_spec(config)
        stack.submodules.mamba_layer.submodules.mixer.params.update(params)
        return stack

    return spec


@pytest.mark.parametrize(
    "params",
    [{"rmsnorm": False}, {"D_has_hdim": True}, {"conv_bias": False}, {"d_conv": 2}, {"conv_init": 0.7}, {"expand": 1}],
    ids=str,
)
def test_variants_of_the_mixer_are_served_as_they_train(params):
    model = tiny_hybrid("MM", spec=changed_mixer(**params))
    assert paged_step.worst_difference(model, adopt(model)) < 1e-5


def test_a_hybrid_of_attention_and_mlp_is_the_gpt_with_its_weights():
    gpt, hybrid = tiny_gpt(), tiny_hybrid("*-*-", position_embedding_type="rope")
    state = {}
    for name, tensor in gpt.state_dict().items():
        parts = name.replace("decoder.final_layernorm", "decoder.final_norm").split(".")
        if parts[1] == "layers":
            parts[2] = str(2 * int(parts[2]) + (parts[3] in ("mlp", "pre_mlp_layernorm")))
        state[".".join(parts)] = tensor
    hybrid.load_state_dict(state)
    caches = [paged_step.Cache(adopt(model)) for model in (gpt, hybrid)]
    with torch.inference_mode():
        for plan in ([(0, [1, 2, 3, 4, 5])], [(0, [6]), (1, [7, 8, 9])]):
            a, b = (cache.adopted.hidden(cache.step(plan)) for cache in caches)
            assert torch.equal(a, b)


def test_shape_says_what_sizing_needs():
    shape = adopt(tiny_hybrid("M*-ME", max_sequence_length=96)).shape
    assert (shape.num_layers, shape.num_attention_layers, shape.num_query_heads, shape.num_kv_heads) == (5, 1, 4, 2)
    assert (shape.head_dim, shape.max_position, shape.dtype) == (16, 96, "float32")
    # 16 heads of 8 and 2 groups of 16 for B and for C: 128 + 2 * 2 * 16 channels
    assert shape.state == StateShape(
        num_layers=2, conv_shape=(192, 4), ssm_shape=(16, 8, 16), conv_dtype="float32", ssm_dtype="float32"
    )
    assert adopt(tiny_gpt()).shape.state is None


def test_shape_of_a_model_without_attention():
    shape = adopt(tiny_mamba(num_layers=3, params_dtype=torch.bfloat16)).shape
    assert (shape.num_layers, shape.num_attention_layers, shape.num_kv_heads, shape.head_dim) == (3, 0, 1, 1)
    assert (shape.dtype, shape.state.conv_dtype, shape.state.ssm_dtype) == ("bfloat16", "bfloat16", "float32")
    assert shape.state.num_layers == 3


def state_config(**changes):
    fields = {
        "layer_type_list": ["M", "*"],
        "mamba_conv_states_shape": (192, 4),
        "mamba_ssm_states_shape": (16, 8, 16),
    }
    return MambaInferenceStateConfig(**fields | changes)


def test_a_state_config_must_be_of_this_model():
    model = tiny_hybrid("M*")
    assert adopt(model, state_config=state_config()).shape.state.num_layers == 1
    with pytest.raises(AdoptionError, match=r"layers.0.mixer: keeps states of \(192, 4\).*the state config says"):
        adopt(model, state_config=state_config(mamba_conv_states_shape=(192, 3)))
    with pytest.raises(AdoptionError, match=r"decoder: layers are 'M\*', the state config says 'MM'"):
        adopt(model, state_config=state_config(layer_type_list=["M", "M"]))
    with pytest.raises(AdoptionError, match="no layer of the model keeps a recurrent state"):
        adopt(tiny_gpt(), state_config=state_config())


# What the scans derive from the weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parameter", ["A_log", "dt_bias", "D", "conv1d.weight", "conv1d.bias"])
def test_a_weight_changed_in_place_is_seen_as_stale_and_gone_after_a_refresh(parameter, dtype):
    model = tiny_hybrid("M*M", params_dtype=dtype)
    adopted = adopt(model)
    assert adopted.scan_weights_differ() is None
    weight = mixer_of(model, 2).get_parameter(parameter)
    aliased = weight.dtype == torch.float32 and parameter != "A_log"
    with torch.no_grad():
        weight.mul_(1.5)
    expected = None if aliased else f"decoder.layers.2.mixer.{parameter}"
    assert adopted.scan_weights_differ() == expected
    adopted.refresh_scan_weights()
    assert adopted.scan_weights_differ() is None
    if dtype == torch.float32:
        assert paged_step.worst_difference(model, adopted) < 1e-5


def test_a_parameter_that_training_replaces_or_repoints_is_seen():
    model = tiny_hybrid("M*M")
    adopted, mixer = adopt(model), mixer_of(model)
    mixer.D = torch.nn.Parameter(mixer.D.detach() * 2)
    assert adopted.scan_weights_differ() == "decoder.layers.0.mixer.D"
    adopted.refresh_scan_weights()
    mixer.dt_bias.data = mixer.dt_bias.data + 0.5
    assert adopted.scan_weights_differ() == "decoder.layers.0.mixer.dt_bias"
    adopted.refresh_scan_weights()
    mixer.conv1d.weight.data = mixer.conv1d.weight.data * 2
    mixer.in_proj.weight.data = mixer.in_proj.weight.data * 2
    assert adopted.scan_weights_differ() == "decoder.layers.0.mixer.conv1d.weight"
    adopted.refresh_scan_weights()
    assert adopted.scan_weights_differ() is None
    assert paged_step.worst_difference(model, adopted) < 1e-5


def test_derived_weights_keep_their_address_over_refreshes_in_any_mode():
    """A captured graph holds it."""
    model = tiny_mamba(params_dtype=torch.bfloat16)
    with torch.inference_mode():
        adopted = adopt(model)
    scan_weights = mixer_of(model).fused.scan_weights
    names = ("conv_CW", "conv_bias_C", "decay_H", "skip_H", "dt_bias_H")
    before = [getattr(scan_weights.weights, name).data_ptr() for name in names]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    adopted.refresh_scan_weights()
    with torch.inference_mode():
        adopted.refresh_scan_weights()
    assert [getattr(scan_weights.weights, name).data_ptr() for name in names] == before
    torch.testing.assert_close(scan_weights.weights.decay_H, -mixer_of(model).A_log.exp().detach())


def test_a_copy_that_never_trained_serves_the_weights_copied_into_it():
    trained, copy_of_it = tiny_hybrid("M*-M", seed=1), tiny_hybrid("M*-M", seed=2)
    adopted = adopt(copy_of_it)
    with torch.no_grad():
        for mine, theirs in zip(copy_of_it.parameters(), trained.parameters(), strict=True):
            mine.copy_(theirs)
    assert adopted.scan_weights_differ() == "decoder.layers.0.mixer.A_log"
    adopted.refresh_scan_weights()
    assert paged_step.worst_difference(trained, adopted) < 1e-5


# Patterns and specs


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("M*X", r"'M\*X', position 2: 'X' is no layer symbol; known are M \(Mamba-2\), \* \(attention\), - \(MLP\), E"),
        ("MG", r"position 1: 'G' \(gated delta net\) is not supported"),
        ("M|M", r"position 1: '\|' \(pipeline stage boundary\) is not supported"),
        ("", "the layer pattern is empty"),
        (["M", "Q"], "^layer pattern 'MQ', position 1: 'Q' is no layer symbol"),
        ("M*-", r"^layer pattern 'M\*-' has 3 layers, the config has num_layers=4$"),
    ],
)
def test_a_pattern_that_cannot_be_built_is_refused_by_symbol_and_position(pattern, message):
    with pytest.raises(ConfigError, match=message):
        check_hybrid_pattern(pattern, num_layers=4)
    check_hybrid_pattern("M*-E", num_layers=4)


def test_a_model_of_another_pattern_is_refused_while_it_is_built():
    config = tiny_config(num_layers=2)
    with pytest.raises(ConfigError, match=r"position 1: 'G' \(gated delta net\) is not supported"):
        mcore.HybridModel(config, hybrid_spec(config), 128, 64, **{PATTERN: "MG"})


PATTERN = "hybrid_layer_pattern" if mcore.version() >= (0, 19) else "hybrid_override_pattern"


def test_experts_in_the_pattern_need_experts_in_the_config():
    with pytest.raises(ConfigError, match=r"'ME' has experts \(E\), but config.num_moe_experts is not set"):
        config = tiny_config(num_layers=2)
        mcore.HybridModel(config, hybrid_spec(config), 128, 64, **{PATTERN: "ME"})


def unpaged(stack):
    """The stack with stock layers and attention, as a training script writes it."""
    submodules = stack.submodules
    submodules.mamba_layer.module = mcore.MambaLayer
    submodules.attention_layer.module = mcore.TransformerLayer
    submodules.attention_layer.submodules.self_attention.module = mcore.SelfAttention
    submodules.mlp_layer.module = mcore.MLPLayer
    if submodules.moe_layer is not mcore.IdentityOp:
        submodules.moe_layer.module = next(iter(mcore.moe_layer_classes()), mcore.TransformerLayer)
    return stack


def test_with_inference_pages_a_hybrid_stack_spec_and_equals_adoption():
    plain = tiny_hybrid("M*-ME", spec=lambda config: unpaged(hybrid_spec(config)))
    assert type(plain.decoder.layers[0]) is mcore.MambaLayer
    paged = tiny_hybrid("M*-ME", spec=lambda config: with_inference(unpaged(hybrid_spec(config))))
    kinds = [type(layer) for layer in paged.decoder.layers]
    assert kinds[:2] == [PagedMambaLayer, PagedTransformerLayer]
    assert paged_step.worst_difference(plain, adopt(paged)) < 1e-5
    assert paged_step.worst_difference(paged, adopt(plain)) < 1e-5
    assert [type(layer) for layer in plain.decoder.layers] == kinds

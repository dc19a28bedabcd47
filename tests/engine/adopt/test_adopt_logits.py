"""Paged logits equal the training path's, for every architecture that adoption accepts."""

from __future__ import annotations

import contextlib
import functools
import types

import paged_step
import pytest
import torch
import torch.nn.functional as F
from model_kinds import LATENT, LATENT_EXPERTS, SOFTCAPPED, SPARSE
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_infer.errors import AdoptionError, ConfigError
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.adopt import adopt
from megatron_infer.models.extensions import Extensions
from megatron_infer.models.hybrid import hybrid_spec
from megatron_infer.models.mamba_mixer import SlottedMambaMixer
from megatron_infer.models.mcore_compat import SelfAttention, TransformerLayer
from megatron_infer.models.paged_layers import PAGED_ATTENTION, PagedTransformerLayer
from megatron_infer.models.rotary import rotary_table
from megatron_infer.models.specs import gpt_spec
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import DELTA, EXPERTS, YARN, stock_spec, tiny_gpt, tiny_hybrid

try:
    from megatron.core.inference.utils import InferenceMode  # 0.19: a flag of the process tells GPTModel.forward
except ImportError:

    class InferenceMode:
        """0.16 needs no flag."""

        active = contextlib.nullcontext


LAYER_NORM = {"normalization": "LayerNorm", "add_bias_linear": True}
QUICK_GEGLU = {
    "activation_func": mcore.quick_gelu,
    "gated_linear_unit": True,
    "bias_activation_fusion": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 0.5,
}
"""As Megatron's --quick-geglu and gpt-oss in Megatron Bridge."""
ARCHITECTURES = {
    "gqa": {},
    "mha": {"num_query_groups": 4},
    "mqa": {"num_query_groups": 1},
    "one_layer": {"num_layers": 1},
    "kv_channels": {"kv_channels": 24},
    "rope_none": {"position_embedding_type": "none"},
    "learned_positions": {"position_embedding_type": "learned_absolute"},
    "rope_base": {"rotary_base": 500000},
    "rope_llama3": {"rope_scaling": True, "rope_scaling_factor": 4.0},
    "yarn": {"position_embedding_type": "yarn", **YARN},
    "yarn_rounded": {
        "position_embedding_type": "yarn",
        **YARN,
        "yarn_correction_range_round_to_int": True,
        "yarn_beta_fast": 16.0,
        "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 0.5,
    },
    "rope_of_a_config_with_yarn": {**YARN, "rotary_percent": 0.5},
    "rope_percent": {"rotary_percent": 0.5},
    "rope_interleaved": {"rotary_interleaved": True},
    "rope_interleaved_percent": {"rotary_interleaved": True, "rotary_percent": 0.5},
    "rope_interpolated": {"seq_len_interpolation_factor": 2.5},
    "no_rope_layers": {"num_layers": 4, "no_rope_freq": 2},
    "sinks": {"softmax_type": "learnable"},
    "sinks_window": {"softmax_type": "learnable", "window_size": (4, 0)},
    "off_by_one": {"softmax_type": "off-by-one"},
    "qk_layernorm": {"qk_layernorm": True},
    "qk_layernorm_bias": {"qk_layernorm": True, "normalization": "LayerNorm"},
    "qk_l2_norm": {"qk_l2_norm": True},
    "qkv_bias": {"add_qkv_bias": True},
    "all_biases": {"add_bias_linear": True},
    "tied": {"share_embeddings_and_output_weights": True},
    "layer_norm": {"normalization": "LayerNorm"},
    "zero_centered_rms": {"layernorm_zero_centered_gamma": True, "qk_layernorm": True},
    "zero_centered_layer_norm": {**LAYER_NORM, "layernorm_zero_centered_gamma": True},
    "gelu": {**LAYER_NORM, "gated_linear_unit": False, "activation_func": F.gelu},
    "gelu_tanh": {"gated_linear_unit": False, "activation_func": functools.partial(F.gelu, approximate="tanh")},
    "geglu": {"activation_func": F.gelu},
    "relu2": {"gated_linear_unit": False, "activation_func": mcore.squared_relu},
    "quick_geglu": {"activation_func": mcore.quick_gelu, "glu_linear_offset": 1.0},
    "quick_geglu_unfused": {"activation_func": mcore.unfused_quick_gelu, "glu_linear_offset": 1.0},
    "fast_gelu": {"gated_linear_unit": False, "activation_func": mcore.fast_gelu},
    "swiglu_bias": {"add_bias_linear": True, "activation_func": F.silu},
    "swiglu_clamp": {"activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    "softmax_scale": {"softmax_scale": 0.7},
    "layer_scaling": {"apply_query_key_layer_scaling": True},
    "window": {"window_size": (4, 0)},
    "window_some_layers": {"num_layers": 4, "window_size": (3, 0), "window_attn_skip_freq": 2},
    "window_listed_layers": {"num_layers": 3, "window_size": (0, 0), "window_attn_skip_freq": [1, 0, 1]},
    "gpt2": {
        **LAYER_NORM,
        "num_query_groups": 4,
        "gated_linear_unit": False,
        "activation_func": F.gelu,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": True,
    },
    "qwen3_like": {"qk_layernorm": True, "kv_channels": 32, "share_embeddings_and_output_weights": True},
    "moe": EXPERTS,
    "moe_top1": {**EXPERTS, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "moe_weights_on_input": {
        **EXPERTS,
        "moe_router_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_shared_expert_intermediate_size": 40,
    },
    "moe_pre_softmax_scaled": {**EXPERTS, "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.7},
    "moe_sigmoid_groups": {
        **EXPERTS,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
    },
    "moe_fp32_router": {**EXPERTS, "moe_router_dtype": "fp32"},
    "moe_sinkhorn": {**EXPERTS, "moe_router_topk": 1, "moe_router_load_balancing_type": "sinkhorn"},
    "moe_biases_gelu": {**EXPERTS, "add_bias_linear": True, "gated_linear_unit": False, "activation_func": F.gelu},
    "gpt_oss_like": {
        **EXPERTS,
        **QUICK_GEGLU,
        "bias_activation_fusion": False,
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "window_size": (4, 0),
        "window_attn_skip_freq": 2,
        "position_embedding_type": "yarn",
        **YARN,
    },
    "moe_quick_geglu_fused": {**EXPERTS, **QUICK_GEGLU},
    "moe_some_layers": {**EXPERTS, "num_layers": 3, "moe_layer_freq": [0, 1, 1]},
    "moe_shared_expert": {**EXPERTS, "moe_shared_expert_intermediate_size": 40},
    "moe_latent": {**EXPERTS, **LATENT_EXPERTS},
    "moe_latent_bias": {**EXPERTS, "moe_latent_size": 24, "add_bias_linear": True, "moe_router_dtype": "fp32"},
    "moe_gated_shared_expert": {**EXPERTS, "moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True},
    "softcapped": SOFTCAPPED,
    "softcapped_alone": {
        "extensions": Extensions(attention_softcap=1.5, logit_softcap=3.0),
        "softmax_type": "learnable",
    },
    "norms_after": {"extensions": Extensions(norms="after", embedding_scale=3.0), "add_bias_linear": True},
    "whole_head_norms": {"extensions": Extensions(whole_head_norms=True), "qk_layernorm": True, **EXPERTS},
    "gated": {"attention_output_gate": True},
    "gated_mqa_bias": {
        "attention_output_gate": True,
        "num_query_groups": 1,
        "add_qkv_bias": True,
        "qk_layernorm": True,
    },
    "delta": DELTA,
    "delta_alone": {**DELTA, "linear_attention_freq": [1, 1, 1]},
    "delta_every_second": {**DELTA, "linear_attention_freq": 2, "layernorm_zero_centered_gamma": False},
    "delta_one_head_a_group": {**DELTA, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2},
    "delta_experts": {**DELTA, **EXPERTS, "moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True},
    "sparse": {**SPARSE, "dsa_indexer_topk": 4},
    "sparse_shared_choice": {
        **SPARSE,
        "dsa_indexer_topk": 4,
        "num_layers": 4,
        "extensions": Extensions(index_interleaved=True, index_shared=(False, True, False, True)),
    },
    "sparse_whole_queries": {**SPARSE, "dsa_indexer_topk": 4, "q_lora_rank": None, "rope_type": "rope"},
    "latent_yarn": LATENT,
    "latent_rope": {**LATENT, "rope_type": "rope", "rotary_scaling_factor": 1.0},
    "latent_whole_queries": {**LATENT, "q_lora_rank": None},
    "latent_without_norms": {**LATENT, "qk_layernorm": False},
    "latent_wide_values": {**LATENT, "v_head_dim": 40, "qk_head_dim": 24, "add_bias_linear": True},
    "latent_experts": {
        **LATENT,
        **EXPERTS,
        "num_layers": 3,
        "moe_layer_freq": [0, 1, 1],
        "moe_shared_expert_intermediate_size": 40,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
    },
}


ROPE = {"position_embedding_type": "rope"}
HYBRIDS = {
    "hybrid_mamba": ("MMMM", {}),
    "hybrid_one_mamba": ("M", {}),
    "hybrid": ("M*-M*-", {}),
    "hybrid_rope": ("M*-M*-", ROPE),
    "hybrid_learned": ("M*-M", {"position_embedding_type": "learned_absolute"}),
    "hybrid_experts": ("MEM*E", {}),
    "hybrid_experts_rope": ("MEM*E", ROPE),
    "hybrid_shared_expert": ("ME", {"moe_shared_expert_intermediate_size": 40}),
    "hybrid_attention_first": ("*M-", ROPE),
    "hybrid_attention_alone": ("*-*-", ROPE),
    "hybrid_one_group": ("M*", {"mamba_num_groups": 1}),
    "hybrid_heads": ("MM", {"mamba_num_heads": 6, "mamba_head_dim": 12}),
    "hybrid_one_norm": ("MM", {"norm_groups": 1}),
    "hybrid_layer_norm": ("M*-", {"normalization": "LayerNorm", "add_bias_linear": True}),
    "hybrid_zero_centered": ("M*-", {"layernorm_zero_centered_gamma": True}),
    "hybrid_tied": ("MM", {"share_embeddings_and_output_weights": True}),
    "hybrid_squared_relu": ("M*-", {"gated_linear_unit": False, "activation_func": mcore.squared_relu}),
    "hybrid_qk_norm_window": ("M*M*", {"qk_layernorm": True, "window_size": (4, 0), **ROPE}),
}


def make(name, **more):
    if name in HYBRIDS:
        pattern, settings = HYBRIDS[name]
        return tiny_hybrid(pattern, **settings, **more)
    return tiny_gpt(**ARCHITECTURES[name], **more)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *HYBRIDS])
def test_paged_logits_equal_the_full_forward(name):
    model = make(name)
    adopted = adopt(model)
    assert paged_step.worst_difference(model, adopted) < 1e-5
    if name in HYBRIDS:
        pattern, _ = HYBRIDS[name]
        assert (len(adopted.specs), len(adopted.ssm_specs)) == (pattern.count("*"), pattern.count("M"))


@pytest.mark.parametrize(("extensions", "settings", "message"), [
    ({"whole_head_norms": True}, {}, "needs qk_layernorm=True"),
    ({"local_rotary_base": 100.0}, {}, "local_rotary_base=100 needs layers with a window"),
    ({"norms": "both"}, EXPERTS, "norms both experts are not supported"),
])  # fmt: skip
def test_extensions_that_would_have_no_effect_or_a_part_of_it_are_refused(extensions, settings, message):
    with pytest.raises(ConfigError, match=message):
        tiny_gpt(extensions=Extensions(**extensions), **settings)
    with pytest.raises(ConfigError, match="a hybrid with the extensions"):
        tiny_hybrid("M*", extensions=Extensions(**extensions))


def test_a_fused_activation_that_clamps_before_the_bias_is_refused():
    """megatron-core's own two paths give different numbers there; the engine computes only the other one."""
    model = tiny_gpt(**{**EXPERTS, **QUICK_GEGLU, "add_bias_linear": True})
    with pytest.raises(AdoptionError, match=r"clamps before it adds the bias.*bias_activation_fusion=False"):
        adopt(model)


@pytest.mark.parametrize(
    "name",
    [
        *("gqa", "gpt2", "moe", "window_some_layers", "zero_centered_rms", "latent_yarn", "softcapped", "norms_after"),
        "delta",
        *("hybrid_rope", "hybrid_experts", "hybrid_mamba", "hybrid_layer_norm"),
    ],
)
def test_the_decoder_called_as_megatron_calls_it_gives_the_same(name):
    model = make(name)
    adopted = adopt(model)

    def through_decoder(step):
        embedded = adopted.embed(step)
        before = embedded.clone()
        hidden = model.decoder(hidden_states=embedded, attention_mask=None, inference_context=step)
        assert torch.equal(embedded, before), "the caller's hidden states were overwritten"
        return hidden.squeeze(1)

    assert paged_step.worst_difference(model, adopted, forward=through_decoder) < 1e-5


@pytest.mark.parametrize("name", ["gqa", "learned_positions", "moe", "tied", "softcapped"])
def test_gpt_model_forward_with_a_step_gives_the_logits_of_the_last_tokens(name):
    model = tiny_gpt(**ARCHITECTURES[name])
    adopted = adopt(model)
    tokens = paged_step.prompts()
    cache = paged_step.Cache(adopted)
    with torch.inference_mode():
        for start, stop in ((0, 6), (6, 7)):
            step = cache.step([(i, tokens[i][start:stop]) for i in (0, 1, 2)])
            with InferenceMode.active():
                logits = model(
                    step.token_ids_T[None],
                    step.positions_T[None],
                    None,
                    inference_context=step,
                    runtime_gather_output=True,
                )
            expected = torch.stack([paged_step.full_logits(model, tokens[i][:stop])[-1] for i in (0, 1, 2)])
            torch.testing.assert_close(logits.reshape(3, -1), expected, atol=1e-5, rtol=0)


class TheirLayer(TransformerLayer):
    """Theirs: adds a constant after the stock layer."""

    def forward(self, *args, **kwargs):
        hidden, context = super().forward(*args, **kwargs)
        return hidden + 0.25, context


class TheirMambaLayer(mcore.MambaLayer):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) + 0.25


class TheirPositionalLayer(mcore.MambaLayer):
    """Theirs: calls the mixer with the step in its place, not by keyword."""

    def forward(self, hidden_states, attention_mask=None, inference_context=None, **options):
        mixed = self.mixer(self.norm(hidden_states), inference_context)
        return self.mamba_bda(self.training, False)(mixed, hidden_states, self.hidden_dropout)


def their_gpt(config):
    block = gpt_spec(config)
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        layer.module = TheirLayer
    return block


def their_hybrid(config, module=TheirMambaLayer):
    stack = hybrid_spec(config)
    stack.submodules.mamba_layer.module = module
    return stack


def their_positional(config):
    return their_hybrid(config, TheirPositionalLayer)


@pytest.mark.parametrize(
    ("name", "spec", "cls", "part", "paged"),
    [
        ("gqa", their_gpt, TheirLayer, "self_attention", PAGED_ATTENTION[SelfAttention]),
        ("hybrid", their_hybrid, TheirMambaLayer, "mixer", SlottedMambaMixer),
        ("hybrid", their_positional, TheirPositionalLayer, "mixer", SlottedMambaMixer),
    ],
)
def test_attention_or_mixer_alone_takes_a_step_under_a_foreign_layer(name, spec, cls, part, paged):
    model = make(name, spec=spec)
    adopted = adopt(model)
    layer = model.decoder.layers[0]
    assert type(layer) is cls and type(getattr(layer, part)) is paged
    assert paged_step.worst_difference(model, adopted) < 1e-5


def test_adopting_a_stock_model_gives_what_the_spec_gives():
    by_spec, stock = tiny_gpt(), tiny_gpt(spec=stock_spec)
    assert type(stock.decoder.layers[0].self_attention) is SelfAttention
    assert type(by_spec.decoder.layers[0]) is PagedTransformerLayer
    stock.load_state_dict(by_spec.state_dict(), strict=False)
    assert set(stock.state_dict()) == set(by_spec.state_dict())
    cache_a, cache_b = paged_step.Cache(adopt(by_spec)), paged_step.Cache(adopt(stock))
    with torch.inference_mode():
        for plan in ([(0, [1, 2, 3, 4, 5])], [(0, [6]), (1, [7, 8, 9])]):
            a, b = (cache.adopted.hidden(cache.step(plan)) for cache in (cache_a, cache_b))
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["gqa", "hybrid", "gpt_oss_like"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_precision_are_as_close_to_fp32_as_the_training_path(name, dtype):
    exact, rounded = make(name), make(name, params_dtype=dtype, fp16=dtype is torch.float16)
    rounded.load_state_dict(exact.state_dict())
    adopted, tokens = adopt(rounded), paged_step.prompts()[0]
    assert adopted.shape.dtype == str(dtype).removeprefix("torch.") and adopted.shape.kv_dtype_bytes == 2
    truth = paged_step.full_logits(exact, tokens)
    training = (paged_step.full_logits(rounded, tokens).float() - truth).abs().mean()
    with torch.inference_mode():
        step = paged_step.Cache(adopted).step([(0, tokens)])
        paged = (adopted.logits(adopted.hidden(step), step.ops).float() - truth).abs().mean()
    assert paged < 1.5 * training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["gqa", "rope_llama3", "rope_percent", "rope_interleaved", "rope_interpolated", "rope_base", "yarn"]
)
def test_rotary_table_equals_trainings_to_the_bit(name, dtype):
    model = tiny_gpt(**ARCHITECTURES[name])
    table = adopt(model).rotary_table(200)
    angles, factor = model.rotary_pos_emb(200) if name == "yarn" else (model.rotary_pos_emb(200), 1.0)
    assert torch.equal(table.cos_PR.to(dtype), (angles.cos() * factor).to(dtype)[:, 0, 0])
    assert torch.equal(table.sin_PR.to(dtype), (angles.sin() * factor).to(dtype)[:, 0, 0])


def test_a_long_rotary_table_is_computed_in_a_few_launches_on_a_device():
    """Of another kind than a CPU; with every weight update."""
    model = tiny_gpt(**ARCHITECTURES["gqa"])
    model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq.to("meta")
    launches = []

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            launches.append(func)
            return func(*args, **(kwargs or {}))

    with Launches():
        table = rotary_table(model.rotary_pos_emb, 131072, torch.device("meta"))
    assert table.cos_PR.shape == table.sin_PR.shape == (131072, 2 * len(model.rotary_pos_emb.inv_freq))
    assert len(launches) < 20, len(launches)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without CUDA")
@pytest.mark.parametrize(
    "name",
    [
        *("gqa", "mha", "window", "window_some_layers", "layer_scaling", "softmax_scale", "no_rope_layers", "gpt2"),
        *("sinks", "sinks_window", "off_by_one"),
    ],
)
def test_paged_logits_equal_stock_attention_and_norms(name):
    """Against megatron-core's own core attention and norms, which need the shim to run forward here."""
    with cpu_shim(2):
        model = tiny_gpt(spec=stock_spec, **ARCHITECTURES[name])
        assert type(model.decoder.layers[0].self_attention.core_attention) is mcore.DotProductAttention
        assert paged_step.worst_difference(model, adopt(model)) < 1e-5


def test_learnable_sinks_have_megatrons_name_in_checkpoints_and_learn():
    model = tiny_gpt(softmax_type="learnable").train()
    name = "self_attention.core_attention.softmax_offset"
    assert f"decoder.layers.1.{name}" in model.state_dict()
    sharded = model.sharded_state_dict()
    assert any(key.endswith(name) for key in sharded)
    tokens = torch.arange(8)[None]
    model(tokens, tokens, None).square().sum().backward()
    assert model.get_parameter(f"decoder.layers.1.{name}").grad.all()


def test_packed_sequences_attend_each_to_itself():
    attention = tiny_gpt().decoder.layers[0].self_attention.core_attention
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(11, heads, 16, generator=generator) for heads in (4, 2, 2))
    packed = types.SimpleNamespace(cu_seqlens_q=torch.tensor([0, 4, 5, 9]), qkv_format="thd")
    together = attention(query, key, value, packed_seq_params=packed)
    assert len(together) == 11, "tokens after the last sequence are padding"
    for first, end in ((0, 4), (4, 5), (5, 9)):
        alone = attention(*(x[first:end].unsqueeze(1) for x in (query, key, value))).squeeze(1)
        torch.testing.assert_close(together[first:end], alone)


def test_frequencies_changed_after_construction_are_used():
    model = tiny_gpt()
    model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq * 0.3
    assert paged_step.worst_difference(model, adopt(model)) < 1e-5


def test_fused_activations_of_training_are_matched():
    """bias_activation_fusion makes GELU the tanh approximation: the unfused model of that activation."""
    settings = {**LAYER_NORM, "gated_linear_unit": False}
    unfused = tiny_gpt(**settings, activation_func=functools.partial(F.gelu, approximate="tanh"))
    fused = tiny_gpt(**settings, activation_func=F.gelu, bias_activation_fusion=True)
    assert paged_step.worst_difference(unfused, adopt(fused)) < 1e-5


def test_shape_says_what_sizing_needs():
    shape = adopt(tiny_gpt(num_layers=3, kv_channels=24, vocab_size=128, max_sequence_length=96), vocab_size=120).shape
    assert (shape.num_layers, shape.num_attention_layers, shape.num_query_heads, shape.num_kv_heads) == (3, 3, 4, 2)
    assert (shape.head_dim, shape.hidden_size, shape.vocab_size, shape.padded_vocab_size) == (24, 64, 120, 128)
    assert (shape.max_position, shape.kv_dtype_bytes, shape.dtype) == (96, 4, "float32")


@pytest.mark.parametrize("name", ["tied", "hybrid_experts"])
def test_packable_weights_are_all_and_only_the_linears(name):
    model = make(name)
    adopted = adopt(model)
    seen = []

    class Recording(paged_step.PlainOps):
        def linear(self, x, weight, bias=None):
            seen.append(id(weight))
            return super().linear(x, weight, bias)

        def fp32_linear(self, x, weight, bias, rows):
            seen.append(id(weight))
            return super().fp32_linear(x, weight, bias, rows)

    with torch.inference_mode():
        step = paged_step.Cache(adopted).step([(0, list(range(40)))])
        step.ops = Recording()
        adopted.logits(adopted.hidden(step), step.ops)
    assert set(seen) == {id(weight) for weight in adopted.packable_weights()}
    assert {id(weight) for weight in adopted.packable_weights()} <= {id(p) for p in model.parameters()}
    mixers = [layer.mixer for layer in model.decoder.layers if hasattr(layer, "mixer")]
    assert {id(linear.weight) for mixer in mixers for linear in (mixer.in_proj, mixer.out_proj)} <= set(seen)

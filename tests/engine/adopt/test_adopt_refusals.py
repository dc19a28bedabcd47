"""What cannot be adopted is refused by module and reason, and nothing has changed then."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from model_kinds import LATENT, SPARSE
from test_adopt_hybrid import unpaged

from megatron_infer.distributed.groups import ParallelGroups
from megatron_infer.errors import AdoptionError, ConfigError, ModelError
from megatron_infer.models.adopt import adopt
from megatron_infer.models.delta_net import SlottedDeltaNet
from megatron_infer.models.extensions import Extensions
from megatron_infer.models.hybrid import hybrid_spec
from megatron_infer.models.mcore_compat import (
    MLP,
    AttnMaskType,
    ColumnParallelLinear,
    DotProductAttention,
    DSAttention,
    GPTModel,
    HybridStack,
    LanguageModelEmbedding,
    SelfAttention,
    TopKRouter,
    TransformerLayer,
)
from megatron_infer.models.specs import with_inference
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import EXPERTS, stock_spec, tiny_config, tiny_gpt, tiny_hybrid


def stock(**overrides):
    return tiny_gpt(spec=stock_spec, **overrides)


def set_config(**values):
    """A model whose config says something it was not built with: the field alone must refuse it."""
    model = stock()
    for name, value in values.items():
        setattr(model.config, name, value)
    return model


def other_index_rope():
    """A model with sparse attention whose second indexer has a rope of its own."""
    model = tiny_gpt(**SPARSE)
    model.decoder.layers[1].self_attention.core_attention.indexer.rotary_pos_emb.inv_freq_inter *= 2
    return model


def megatrons_sparse_core():
    """A model with megatron-core's own sparse attention, which multiplies by a Hadamard matrix unless told not to."""
    model = tiny_gpt(**SPARSE)
    model.decoder.layers[0].self_attention.core_attention.__class__ = DSAttention
    return model


def set_latent(**values):
    """The same of a model with latent attention."""
    model = tiny_gpt(**LATENT)
    for name, value in values.items():
        setattr(model.config, name, value)
    return model


def other_rope(model):
    model.decoder.layers[1].self_attention.rotary_pos_emb.scaling_factor = 8.0
    model.decoder.layers[1].self_attention.rotary_pos_emb.inv_freq_inter /= 2


def changed(change, *, spec=stock_spec, **overrides):
    model = tiny_gpt(spec=spec, **overrides)
    change(model)
    return model


def changed_hybrid(change):
    model = tiny_hybrid("M*-M", spec=lambda config: unpaged(hybrid_spec(config)))
    change(model)
    return model


class TheirAttention(SelfAttention):
    pass


class TheirLayer(TransformerLayer):
    pass


class TheirMLP(MLP):
    pass


class TheirRouter(TopKRouter):
    pass


class TheirLinear(ColumnParallelLinear):
    pass


class TheirCore(DotProductAttention):
    pass


class TheirGPT(GPTModel):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def become(path, cls):
    def change(model):
        model.get_submodule(path).__class__ = cls

    return change


def their_layers(config):
    plain = stock_spec(config)
    plain.module = TheirLayer
    return with_inference(plain)


def split_sequences(model):
    model.config.sequence_parallel = True


def add_hook(model):
    model.decoder.layers[1].mlp.linear_fc1.register_forward_hook(lambda *_: None)


def other_norm(model):
    model.decoder.layers[0].input_layernorm = torch.nn.GroupNorm(1, 64)


def fully_sharded():
    """FSDP2 in place: parameters are DTensors, modules have hooks and classes of FSDP's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = stock()
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def with_vision():
    """megatron-core's LLaVA, the stage that has the language model: a GPTModel."""
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.transformer.mlp import MLPSubmodules

    config = tiny_config(num_layers=2)
    vision = tiny_config(num_layers=2)
    config.language_model_type, vision.vision_model_type = "llama", "clip"
    spec = stock_spec(config)
    return LLaVAModel(
        language_transformer_config=config,
        language_transformer_layer_spec=spec,
        language_vocab_size=128,
        language_max_sequence_length=512,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=spec,
        drop_vision_class_token=False,
        vision_projection_config=tiny_config(num_layers=2),
        vision_projection_layer_spec=MLPSubmodules(),
        add_encoder=False,
    )


class ScaledEmbedding(LanguageModelEmbedding):
    """As Gemma's."""

    def forward(self, *args, **options):
        return super().forward(*args, **options) * self.config.hidden_size**0.5


class TheirMixer(torch.nn.Module):
    pass


class TheirStack(HybridStack):
    pass


def widen(model):
    model.decoder.layers[0].mixer.D = torch.nn.Parameter(torch.ones(3))


def other_gated_norm(model):
    model.decoder.layers[0].mixer.norm = torch.nn.GroupNorm(1, 128)


def norm_in_front_of_nothing(model):
    model.decoder.layers[2].input_layernorm = torch.nn.RMSNorm(64)


def smaller_state(model):
    mixer = model.decoder.layers[3].mixer
    mixer.headdim, mixer.nheads_local_tp = 16, 8
    for name in ("A_log", "D", "dt_bias"):
        setattr(mixer, name, torch.nn.Parameter(torch.ones(8)))


LAYER = "decoder.layers.1"
REFUSED = {
    "latent_in_name": (lambda: set_config(multi_latent_attention=True), "multi_latent_attention=True, but .*Attention"),
    "latent_own_cache": (lambda: set_latent(cache_mla_latents=True), "cache_mla_latents=True: .*takes the up"),
    "latent_interleaved": (lambda: set_latent(rotary_interleaved=True), "rotary_interleaved=True: .*sorts"),
    "latent_fp8": (lambda: set_latent(fp8="e4m3"), "fp8='e4m3': latent attention"),
    "latent_window": (lambda: set_latent(window_size=(4, 0)), "window_size=.*windows"),
    "latent_sinks": (lambda: set_latent(softmax_type="off-by-one"), "softmax_type='off-by-one'.*sinks"),
    "latent_ropes": (
        lambda: changed(other_rope, spec=None, **LATENT),
        "layers.1.self_attention.rotary_pos_emb: rotates otherwise",
    ),
    "sparse_shared_over_stages": (
        lambda: tiny_gpt(**SPARSE, extensions=Extensions(index_shared=(True, False))),
        "layers.0.self_attention: attends to keys that a layer of another pipeline stage chooses",
    ),
    "sparse_hadamard": (
        megatrons_sparse_core,
        "core_attention: (the indexer of megatron-core before 0.19 rotates last|dsa_indexer_rotate_activation=True)",
    ),
    "sparse_ropes": (other_index_rope, "indexer.rotary_pos_emb: rotates otherwise than the attention's"),
    "output_gate": (lambda: set_config(attention_output_gate=True), "linear_qkv: 128 rows, expected 192 of"),
    "sinks": (
        lambda: set_config(softmax_type="learnable"),
        "core_attention: softmax_type='learnable', but softmax_offset is None, not a tensor of 4 heads",
    ),
    "fp4": (lambda: set_config(fp4="e2m1"), "fp4='e2m1'"),
    "cuda_graphs": (
        lambda: changed(lambda m: setattr(m.config, "cuda_graph_impl", "local"), spec=their_layers),
        "decoder.layers.0: a layer of another class with cuda_graph_impl=local: .* set it to 'none'",
    ),
    "sequence_parallel": (
        lambda: changed(split_sequences, spec=their_layers),
        "decoder.layers.0: a layer of another class with sequence_parallel=True.*set_model_to_sequence_parallel",
    ),
    "token_types": (
        lambda: changed(lambda m: setattr(m.embedding, "num_tokentypes", 1)),
        "embedding: token-type embeddings are not supported",
    ),
    "pipeline": (lambda: set_config(pipeline_model_parallel_size=2), "pipeline_model_parallel_size=2"),
    "virtual_pipeline": (
        lambda: set_config(virtual_pipeline_model_parallel_size=2),
        "the model is one chunk of its rank; give the list of all",
    ),
    "window_to_the_future": (lambda: set_config(window_size=(4, 1)), r"window_size=\(4, 1\)"),
    "unbounded_window": (lambda: set_config(window_size=(-1, 0)), r"window_size=\(-1, 0\)"),
    "chunks": (
        lambda: [stock(), stock()],
        "virtual_pipeline_model_parallel_size=1, but 2 model chunks are given; give all chunks of the rank",
    ),
    "chunks_disordered": (
        lambda: [set_config(virtual_pipeline_model_parallel_size=2) for _ in range(2)],
        r"the model chunks are not in their order \(layers \[1, 2, 1, 2\]\)",
    ),
    "not_gpt": (lambda: torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear is not a megatron-core GPTModel or"),
    "unknown_wrapper": (lambda: torch.nn.DataParallel(stock()), "wrapper torch.nn.parallel.*DataParallel is not known"),
    "compiled": (
        lambda: torch.compile(stock()),
        r"eval_frame.OptimizedModule is not a megatron-core GPTModel .*; give its language model: model\._orig_mod$",
    ),
    "compiled_within": (
        lambda: torch.nn.DataParallel(torch.compile(stock())),
        r"wrapper .* give its language model: model\.module\._orig_mod$",
    ),
    "vision": (with_vision, r"LLaVAModel is not a .*; give its language model: model\.language_model$"),
    "fsdp2": (fully_sharded, r"weight: is a DTensor.*RolloutSession\(model\).generating\(\) gathers"),
    "scaled_embedding": (
        lambda: changed(become("embedding", ScaledEmbedding)),
        r"embedding: class .*ScaledEmbedding is not .*LanguageModelEmbedding: what its forward adds is not computed",
    ),
    "their_forward": (lambda: changed(become("", TheirGPT)), "TheirGPT overrides forward"),
    "their_attention": (
        lambda: changed(become(f"{LAYER}.self_attention", TheirAttention)),
        f"{LAYER}.self_attention: attention class .*TheirAttention .*with_inference",
    ),
    "their_layer": (lambda: changed(become(LAYER, TheirLayer)), f"{LAYER}: layer class .*TheirLayer .*with_inference"),
    "their_mlp": (lambda: changed(become(f"{LAYER}.mlp", TheirMLP)), f"{LAYER}.mlp: class .*TheirMLP"),
    "their_linear": (
        lambda: changed(become(f"{LAYER}.self_attention.linear_qkv", TheirLinear)),
        f"{LAYER}.self_attention.linear_qkv: linear class .*TheirLinear",
    ),
    "their_core": (
        lambda: changed(become(f"{LAYER}.self_attention.core_attention", TheirCore)),
        f"{LAYER}.self_attention.core_attention: class .*TheirCore is not known.*with_inference",
    ),
    "their_router": (
        lambda: changed(become(f"{LAYER}.mlp.router", TheirRouter), **EXPERTS),
        f"{LAYER}.mlp.router: router class TheirRouter",
    ),
    "their_norm": (
        lambda: changed(other_norm),
        "decoder.layers.0.input_layernorm: norm class .*GroupNorm is not known",
    ),
    "their_output": (lambda: changed(become("output_layer", TheirLinear)), "output_layer: class .*TheirLinear"),
    "hook": (lambda: changed(add_hook), f"{LAYER}.mlp.linear_fc1: has a forward hook"),
    "padding_mask": (
        lambda: changed(lambda m: setattr(m.decoder.layers[0].self_attention, "attn_mask_type", AttnMaskType.padding)),
        "decoder.layers.0.self_attention: attn_mask_type is padding",
    ),
    "no_final_norm": (
        lambda: changed(lambda m: setattr(m.decoder, "final_layernorm", None)),
        "decoder.final_layernorm: missing",
    ),
    "double": (lambda: stock().double(), "weights are float64; supported are float32, bfloat16 or float16"),
    "two_dtypes": (lambda: changed(lambda m: m.decoder.layers[1].mlp.bfloat16()), "weights are bfloat16, float32"),
    "capacity": (
        lambda: changed(lambda m: setattr(m.config, "moe_expert_capacity_factor", 1.0), spec=their_layers),
        "decoder.layers.0: a layer of another class with moe_expert_capacity_factor=1.0: .*would drop tokens",
    ),
    "jitter": (lambda: stock(**EXPERTS, moe_input_jitter_eps=0.1), "moe_input_jitter_eps=0.1"),
    "fused_relu": (
        lambda: changed(
            lambda m: [setattr(m.config, "bias_activation_fusion", True)],
            activation_func=F.relu,
            gated_linear_unit=False,
        ),
        "decoder.layers.0.mlp: bias_activation_fusion with activation .*relu.*no such kernel",
    ),
    "no_layers": (
        lambda: changed(lambda m: m.decoder.layers.__init__()),
        "decoder.layers: no layer of the model attends",
    ),
    "nothing_kept": (lambda: tiny_hybrid("--"), "decoder.layers: no layer of the model attends or keeps a state"),
}
HYBRIDS_REFUSED = {
    "mixer": (become("decoder.layers.0.mixer", TheirMixer), r"layers.0.mixer: mixer class .*TheirMixer is not"),
    "stack": (become("decoder", TheirStack), "decoder: class .*TheirStack is not megatron-core's"),
    "linear": (
        become("decoder.layers.0.mixer.in_proj", torch.nn.Linear),
        "layers.0.mixer.in_proj: linear class .*Linear is not known",
    ),
    "gated_norm": (other_gated_norm, "layers.0.mixer.norm: norm class .*GroupNorm is not known"),
    "shape": (widen, r"layers.0.mixer.D: shape \(3,\), expected \(16,\)"),
    "other_heads": (smaller_state, "layers.3.mixer: state shapes differ between recurrent layers"),
    "no_final_norm": (lambda model: delattr(model.decoder, "final_norm"), "decoder.final_norm: missing"),
    "adding": (
        lambda model: setattr(model.decoder.layers[0], "mamba_bda", lambda **_: None),
        "layers.0.mamba_bda: .* is not megatron-core's bias-dropout-add",
    ),
    "stray_norm": (norm_in_front_of_nothing, "layers.2.input_layernorm: .*RMSNorm in a layer without self_attention"),
    "activation": (
        lambda model: setattr(model.decoder.layers[0].mixer, "activation", "gelu"),
        "activation 'gelu' behind the convolution",
    ),
    "no_rope": (  # of 0.16, which builds none for this kind of positions
        lambda model: setattr(model, "position_embedding_type", "yarn"),
        "rotary_pos_emb: position_embedding_type='yarn', but the model has no such module",
    ),
}
"""Changes of an unpaged hybrid of M*-M."""
REFUSED |= {
    f"hybrid_{name}": (functools.partial(changed_hybrid, change), message)
    for name, (change, message) in HYBRIDS_REFUSED.items()
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_refusal_names_the_module_and_the_reason(mistake):
    build, message = REFUSED[mistake]
    model = build()
    before = [type(module) for module in _modules(model)]
    with pytest.raises(AdoptionError, match=message) as caught:
        adopt(model)
    assert isinstance(caught.value, ModelError)
    assert str(caught.value).startswith(f"{caught.value.module_name or '<root>'}: ")
    assert [type(module) for module in _modules(model)] == before, "a refused model was changed"
    assert all(getattr(module, "fused", None) is None for module in _modules(model))


def _modules(model):
    return [module for part in (model if isinstance(model, list) else [model]) for module in part.modules()]


class WrapperOfMegatronFSDP(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    "names",
    [
        {"FullyShardedDataParallel": WrapperOfMegatronFSDP},
        {
            "FullyShardedDataParallel": lambda module: WrapperOfMegatronFSDP(module),
            "FullyShardedDataParallelV1": WrapperOfMegatronFSDP,
        },
    ],
    ids=["0.19", "0.20"],
)
def test_the_wrapper_of_megatron_fsdp_is_known_in_each_version(names, monkeypatch):
    with pytest.raises(AdoptionError, match=r"wrapper .*WrapperOfMegatronFSDP is not known"):
        adopt(WrapperOfMegatronFSDP(stock()))
    adapter = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
    monkeypatch.setitem(sys.modules, adapter, SimpleNamespace(**names))
    assert adopt(WrapperOfMegatronFSDP(stock())).shape.num_layers == 2


def test_vocabulary_larger_than_the_embedding_is_refused():
    with pytest.raises(AdoptionError, match="vocab_size=500, but the model's embedding has 128 rows"):
        adopt(stock(), vocab_size=500)


def test_custom_classes_are_adopted_when_the_spec_vouches_for_them():
    def spec(config):
        plain = stock_spec(config)
        plain.submodules.self_attention.submodules.core_attention = TheirCore
        plain.submodules.self_attention.module = TheirAttention
        return with_inference(plain)

    model = tiny_gpt(spec=spec)
    assert adopt(model).shape.num_layers == 2
    assert all(isinstance(layer.self_attention, TheirAttention) for layer in model.decoder.layers)


def test_with_inference_refuses_what_has_no_self_attention():
    with pytest.raises(AdoptionError, match="is not a decoder layer's spec"):
        with_inference(torch.nn.Linear)
    spec = stock_spec(tiny_config())
    spec.submodules.self_attention.module = TheirMLP
    with pytest.raises(AdoptionError, match="self_attention: TheirMLP is neither megatron-core's SelfAttention nor"):
        with_inference(spec)


def test_a_paged_part_of_another_kind_is_refused_by_name():
    stack = hybrid_spec(tiny_hybrid("M*-M").config)
    stack.submodules.mamba_layer.submodules.mixer.module = SlottedDeltaNet
    with pytest.raises(AdoptionError, match="SlottedDeltaNet is neither megatron-core's MambaMixer nor derived from"):
        with_inference(stack)
    model = tiny_hybrid("M*-M")
    mixer, attention = model.decoder.layers[0].mixer, model.decoder.layers[1].self_attention
    model.decoder.layers[0].mixer = attention
    with pytest.raises(AdoptionError, match=r"layers\.0\.mixer: .* is not megatron-core's MambaMixer"):
        adopt(model)
    model.decoder.layers[0].mixer, model.decoder.layers[1].self_attention = mixer, mixer
    with pytest.raises(AdoptionError, match=r"layers\.1\.self_attention: .* is not megatron-core's SelfAttention"):
        adopt(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the machine without CUDA")
def test_cpu_shim_leaves_torch_as_it_was():
    before = {name: getattr(torch.cuda, name) for name in ("current_device", "synchronize", "Stream", "get_rng_state")}
    with cpu_shim(4):
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert {name: getattr(torch.cuda, name) for name in before} == before
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises(ValueError, match="levels are 1 to 4"), cpu_shim(7):
        pass


def test_cpu_shim_refuses_where_cuda_is_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="would hide the CUDA device"), cpu_shim(1):
        pass


def test_groups_without_the_context_parallel_ranks_of_the_config_are_a_config_error():
    with pytest.raises(ConfigError, match=r"has context_parallel_size=2, .* have cp=1; give the groups"):
        ParallelGroups.of(None, set_config(context_parallel_size=2))

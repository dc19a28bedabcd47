"""Megatron-Bridge's own classes, known by name: stand-ins of the same name and forward compute in steps what they do.

`tools/census.py` runs the real ones, where Megatron-Bridge is installed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import paged_step
import pytest
import torch

from megatron_infer.errors import AdoptionError, ModelError
from megatron_infer.models import bridge_modules
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.adopt import adopt
from megatron_infer.models.core_attention import TorchCoreAttention, TorchNorm
from megatron_infer.models.extended_modules import KeyNorm, QueryNorm, TwoRopes
from megatron_infer.models.loading.checkpoint import description_from_model
from megatron_infer.models.rotary import DeviceAgnosticRotary
from megatron_infer.models.specs import gpt_spec
from megatron_infer.testing.tiny import tiny_gpt


def named(name: str) -> Callable[[type], type]:
    """A class decorator: the class has Bridge's name."""

    def rename(kind: type) -> type:
        kind.__module__, _, kind.__qualname__ = name.rpartition(".")
        return kind

    return rename


def extend_instance(module: torch.nn.Module, mixin: type) -> None:
    base = type(module)
    module.__class__ = type(base.__name__, (mixin, base), {"__module__": "megatron.bridge.models.gemma.modules"})


@named(bridge_modules.SCALING_MIXIN)
class Scaling(torch.nn.Module):
    def forward(self, **kwargs):
        embeddings = super().forward(**kwargs)
        return embeddings * torch.tensor(self.config.hidden_size**0.5, dtype=embeddings.dtype)


@named(bridge_modules.CAPPING_MIXIN)
class Capping(mcore.ColumnParallelLinear):
    def forward(self, *args, **kwargs):
        logits, bias = super().forward(*args, **kwargs)
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(logits / cap), bias


@named(bridge_modules.GEMMA3_EMBEDDING)
class Gemma3Embedding(mcore.LanguageModelEmbedding):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * self.config.hidden_size**0.5


@named(bridge_modules.NORMED_ROW_LINEAR)
class NormedLinear(mcore.RowParallelLinear):
    def __init__(self, input_size, output_size, *, config, **options):
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = TorchNorm(config, output_size)

    def forward(self, x):
        output, bias = super().forward(x)
        return self.post_layernorm(output), bias


@named(bridge_modules.CAPPED_CORES[1])
class CappedCore(TorchCoreAttention):
    def __init__(self, config, layer_number, *args, **kwargs):
        super().__init__(config, layer_number, *args, **kwargs)
        self.norm_factor, self.softmax_scale = math.sqrt(9.0), 1 / 3
        self.softcap = config.attn_logit_softcapping
        self.window = self.window_size = config.window_size if layer_number % 2 else None


@named(bridge_modules.PATTERNED_CORES[0])
class PatternedCore(TorchCoreAttention):
    def __init__(self, config, layer_number, *args, **kwargs):
        config = copy.copy(config)
        config.window_size = (4, 0) if bridge_modules.is_local(config, layer_number) else None
        super().__init__(config, layer_number, *args, **kwargs)


@named(bridge_modules.TWO_ROPE_ATTENTION[0])
class TwoRopeAttention(mcore.SelfAttention):
    def forward(self, hidden_states, attention_mask, *args, rotary_pos_emb=None, **kwargs):
        ropes = rotary_pos_emb.chunk(2, dim=-1)
        chosen = ropes[0 if bridge_modules.is_local(self.config, self.layer_number) else 1]
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=chosen, **kwargs)


@named(bridge_modules.TWO_ROPES[0])
class BridgeRopes(TwoRopes):
    """Angles side by side; Bridge's are stacked."""


@named(bridge_modules.TWO_ROPES[1])
class MiMoRopes(TwoRopes):
    pass


@named(bridge_modules.MIXED_HEADS_ATTENTION)
class MixedHeadsAttention(TwoRopeAttention):
    """Layers with a window have 4 kv heads, the others 2; values have 12 dims and keys 16."""

    def __init__(self, config, submodules, layer_number, *args, **kwargs):
        config = copy.copy(config)
        is_local = bridge_modules.is_local(config, layer_number)
        config.v_head_dim = 12
        config.num_query_groups = config.swa_num_query_groups if is_local else config.full_attn_num_query_groups
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        rows = 4 * 16 + config.num_query_groups * (16 + 12)
        self.linear_qkv.weight = torch.nn.Parameter(0.2 * torch.randn(rows, config.hidden_size))
        self.linear_proj.weight = torch.nn.Parameter(0.2 * torch.randn(config.hidden_size, 4 * 12))

    def get_query_key_value_tensors(self, hidden_states, *_, **__):
        groups = self.num_query_groups_per_partition
        mixed = self.linear_qkv(hidden_states)[0].unflatten(-1, (groups, -1))
        query, key, value = mixed.split([4 // groups * 16, 16, 12], dim=-1)
        return query.reshape(*query.shape[:2], 4, 16), key, value


@named(bridge_modules.PATTERNED_CORES[1])
class MixedHeadsCore(TorchCoreAttention):
    """Layers with a window have sinks. Values have a factor."""

    def __init__(self, config, layer_number, *args, **kwargs):
        config, is_local = copy.copy(config), bridge_modules.is_local(config, layer_number)
        config.window_size = (4, 0) if is_local else None
        config.softmax_type = "learnable" if is_local else "vanilla"
        super().__init__(config, layer_number, *args, **kwargs)
        self._attention_value_scale = config.attention_value_scale

    def forward(self, query, key, value, *args, **kwargs):
        return super().forward(query, key, value * self._attention_value_scale, *args, **kwargs)


@named(bridge_modules.WHOLE_HEAD_ATTENTION)
class WholeHeadAttention(mcore.SelfAttention):
    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.q_layernorm = TorchNorm(config, config.num_attention_heads * config.kv_channels)
        self.k_layernorm = TorchNorm(config, config.num_query_groups * config.kv_channels)

    def get_query_key_value_tensors(self, *args, **kwargs):
        norms = self.q_layernorm, self.k_layernorm
        self.q_layernorm = self.k_layernorm = None
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        self.q_layernorm, self.k_layernorm = norms
        query, key = (norm(x.flatten(2)).view_as(x) for norm, x in zip(norms, (query, key), strict=True))
        return query, key, value


@named(bridge_modules.WHOLE_HEAD_NORM)
class WholeQueryNorm(QueryNorm):
    pass


@named(bridge_modules.WHOLE_HEAD_NORM)
class WholeKeyNorm(KeyNorm):
    pass


def model_of(*, attention: type = mcore.SelfAttention, slots: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A model of megatron-core's classes, with others in the slots of attention and MLP. fields: also of a provider."""
    known = mcore.config_fields()
    extra = {name: fields.pop(name) for name in list(fields) if name not in known}

    def spec(config: Any) -> Any:
        vars(config).update(extra)
        block = gpt_spec(config)
        for layer in block.layer_specs:
            parts = mcore.submodules_of(layer)
            layer.module, parts.self_attention.module = mcore.TransformerLayer, attention
            for part in (parts.self_attention, parts.mlp):
                for name, kind in (slots or {}).items():
                    if hasattr(mcore.submodules_of(part), name):
                        setattr(mcore.submodules_of(part), name, kind)
        return block

    return tiny_gpt(spec=spec, **fields)


def gemma() -> Any:
    model = model_of(layernorm_zero_centered_gamma=True)
    extend_instance(model.embedding, Scaling)
    return model


def gemma2() -> Any:
    slots = {"linear_proj": NormedLinear, "linear_fc2": NormedLinear, "core_attention": CappedCore}
    caps = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
    model = model_of(slots=slots, window_size=(4, 0), **caps)
    extend_instance(model.embedding, Scaling)
    extend_instance(model.output_layer, Capping)
    return model


def gemma3() -> Any:
    slots = {"linear_proj": NormedLinear, "linear_fc2": NormedLinear, "core_attention": PatternedCore}
    pattern = {"interleaved_attn_pattern": (1, 1)}
    model = model_of(attention=TwoRopeAttention, slots=slots, qk_layernorm=True, **pattern)
    model.embedding.__class__ = Gemma3Embedding
    model.rotary_pos_emb.__class__ = BridgeRopes
    model.rotary_pos_emb.rope_local = DeviceAgnosticRotary(
        kv_channels=model.config.kv_channels, rotary_percent=1.0, rotary_base=100, use_cpu_initialization=True
    )
    return model


def mimo_v2_flash() -> Any:
    fields = {
        "hybrid_attention_pattern": [0, 1],
        "full_attn_num_query_groups": 2,
        "swa_num_query_groups": 4,
        "attention_value_scale": 0.7,
    }
    torch.manual_seed(0)
    model = model_of(attention=MixedHeadsAttention, slots={"core_attention": MixedHeadsCore}, **fields)
    model.rotary_pos_emb.__class__ = MiMoRopes
    model.rotary_pos_emb.rope_local = DeviceAgnosticRotary(
        kv_channels=model.config.kv_channels, rotary_percent=1.0, rotary_base=100, use_cpu_initialization=True
    )
    return model


def exaone4() -> Any:
    slots = {"linear_proj": NormedLinear, "linear_fc2": NormedLinear}
    model = model_of(slots=slots, qk_layernorm=True)
    for layer in model.decoder.layers:
        layer.input_layernorm, layer.pre_mlp_layernorm = mcore.IdentityOp(), mcore.IdentityOp()
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "mimo_v2_flash": mimo_v2_flash,
    "exaone4": exaone4,
    "olmoe": lambda: model_of(attention=WholeHeadAttention, qk_layernorm=True),
    "minimax_m2": lambda: model_of(
        slots={"q_layernorm": WholeQueryNorm, "k_layernorm": WholeKeyNorm}, qk_layernorm=True
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_steps_compute_what_the_classes_forward_does_before_and_after_adoption(name):
    model = MODELS[name]()
    tokens = list(range(3, 23))
    before = paged_step.full_logits(model, tokens)
    adopted = adopt(model)
    assert paged_step.worst_difference(model, adopted) < 1e-5
    assert torch.equal(paged_step.full_logits(model, tokens), before), "the trainer's forward is another"
    assert paged_step.worst_difference(model, adopt(model)) < 1e-5, "adopted again"


@pytest.mark.parametrize(("name", "where"), [
    ("gemma", "embedding"),
    ("gemma2", "output_layer"),
    ("gemma2", "decoder.layers.1.self_attention.core_attention"),
    ("gemma3", "embedding"),
    ("gemma3", "rotary_pos_emb"),
    ("gemma3", "decoder.layers.1.self_attention"),
    ("mimo_v2_flash", "rotary_pos_emb"),
    ("mimo_v2_flash", "decoder.layers.1.self_attention"),
    ("mimo_v2_flash", "decoder.layers.1.self_attention.core_attention"),
    ("exaone4", "decoder.layers.1.mlp.linear_fc2"),
    ("olmoe", "decoder.layers.1.self_attention"),
    ("minimax_m2", "decoder.layers.1.self_attention.q_layernorm"),
])  # fmt: skip
def test_a_subclass_of_one_is_another_class(name, where):
    model = MODELS[name]()
    module = model.get_submodule(where)
    module.__class__ = type("Mine", (type(module),), {})
    with pytest.raises(AdoptionError, match=where):
        adopt(model)


@pytest.mark.parametrize("name", ["gemma2", "exaone4", "minimax_m2"])
def test_a_description_does_not_leave_out_what_the_classes_add(name):
    with pytest.raises(ModelError, match=r"is a megatron\.bridge\.models\..* cannot express yet"):
        description_from_model(MODELS[name]())


def test_heads_that_one_cache_cannot_hold_are_refused():
    model = mimo_v2_flash()
    model.decoder.layers[0].self_attention.config.swa_num_query_groups = 3
    with pytest.raises(AdoptionError, match="2 kv heads with values of 12, where other layers have 3: one cache"):
        adopt(model)


def test_a_stock_core_attention_whose_config_caps_scores_is_refused():
    with pytest.raises(AdoptionError, match=r"attn_logit_softcapping=1\.5 with .*DotProductAttention"):
        adopt(model_of(slots={"core_attention": mcore.DotProductAttention}, attn_logit_softcapping=1.5))

"""Megatron-Bridge's own classes for model families: known by name, read in place, never imported.

Each is a class of megatron-core or Transformer Engine whose forward does a little more, as the tables say. A user's
subclass of one is another class, which is not known. Checked against Megatron-Bridge 0.6.2.
"""

from __future__ import annotations

import math
from typing import Any

import torch

BRIDGE = "megatron.bridge.models."
PAGED = f"{__name__.rpartition('.')[0]}.paged_layers"
"""The module of paged classes."""
_MIXED_IN = f"{BRIDGE}gemma.modules."
"""Where `extend_instance` makes classes: of a mixin and the class that the instance had, with the latter's name."""
GEMMA3_EMBEDDING = f"{BRIDGE}gemma.gemma3_provider.Gemma3LanguageModelEmbedding"
SCALING_MIXIN = f"{_MIXED_IN}EmbeddingScalingMixin"
CAPPING_MIXIN = f"{BRIDGE}gemma.gemma2_provider.Gemma2OutputLayer"
NORMED_ROW_LINEAR = f"{BRIDGE}common.te_layers.TERowParallelLinearLayerNorm"
"""Transformer Engine's row-parallel linear, and then the norm `post_layernorm`."""
WHOLE_HEAD_NORM = f"{BRIDGE}minimax_m2.minimax_m2_provider._FullDimRMSNorm"
"""A norm over all heads of all tensor-parallel ranks."""
_MIMO_V2 = f"{BRIDGE}mimo_v2_flash.modeling_mimo_v2_flash.MiMoV2Flash"
TWO_ROPES = (f"{BRIDGE}gemma.gemma3_provider.Gemma3RotaryEmbedding", f"{_MIMO_V2}RotaryEmbedding")
MIXED_HEADS_ATTENTION = f"{_MIMO_V2}SelfAttention"
"""Layers with a window have another number of KV heads, and values another width than keys."""
TWO_ROPE_ATTENTION = (f"{BRIDGE}gemma.gemma3_provider.Gemma3SelfAttention", MIXED_HEADS_ATTENTION)
WHOLE_HEAD_ATTENTION = f"{BRIDGE}olmoe.olmoe_provider.OLMoESelfAttention"
"""Its norms of queries and keys run over all heads."""
_FALCON_H1 = f"{BRIDGE}falcon_h1.modeling_falconh1.falconh1_"
FALCON_H1_MODEL = f"{_FALCON_H1}model.FalconH1Model"
"""megatron-core's MambaModel with a stack of its own and factors of embeddings and logits."""
FALCON_H1_STACK = f"{_FALCON_H1}block.FalconH1Stack"
FALCON_H1_LAYER = f"{_FALCON_H1}layer.FalconH1Layer"
"""Attention and a mixer side by side, then an MLP; the three below have factors of their own."""
FALCON_H1_ATTENTION = f"{_FALCON_H1}layer.FalconH1SelfAttention"
FALCON_H1_MIXER = f"{_FALCON_H1}layer.FalconH1MambaMixer"
FALCON_H1_MLP = f"{_FALCON_H1}layer.FalconH1MLP"
ATTENTIONS = (*TWO_ROPE_ATTENTION, WHOLE_HEAD_ATTENTION, FALCON_H1_ATTENTION)
PATTERNED_CORES = (
    f"{BRIDGE}gemma.gemma3_provider.Gemma3TEDotProductAttention",
    f"{_MIMO_V2}TEDotProductAttention",
)
"""Transformer Engine's attention with a config of its own, which says the window and the sinks."""
CAPPED_CORES = tuple(
    f"{BRIDGE}gemma.gemma2_provider.{name}" for name in ("Gemma2FlexDotProductAttention", "Gemma2DotProductAttention")
)
"""Attention with capped scores, in layers of odd numbers with a window."""


def name_of(kind: type) -> str:
    """The full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_of(module: Any, *names: str) -> bool:
    """Whether its class is one of these, or the paged one that adoption makes of one."""
    own = next(kind for kind in type(module).__mro__ if kind.__module__ != PAGED)
    return name_of(own) in names


def is_bridge(module: Any) -> bool:
    """Whether its class is any of Bridge's, known or not."""
    own = next(kind for kind in type(module).__mro__ if kind.__module__ != PAGED)
    return own.__module__.startswith(BRIDGE)


def _mixed_in(module: Any, mixin: str, base: type) -> bool:
    """Whether its class is what `extend_instance` makes of `mixin` and megatron-core's `base`."""
    kind = type(module)
    return (
        name_of(kind) == _MIXED_IN + base.__name__
        and [name_of(one) for one in kind.__bases__] == [mixin, name_of(base)]
        and "forward" not in vars(kind)
    )


def embedding_scale(embedding: Any, base: type) -> float | None:
    """What Bridge's class multiplies embeddings with; None: it is not Bridge's. base: megatron-core's class."""
    scale = math.sqrt(embedding.config.hidden_size)
    if is_of(embedding, GEMMA3_EMBEDDING):
        return scale
    if _mixed_in(embedding, SCALING_MIXIN, base):
        return torch.tensor(scale, dtype=embedding.word_embeddings.weight.dtype).item()
    return None


def is_capped_output(layer: Any, base: type) -> bool:
    """Whether it is Bridge's output layer with capped logits. base: megatron-core's class."""
    return _mixed_in(layer, CAPPING_MIXIN, base)


def is_local(config: Any, layer_number: int) -> bool:
    """Whether this layer, from 1 on, of Bridge's models with two ropes has the window and the local rope."""
    if (pattern := getattr(config, "hybrid_attention_pattern", None)) is not None:
        return bool(pattern[layer_number - 1] == 1)
    return bool(layer_number % sum(config.interleaved_attn_pattern))

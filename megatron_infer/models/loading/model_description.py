"""A model's description: what to build and how to find its weights. To and from JSON, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from megatron_infer.errors import ModelError
from megatron_infer.models.extensions import Extensions
from megatron_infer.models.stage_layers import window_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are scaled.

    kind: "linear" (factor only), "llama3", "yarn", "factors" (one per frequency), "longrope" (`factors` for sequences
    up to original_max_position, `long_factors` for longer ones), or "dynamic" (none up to max_sequence_length).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """yarn's bounds, in rotations within original_max_position. A frequency above beta_fast stays. A frequency below
    beta_slow is divided by the factor."""
    truncate: bool = True
    """Whether yarn rounds the two bounds to whole frequencies."""
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    """yarn's, of latent attention. `attention_factor` is made of both."""
    attention_factor: float = 1.0
    """yarn and longrope multiply rotated queries and keys by it each; softmax_scale has its square."""
    is_in_rotation: bool = False
    """softmax_scale does not have it, cosines and sines do: heads or layers do not rotate as a whole."""

    @property
    def mscale_ratio(self) -> float:
        """What megatron-core makes of mscale and mscale_all_dim: the factor of latent attention's cosines and sines."""

        def of(weight: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

        return of(self.mscale) / of(self.mscale_all_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridDescription:
    """A hybrid decoder: the kind of each layer, and the fields of its mixers that TransformerConfig does not have."""

    pattern: str
    """megatron-core's symbol of each layer: M Mamba, * attention, - MLP, E mixture of experts; and P, which attends and
    mixes side by side (`models.parallel_layer`)."""
    norm_groups: int
    """Groups of channels that the mixer's gated norm normalises separately, over all ranks."""
    norm_epsilon: float = 1e-5
    """The gated norm's; TransformerConfig has that of the other norms."""
    gated_norm: bool = True
    """Whether a mixer norms its gated result."""
    conv_width: int = 4
    conv_bias: bool = True
    projection_bias: bool = False
    """Whether in_proj and out_proj have biases."""
    dt_min: float = 0.0
    dt_max: float | None = None
    """softplus(dt + bias) is clamped to this range; None: no upper end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScales:
    """Factors in the source's forward that loading multiplies into its weights.

    Example: x + m * (W h + b) = x + ((m W) h + m b), so `residual` goes into the last linear of each block.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    head_from_embedding: bool = False
    """The source ties head and embedding, which have different factors here and so are two tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What is needed to build a model and to find its weights: a GPTModel, or a MambaModel where `hybrid` is set."""

    architecture: str
    """Class name in the Hugging Face config, e.g. LlamaForCausalLM; decides the names of the tensors."""
    transformer: Mapping[str, Any]
    """Keyword arguments of TransformerConfig; the activation by its Hugging Face name."""
    vocab_size: int
    """True vocabulary size; the built model may have padding beyond it."""
    max_sequence_length: int
    position_embedding: str = "rope"
    """rope, learned_absolute or none."""
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    linear_biases: tuple[str, ...] = ()
    """Which of qkv, proj, fc1, fc2, router, experts have a bias in the source. megatron-core gives biases to all or to
    qkv alone; those that the source does not have are zeros."""
    hybrid: HybridDescription | None = None
    scales: WeightScales | None = None
    """None: weights are loaded unscaled."""
    latent_norm_epsilon: float | None = None
    """Of the norms of latents; None: that of the others."""
    extensions: Extensions = field(default_factory=Extensions)
    """What TransformerConfig cannot say of the layers, embedding and logits."""
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    dtype: str = "float32"
    """The dtype in which the source stores the weights."""
    name: str = field(default="", compare=False)

    def for_length(self, length: int | None) -> ModelDescription:
        """The description of a model that serves sequences up to `length`; None: up to max_sequence_length.

        A longrope becomes the factors of such sequences, and positions end where others begin. Cached keys have one
        kind of factors, so that the longest sequence decides for all, as in vLLM.
        """
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "longrope":
            return self
        original = scaling.original_max_position
        is_long = min(length or self.max_sequence_length, self.max_sequence_length) > original
        factors = scaling.long_factors if is_long else scaling.factors
        return replace(
            self,
            rope_scaling=replace(scaling, kind="factors", factors=factors, long_factors=()),
            max_sequence_length=self.max_sequence_length if is_long else min(original, self.max_sequence_length),
        )

    def of_layers(self, *, has_window: bool) -> ModelDescription:
        """The description of a model all of whose layers attend as those with a window do, or as the others."""
        extensions, layers = self.extensions, dict(self.transformer)
        if has_window and extensions.local_query_groups is not None:
            layers["num_query_groups"] = extensions.local_query_groups
        if not has_window and extensions.local_sinks:
            layers.pop("softmax_type", None)
        extensions = replace(extensions, local_query_groups=None, local_sinks=False)
        return replace(self, transformer=layers, extensions=extensions)

    @property
    def window_layers(self) -> list[bool]:
        """Which layers have a window."""
        layers = self.transformer
        has_window = layers.get("window_size") is not None
        found = window_layers(layers["num_layers"], layers.get("window_attn_skip_freq"))
        return [has_window and one for one in found]

    @property
    def has_whole_experts(self) -> bool:
        """Whether no expert may be split over ranks: megatron-core does not split those with biases."""
        return "experts" in self.linear_biases

    @property
    def needs_paged_spec(self) -> str | None:
        """Why megatron-core's stock classes cannot build it; None: they can."""
        if self.hybrid is not None:
            return "a hybrid's stock classes need Transformer Engine and mamba-ssm; it is built of the paged spec"
        if self.transformer.get("multi_latent_attention"):
            return "megatron-core's local spec has no core attention for latents; it is built of the paged spec"
        if self.extensions != Extensions():
            return "megatron-core has no modules for its norms, scales, caps or ropes; it is built of the paged spec"
        if self.transformer.get("layernorm_zero_centered_gamma"):
            return "stock norms have no zero-centred weights without Transformer Engine; it is built of the paged spec"
        return None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"transformer": dict(self.transformer)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelDescription:
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(value) - known)
        if unknown:
            raise ModelError(f"model description: unknown fields {', '.join(unknown)} (written by a newer version?)")
        data = dict(value)
        for key in ("linear_biases", "eos_ids"):
            data[key] = tuple(data.get(key, ()))
        if data.get("rope_scaling") is not None:
            rope = dict(data["rope_scaling"])
            lists = {name: tuple(rope.get(name, ())) for name in ("factors", "long_factors")}
            data["rope_scaling"] = RopeScaling(**rope | lists)
        try:
            for key, kind in KINDS.items():
                if data.get(key) is not None:
                    data[key] = kind(**data[key])
            return cls(**data)
        except TypeError as error:
            raise ModelError(f"model description: {error}") from error


KINDS: Mapping[str, type] = {"hybrid": HybridDescription, "scales": WeightScales, "extensions": Extensions}
"""Fields of a ModelDescription that are groups of fields."""

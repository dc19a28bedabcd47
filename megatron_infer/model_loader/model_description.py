"""A plain description of a model: what to build and how to find its weights; JSON in and out, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megatron_infer.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched: kind "linear" (factor only), "llama3", or "factors" (one per frequency)."""

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridDescription:
    """What makes a decoder a hybrid one: what each layer is, and the Mamba mixers beyond TransformerConfig's fields."""

    pattern: str
    """One symbol a layer, as megatron-core spells them: M Mamba, * attention, - MLP, E mixture of experts."""
    norm_groups: int
    """Runs of channels that the mixer's gated norm takes apart."""
    norm_epsilon: float = 1e-5
    """Of the gated norm; that of all others is in the TransformerConfig."""
    conv_width: int = 4
    conv_bias: bool = True
    projection_bias: bool = False
    """Whether in_proj and out_proj have biases."""
    dt_min: float = 0.0
    dt_max: float | None = None
    """softplus(dt + bias) is clamped to this range; None: no upper end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScales:
    """Factors of the source's forward that are multiplied into its weights when they are loaded.

    Example: x + m * (W h + b) = x + ((m W) h + m b), so `residual` goes into the last linear of each block.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    head_from_embedding: bool = False
    """The source ties head and embedding; here each has its own factor, so they are two tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Everything that is needed to build a model and to find its weights; JSON in and out.

    Without `hybrid` it is a GPTModel, with it a MambaModel.
    """

    architecture: str
    """Class name in the Hugging Face config, e.g. LlamaForCausalLM: decides how tensors are named."""
    transformer: Mapping[str, Any]
    """TransformerConfig keyword arguments that describe the model; the activation by its Hugging Face name."""
    vocab_size: int
    """True vocabulary size; the model may be built with padding beyond it."""
    max_sequence_length: int
    position_embedding: str = "rope"
    """rope, learned_absolute or none."""
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    linear_biases: tuple[str, ...] = ()
    """Which of qkv, proj, fc1, fc2 have a bias in the source. megatron-core gives biases to all or to qkv alone; those
    that the source does not have are zeros, which changes nothing."""
    hybrid: HybridDescription | None = None
    scales: WeightScales | None = None
    """None: weights are loaded as they are."""
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    dtype: str = "float32"
    """What the weights are stored in."""
    name: str = field(default="", compare=False)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"transformer": dict(self.transformer)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelDescription:
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(value) - known)
        if unknown:
            raise ModelError(f"model plan: unknown fields {', '.join(unknown)} (written by a newer version?)")
        data = dict(value)
        for key in ("linear_biases", "eos_ids"):
            data[key] = tuple(data.get(key, ()))
        if data.get("rope_scaling") is not None:
            rope = dict(data["rope_scaling"])
            data["rope_scaling"] = RopeScaling(**rope | {"factors": tuple(rope.get("factors", ()))})
        try:
            for key, kind in (("hybrid", HybridDescription), ("scales", WeightScales)):
                if data.get(key) is not None:
                    data[key] = kind(**data[key])
            return cls(**data)
        except TypeError as error:
            raise ModelError(f"model plan: {error}") from error

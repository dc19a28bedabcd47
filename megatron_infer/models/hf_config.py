"""Hugging Face config.json -> a plain description of the model for megatron-core; no transformers, no torch.

A config key that changes the arithmetic either acts or is refused by name; a key that is not known here is named in one
warning. Source of the semantics: the models' own config and modelling files in `transformers`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
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
class ModelPlan:
    """Everything that is needed to build a GPTModel and to find its weights; JSON in and out."""

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
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    dtype: str = "float32"
    """What the weights are stored in."""
    name: str = field(default="", compare=False)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"transformer": dict(self.transformer)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelPlan:
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
            return cls(**data)
        except TypeError as error:
            raise ModelError(f"model plan: {error}") from error


# Keys that say nothing about the arithmetic of inference.
# fmt: off
_HARMLESS = frozenset({
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range",
    "attention_dropout", "_name_or_path", "auto_map", "pretraining_tp", "bos_token_id", "eos_token_id",
    "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id", "is_decoder",
    "cross_attention_hidden_size", "add_cross_attention", "tie_encoder_decoder", "task_specific_params",
    "problem_type", "id2label", "label2id", "num_labels", "return_dict", "output_hidden_states", "output_attentions",
    "chunk_size_feed_forward", "use_return_dict", "torchscript", "pruned_heads", "tokenizer_class",
    "finetuning_task", "use_bfloat16", "is_encoder_decoder", "transformers.js_config", "_attn_implementation",
    "attn_implementation", "use_mrope", "unsloth_version", "unsloth_fixed", "keys_to_ignore_at_inference",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "resid_dropout", "embd_dropout", "hidden_dropout", "n_ctx",
    "_attn_implementation_autoset", "gradient_checkpointing", "prefix", "temperature", "top_k", "top_p",
    "max_length", "min_length", "do_sample", "num_beams", "repetition_penalty", "length_penalty", "is_llama_config",
})
# fmt: on

# Keys of other models that change the arithmetic, with the value at which they do not. Any other value is refused.
_MUST_BE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "softmax_scale": (None,),
    "attn_scale": (None,),
    "scale_emb": (None, 1, 1.0),
    "scale_depth": (None,),
    "dim_model_base": (None,),
    "mup_scale": (None, 1, 1.0),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "position_embedding_type": (None, "absolute", "rope"),
    "parallel_attn": (None, False),
    "use_parallel_residual": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "q_lora_rank": (None,),
    "kv_lora_rank": (None,),
    "quantization_config": (None,),
    "compression_config": (None,),
    "rope_interleaved": (None, False),
    "attention_chunk_size": (None,),
    "floor_scale": (None,),
    "attn_temperature_tuning": (None, False, 0),
    "attention_sink": (None, False),
    "num_nextn_predict_layers": (None, 0),
    "mlp_only_layers": (None, []),
    "llama_4_scaling": (None,),
    "resid_mlp_multiplier": (None, 1, 1.0),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "scale_attn_weights": (None, True),
    "reorder_and_upcast_attn": (None, False),
    "head_dim_list": (None,),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
}


class _Keys:
    """A config.json that remembers which keys were read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.read = set(_HARMLESS)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self.config.get(key, default)

    def number(self, key: str, default: Any = None, *, kind: type = int) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"config.json: no {key!r}, which this architecture needs")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ModelError(f"config.json: {key!r} must be a positive number, got {value!r}")
        return kind(value)


def plan_from_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, *, name: str = ""
) -> ModelPlan:
    """The plan of a Hugging Face config.json. Raises ModelError for what is unknown or cannot be done exactly."""
    names = config.get("architectures") or []
    architecture = names[0] if names else _by_model_type(config)
    family = FAMILIES.get(architecture)
    if family is None:
        refused = _REFUSED.get(architecture)
        reason = f" ({refused})" if refused else ""
        raise ModelError(
            f"{name or 'model'}: architecture {architecture!r} is not supported{reason}; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    keys = _Keys(config)
    parts = family(keys)
    _check_rest(keys, architecture)
    generation = generation_config or {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    bos = config.get("bos_token_id")
    pad = config.get("pad_token_id")
    return ModelPlan(
        architecture=architecture,
        eos_ids=tuple(eos) if isinstance(eos, (list, tuple)) else (() if eos is None else (eos,)),
        bos_id=bos[0] if isinstance(bos, list) else bos,
        pad_id=pad,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        name=name,
        **parts,
    )


def _by_model_type(config: Mapping[str, Any]) -> str:
    kind = config.get("model_type")
    return _MODEL_TYPES.get(kind, str(kind)) if kind else "(none named in config.json)"


def _check_rest(keys: _Keys, architecture: str) -> None:
    refused = [
        f"{key}={keys.config[key]!r}"
        for key, neutral in _MUST_BE_NEUTRAL.items()
        if key in keys.config and key not in keys.read and keys.config[key] not in neutral
    ]
    if refused:
        raise ModelError(
            f"{architecture}: these options change the model's arithmetic and are not supported: {', '.join(refused)}"
        )
    unknown = sorted(set(keys.config) - keys.read - set(_MUST_BE_NEUTRAL))
    if unknown:
        warnings.warn(f"{architecture}: config.json keys not known here, ignored: {', '.join(unknown)}", stacklevel=3)


def _decoder(
    keys: _Keys,
    *,
    kv_heads_default: int | None = None,
    head_dim_default: int | None = None,
    eps_default: float = 1e-6,
    base_default: float = 10000.0,
    tied_default: bool = False,
    partial_rotary: bool = False,
) -> dict[str, Any]:
    """The part that all Llama-like decoders share."""
    heads = keys.number("num_attention_heads")
    hidden = keys.number("hidden_size")
    kv_heads = keys.number("num_key_value_heads", kv_heads_default or heads)
    head_dim = keys.get("head_dim") or head_dim_default or hidden // heads
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    activation = keys.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"config.json: hidden_act {activation!r} is not supported (supported: {', '.join(sorted(ACTIVATIONS))})"
        )
    transformer = {
        "num_layers": keys.number("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": kv_heads,
        "kv_channels": int(head_dim),
        "ffn_hidden_size": keys.number("intermediate_size"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": keys.number("rms_norm_eps", eps_default, kind=float),
        "gated_linear_unit": True,
        "activation": activation,
    }
    return {
        "transformer": transformer,
        "vocab_size": keys.number("vocab_size"),
        "max_sequence_length": keys.number("max_position_embeddings", 2048),
        "tied_embeddings": bool(keys.get("tie_word_embeddings", tied_default)),
        **_rope(keys, base_default, partial_rotary),
    }


def _rope(keys: _Keys, default_base: float, partial: bool) -> dict[str, Any]:
    """Rotary embedding, from rope_parameters (newer configs) or rope_theta and rope_scaling (older)."""
    old = keys.get("rope_scaling") or {}
    new = keys.get("rope_parameters") or {}
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        raise ModelError("config.json: rope_scaling / rope_parameters must be an object")
    parameters = {**old, **new}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ModelError("config.json: rope_parameters differ per layer type, which is not supported")
    base = parameters.pop("rope_theta", None) or keys.get("rope_theta", default_base)
    keys.read.add("rope_theta")
    percent = parameters.pop("partial_rotary_factor", None) or keys.get("partial_rotary_factor") or 1.0
    keys.read.add("partial_rotary_factor")
    if percent != 1.0 and not partial:
        raise ModelError(f"config.json: partial_rotary_factor={percent} is not supported for this architecture")
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if kind == "default":
        scaling, used = None, set()
    elif kind == "linear":
        scaling, used = RopeScaling(kind="linear", factor=float(_need(parameters, "factor"))), {"factor"}
    elif kind == "llama3":
        scaling = RopeScaling(
            kind="llama3",
            factor=float(_need(parameters, "factor")),
            low_freq_factor=float(_need(parameters, "low_freq_factor")),
            high_freq_factor=float(_need(parameters, "high_freq_factor")),
            original_max_position=int(_need(parameters, "original_max_position_embeddings")),
        )
        used = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    else:
        raise ModelError(f"config.json: rope type {kind!r} is not supported (supported: default, linear, llama3)")
    left = {key for key in parameters if key not in used and key != "original_max_position_embeddings"}
    if left:
        raise ModelError(f"config.json: rope parameters {', '.join(sorted(left))} are not known for rope type {kind!r}")
    return {"rotary_base": float(base), "rotary_percent": float(percent), "rope_scaling": scaling}


def _need(parameters: Mapping[str, Any], key: str) -> Any:
    if key not in parameters:
        raise ModelError(f"config.json: rope_scaling has no {key!r}, which its type needs")
    return parameters[key]


def _windows(keys: _Keys, parts: dict[str, Any], *, window: int | None, layers: list[bool] | None) -> None:
    """Sliding windows of W keys, the query's own included; megatron-core counts those left of it.

    layers: which layers slide (None: all).
    """
    types = keys.get("layer_types")
    if types is not None:
        known = {"full_attention": False, "sliding_attention": True}
        unknown = sorted({str(kind) for kind in types if kind not in known})
        if unknown:
            raise ModelError(f"config.json: layer types {', '.join(unknown)} are not supported")
        if len(types) != parts["transformer"]["num_layers"]:
            raise ModelError(f"config.json: {len(types)} layer_types for {parts['transformer']['num_layers']} layers")
        layers = [known[kind] for kind in types]
    if window is None and types is not None and any(layers or ()):
        raise ModelError("config.json: layer_types has sliding_attention but there is no sliding_window")
    if window is None or (layers is not None and not any(layers)):
        return
    parts["transformer"]["window_size"] = [window - 1, 0]
    if layers is not None and not all(layers):
        parts["transformer"]["window_attn_skip_freq"] = [int(slides) for slides in layers]


def _biases(parts: dict[str, Any], *kinds: str) -> dict[str, Any]:
    """Record which linears have biases, and ask megatron-core for the least that covers them."""
    parts["linear_biases"] = kinds
    parts["transformer"]["add_bias_linear"] = bool(set(kinds) - {"qkv"})
    parts["transformer"]["add_qkv_bias"] = "qkv" in kinds
    return parts


def _llama(keys: _Keys) -> dict[str, Any]:
    parts = _decoder(keys)
    attention = ("qkv", "proj") if keys.get("attention_bias", False) else ()
    mlp = ("fc1", "fc2") if keys.get("mlp_bias", False) else ()
    _windows(keys, parts, window=keys.get("sliding_window"), layers=None)
    return _biases(parts, *attention, *mlp)


def _mistral(keys: _Keys) -> dict[str, Any]:
    parts = _decoder(keys, kv_heads_default=8)
    _windows(keys, parts, window=keys.get("sliding_window", 4096), layers=None)
    return _biases(parts)


def _qwen2(keys: _Keys) -> dict[str, Any]:
    parts = _decoder(keys, kv_heads_default=32)
    _qwen_windows(keys, parts)
    return _biases(parts, "qkv")


def _qwen3(keys: _Keys) -> dict[str, Any]:
    parts = _decoder(keys, kv_heads_default=32, head_dim_default=128)
    parts["transformer"]["qk_layernorm"] = True
    _qwen_windows(keys, parts)
    return _biases(parts, *(("qkv", "proj") if keys.get("attention_bias", False) else ()))


def _qwen_windows(keys: _Keys, parts: dict[str, Any]) -> None:
    window = keys.get("sliding_window", 4096)
    first = keys.get("max_window_layers", 28)
    if not keys.get("use_sliding_window", False):
        window = None
    layers = [layer >= first for layer in range(parts["transformer"]["num_layers"])]
    _windows(keys, parts, window=window, layers=layers)


def _smollm3(keys: _Keys) -> dict[str, Any]:
    parts = _decoder(keys, kv_heads_default=4, base_default=2e6, tied_default=True)
    num_layers = parts["transformer"]["num_layers"]
    interval = keys.get("no_rope_layer_interval", 4)
    rotates = keys.get("no_rope_layers")
    if rotates is None:
        rotates = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if len(rotates) < num_layers:
        raise ModelError(f"config.json: no_rope_layers has {len(rotates)} entries for {num_layers} layers")
    # A 1 in the config means "rotates"; in megatron-core it means "does not".
    parts["transformer"]["no_rope_freq"] = [int(not rotate) for rotate in rotates[:num_layers]]
    window = keys.get("sliding_window")
    if not keys.get("use_sliding_window", False):
        window = None
    _windows(keys, parts, window=window, layers=[not rotate for rotate in rotates[:num_layers]])
    attention = ("qkv", "proj") if keys.get("attention_bias", False) else ()
    mlp = ("fc1", "fc2") if keys.get("mlp_bias", False) else ()
    return _biases(parts, *attention, *mlp)


def _phi3(keys: _Keys) -> dict[str, Any]:
    keys.read.add("original_max_position_embeddings")  # only the longrope type uses it, and that type is refused
    parts = _decoder(keys, eps_default=1e-5, partial_rotary=True)
    _windows(keys, parts, window=keys.get("sliding_window"), layers=None)
    return _biases(parts)


def _gpt2(keys: _Keys) -> dict[str, Any]:
    heads, hidden = keys.number("n_head"), keys.number("n_embd")
    activation = keys.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"config.json: activation_function {activation!r} is not supported "
            f"(supported: {', '.join(sorted(ACTIVATIONS))})"
        )
    transformer = {
        "num_layers": keys.number("n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "ffn_hidden_size": keys.get("n_inner") or 4 * hidden,
        "normalization": "LayerNorm",
        "layernorm_epsilon": keys.number("layer_norm_epsilon", 1e-5, kind=float),
        "gated_linear_unit": False,
        "activation": activation,
    }
    parts = {
        "transformer": transformer,
        "vocab_size": keys.number("vocab_size"),
        "max_sequence_length": keys.number("n_positions", 1024),
        "position_embedding": "learned_absolute",
        "tied_embeddings": bool(keys.get("tie_word_embeddings", True)),
    }
    return _biases(parts, "qkv", "proj", "fc1", "fc2")


ACTIVATIONS = frozenset({"silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"})

FAMILIES: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
    "Phi3ForCausalLM": _phi3,
    "GPT2LMHeadModel": _gpt2,
}

_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

_REFUSED = {
    "GemmaForCausalLM": "it scales embeddings by sqrt(hidden), which GPTModel does not",
    "Gemma2ForCausalLM": "it scales embeddings, caps logits and norms after each block, which GPTModel does not",
    "Gemma3ForCausalLM": "it scales embeddings and norms after each block, which GPTModel does not",
    "Olmo2ForCausalLM": "it norms after attention and MLP, which GPTModel does not",
    "GraniteForCausalLM": "it scales embeddings, residuals and logits, which GPTModel does not",
    "MixtralForCausalLM": "mixture-of-experts weights are not mapped yet",
    "Qwen3MoeForCausalLM": "mixture-of-experts weights are not mapped yet",
}

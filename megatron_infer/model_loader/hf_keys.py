"""What the families of Hugging Face configs share: keys that are harmless or refused, and the parts of a decoder.

A config key that changes the arithmetic has its effect or is refused by name; unknown keys are named in one warning.
Source of the semantics: the models' own config and modelling files in `transformers`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from megatron_infer.errors import ModelError
from megatron_infer.model_loader.model_description import RopeScaling

ACTIVATIONS = frozenset({"silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"})

# Keys without effect on the arithmetic of inference.
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

# Keys of other models that change the arithmetic -> values at which they do not. Other values are refused.
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


class Keys:
    """A config.json that remembers which keys were read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.read = set(_HARMLESS)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self.config.get(key, default)

    def require(self, key: str, *allowed: Any, why: str) -> None:
        """Raise ModelError unless `key` is absent or one of `allowed`."""
        value = self.get(key)
        if key in self.config and value not in allowed:
            raise ModelError(f"config.json: {key}={value!r} is not supported: {why}")

    def rename(self, names: Mapping[str, str]) -> None:
        """Read older names of keys as the new ones; where a config has both, the older wins as in transformers."""
        self.config = {**self.config, **{new: self.config[old] for old, new in names.items() if old in self.config}}
        self.read.update(names)

    def number(self, key: str, default: Any = None, *, kind: type = int, null: Any = None) -> Any:
        """A positive number. default: the value without the key; null: the value for a null."""
        value = self.get(key, default)
        value = null if value is None else value
        if value is None:
            raise ModelError(f"config.json: no {key!r}, which this architecture needs")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ModelError(f"config.json: {key!r} must be a positive number, got {value!r}")
        return kind(value)


def check_rest(keys: Keys, architecture: str) -> None:
    """Raise ModelError for keys that change the arithmetic and were not read; warn of unknown ones."""
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


def decoder(
    keys: Keys,
    *,
    kv_heads_default: int | None = None,
    head_dim_default: int | None = None,
    eps_default: float = 1e-6,
    base_default: float = 10000.0,
    tied_default: bool = False,
    partial_rotary: bool = False,
    rotary_percent_default: float = 1.0,
) -> dict[str, Any]:
    """The part that Llama-like decoders have in common."""
    heads = keys.number("num_attention_heads")
    hidden = keys.number("hidden_size")
    kv_heads = keys.number("num_key_value_heads", kv_heads_default or heads, null=heads)
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
        **rope(keys, base_default, partial_rotary, rotary_percent_default),
    }


def rope(keys: Keys, default_base: float, partial: bool, default_percent: float = 1.0) -> dict[str, Any]:
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
    percent = parameters.pop("partial_rotary_factor", None) or keys.get("partial_rotary_factor") or default_percent
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


def windows(keys: Keys, parts: dict[str, Any], *, window: int | None, layers: list[bool] | None) -> None:
    """Sliding windows of W keys, the query's own included; megatron-core counts the keys before it.

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


def biases(parts: dict[str, Any], *kinds: str) -> dict[str, Any]:
    """Note which linears have biases, and ask megatron-core for the fewest that cover them."""
    parts["linear_biases"] = kinds
    parts["transformer"]["add_bias_linear"] = bool(set(kinds) - {"qkv"})
    parts["transformer"]["add_qkv_bias"] = "qkv" in kinds
    return parts

"""Hugging Face config.json -> the model's description for megatron-core; no transformers, no torch.

A config key that changes the arithmetic has its effect or is refused by name; unknown keys are named in one warning.
Source of the semantics: the models' own config and modelling files in `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_infer.errors import ModelError
from megatron_infer.model_loader import hf_hybrid
from megatron_infer.model_loader.hf_keys import ACTIVATIONS, Keys, biases, check_rest, decoder, windows
from megatron_infer.model_loader.model_description import ModelDescription
from megatron_infer.text.end_ids import end_ids_of


def description_from_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, *, name: str = ""
) -> ModelDescription:
    """The description in a Hugging Face config.json. Raises ModelError for what is unknown or cannot be exact."""
    architecture = architecture_of(config)
    family = FAMILIES.get(architecture)
    if family is None:
        refused = _REFUSED.get(architecture)
        reason = f" ({refused})" if refused else ""
        raise ModelError(
            f"{name or 'model'}: architecture {architecture!r} is not supported{reason}; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    keys = Keys(config)
    parts = family(keys)
    check_rest(keys, architecture)
    bos = config.get("bos_token_id")
    pad = config.get("pad_token_id")
    return ModelDescription(
        architecture=architecture,
        eos_ids=end_ids_of(generation_config or {}, config),
        bos_id=bos[0] if isinstance(bos, list) else bos,
        pad_id=pad,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        name=name,
        **parts,
    )


def architecture_of(config: Mapping[str, Any]) -> str:
    """The name of the architecture, else that of the model's type."""
    names = config.get("architectures") or []
    return str(names[0]) if names else _by_model_type(config)


def _by_model_type(config: Mapping[str, Any]) -> str:
    kind = config.get("model_type")
    return _MODEL_TYPES.get(kind, str(kind)) if kind else "(none named in config.json)"


def _llama(keys: Keys) -> dict[str, Any]:
    parts = decoder(keys)
    attention = ("qkv", "proj") if keys.get("attention_bias", False) else ()
    mlp = ("fc1", "fc2") if keys.get("mlp_bias", False) else ()
    windows(keys, parts, window=keys.get("sliding_window"), layers=None)
    return biases(parts, *attention, *mlp)


def _mistral(keys: Keys) -> dict[str, Any]:
    parts = decoder(keys, kv_heads_default=8)
    windows(keys, parts, window=keys.get("sliding_window", 4096), layers=None)
    return biases(parts)


def _qwen2(keys: Keys) -> dict[str, Any]:
    parts = decoder(keys, kv_heads_default=32)
    _qwen_windows(keys, parts)
    return biases(parts, "qkv")


def _qwen3(keys: Keys) -> dict[str, Any]:
    parts = decoder(keys, kv_heads_default=32, head_dim_default=128)
    parts["transformer"]["qk_layernorm"] = True
    _qwen_windows(keys, parts)
    return biases(parts, *(("qkv", "proj") if keys.get("attention_bias", False) else ()))


def _qwen_windows(keys: Keys, parts: dict[str, Any]) -> None:
    window = keys.get("sliding_window", 4096)
    first = keys.get("max_window_layers", 28)
    if not keys.get("use_sliding_window", False):
        window = None
    layers = [layer >= first for layer in range(parts["transformer"]["num_layers"])]
    windows(keys, parts, window=window, layers=layers)


def _smollm3(keys: Keys) -> dict[str, Any]:
    parts = decoder(keys, kv_heads_default=4, base_default=2e6, tied_default=True)
    num_layers = parts["transformer"]["num_layers"]
    interval = keys.get("no_rope_layer_interval", 4)
    rotates = keys.get("no_rope_layers")
    if rotates is None:
        rotates = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if len(rotates) < num_layers:
        raise ModelError(f"config.json: no_rope_layers has {len(rotates)} entries for {num_layers} layers")
    # 1 means "rotates" in the config and "does not rotate" in megatron-core.
    parts["transformer"]["no_rope_freq"] = [int(not rotate) for rotate in rotates[:num_layers]]
    window = keys.get("sliding_window")
    if not keys.get("use_sliding_window", False):
        window = None
    windows(keys, parts, window=window, layers=[not rotate for rotate in rotates[:num_layers]])
    attention = ("qkv", "proj") if keys.get("attention_bias", False) else ()
    mlp = ("fc1", "fc2") if keys.get("mlp_bias", False) else ()
    return biases(parts, *attention, *mlp)


def _phi3(keys: Keys) -> dict[str, Any]:
    keys.read.add("original_max_position_embeddings")  # used by the longrope type only, which is refused
    parts = decoder(keys, eps_default=1e-5, partial_rotary=True)
    windows(keys, parts, window=keys.get("sliding_window"), layers=None)
    return biases(parts)


def _gpt2(keys: Keys) -> dict[str, Any]:
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
    return biases(parts, "qkv", "proj", "fc1", "fc2")


FAMILIES: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
    "Phi3ForCausalLM": _phi3,
    "GPT2LMHeadModel": _gpt2,
    **hf_hybrid.FAMILIES,
}

_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    **hf_hybrid.MODEL_TYPES,
}

_REFUSED = {
    "GemmaForCausalLM": "it scales embeddings by sqrt(hidden), which GPTModel does not",
    "Gemma2ForCausalLM": "it scales embeddings, caps logits and norms after each block, which GPTModel does not",
    "Gemma3ForCausalLM": "it scales embeddings and norms after each block, which GPTModel does not",
    "Olmo2ForCausalLM": "it norms after attention and MLP, which GPTModel does not",
    "GraniteForCausalLM": "it scales embeddings, residuals and logits, which GPTModel does not",
    "MixtralForCausalLM": "mixture-of-experts weights are not mapped yet",
    "Qwen3MoeForCausalLM": "mixture-of-experts weights are not mapped yet",
    **hf_hybrid.REFUSED,
}

"""A config.json that remembers what was read of it, and the keys that are harmless or refused for every family.

A config key that changes the arithmetic has its effect or is refused by name; unknown keys are named in one warning.
Source of the semantics: the models' own config and modelling files in `transformers`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from megatron_infer.errors import ModelError

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

# Keys of other models that change the arithmetic -> values at which they do not. Other values are refused.
_MUST_BE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "attention_multiplier", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
        "softmax_scale", "attn_scale", "scale_depth", "dim_model_base", "clip_qkv", "q_lora_rank", "kv_lora_rank",
        "quantization_config", "compression_config", "attention_chunk_size", "floor_scale", "llama_4_scaling",
        "head_dim_list",
    ), (None,)),
    **dict.fromkeys((
        "residual_multiplier", "embedding_multiplier", "logits_scaling", "logit_scale", "scale_emb", "mup_scale",
        "resid_mlp_multiplier",
    ), (None, 1, 1.0)),
    **dict.fromkeys((
        "alibi", "parallel_attn", "use_parallel_residual", "rope_interleaved", "attention_sink", "use_qk_norm",
        "qk_layernorm", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "use_bidirectional_attention",
    ), (None, False)),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_nextn_predict_layers"), (None, 0)),
    **dict.fromkeys(("scale_attn_weights", "is_causal"), (None, True)),
    "position_embedding_type": (None, "absolute", "rope"),
    "num_local_experts": (None, 0, 1),
    "attn_temperature_tuning": (None, False, 0),
    "mlp_only_layers": (None, []),
}
# fmt: on


class Keys:
    """A config.json that remembers which keys were read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.read = set(_HARMLESS)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self.config.get(key, default)

    def require(self, key: str, *allowed: Any, why: str, case: str = "") -> None:
        """Raise ModelError unless `key` is absent or one of `allowed`. case: where the rule holds, for the error."""
        value = self.get(key)
        if key in self.config and value not in allowed:
            raise ModelError(f"config.json: {key}={value!r}{case} is not supported: {why}")

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
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ModelError(f"config.json: {key!r} must be a positive number, got {value!r}")
        if kind is int and (value != int(value) or value >= 2**31):
            raise ModelError(f"config.json: {key!r} must be a whole number below 2**31, got {value!r}")
        return kind(value)


def check_mxfp4(keys: Keys) -> None:
    """Raise ModelError for weights that are quantised in another way than MXFP4."""
    how = keys.get("quantization_config")
    method = how.get("quant_method") if isinstance(how, Mapping) else how
    if how is not None and method != "mxfp4":
        raise ModelError(f"config.json: quantization_config with quant_method={method!r} is not supported (mxfp4 is)")


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

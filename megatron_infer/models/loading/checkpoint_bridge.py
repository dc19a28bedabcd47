"""run_config.yaml, which Megatron-Bridge writes next to a checkpoint's tensors, as the arguments of a Megatron-LM run.

The file names classes and functions for Bridge to import. Here they are names: nothing is imported or called.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_infer.errors import ModelError
from megatron_infer.utils.files import regular

RUN_CONFIG = "run_config.yaml"
MAX_BYTES = 4 << 20
_PROVIDERS = ("GPTModelProvider", "MLAModelProvider", "MistralModelProvider")
"""Bridge's classes that build a GPTModel of what the fields say. Others have layers or embeddings of their own."""
_REFUSED = (
    *("experimental_attention_variant", "linear_attention_freq", "attn_logit_softcapping", "heterogeneous_block_specs"),
    *("activation_func_clamp_value", "glu_linear_offset", "layernorm_zero_centered_gamma"),
)
_POSITIONS = ("rope", "learned_absolute", "none")


def arguments_of_run(path: Path, *, remedy: str) -> dict[str, Any]:
    """The arguments that a Megatron-LM run of the same model has. Raises ModelError, which ends with `remedy`."""
    model = _model_of(path)
    provider = _name(model)
    if provider not in _PROVIDERS:
        raise ModelError(f"{path}: its model is a {provider}, which may compute more than its fields say; {remedy}")
    refused = [f"{field}={model[field]!r}" for field in _REFUSED if model.get(field)]
    positions, softmax = model.get("position_embedding_type"), _name(model.get("softmax_type"))
    if positions not in _POSITIONS:
        refused.append(f"position_embedding_type={positions!r}")
    if softmax not in ("", "vanilla"):
        refused.append(f"softmax_type={softmax!r}")
    activation, is_gated = _name(model.get("activation_func")), bool(model.get("gated_linear_unit"))
    if (activation, is_gated) not in (("silu", True), ("gelu", False), ("squared_relu", False)):
        refused.append(f"activation_func={activation!r} with gated_linear_unit={is_gated}")
    if refused:
        raise ModelError(f"{path}: {', '.join(refused)}, which is not expressed by this file's reader; {remedy}")
    return model | {
        "max_position_embeddings": model.get("seq_length"),
        "num_experts": model.get("num_moe_experts"),
        "padded_vocab_size": model.get("vocab_size"),
        "group_query_attention": model.get("num_query_groups") is not None,
        "swiglu": is_gated,
        "squared_relu": activation == "squared_relu",
        "norm_epsilon": model.get("layernorm_epsilon"),
        "untie_embeddings_and_output_weights": not model.get("share_embeddings_and_output_weights", True),
        "use_rope_scaling": bool(model.get("rope_scaling")),
        "rotary_seq_len_interpolation_factor": model.get("seq_len_interpolation_factor"),
    }


def _model_of(path: Path) -> dict[str, Any]:
    """The fields of its model."""
    try:
        if regular(path).stat().st_size > MAX_BYTES:
            raise ModelError(f"{path}: more than {MAX_BYTES:,} bytes, which is no run's configuration")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: no YAML of plain values: {str(error)[:300]}") from None
    model = content.get("model") if isinstance(content, Mapping) else None
    if not isinstance(model, Mapping):
        raise ModelError(f"{path}: it describes no model")
    return {str(name): value for name, value in model.items()}


def _name(value: Any) -> str:
    """The last part of the name of a class, a function or an enum's member; of text itself."""
    if isinstance(value, Mapping):
        value = value.get("_name_") or value.get("_target_")
    return str(value or "").rpartition(".")[2]

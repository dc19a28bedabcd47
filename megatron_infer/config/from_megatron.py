"""Options and sampling parameters of megatron-core 0.16 to 0.20 in the terms of this package.

Called by `InferenceConfig.from_megatron` and `SamplingParams.from_megatron`. Reads attributes only: importing this
module needs neither megatron-core nor torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.errors import ConfigError, RequestError

CONVERTED = {"offload_kv_cache": "0.16", "num_speculative_tokens": "0.17", "async_sched_mode": "0.19"}
"""Field of Megatron with another name here -> the first version of megatron-core that has it. 0.16 has keywords, and no
such class. Fields with the same name here: `Option.since`."""
KEYWORDS_OF_0_16 = {
    "inference_logging_step_interval": "logging_step_interval",
    "random_seed": "seed",
    "persist_cuda_graphs": "static_kv_memory_pointers",
}
"""Keyword of 0.16's DynamicInferenceContext or DynamicInferenceEngine -> our field, where the names differ."""
MODEL_KEYWORDS_OF_0_16 = (
    "params_dtype",
    "num_layers",
    "kv_channels",
    "num_attention_heads",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "cache_mla_latent",
    "kv_lora_rank",
    "qk_pos_emb_head_dim",
    "enable_cuda_graph",
)
"""Keywords of 0.16 without a field here: the engine reads them off the model; enable_cuda_graph is not read there."""
UNSUPPORTED: dict[str, tuple[str, object, str]] = {
    "use_synchronous_zmq_collectives": (
        "0.17",
        False,
        "the ranks of an engine agree over process groups, not over ZMQ",
    ),
    "disable_ep_consensus": ("0.18", False, "the ranks of an engine plan each step together, none can leave that out"),
    "ep_consensus_interval": ("0.18", 20, "the ranks of an engine plan each step together, whatever the interval"),
    "image_preprocessing_config": ("0.20", None, "models here read text alone"),
    "verbose": ("0.18", False, "print(engine.sizes.table()) shows the sizes and how each was derived"),
}
"""Field of Megatron that has none here -> (since, its default, why no other value is taken)."""
_LOGPROBS_MODES = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "return_log_probs",
    "skip_prompt_log_probs",
    "num_tokens_to_generate",
    "num_tokens_total",
    "termination_id",
    "top_n_logprobs",
    "return_prompt_top_n_logprobs",
    "stop_words",
    "detokenize_stop_sequence",
    "return_prompt_tokens",
    "detokenize_generations",
    "seed",
)
UNSUPPORTED_SAMPLING: dict[str, tuple[object, str]] = {
    "return_segments": (False, "ask for log probabilities, each of which has the text of its token"),
    "add_BOS": (False, "begin the prompt's ids with the token, or let the tokenizer add it"),
    "streaming": (False, "ask for a stream where the request is added: add_request(..., stream='delta')"),
    "streaming_interval": (1, "a stream has an output for each step of its request"),
    "do_kv_handoff": (
        False,
        "keys and values are handed to no peer; engine.save_requests(kv=True) writes them to files",
    ),
}
"""Field of Megatron's SamplingParams that has none here -> (its default, why no other value is taken)."""
NOT_KNOWN = "it is not known here"
NO_TERMINATION = -1
"""The termination_id that no token has: the request runs to its limit."""


def config_values(config: object, same: Collection[str]) -> dict[str, Any]:
    """Fields of our InferenceConfig from Megatron's, or from a mapping of its keywords or of those of 0.16.

    same: the fields of ours that Megatron has, too.
    """
    given, defaults = _given("InferenceConfig", config, ConfigError)
    if is_dataclass(config) and not isinstance(config, type):
        verbose = given.get("_verbose", False)  # an InitVar there, which is no field
        given = {item.name: given[item.name] for item in fields(config)} | {"verbose": verbose}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in MODEL_KEYWORDS_OF_0_16:
            continue
        if name not in same and name not in KEYWORDS_OF_0_16 and name not in CONVERTED:
            _, default, why = UNSUPPORTED.get(name, ("", defaults.get(name, ...), NOT_KNOWN))
            _require_default("InferenceConfig", name, value, default, why, ConfigError)
        elif name == "offload_kv_cache":  # 0.16
            kept = "persist" if given.get("unified_memory_level") else "recompute"
            values["kv_cache_management_mode"] = "offload" if value else kept
        elif name == "num_speculative_tokens":  # MTP layers draft them
            values["speculative"] = {"method": "mtp", name: value} if value else None
        elif name == "async_sched_mode":
            values["overlap"] = True if _plain(value) == "async" else None  # "legacy" is the default there
        elif name == "request_metadata_types":  # pairs since 0.19, which keeps all of them for the device
            values[name] = value and [tuple(one) if len(one) != 2 else (*one, True) for one in value]
        elif name == "logprobs_mode":
            values[name] = _LOGPROBS_MODES.get(value, value)
        elif name == "sampling_backend":
            values[name] = "auto" if value in ("torch", "flashinfer") else value  # all draw the same tokens here
        elif name == "mamba_inference_state_config":
            values[name] = None if value is None else _state_config(value)
        elif name == "use_cuda_graphs_for_non_decode_steps" and value == defaults.get(name):
            continue  # True there, and off here until it has been measured
        elif name != "cuda_graph_max_tokens" or value is not None:  # None in 0.16: not given
            values[KEYWORDS_OF_0_16.get(name, name)] = _plain(value)
    return values


def sampling_values(params: object, num_prompt_tokens: int | None) -> dict[str, Any]:
    """Fields of our SamplingParams from Megatron's, or from a mapping of its fields."""
    given, defaults = _given("SamplingParams", params, RequestError)
    for name, value in given.items():
        if name not in _SAMPLING_FIELDS:
            default, why = UNSUPPORTED_SAMPLING.get(name, (defaults.get(name, ...), NOT_KNOWN))
            _require_default("SamplingParams", name, value, default, why, RequestError)
    values: dict[str, Any] = {"max_tokens": _max_tokens(given, num_prompt_tokens)}
    values |= {name: given[name] for name in ("temperature", "top_k", "seed") if name in given}
    values["detokenize"] = given.get("detokenize_generations", True) or bool(given.get("stop_words"))
    if given.get("top_k") == 1:  # the most likely token, whatever the temperature
        values |= {"temperature": 0.0, "top_k": 0}
    values["top_p"] = given.get("top_p") or 1.0
    if given.get("top_n_logprobs") and not given.get("return_log_probs"):
        why = "it needs return_log_probs=True, in Megatron too"
        _require_default("SamplingParams", "top_n_logprobs", given["top_n_logprobs"], ..., why, RequestError)
    if given.get("return_log_probs"):
        values["logprobs"] = given.get("top_n_logprobs", 0)
        values["prompt_logprobs"] = None if given.get("skip_prompt_log_probs") else values["logprobs"]
    stop_id = given.get("termination_id")
    if stop_id is not None:  # instead of the model's own
        values |= {"ignore_eos": True, "stop_token_ids": () if stop_id == NO_TERMINATION else (stop_id,)}
    values["stop"] = given.get("stop_words") or None
    values["include_stop_str_in_output"] = given.get("detokenize_stop_sequence", False)
    return values


def _given(name: str, source: Any, error: type[Exception]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(values, defaults) of megatron-core's dataclass `name`, with attributes that were added, or of a mapping."""
    if isinstance(source, Mapping):
        return dict(source), {}
    if not is_dataclass(source) or isinstance(source, type) or _is_ours(source):
        raise error(f"from_megatron takes megatron-core's {name} or a mapping of its fields, got {_kind(source)}")
    defaults = {item.name: item.default_factory() for item in fields(source) if item.default_factory is not MISSING}
    defaults |= {item.name: item.default for item in fields(source) if item.default is not MISSING}
    added = getattr(source, "__dict__", {})  # a dataclass may have slots
    return {item.name: getattr(source, item.name) for item in fields(source)} | added, defaults


def _require_default(owner: str, name: str, value: object, default: object, why: str, error: type[Exception]) -> None:
    """Raise `error` for a field without a counterpart, unless it has its default (...: it has none)."""
    if value != default:
        shown = "" if default is ... else f"; leave it {default!r}"
        raise error(f"{name}={value!r} of megatron-core's {owner} cannot be kept: {why}{shown}")


def _max_tokens(given: Mapping[str, Any], num_prompt_tokens: int | None) -> int | None:
    total, num_tokens = given.get("num_tokens_total"), given.get("num_tokens_to_generate")
    if total is None:
        return num_tokens
    if num_tokens is not None:
        why = "num_tokens_to_generate is set as well, and Megatron takes one of them"
    elif num_prompt_tokens is None:
        why = "it counts the prompt: give num_prompt_tokens, the prompt's length"
    else:
        return int(total - num_prompt_tokens)
    raise RequestError(f"num_tokens_total={total!r} of megatron-core's SamplingParams cannot be kept: {why}")


def _state_config(config: object) -> MambaInferenceStateConfig:
    """Ours from Megatron's, which has torch dtypes and in 0.16 other names. The chunk size is read off the model."""

    def found(*names: str) -> Any:
        return next((getattr(config, name) for name in names if hasattr(config, name)), None)

    def dtype(name: str) -> str | None:
        return None if found(name) is None else str(found(name)).removeprefix("torch.")

    return MambaInferenceStateConfig(
        layer_type_list=list(found("layer_type_list")),
        mamba_conv_states_shape=tuple(found("conv_states_shape", "mamba_conv_states_shape")),
        mamba_ssm_states_shape=tuple(found("ssm_states_shape", "mamba_ssm_states_shape")),
        conv_states_dtype=dtype("conv_states_dtype"),
        ssm_states_dtype=dtype("ssm_states_dtype"),
    )


def _plain(value: object) -> object:
    """Megatron's enums have the values of ours."""
    return value.value if isinstance(value, Enum) else value


def _is_ours(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == __name__.partition(".")[0]


def _kind(value: object) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}" + (" itself" if isinstance(value, type) else "")

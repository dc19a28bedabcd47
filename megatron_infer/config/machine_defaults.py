"""Options for a caller that gives no config, or only some options: defaults that suit the machine and the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_infer.config.capacity import GIB, REQUEST_ROUNDER, cap_to_memory
from megatron_infer.config.inference import InferenceConfig, PrefixCachingEvictionPolicy
from megatron_infer.config.model_shape import DTYPE_BYTES, ModelShape, StateShape
from megatron_infer.config.sizing import DEFAULT_MAX_TOKENS

CPU_BUFFER_GIB, CPU_BUFFER_SHARE = 4.0, 0.25
"""KV buffer on a CPU by default: the smaller of this size and this share of the free memory."""
CPU_STEP_TOKENS = 512
"""Tokens of one step on a CPU by default: longer prompts are chunked, so that other requests wait a quarter of a second
for a token."""
SPREADING_ALPHA = 0.5
"""Weight of cached prefixes against free rows where no policy of routing is asked for."""
MAX_DEFAULT_CACHED_STATES = 64
"""The most recurrent states that the prefix cache keeps by default; they take at most an eighth of the buffer."""


def machine_defaults(*, is_cuda: bool, available_bytes: int) -> dict[str, Any]:
    """Fields in which an LLM or a command without a config departs from the defaults of `InferenceConfig`.

    The prefix cache is on, prompts are chunked, and a coordinator weighs free rows against prefixes; on a CPU the
    buffer is small enough for a laptop.
    """
    common: dict[str, Any] = {
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU,
        "prefix_caching_routing_alpha": SPREADING_ALPHA,
    }
    if is_cuda:
        return common
    return common | {
        "buffer_size_gb": round(min(CPU_BUFFER_GIB, CPU_BUFFER_SHARE * available_bytes / GIB), 2),
        "block_size_tokens": 64,
        "max_requests": 256,
        "max_tokens": CPU_STEP_TOKENS,
    }


def machine_config(
    asked: Mapping[str, Any],
    shape: ModelShape | None = None,
    *,
    is_cuda: bool,
    available_bytes: int,
    tensor_parallel_size: int = 1,
) -> InferenceConfig:
    """The options asked for, over `machine_defaults` and over defaults that suit the model where its shape is known.

    A default that contradicts an option asked for is dropped, or rounded where the ranks need a multiple.
    """
    base = machine_defaults(is_cuda=is_cuda, available_bytes=available_bytes)
    if "prefix_caching_coordinator_policy" in asked:
        del base["prefix_caching_routing_alpha"]  # the policy acts as its name says
    if asked.get("enable_prefix_caching") is False:
        base.pop("prefix_caching_eviction_policy")
    if asked.get("enable_chunked_prefill") is False:
        base.pop("max_tokens", None)  # else prompts beyond a small step would be refused
    requests, tokens = asked.get("max_requests"), asked.get("max_tokens")
    if isinstance(tokens, int) and "max_requests" in base:
        base["max_requests"] = min(base["max_requests"], tokens)
    if isinstance(requests, int) and "max_tokens" in base:
        base["max_tokens"] = max(base["max_tokens"], requests)
    if shape is not None and shape.state is not None:
        state = _state_asked_for(asked.get("mamba_inference_state_config"), shape.state)
        _set_state_defaults(base, asked, shape, state, available_bytes)
    if "max_requests" in base:
        base["max_requests"] -= base["max_requests"] % tensor_parallel_size
        if not base["max_requests"]:
            del base["max_requests"]  # `resolve` says what is too small
    return InferenceConfig.from_dict(base | dict(asked))


def _state_asked_for(config: object, state: StateShape) -> StateShape:
    """The state with the dtypes of a state config, as far as they are valid: `InferenceConfig` refuses others later."""

    def asked(field: str, default: str) -> str:
        dtype = config.get(field) if isinstance(config, Mapping) else getattr(config, field, None)
        return dtype if isinstance(dtype, str) and dtype in DTYPE_BYTES else default

    conv, ssm = asked("conv_states_dtype", state.conv_dtype), asked("ssm_states_dtype", state.ssm_dtype)
    return replace(state, conv_dtype=conv, ssm_dtype=ssm)


def _set_state_defaults(
    base: dict[str, Any], asked: Mapping[str, Any], shape: ModelShape, state: StateShape, available_bytes: int
) -> None:
    """Defaults for a model with recurrent state: requests whose states fit, and some states for the prefix cache.

    States take at most half of the buffer, or all of it where no layer keeps keys and values.
    """
    buffer_gb = asked.get("buffer_size_gb", base.get("buffer_size_gb", InferenceConfig.buffer_size_gb))
    max_tokens = asked.get("max_tokens") or DEFAULT_MAX_TOKENS
    if not isinstance(buffer_gb, (int, float)) or not 0 < buffer_gb < math.inf or not isinstance(max_tokens, int):
        return  # InferenceConfig refuses it and says why
    num_states = int(buffer_gb * GIB) // state.slot_bytes
    if asked.get("enable_prefix_caching", True) and "prefix_caching_mamba_gb" not in asked:
        count = max(1, min(MAX_DEFAULT_CACHED_STATES, num_states // 8))
        base["prefix_caching_mamba_gb"] = count * state.slot_bytes / GIB
    if "max_requests" in asked:
        return
    most, cached_gb = base.pop("max_requests", max_tokens), asked.get("prefix_caching_mamba_gb")
    if "mamba_memory_ratio" in asked:
        return
    kept = base.get("prefix_caching_mamba_gb", 0) if cached_gb is None else cached_gb
    left = available_bytes - int(kept * GIB) if isinstance(kept, (int, float)) and math.isfinite(kept) else 0
    num_states = cap_to_memory(int(buffer_gb * GIB), 0, max(0, left))[0] // state.slot_bytes
    fit = min(num_states // 2 if shape.num_attention_layers else num_states - 1, most, max_tokens)
    base["max_requests"] = max(1, fit // 16 * 16 or fit // REQUEST_ROUNDER * REQUEST_ROUNDER or fit)

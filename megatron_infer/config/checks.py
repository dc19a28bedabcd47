"""Checks of an InferenceConfig: wrong values, unsupported values, and options without effect. Used by `config` only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from megatron_infer.config.capacity import GIB
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.request_metadata import check_types
from megatron_infer.errors import CapacityError, ConfigError, unknown_name

if TYPE_CHECKING:
    from megatron_infer.config.inference import InferenceConfig
    from megatron_infer.config.model_shape import ModelShape

_AT_LEAST: dict[str, tuple[int, bool]] = {
    "block_size_tokens": (1, False),
    "max_requests": (1, True),
    "max_tokens": (1, True),
    "max_sequence_length": (2, False),
    "logging_step_interval": (0, False),
    "unified_memory_level": (0, False),
    "num_cuda_graphs": (-1, True),
    "cuda_graph_mixed_prefill_count": (0, True),
    "cuda_graph_max_tokens": (1, False),
    "seed": (0, False),
    "vocab_size": (1, True),
    "max_steps_in_flight": (1, False),
    "max_queue_size_tg": (1, True),
    "min_batch_size_tg": (1, True),
    "max_batch_total_tokens": (1, True),
}
"""Integer field -> (smallest value, whether None is allowed)."""
_GIGABYTES = {
    "buffer_size_gb": False,
    "paused_buffer_size_gb": True,
    "swap_buffer_size_gb": True,
    "prefix_caching_mamba_gb": False,
}
"""Field in GiB -> whether 0 is allowed."""
PHASED_OPTIONS = ("max_queue_size_tg", "min_batch_size_tg", "ce_delay_ms", "enable_prioritize_first_decode")
LOGPROBS_MODES = ("raw", "processed")
_GRAPH_OPTIONS = (
    "cuda_graph_capture",
    "cuda_graph_mixed_prefill_count",
    "use_cuda_graphs_for_non_decode_steps",
    "cuda_graph_sizing_distribution",
    "cuda_graph_max_tokens",
    "cuda_graph_all_prefills",
)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_values(config: InferenceConfig) -> None:
    """Raise ConfigError, with the name of the field, for a value that is never valid."""
    for name, (smallest, optional) in _AT_LEAST.items():
        value = getattr(config, name)
        if value is None and optional:
            continue
        if not _is_int(value):
            raise ConfigError(
                f"{name} is {value!r} ({type(value).__name__}), it must be an integer"
                + (" or None" if optional else "")
            )
        if value < smallest:
            raise ConfigError(f"{name} is {value:,}, it must be at least {smallest}")
    for item in fields(config):
        kind, value = str(item.type), getattr(config, item.name)
        if kind.startswith("bool") and not isinstance(value, bool) and not (value is None and kind != "bool"):
            raise ConfigError(f"{item.name} is {value!r} ({type(value).__name__}), it must be True or False")
    _check_gigabytes(config)
    if config.unified_memory_level > 1:
        raise ConfigError(f"unified_memory_level is {config.unified_memory_level}, the levels are 0 and 1")
    if config.unified_memory_level == 1 and config.kv_cache_management_mode == "offload":
        raise ConfigError(
            'unified_memory_level=1 excludes kv_cache_management_mode="offload": unified memory moves to the host by '
            'itself when the device needs the room; take "persist"'
        )
    if config.preemption_mode == "swap" and not config.swap_buffer_size_gb:
        raise ConfigError('preemption_mode="swap" needs host memory to swap to: set swap_buffer_size_gb above 0')
    _check_exact(config)
    if config.cuda_graph_all_prefills and not config.enable_chunked_prefill:
        raise ConfigError(
            "cuda_graph_all_prefills=True needs enable_chunked_prefill=True: a prompt larger than every graph could "
            "never be computed"
        )
    timeout_s = config.collective_timeout_s
    if not (_is_int(timeout_s) or isinstance(timeout_s, float)) or not 0 < timeout_s < math.inf:
        raise ConfigError(f"collective_timeout_s is {timeout_s!r}, it must be a finite number of seconds above 0")
    for name in ("prefix_caching_routing_alpha", "admission_watermark"):
        share = getattr(config, name)
        if share is None and getattr(type(config), name) is None:
            continue
        if not (_is_int(share) or isinstance(share, float)) or not 0 <= share <= 1:
            raise ConfigError(f"{name} is {share!r}, it must be a number from 0 to 1")
    _check_batching(config)
    if config.speculative is not None and config.speculative.num_speculative_tokens >= config.block_size_tokens:
        raise ConfigError(
            f"speculative: num_speculative_tokens is {config.speculative.num_speculative_tokens}, it must be below "
            f"block_size_tokens = {config.block_size_tokens}, so that drafts take one more block at most; lower it"
        )
    if config.batch_invariant and config.speculative is not None and config.speculative.verification == "residual":
        raise ConfigError(
            "speculative: verification 'residual' with batch_invariant=True: its tokens depend on how many were "
            "drafted in a step, so nothing is gained by equal bits; use 'same_tokens'"
        )
    if config.seed >= 2**64:
        raise ConfigError(f"seed is {config.seed:,}, the limit is 2**64 - 1")
    if config.logprobs_mode not in LOGPROBS_MODES:
        message = unknown_name("value", str(config.logprobs_mode), LOGPROBS_MODES)
        raise ConfigError(f"logprobs_mode: {message}; one of {', '.join(LOGPROBS_MODES)}")
    if config.metrics_writer is not None and not callable(getattr(config.metrics_writer, "log", None)):
        raise ConfigError(
            f"metrics_writer is {config.metrics_writer!r}, it must be the wandb module (or an object with its log())"
        )
    if config.max_requests is not None and config.max_tokens is not None and config.max_requests > config.max_tokens:
        raise ConfigError(
            f"max_requests is {config.max_requests:,}, the limit is max_tokens = {config.max_tokens:,} (decoding "
            "takes one token per request of a step); raise max_tokens or lower max_requests"
        )
    check_types(config.request_metadata_types)
    if config.lora is not None and not isinstance(config.lora, LoRAConfig):
        raise ConfigError(f"lora is {config.lora!r} ({type(config.lora).__name__}), it must be a LoRAConfig or None")


def _check_exact(config: InferenceConfig) -> None:
    """Raise ConfigError for an option that excludes batch_invariant."""
    if not config.batch_invariant:
        return
    for name in ("attention_backend", "sampling_backend", "linear_backend"):
        asked = getattr(config, name).value
        if asked not in ("auto", "native"):
            raise ConfigError(
                f'{name}={asked!r} excludes batch_invariant=True, which has native kernels only; leave it "auto"'
            )
    if config.use_flashinfer_fused_rope:
        raise ConfigError(
            "use_flashinfer_fused_rope=True excludes batch_invariant=True, whose kernels rotate queries and keys "
            "themselves; leave it False"
        )
    if config.kv_cache_dtype.value != "auto":
        raise ConfigError(
            f"kv_cache_dtype={config.kv_cache_dtype.value!r} excludes batch_invariant=True: a training forward does "
            'not round keys and values; leave it "auto"'
        )
    if config.weight_dtype.value != "auto":
        raise ConfigError(
            f"weight_dtype={config.weight_dtype.value!r} excludes batch_invariant=True: a training forward does not "
            'round weights; leave it "auto"'
        )


def _check_batching(config: InferenceConfig) -> None:
    delay_ms = config.ce_delay_ms
    if not (_is_int(delay_ms) or isinstance(delay_ms, float)) or not 0 <= delay_ms < math.inf:
        raise ConfigError(f"ce_delay_ms is {delay_ms!r}, it must be a finite number of milliseconds, 0 or more")
    for name in PHASED_OPTIONS:
        value = getattr(config, name)
        if config.batching != "phased" and value != getattr(type(config), name):
            raise ConfigError(
                f'{name} is {value!r}, it acts only with batching="phased", which is {config.batching.value!r}; set '
                f'batching="phased" or leave {name} at {getattr(type(config), name)!r}'
            )


def _check_gigabytes(config: InferenceConfig) -> None:
    for name, allow_zero in _GIGABYTES.items():
        value = getattr(config, name)
        if value is None and getattr(type(config), name) is None:
            continue
        if not (_is_int(value) or isinstance(value, float)):
            raise ConfigError(f"{name} is {value!r} ({type(value).__name__}), it must be a number of GiB")
        if not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
            raise ConfigError(
                f"{name} is {value} GiB, it must be a finite number {'of 0 or more' if allow_zero else 'above 0'}"
            )
    paused = config.paused_buffer_size_gb or 0
    if config.unified_memory_level == 0 and paused > config.buffer_size_gb:
        raise ConfigError(
            f"paused_buffer_size_gb is {paused} GiB, the limit is buffer_size_gb = {config.buffer_size_gb} GiB, of "
            "which it is a part; lower it or raise the buffer"
        )
    state = config.mamba_inference_state_config
    if state is not None and not isinstance(state, MambaInferenceStateConfig):
        raise ConfigError(
            f"mamba_inference_state_config is {state!r} ({type(state).__name__}), it must be a "
            "MambaInferenceStateConfig or None; MambaInferenceStateConfig.from_model(model) makes one"
        )
    ratio = config.mamba_memory_ratio
    if ratio is not None and not (isinstance(ratio, float) and 0.0 < ratio < 1.0):
        raise ConfigError(f"mamba_memory_ratio is {ratio!r}, it must be a number between 0 and 1 (exclusive)")


def without_effect(config: InferenceConfig) -> Iterator[str]:
    """A message for each option that is set and has no effect: why, and what to set instead."""
    if not config.materialize_only_last_token_logits:
        yield (
            "materialize_only_last_token_logits=False: only the rows that are needed (sampled positions, prompt "
            "logprobs in chunks) are ever computed, whatever its value"
        )
    nothing_cached = "acts only with enable_prefix_caching=True, which is off: nothing is cached"
    if config.prefix_caching_eviction_policy != "ref_zero" and not config.enable_prefix_caching:
        yield f"prefix_caching_eviction_policy={config.prefix_caching_eviction_policy.value!r} {nothing_cached}"
    if config.prefix_caching_mamba_gb is not None and not config.enable_prefix_caching:
        yield f"prefix_caching_mamba_gb={config.prefix_caching_mamba_gb} {nothing_cached}"
    if config.preemption_mode == "recompute" and config.swap_buffer_size_gb:
        yield (
            f"swap_buffer_size_gb={config.swap_buffer_size_gb} has no effect with "
            'preemption_mode="recompute": nothing is swapped'
        )
    if config.num_cuda_graphs == 0:
        yield from graph_options_without_effect(config, "is 0")
    if config.metrics_writer is not None and config.logging_step_interval == 0:
        yield "metrics_writer is set, but logging_step_interval is 0: no metrics are written; set an interval"


def graph_options_without_effect(config: InferenceConfig, why: str) -> Iterator[str]:
    """A message that names the options of graphs that are set. why: what num_cuda_graphs is."""
    graphs = [name for name in _GRAPH_OPTIONS if getattr(config, name) != getattr(type(config), name)]
    if graphs:
        yield f"{', '.join(graphs)} act only with num_cuda_graphs, which {why}: no graphs are captured"


def check_model(config: InferenceConfig, shape: ModelShape) -> None:
    """Raise ConfigError for an option that this model excludes."""
    if config.mamba_inference_state_config is not None and shape.state is None and not shape.is_stage:
        raise ConfigError("mamba_inference_state_config is set, but the model keeps no recurrent state; leave it None")


def check_draft(config: InferenceConfig, shape: ModelShape, draft: ModelShape) -> None:
    """Raise ConfigError for a model that cannot draft for one of `shape`; of neither any tensor is needed."""
    if draft.is_stage:
        raise ConfigError(
            "speculative: draft_model is one of several pipeline stages; give a whole model, which the last stage of "
            "the model that it drafts for runs by itself"
        )
    if draft.state is not None or not draft.num_attention_layers:
        raise ConfigError(
            "speculative: the draft model has recurrent states, which are not kept for drafts; take a draft model of "
            "attention layers alone"
        )
    if draft.vocab_size != shape.vocab_size:
        raise ConfigError(
            f"speculative: the draft model has {draft.vocab_size:,} tokens, the model {shape.vocab_size:,}; take a "
            "draft model of the same vocabulary"
        )
    length = min(config.max_sequence_length, shape.max_position or config.max_sequence_length)
    if draft.max_position is not None and draft.max_position < length:
        raise ConfigError(
            f"speculative: the draft model has {draft.max_position:,} positions, max_sequence_length is {length:,}; "
            f"set max_sequence_length={draft.max_position}, or take another draft model"
        )


def check_mtp(shape: ModelShape) -> None:
    """Raise ConfigError where the model of `shape` has no MTP layer that could draft for it."""
    if not shape.num_mtp_layers:
        raise ConfigError(
            "speculative: method 'mtp' drafts with the model's own MTP layers, and this model has none "
            "(mtp_num_layers); take method 'ngram', or 'draft' with a draft model"
        )
    if shape.state is not None:
        raise ConfigError(
            "speculative: method 'mtp' for a model with recurrent states is not built; take method 'ngram'"
        )


def check_draft_weights(name: str, draft: ModelShape, available_bytes: int) -> None:
    """Raise CapacityError for a draft model whose weights are larger than the free memory."""
    needed = draft.num_parameters * draft.kv_dtype_bytes
    if needed > available_bytes:
        raise CapacityError(
            f"speculative: the draft model {name} has {draft.num_parameters:,} parameters of {draft.dtype}, "
            f"{needed / GIB:.3f} GiB; {available_bytes / GIB:.3f} GiB are free; take a smaller draft model"
        )


def without_effect_on(config: InferenceConfig, shape: ModelShape) -> Iterator[str]:
    """A message for each option that is set and has no effect with this model."""
    snapshot_gb, is_whole = config.prefix_caching_mamba_gb, not shape.is_stage
    if config.enable_prefix_caching and shape.state is None and snapshot_gb is not None and is_whole:
        yield (
            f"prefix_caching_mamba_gb={snapshot_gb} has no effect: the model keeps no recurrent state, its prefixes "
            "are shared by KV blocks alone"
        )
    if config.enable_prefix_caching and shape.state is not None and snapshot_gb is None:
        yield (
            "enable_prefix_caching=True finds no prefix for this model: it has recurrent states, and the prefix cache "
            f"keeps none without prefix_caching_mamba_gb (a state takes {shape.state.slot_bytes / GIB:.6f} GiB)"
        )
    if not shape.num_attention_layers and config.preemption_mode == "swap":
        yield (
            'preemption_mode="swap" has no effect on a model without attention layers: its blocks take no '
            "memory, so no request is ever evicted"
        )
    if not shape.num_attention_layers and is_whole and config.kv_cache_dtype != "auto":
        yield f"kv_cache_dtype={config.kv_cache_dtype.value!r} has no effect on a model without attention layers"

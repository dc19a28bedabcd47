"""Checks of an InferenceConfig: wrong values, unsupported values, and options without effect. Used by `config` only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_infer.config.capacity import GIB
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.options import options_of
from megatron_infer.config.request_metadata import check_types
from megatron_infer.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from megatron_infer.config.inference import InferenceConfig
    from megatron_infer.config.model_shape import ModelShape


def acting_with(what: str, config: type[InferenceConfig]) -> Iterator[tuple[str, Any]]:
    """(name, default) of each option that acts only with `what`: "phased" batching, or CUDA "graphs"."""
    return ((name, one.default) for name, one in options_of(config).items() if one.acts_with == what)


def check_values(config: InferenceConfig) -> None:
    """Raise ConfigError, with the name of the field, for a value that is never valid."""
    _check_memory(config)
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


_WITH_EXACT: Mapping[str, tuple[tuple[object, ...], str]] = {
    **dict.fromkeys(
        ("attention_backend", "sampling_backend", "linear_backend"),
        (("auto", "native"), "exact mode has native kernels only"),
    ),
    "use_flashinfer_fused_rope": ((False, None), "native kernels rotate queries and keys themselves"),
    "kv_cache_dtype": (("auto",), "a training forward does not round keys and values"),
    "weight_dtype": (("auto",), "a training forward does not round weights"),
}
"""Option -> the values that batch_invariant allows, and why no others."""


def _check_exact(config: InferenceConfig) -> None:
    """Raise ConfigError for an option that excludes batch_invariant."""
    for name, (allowed, why) in _WITH_EXACT.items() if config.batch_invariant else ():
        value = getattr(config, name)
        plain = getattr(value, "value", value)
        if plain not in allowed:
            raise ConfigError(f"{name}={plain!r} excludes batch_invariant=True: {why}; leave it {allowed[0]!r}")


def _check_batching(config: InferenceConfig) -> None:
    for name, default in acting_with("phased", type(config)):
        value = getattr(config, name)
        if config.batching != "phased" and value != default:
            raise ConfigError(
                f'{name} is {value!r}, it acts only with batching="phased", which is {config.batching.value!r}; set '
                f'batching="phased" or leave {name} at {default!r}'
            )


def _check_memory(config: InferenceConfig) -> None:
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
    graphs = [name for name, default in acting_with("graphs", type(config)) if getattr(config, name) != default]
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
    needed = draft.weight_bytes
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

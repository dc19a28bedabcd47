"""Every size of an engine, derived from the options, one rank's share of a model and the memory there is.

The rules are those of Megatron's dynamic context, so that a job sized there is sized the same here:

    buffer bytes ── // (block bytes [+ state bytes]) ──> blocks of the pool, the last one a dummy for padding writes
    paused bytes ── // the same ───────────────────────> how many of those blocks paused requests may keep
    blocks - 1   ── floor to TP, then to 4 ────────────> max_requests, when the user gives none

    states: a share of the buffers (mamba_memory_ratio), or those of max_requests, or one per block (`split_pool`)
    state slots = max_requests + a dummy for padding writes + cached states + states behind drafts

Cached states and those behind drafts are on top of the buffer. So is the dummy slot where a ratio or max_requests
reserves states: Megatron needs no dummy and reserves exactly those states. Without attention layers (Megatron refuses
such models) blocks only name positions: they take no bytes, and the buffer holds states only, the dummy among them.

Two deviations are on purpose. A buffer that holds no usable block is refused (Megatron silently takes two blocks, more
than it was given). A derived max_requests neither rounds down to zero nor exceeds max_tokens (Megatron asserts).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from megatron_infer.config.capacity import (
    GIB,
    REQUEST_ROUNDER,
    cap_to_memory,
    derive_max_requests,
    split_pool,
)
from megatron_infer.config.graph_memory import GraphMemory
from megatron_infer.config.graph_shapes import CAPTURE_S, ends_of_shapes, make_shapes
from megatron_infer.config.model_shape import (
    CACHE_LINE,
    KV_DTYPE_BYTES,
    LatentShape,
    ModelShape,
    kv_token_bytes,
    state_bytes,
)
from megatron_infer.config.resolved_sizes import CONSTANT_HOW, ResolvedSizes, dependent_sizes
from megatron_infer.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from megatron_infer.config.inference import InferenceConfig

DEFAULT_MAX_TOKENS = 16384
MIN_POOL_BLOCKS = 2
"""One block to use and the dummy block."""
MIN_STATE_SLOTS = 2
"""One state slot to use and the dummy slot, where the buffer holds only states."""


STATE_SIZES = ("state_slot_bytes", "num_cached_states", "num_draft_states", "num_state_slots", "state_bytes")
"""Fields of ResolvedSizes that are 0 for a model without recurrent state."""


class MemoryBudget(NamedTuple):
    """The memory that the options give to the cache of one rank."""

    buffer_bytes: int
    paused_bytes: int
    state_ratio: float | None
    """Share of both for recurrent states; None: see `split_pool`."""
    cached_state_bytes: int | None
    """For states that the prefix cache keeps, on top of both; None: it keeps none."""
    note: str
    """Why the buffer is smaller than buffer_size_gb; "" if it is not."""


def budget_of(config: InferenceConfig, shape: ModelShape, available_bytes: int | None) -> MemoryBudget:
    """The budget on a device with so much free memory (None: unknown)."""
    cached_state_bytes = None
    if shape.state is not None and config.enable_prefix_caching and config.prefix_caching_mamba_gb is not None:
        cached_state_bytes = int(config.prefix_caching_mamba_gb * GIB)
    if available_bytes is not None:
        available_bytes = max(0, available_bytes - (cached_state_bytes or 0))
    asked, paused = int(config.buffer_size_gb * GIB), int((config.paused_buffer_size_gb or 0) * GIB)
    buffer_bytes, paused_bytes, note = cap_to_memory(asked, paused, available_bytes)
    # The share of states is for the pipeline stages that keep some.
    ratio = None if shape.is_stage and shape.state is None else config.mamba_memory_ratio
    return MemoryBudget(buffer_bytes, paused_bytes, ratio, cached_state_bytes, note)


def resolve_sizes(
    config: InferenceConfig,
    shape: ModelShape,
    budget: MemoryBudget,
    *,
    tensor_parallel_size: int,
    draft: ModelShape | None = None,
) -> ResolvedSizes:
    """Derive every size but those of CUDA graphs (see `add_graphs`).

    draft: the model that drafts tokens, whose keys and values lie under the same block ids; None: there is none.
    Raises CapacityError or ConfigError with the figures when the pieces do not fit together.
    """
    if shape.num_attention_layers == 0 and shape.state is None and not shape.is_stage:
        raise ConfigError("the model has neither attention nor Mamba layers: there is nothing to keep of a sequence")
    draft_bytes = 0 if draft is None else _block_bytes(config, draft)
    block_bytes = _block_bytes(config, shape) + draft_bytes
    slot_bytes = state_bytes(shape)
    length = min(config.max_sequence_length, shape.max_position or config.max_sequence_length)
    max_tokens = DEFAULT_MAX_TOKENS if config.max_tokens is None else config.max_tokens
    num_blocks, paused, num_states = _pool(config, budget, block_bytes, slot_bytes)
    limits = ([num_blocks - 1] if block_bytes else []) + ([] if num_states is None else [num_states])
    if config.max_requests is None:
        max_requests = derive_max_requests(
            min(limits, default=max_tokens), tensor_parallel_size=tensor_parallel_size, max_tokens=max_tokens
        )
    else:
        max_requests = config.max_requests
        _check_max_requests(max_requests, budget, num_states, slot_bytes, max_tokens, tensor_parallel_size)
    figures = dependent_sizes(
        block_size=config.block_size_tokens,
        block_bytes=block_bytes,
        num_blocks=num_blocks if block_bytes else None,
        max_sequence_length=length,
        max_requests=max_requests,
        num_cached_states=_num_cached_states(budget, slot_bytes),
        num_draft_states=0 if config.speculative is None else config.speculative.num_speculative_tokens,
        state_slot_bytes=slot_bytes,
        max_prompt_tokens=None if config.enable_chunked_prefill else max_tokens,
    )
    how = CONSTANT_HOW | _how_tokens(config, length)
    how |= _how_blocks(config, shape, budget, figures["num_blocks"], paused, block_bytes)
    if draft is not None:
        how["draft_block_bytes"] = _how_block_bytes(config, draft)
        how["block_bytes"] += " + draft_block_bytes"
    how |= _how_states(config, shape, budget, num_states, tensor_parallel_size, block_bytes)
    return ResolvedSizes(
        block_size=config.block_size_tokens,
        block_bytes=block_bytes,
        draft_block_bytes=draft_bytes,
        paused_block_limit=paused,
        state_slot_bytes=slot_bytes,
        max_tokens=max_tokens,
        max_prefill_tokens=max_tokens,
        graph_shapes=(),
        graph_bytes=0,
        how=how,
        **figures,
    )


def add_graphs(
    config: InferenceConfig, sizes: ResolvedSizes, shape: ModelShape, *, tensor_parallel_size: int
) -> ResolvedSizes:
    """The sizes with the CUDA graphs that follow from them. Raises ConfigError where there can be none as asked."""
    shapes = make_shapes(
        config,
        max_requests=sizes.max_requests,
        max_tokens=sizes.max_tokens,
        tensor_parallel_size=tensor_parallel_size,
    )
    if not shapes:
        return sizes
    memory = GraphMemory.sized(sizes, shape, tensor_parallel_size=tensor_parallel_size)
    graph_bytes = memory.pool_bytes(shapes) + memory.output_bytes(shapes)
    at_start = config.cuda_graph_capture.value == "start"
    how = {
        "graph_shapes": f"num_cuda_graphs={config.num_cuda_graphs}, {config.cuda_graph_sizing_distribution.value}; "
        f"(tokens, prefill, decode): {ends_of_shapes(shapes)}; "
        + (
            f"as far as {CAPTURE_S:g} s go, captured at start and at a resume"
            if at_start
            else "captured when first needed"
        ),
        "graph_bytes": "estimate: the shape that needs most, whose pool all share, and the outputs; measured as "
        "they are captured",
    }
    return replace(sizes, graph_shapes=shapes, graph_bytes=graph_bytes, how={**sizes.how, **how})


# ---------------------------------------------------------------------- pool and requests


def _element_bytes(config: InferenceConfig, shape: ModelShape) -> int:
    """Bytes of one element of a key or value."""
    kv_dtype = config.kv_dtype_of(shape)
    return shape.kv_dtype_bytes if kv_dtype == shape.dtype else KV_DTYPE_BYTES[kv_dtype]


def _block_bytes(config: InferenceConfig, shape: ModelShape) -> int:
    return config.block_size_tokens * kv_token_bytes(shape, _element_bytes(config, shape))


def _pool(
    config: InferenceConfig, budget: MemoryBudget, block_bytes: int, slot_bytes: int
) -> tuple[int, int, int | None]:
    """(blocks of the pool, blocks paused requests may keep, requests whose states fit or None if blocks decide)."""
    if not block_bytes and not slot_bytes:
        return 0, 0, None  # a pipeline stage that keeps nothing of a sequence
    unified = config.unified_memory_level > 0
    split = split_pool(
        budget.buffer_bytes,
        budget.paused_bytes if block_bytes or unified else 0,  # else it is a part of the buffer
        block_bytes=block_bytes,
        state_bytes=slot_bytes,
        state_ratio=budget.state_ratio,
        max_requests=config.max_requests,
    )
    if not block_bytes:
        assert split.state_slots is not None
        if split.state_slots < MIN_STATE_SLOTS:
            raise _too_small(config, budget, block_bytes, slot_bytes)
        return 0, 0, split.state_slots - 1
    if split.num_blocks < MIN_POOL_BLOCKS or split.state_slots == 0:
        raise _too_small(config, budget, block_bytes, slot_bytes)
    if unified:
        return split.num_blocks + split.paused_blocks, split.paused_blocks, split.state_slots
    if split.paused_blocks > split.num_blocks - MIN_POOL_BLOCKS:
        raise ConfigError(
            f"paused_buffer_size_gb would let paused requests keep {split.paused_blocks:,} of {split.num_blocks:,} "
            f"blocks, the limit is {split.num_blocks - MIN_POOL_BLOCKS:,} (one is to run, one is the dummy); "
            "lower paused_buffer_size_gb or raise buffer_size_gb"
        )
    return split.num_blocks, split.paused_blocks, split.state_slots


def _too_small(config: InferenceConfig, budget: MemoryBudget, block_bytes: int, slot_bytes: int) -> CapacityError:
    """The error for a buffer without a usable block or state: what it lacks, and what to set."""
    num_bytes, ratio, blocks = budget.buffer_bytes, budget.state_ratio, MIN_POOL_BLOCKS * block_bytes
    if not block_bytes:
        needed = math.ceil(MIN_STATE_SLOTS * slot_bytes / (ratio or 1.0))
        parts = f"a state slot takes {slot_bytes:,} and a dummy slot is kept beside it"
    else:
        parts = (
            f"one block of {config.block_size_tokens} tokens takes {block_bytes:,} and a dummy block is kept beside it"
        )
        if not slot_bytes:
            needed = blocks
        elif ratio is not None:
            needed = max(math.ceil(blocks / (1.0 - ratio)), math.ceil(slot_bytes / ratio)) + 1
            parts += f", a recurrent state {slot_bytes:,}, and mamba_memory_ratio={ratio} divides the buffer"
        elif config.max_requests is not None:
            needed = blocks + config.max_requests * slot_bytes + 1
            parts += f", recurrent states of {config.max_requests:,} requests (max_requests) {needed - blocks - 1:,}"
        else:
            needed = blocks + MIN_POOL_BLOCKS * slot_bytes
            parts += f", each with a recurrent state of {slot_bytes:,}"
    remedy = "" if not block_bytes else " or lower block_size_tokens"
    return CapacityError(
        f"the KV buffer has {num_bytes:,} bytes ({num_bytes / GIB:.6f} GiB, buffer_size_gb), {parts}: "
        f"at least {needed:,} are needed; set buffer_size_gb >= {_least_gib(needed):.6f}{remedy}"
    )


def _num_cached_states(budget: MemoryBudget, slot_bytes: int) -> int:
    if budget.cached_state_bytes is None or not slot_bytes:
        return 0
    if budget.cached_state_bytes < slot_bytes:
        raise CapacityError(
            f"prefix_caching_mamba_gb gives {budget.cached_state_bytes:,} bytes, one recurrent state takes "
            f"{slot_bytes:,}; set prefix_caching_mamba_gb >= {_least_gib(slot_bytes):.6f}, or None to cache no states"
        )
    return budget.cached_state_bytes // slot_bytes


def _least_gib(num_bytes: int) -> float:
    """GiB with six decimals, rounded up."""
    return math.ceil(num_bytes / GIB * 1e6) / 1e6


def _check_max_requests(
    max_requests: int,
    budget: MemoryBudget,
    num_states: int | None,
    slot_bytes: int,
    max_tokens: int,
    tensor_parallel_size: int,
) -> None:
    """Raise CapacityError or ConfigError for a configured max_requests that memory, ranks or steps do not allow.

    num_states: requests whose states fit; None: no limit of its own.
    """
    if num_states is not None and max_requests > num_states:
        share = "" if budget.state_ratio is None else f"mamba_memory_ratio={budget.state_ratio} of "
        raise CapacityError(
            f"max_requests is {max_requests:,}, {share}the buffer holds the recurrent states of {num_states:,} "
            f"({slot_bytes:,} bytes each); lower max_requests or raise buffer_size_gb"
            + ("" if budget.state_ratio is None else " or mamba_memory_ratio")
        )
    if max_requests % tensor_parallel_size:
        raise ConfigError(
            f"max_requests is {max_requests:,}, it must be a multiple of the tensor parallel size "
            f"{tensor_parallel_size}; round it up"
        )
    if max_requests > max_tokens:
        raise ConfigError(
            f"max_requests is {max_requests:,}, the limit is max_tokens = {max_tokens:,} (a decoding request takes "
            "one token of a step); raise max_tokens or lower max_requests"
        )


# ---------------------------------------------------------------------- how each size was derived


def _how_tokens(config: InferenceConfig, max_sequence_length: int) -> dict[str, str]:
    length = f"the model's positions; {config.max_sequence_length:,} were asked for"
    chunked = ")" if config.enable_chunked_prefill else ", max_tokens: enable_chunked_prefill is off)"
    return {
        "max_sequence_length": "as configured" if max_sequence_length == config.max_sequence_length else length,
        "max_tokens": "as configured" if config.max_tokens is not None else "default",
        "max_prompt_tokens": "min(max_sequence_length - 1, num_usable_blocks x block_size" + chunked,
    }


def _how_block_bytes(config: InferenceConfig, shape: ModelShape) -> str:
    element = f"{_element_bytes(config, shape)} B ({config.kv_dtype_of(shape)})"
    places = f"x {shape.num_attention_layers} attention layers x {config.block_size_tokens} tokens"
    if (latent := shape.latent) is None:
        return f"{element} x 2 (K, V) {places} x {shape.num_kv_heads} kv heads x {shape.head_dim}"
    index = f", an index key of {latent.index_dim}" if latent.index_dim else ""
    return (
        f"{element} {places} x {shape.head_dim} (a latent of {latent.rank} and a rotary part of {latent.rotary_dim}"
        f"{index}, all on each rank; full keys and values of {latent.num_heads} heads would be "
        f"{latent.full_width:,}{_how_prompts(config, shape, latent)})"
    )


def _how_prompts(config: InferenceConfig, shape: ModelShape, latent: LatentShape) -> str:
    """When chunks of prompts have full keys and values for the time of a layer."""
    if latent.expands_from is None or config.batch_invariant or config.kv_dtype_of(shape) != shape.dtype:
        return "; no prompt makes them"
    return f"; native kernels make them, layer by layer, for chunks of prompts from {latent.expands_from:,} tokens on"


def _how_blocks(
    config: InferenceConfig, shape: ModelShape, budget: MemoryBudget, num_blocks: int, paused: int, block_bytes: int
) -> dict[str, str]:
    usable = f"num_blocks - 1: {(num_blocks - 1) * config.block_size_tokens:,} tokens"
    if not block_bytes:
        none = "no attention layers"
        return {
            "block_bytes": f"{none}: blocks name positions and take no memory",
            "num_blocks": "(max_requests + num_cached_states) x max_blocks_per_row + a dummy block: never lacking",
            "num_usable_blocks": usable,
            "paused_block_limit": f"{none}: no request pauses for a block",
        }
    less = ""
    if shape.state is not None and budget.state_ratio is not None:
        less = f" x (1 - mamba_memory_ratio {budget.state_ratio})"
    elif shape.state is not None and config.max_requests is not None:
        less = f" less the states of {config.max_requests:,} requests (max_requests)"
    unit = "(block_bytes + state_slot_bytes)" if shape.state is not None and not less else "block_bytes"
    unified = config.unified_memory_level > 0
    return {
        "block_bytes": _how_block_bytes(config, shape),
        "num_blocks": f"{budget.buffer_bytes:,} bytes{less} // {unit}"
        + (f" + {paused:,} of the paused buffer (unified memory)" if unified else "")
        + ", the last is the dummy block"
        + (f"; {budget.note}" if budget.note else ""),
        "num_usable_blocks": usable,
        "paused_block_limit": f"{budget.paused_bytes:,} bytes (paused_buffer_size_gb, "
        + ("on top" if unified else "part")
        + f" of the buffer){less} // {unit}: what paused requests may keep, shared with the others otherwise; beyond "
        "it they are evicted",
    }


def _how_states(
    config: InferenceConfig,
    shape: ModelShape,
    budget: MemoryBudget,
    num_states: int | None,
    tensor_parallel_size: int,
    block_bytes: int,
) -> dict[str, str]:
    """num_states: requests whose states fit; None: blocks decide, or nothing is kept."""
    state, ratio = shape.state, budget.state_ratio
    if not block_bytes and num_states is None:
        limit = "max_tokens: this pipeline stage keeps nothing of a sequence"
    elif not block_bytes:
        share, note = (
            "" if ratio is None else f" x mamba_memory_ratio {ratio}",
            f"; {budget.note}" if budget.note else "",
        )
        limit = f"{budget.buffer_bytes:,} bytes{share} // state_slot_bytes - 1 dummy = {num_states:,}{note}"
    elif num_states is None or ratio is None:
        limit = "num_usable_blocks" + ("" if state is None else " (a state comes with each block)")
    else:
        limit = f"min(num_usable_blocks, {num_states:,} states in mamba_memory_ratio {ratio} of the buffers)"
    floored = f"at most max_tokens, floored to TP={tensor_parallel_size} and {REQUEST_ROUNDER}"
    how = {"max_requests": "as configured" if config.max_requests is not None else f"{limit}, {floored}"}
    if state is None:
        none = "the model keeps no recurrent state"
        return how | dict.fromkeys(STATE_SIZES, none)
    return how | {
        "state_slot_bytes": f"{state.num_layers} Mamba layers x (conv {state.conv_shape} {state.conv_dtype} + SSM "
        f"{state.ssm_shape} {state.ssm_dtype}), each part up to {CACHE_LINE} B",
        "num_cached_states": "prefix_caching_mamba_gb is None or prefix caching is off: no states are cached"
        if budget.cached_state_bytes is None
        else f"{budget.cached_state_bytes:,} bytes (prefix_caching_mamba_gb, on top of the buffer) // state_slot_bytes",
        "num_state_slots": "max_requests + 1 dummy slot + num_cached_states"
        + ("" if config.speculative is None else " + max_requests x num_draft_states"),
        "state_bytes": "num_state_slots x state_slot_bytes",
    }

"""Sizing arithmetic: bytes per block and state slot, GiB in, counts out. Pure: knows ints, never tensors.

The rules are those of Megatron's dynamic context, so that a job sized there is sized the same here:

    buffer bytes ── // (block bytes [+ state bytes]) ──> blocks of the pool, the last one a dummy for padding writes
    paused bytes ── // the same ───────────────────────> how many of those blocks paused requests may keep
    blocks - 1   ── floor to TP, then to 4 ────────────> max_requests, when the user gives none

    states: a share of the buffers (mamba_memory_ratio), or those of max_requests, or one per block (`split_pool`)
    state slots = max_requests + a dummy for padding writes + snapshots of the prefix cache

Snapshots are on top of the buffer; so is the dummy slot where a ratio or max_requests reserves states, since Megatron,
which needs none, reserves exactly those. Without attention layers (Megatron refuses them) blocks only name positions:
they take no bytes, and the buffer holds states alone, the dummy among them.
Two deviations, both on purpose. A buffer that holds no usable block is refused (Megatron silently takes two blocks,
more than it was given); and a derived max_requests never rounds down to zero nor exceeds max_tokens (Megatron asserts).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from megatron_infer.config.graph_shapes import GraphShape, counted_shapes
from megatron_infer.errors import CapacityError, ConfigError

GIB = 1 << 30
REQUEST_ROUNDER = 4
DEFAULT_MAX_TOKENS = 16384
TOKEN_ID_BYTES, CACHE_LINE = 4, 64
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8_E4M3 = "float8_e4m3fn"
"""A dtype of keys and values alone."""
KV_DTYPE_BYTES = DTYPE_BYTES | {FP8_E4M3: 1}
MIN_POOL_BLOCKS = 2
"""One block to use and the dummy block."""
MIN_STATE_SLOTS = 2
"""The same of state slots, where they are all that the buffer holds."""
AVAILABLE_SHARE_LIMIT = 0.8
AVAILABLE_SHARE_CAP = 0.6
"""A buffer above 80 % of the memory that is free leaves too little for weights and activations: it is cut to 60 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """The recurrent state a request keeps on one rank, over all its Mamba layers."""

    num_layers: int
    """Mamba layers of this rank."""
    conv_shape: tuple[int, int]
    """[channels, taps]: the last inputs of the convolution, of one layer."""
    ssm_shape: tuple[int, int, int]
    """[heads, head dim, state dim], of one layer."""
    conv_dtype: str
    ssm_dtype: str

    @property
    def num_groups(self) -> int:
        """Groups of heads that share B and C: channels of the convolution are (x, B, C)."""
        heads, head_dim, state_dim = self.ssm_shape
        return (self.conv_shape[0] - heads * head_dim) // (2 * state_dim)

    @property
    def conv_bytes(self) -> int:
        """Of all layers, rounded up to a cache line."""
        return _lines(self.num_layers * math.prod(self.conv_shape) * DTYPE_BYTES[self.conv_dtype])

    @property
    def ssm_bytes(self) -> int:
        return _lines(self.num_layers * math.prod(self.ssm_shape) * DTYPE_BYTES[self.ssm_dtype])

    @property
    def slot_bytes(self) -> int:
        """Bytes of one state slot. Example: 24 layers, conv (1792, 4), ssm (24, 64, 128), fp32 -> 19,562,496."""
        return self.conv_bytes + self.ssm_bytes


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // CACHE_LINE) * CACHE_LINE


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Mixture-of-experts layers, one rank's share of an expert."""

    top_k: int
    """Experts that a token chooses."""
    fc1_width: int
    """Outputs of the first product."""
    fc2_width: int
    """Inputs of the second."""

    @classmethod
    def of(cls, field: Callable[[str], Any], num_ranks: int) -> ExpertShape | None:
        """field: reads a field of a TransformerConfig; num_ranks: ranks that share an expert. None: no experts."""
        if not field("num_moe_experts"):
            return None
        width = (field("moe_ffn_hidden_size") or field("ffn_hidden_size")) // num_ranks
        gates = 2 if field("gated_linear_unit") else 1
        return cls(top_k=field("moe_router_topk"), fc1_width=gates * width, fc2_width=width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What sizes depend on, of one rank's share of a model."""

    num_layers: int
    num_attention_layers: int
    """Layers of this rank that keep keys and values."""
    num_query_heads: int
    num_kv_heads: int
    """Heads of this rank (see `heads_per_rank`)."""
    head_dim: int
    hidden_size: int
    vocab_size: int
    """True size; entries above it in the padded vocabulary are never drawn."""
    padded_vocab_size: int
    max_position: int | None
    """Positions the model can tell apart; None if unbounded."""
    kv_dtype_bytes: int
    """Of `dtype`."""
    dtype: str
    """"float32" or "bfloat16": the dtype of parameters and activations, and of the cache unless kv_cache_dtype says
    otherwise."""
    num_parameters: int
    state: StateShape | None = None
    """None: no layer of this rank keeps a recurrent state."""
    experts: ExpertShape | None = None
    """None: the model has none."""
    is_stage: bool = False
    """One of several pipeline stages: it may lack attention layers or states, or both, that others have."""


class SizeRow(NamedTuple):
    """One line of `ResolvedSizes.table()`."""

    name: str
    value: int | str
    unit: str
    how: str


def _in(unit: str) -> Any:
    return field(metadata={"unit": unit})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSizes:
    """Every size that follows from (config, model, memory), derived once; `table()` says how."""

    block_size: int = _in("tokens")
    block_bytes: int = _in("bytes")
    num_blocks: int = _in("blocks")
    num_usable_blocks: int = _in("blocks")
    paused_block_limit: int = _in("blocks")
    max_sequence_length: int = _in("tokens")
    max_blocks_per_row: int = _in("blocks")
    max_requests: int = _in("requests")
    state_slot_bytes: int = _in("bytes")
    """0 here and below: the model keeps no recurrent state."""
    num_snapshot_slots: int = _in("slots")
    num_state_slots: int = _in("slots")
    """Slot r < max_requests belongs to row r, slot max_requests is the dummy, the snapshots follow."""
    state_bytes: int = _in("bytes")
    max_tokens: int = _in("tokens/step")
    max_decode_requests: int = _in("requests/step")
    max_prefill_tokens: int = _in("tokens/step")
    max_prompt_tokens: int = _in("tokens")
    full_length_requests: int = _in("requests")
    """How many requests of max_sequence_length fit at once."""
    kv_bytes: int = _in("bytes")
    token_pool_bytes: int = _in("bytes")
    block_table_bytes: int = _in("bytes")
    graph_shapes: tuple[GraphShape, ...] = _in("shapes")
    """Steps that CUDA graphs are captured for, ascending."""
    graph_bytes: int = _in("bytes")
    """Estimate of what they take together, outputs included."""
    how: Mapping[str, str] = field(repr=False, compare=False)
    """Field name -> how its value came about."""

    def table(self) -> list[SizeRow]:
        """(name, value, unit, how it was derived) of every size, in order of derivation."""
        rows = []
        for item in fields(self):
            if item.name == "how":
                continue
            value = getattr(self, item.name)
            if item.name == "graph_shapes":
                value = counted_shapes(value)
            rows.append(SizeRow(item.name, value, item.metadata["unit"], self.how[item.name]))
        return rows


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens. Example: 45 tokens, B=16 -> 3."""
    return -(-num_tokens // block_size)


def heads_per_rank(num_heads: int, tensor_parallel_size: int) -> int:
    """KV heads of one rank; at least one, since heads are replicated when there are more ranks than heads."""
    return max(1, num_heads // tensor_parallel_size)


def kv_block_bytes(*, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of one block over all attention layers, keys and values. Example: 30 x 16 x 3 x 64 bf16 -> 368,640."""
    return dtype_bytes * 2 * num_layers * block_size * num_kv_heads * head_dim


def latent_block_bytes(*, num_layers: int, block_size: int, latent_dim: int, rope_dim: int, dtype_bytes: int) -> int:
    """Bytes of one block of multi-latent attention: one latent and one rotary key per token, no values."""
    return dtype_bytes * num_layers * block_size * (latent_dim + rope_dim)


def state_bytes_per_request(
    *,
    conv_shape: Sequence[int],
    ssm_shape: Sequence[int],
    conv_bytes: int,
    ssm_bytes: int,
    num_layers: int,
    num_speculative_tokens: int = 0,
) -> int:
    """Bytes of recurrent state one request needs; speculation keeps one more copy per drafted position and the next."""
    copies = 1 + (num_speculative_tokens + 1 if num_speculative_tokens else 0)
    return (math.prod(conv_shape) * conv_bytes + math.prod(ssm_shape) * ssm_bytes) * num_layers * copies


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSplit:
    """How the two buffers divide into blocks and recurrent-state slots."""

    num_blocks: int
    """Blocks the buffer holds, before the paused buffer of unified memory is added."""
    paused_blocks: int
    state_slots: int | None
    """Requests whose recurrent state fits; None when the blocks alone decide."""


def split_pool(
    buffer_bytes: int,
    paused_bytes: int,
    *,
    block_bytes: int,
    state_bytes: int = 0,
    state_ratio: float | None = None,
    max_requests: int | None = None,
) -> PoolSplit:
    """Divide the buffers between KV blocks and recurrent states (state_bytes a request; 0 for attention-only models).

    A ratio gives that share of both buffers to states. Without one, a given max_requests reserves exactly its states,
    in proportion from both buffers. Without either, every block brings a state slot along. Blocks without bytes (no
    attention layers) leave both buffers, or the ratio's share of them, to states.
    Raises ConfigError (ratio out of range or without states) or CapacityError (reserved states exceed the buffers).
    """
    if state_ratio is not None:
        if not state_bytes:
            raise ConfigError("mamba_memory_ratio is set, but the model keeps no recurrent state; leave it None")
        if not 0.0 < state_ratio < 1.0:
            raise ConfigError(f"mamba_memory_ratio is {state_ratio}, it must lie between 0 and 1 (exclusive)")
        slots = int((buffer_bytes + paused_bytes) * state_ratio // state_bytes)
        if not block_bytes:
            return PoolSplit(num_blocks=0, paused_blocks=0, state_slots=slots)
        kv_share = 1.0 - state_ratio
        return PoolSplit(
            num_blocks=int(buffer_bytes * kv_share) // block_bytes,
            paused_blocks=int(paused_bytes * kv_share) // block_bytes,
            state_slots=slots,
        )
    if not block_bytes:
        return PoolSplit(num_blocks=0, paused_blocks=0, state_slots=(buffer_bytes + paused_bytes) // state_bytes)
    if state_bytes and max_requests is not None:
        reserved, total = max_requests * state_bytes, buffer_bytes + paused_bytes
        if reserved >= total:
            raise CapacityError(
                f"recurrent states of {max_requests:,} requests (max_requests) need {reserved:,} bytes, the buffers "
                f"hold {total:,}; lower max_requests or raise buffer_size_gb"
            )
        kv_share = 1.0 - reserved / total
        return PoolSplit(
            num_blocks=int(buffer_bytes * kv_share) // block_bytes,
            paused_blocks=int(paused_bytes * kv_share) // block_bytes,
            state_slots=max_requests,
        )
    unit = block_bytes + state_bytes
    return PoolSplit(num_blocks=buffer_bytes // unit, paused_blocks=paused_bytes // unit, state_slots=None)


def derive_max_requests(
    limit: int, *, tensor_parallel_size: int = 1, max_tokens: int | None = None, rounder: int = REQUEST_ROUNDER
) -> int:
    """Largest request count <= `limit` (and max_tokens) divisible by TP, and by `rounder` where that leaves any.

    Raises CapacityError when not even one request per tensor-parallel rank fits.
    """
    if max_tokens is not None:
        limit = min(limit, max_tokens)
    whole = limit // tensor_parallel_size * tensor_parallel_size
    if whole == 0:
        raise CapacityError(
            f"room for {limit:,} requests, but tensor parallelism needs a multiple of {tensor_parallel_size}; "
            "raise buffer_size_gb and max_tokens"
        )
    step = math.lcm(tensor_parallel_size, rounder)
    return whole // step * step or whole


def cap_to_memory(buffer_bytes: int, paused_bytes: int, available_bytes: int | None) -> tuple[int, int, str | None]:
    """(buffer, paused, note or None): a buffer above 80 % of what is free is cut to 60 %, the paused part with it."""
    if available_bytes is None or buffer_bytes <= AVAILABLE_SHARE_LIMIT * available_bytes:
        return buffer_bytes, paused_bytes, None
    capped = int(AVAILABLE_SHARE_CAP * available_bytes)
    note = (
        f"buffer_size_gb asks for {buffer_bytes / GIB:.2f} GiB, more than {AVAILABLE_SHARE_LIMIT:.0%} of the "
        f"{available_bytes / GIB:.2f} GiB available: capped to {AVAILABLE_SHARE_CAP:.0%} = {capped / GIB:.2f} GiB"
    )
    return capped, paused_bytes * capped // buffer_bytes, note


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRequest:
    """The numbers of an InferenceConfig that sizing reads."""

    block_size: int
    buffer_bytes: int
    paused_bytes: int
    max_requests: int | None
    max_tokens: int | None
    max_sequence_length: int
    chunked_prefill: bool
    tensor_parallel_size: int
    unified_memory: bool = False
    """The paused buffer adds to the buffer instead of being a part of it."""
    buffer_note: str = ""
    state_ratio: float | None = None
    """Share of the buffers for recurrent states."""
    snapshot_bytes: int | None = None
    """For states that the prefix cache keeps, on top of the buffers; None: it keeps none."""
    kv_dtype: str | None = None
    """What keys and values are kept in; None: the model's dtype."""


def resolve_sizes(shape: ModelShape, ask: SizingRequest) -> ResolvedSizes:
    """Derive every size. Raises CapacityError or ConfigError with the figures when the pieces do not fit together."""
    if shape.num_attention_layers == 0 and shape.state is None and not shape.is_stage:
        raise ConfigError("the model has neither attention nor Mamba layers: there is nothing to keep of a sequence")
    size, block_bytes = ask.block_size, _block_bytes(shape, ask)
    slot_bytes = 0 if shape.state is None else shape.state.slot_bytes
    if shape.is_stage and not slot_bytes:
        ask = replace(ask, state_ratio=None)  # the share of states is for the stages that keep some
    max_sequence_length = min(ask.max_sequence_length, shape.max_position or ask.max_sequence_length)
    max_tokens = DEFAULT_MAX_TOKENS if ask.max_tokens is None else ask.max_tokens
    width = blocks_for(max_sequence_length, size)
    num_blocks, paused, num_states = _pool(ask, block_bytes, slot_bytes)
    max_requests = _max_requests(ask, num_blocks - 1 if block_bytes else None, num_states, slot_bytes, max_tokens)
    num_snapshots = _num_snapshots(ask, slot_bytes)
    num_state_slots = max_requests + 1 + num_snapshots if slot_bytes else 0
    if not block_bytes:
        num_blocks = (max_requests + num_snapshots) * width + 1
    usable = num_blocks - 1
    prompt_limits = [max_sequence_length - 1, usable * size] + ([] if ask.chunked_prefill else [max_tokens])
    how = {
        "block_size": "block_size_tokens",
        "max_sequence_length": "as configured"
        if max_sequence_length == ask.max_sequence_length
        else f"the model's positions; {ask.max_sequence_length:,} were asked for",
        "max_blocks_per_row": "ceil(max_sequence_length / block_size)",
        "max_tokens": "as configured" if ask.max_tokens is not None else "default",
        "max_decode_requests": "max_requests: one token each",
        "max_prefill_tokens": "max_tokens, less one per request that decodes in the same step",
        "max_prompt_tokens": "min(max_sequence_length - 1, num_usable_blocks x block_size"
        + (")" if ask.chunked_prefill else ", max_tokens: enable_chunked_prefill is off)"),
        "full_length_requests": "min(num_usable_blocks // max_blocks_per_row, max_requests)",
        "kv_bytes": "num_blocks x block_bytes",
        "token_pool_bytes": f"(max_requests + 1) x max_sequence_length x {TOKEN_ID_BYTES} B",
        "block_table_bytes": "(max_requests + 1) x max_blocks_per_row x 4 B",
        "graph_shapes": "num_cuda_graphs is None: every step runs eagerly",
        "graph_bytes": "no graphs",
    }
    how |= _how_blocks(shape, ask, num_blocks, paused) | _how_states(shape, ask, num_states)
    return ResolvedSizes(
        block_size=size,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        num_usable_blocks=usable,
        paused_block_limit=paused,
        max_sequence_length=max_sequence_length,
        max_blocks_per_row=width,
        max_requests=max_requests,
        state_slot_bytes=slot_bytes,
        num_snapshot_slots=num_snapshots,
        num_state_slots=num_state_slots,
        state_bytes=num_state_slots * slot_bytes,
        max_tokens=max_tokens,
        max_decode_requests=max_requests,
        max_prefill_tokens=max_tokens,
        max_prompt_tokens=min(prompt_limits),
        full_length_requests=min(usable // width, max_requests),
        kv_bytes=num_blocks * block_bytes,
        token_pool_bytes=(max_requests + 1) * max_sequence_length * TOKEN_ID_BYTES,
        block_table_bytes=(max_requests + 1) * width * 4,
        graph_shapes=(),
        graph_bytes=0,
        how=how,
    )


def host_places(
    swap_bytes: int, *, block_bytes: int, slot_bytes: int, max_requests: int, max_blocks_per_row: int
) -> tuple[int, int]:
    """(blocks, states) that so much host memory holds of evicted requests: each needs its state and some blocks.

    For every state there is room for the blocks of half a longest sequence, where the memory holds so many; no more
    states than requests can be live. Memory that holds less than one such request goes to one state and blocks.
    Example: 100 bytes, blocks of 5, states of 10, 8 blocks a row -> 3 requests of 10 + 4 x 5: (14, 3).
    """
    if not slot_bytes:
        return (swap_bytes // block_bytes if block_bytes else 0), 0
    if not block_bytes:
        return 0, 0  # nobody is evicted for want of blocks that take no memory
    if swap_bytes < slot_bytes + block_bytes:
        return 0, 0
    typical = slot_bytes + -(-max_blocks_per_row // 2) * block_bytes
    num_states = min(max(1, swap_bytes // typical), max_requests)
    return (swap_bytes - num_states * slot_bytes) // block_bytes, num_states


def _element_bytes(shape: ModelShape, ask: SizingRequest) -> int:
    return shape.kv_dtype_bytes if ask.kv_dtype in (None, shape.dtype) else KV_DTYPE_BYTES[ask.kv_dtype]


def _block_bytes(shape: ModelShape, ask: SizingRequest) -> int:
    return kv_block_bytes(
        num_layers=shape.num_attention_layers,
        block_size=ask.block_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype_bytes=_element_bytes(shape, ask),
    )


def _pool(ask: SizingRequest, block_bytes: int, slot_bytes: int) -> tuple[int, int, int | None]:
    """(blocks of the pool, blocks paused requests may keep, requests whose states fit or None if blocks decide)."""
    if not block_bytes and not slot_bytes:
        return 0, 0, None  # a pipeline stage that keeps nothing of a sequence
    paused_bytes = ask.paused_bytes if block_bytes or ask.unified_memory else 0  # else a part of the buffer
    split = split_pool(
        ask.buffer_bytes,
        paused_bytes,
        block_bytes=block_bytes,
        state_bytes=slot_bytes,
        state_ratio=ask.state_ratio,
        max_requests=ask.max_requests,
    )
    if not block_bytes:
        assert split.state_slots is not None
        if split.state_slots < MIN_STATE_SLOTS:
            raise _too_small(ask, block_bytes, slot_bytes)
        return 0, 0, split.state_slots - 1
    if split.num_blocks < MIN_POOL_BLOCKS or split.state_slots == 0:
        raise _too_small(ask, block_bytes, slot_bytes)
    if ask.unified_memory:
        return split.num_blocks + split.paused_blocks, split.paused_blocks, split.state_slots
    if split.paused_blocks > split.num_blocks - MIN_POOL_BLOCKS:
        raise ConfigError(
            f"paused_buffer_size_gb would let paused requests keep {split.paused_blocks:,} of {split.num_blocks:,} "
            f"blocks, the limit is {split.num_blocks - MIN_POOL_BLOCKS:,} (one is to run, one is the dummy); "
            "lower paused_buffer_size_gb or raise buffer_size_gb"
        )
    return split.num_blocks, split.paused_blocks, split.state_slots


def _too_small(ask: SizingRequest, block_bytes: int, slot_bytes: int) -> CapacityError:
    """The buffer holds no block to use, or no state: by how much, and what to set."""
    ratio, blocks = ask.state_ratio, MIN_POOL_BLOCKS * block_bytes
    if not block_bytes:
        needed = math.ceil(MIN_STATE_SLOTS * slot_bytes / (ratio or 1.0))
        parts = f"a state slot takes {slot_bytes:,} and a dummy slot is kept beside it"
    else:
        parts = f"one block of {ask.block_size} tokens takes {block_bytes:,} and a dummy block is kept beside it"
        if not slot_bytes:
            needed = blocks
        elif ratio is not None:
            needed = max(math.ceil(blocks / (1.0 - ratio)), math.ceil(slot_bytes / ratio)) + 1
            parts += f", a recurrent state {slot_bytes:,}, and mamba_memory_ratio={ratio} divides the buffer"
        elif ask.max_requests is not None:
            needed = blocks + ask.max_requests * slot_bytes + 1
            parts += f", recurrent states of {ask.max_requests:,} requests (max_requests) {needed - blocks - 1:,}"
        else:
            needed = blocks + MIN_POOL_BLOCKS * slot_bytes
            parts += f", each with a recurrent state of {slot_bytes:,}"
    smallest = math.ceil(needed / GIB * 1e6) / 1e6
    remedy = "" if not block_bytes else " or lower block_size_tokens"
    return CapacityError(
        f"the KV buffer has {ask.buffer_bytes:,} bytes ({ask.buffer_bytes / GIB:.6f} GiB, buffer_size_gb), {parts}: "
        f"at least {needed:,} are needed; set buffer_size_gb >= {smallest:.6f}{remedy}"
    )


def _num_snapshots(ask: SizingRequest, slot_bytes: int) -> int:
    if ask.snapshot_bytes is None or not slot_bytes:
        return 0
    if ask.snapshot_bytes < slot_bytes:
        smallest = math.ceil(slot_bytes / GIB * 1e6) / 1e6
        raise CapacityError(
            f"prefix_caching_mamba_gb gives {ask.snapshot_bytes:,} bytes, one recurrent state takes {slot_bytes:,}; "
            f"set prefix_caching_mamba_gb >= {smallest:.6f}, or None for no snapshots"
        )
    return ask.snapshot_bytes // slot_bytes


def _how_blocks(shape: ModelShape, ask: SizingRequest, num_blocks: int, paused: int) -> dict[str, str]:
    usable = f"num_blocks - 1: {(num_blocks - 1) * ask.block_size:,} tokens"
    if not shape.num_attention_layers:
        none = "no attention layers"
        return {
            "block_bytes": f"{none}: blocks name positions and take no memory",
            "num_blocks": "(max_requests + num_snapshot_slots) x max_blocks_per_row + a dummy block: never lacking",
            "num_usable_blocks": usable,
            "paused_block_limit": f"{none}: nobody pauses for a block",
        }
    if shape.state is None:
        beside = ""
    elif ask.state_ratio is not None:
        beside = f" x (1 - mamba_memory_ratio {ask.state_ratio})"
    elif ask.max_requests is not None:
        beside = f" less the states of {ask.max_requests:,} requests (max_requests)"
    else:
        beside = ""
    unit = "(block_bytes + state_slot_bytes)" if shape.state is not None and not beside else "block_bytes"
    return {
        "block_bytes": f"{_element_bytes(shape, ask)} B ({ask.kv_dtype or shape.dtype}) x 2 (K, V) "
        f"x {shape.num_attention_layers} attention layers x {ask.block_size} tokens x {shape.num_kv_heads} kv heads "
        f"x {shape.head_dim}",
        "num_blocks": f"{ask.buffer_bytes:,} bytes{beside} // {unit}"
        + (f" + {paused:,} of the paused buffer (unified memory)" if ask.unified_memory else "")
        + ", the last is the dummy block"
        + (f"; {ask.buffer_note}" if ask.buffer_note else ""),
        "num_usable_blocks": usable,
        "paused_block_limit": f"{ask.paused_bytes:,} bytes (paused_buffer_size_gb, "
        + ("on top" if ask.unified_memory else "part")
        + f" of the buffer){beside} // {unit}: what paused requests may keep, shared with the others otherwise; beyond "
        "it they are evicted",
    }


def _how_states(shape: ModelShape, ask: SizingRequest, num_states: int | None) -> dict[str, str]:
    floored = f"at most max_tokens, floored to TP={ask.tensor_parallel_size} and {REQUEST_ROUNDER}"
    if not shape.num_attention_layers and num_states is None:
        limit = "max_tokens: this pipeline stage keeps nothing of a sequence"
    elif not shape.num_attention_layers:
        note = f"; {ask.buffer_note}" if ask.buffer_note else ""
        share = "" if ask.state_ratio is None else f" x mamba_memory_ratio {ask.state_ratio}"
        limit = f"{ask.buffer_bytes:,} bytes{share} // state_slot_bytes - 1 dummy = {num_states:,}{note}"
    elif num_states is None or ask.state_ratio is None:
        limit = "num_usable_blocks" + ("" if shape.state is None else " (a state comes with each block)")
    else:
        limit = f"min(num_usable_blocks, {num_states:,} states in mamba_memory_ratio {ask.state_ratio} of the buffers)"
    how = {"max_requests": "as configured" if ask.max_requests is not None else f"{limit}, {floored}"}
    state = shape.state
    if state is None:
        none = "the model keeps no recurrent state"
        return how | dict.fromkeys(("state_slot_bytes", "num_snapshot_slots", "num_state_slots", "state_bytes"), none)
    return how | {
        "state_slot_bytes": f"{state.num_layers} Mamba layers x (conv {state.conv_shape} {state.conv_dtype} + SSM "
        f"{state.ssm_shape} {state.ssm_dtype}), each part up to {CACHE_LINE} B",
        "num_snapshot_slots": "prefix_caching_mamba_gb is None or prefix caching is off: no state is kept for others"
        if ask.snapshot_bytes is None
        else f"{ask.snapshot_bytes:,} bytes (prefix_caching_mamba_gb, on top of the buffer) // state_slot_bytes",
        "num_state_slots": "max_requests + 1 dummy slot + num_snapshot_slots",
        "state_bytes": "num_state_slots x state_slot_bytes",
    }


def _max_requests(
    ask: SizingRequest, num_usable_blocks: int | None, num_states: int | None, slot_bytes: int, max_tokens: int
) -> int:
    """As configured, or the fewer of blocks (None: they take no memory) and states (None: one comes with a block)."""
    if ask.max_requests is None:
        limits = [limit for limit in (num_usable_blocks, num_states) if limit is not None] or [max_tokens]
        return derive_max_requests(min(limits), tensor_parallel_size=ask.tensor_parallel_size, max_tokens=max_tokens)
    if num_states is not None and ask.max_requests > num_states:
        share = "" if ask.state_ratio is None else f"mamba_memory_ratio={ask.state_ratio} of "
        raise CapacityError(
            f"max_requests is {ask.max_requests:,}, {share}the buffer holds the recurrent states of {num_states:,} "
            f"({slot_bytes:,} bytes each); lower max_requests or raise buffer_size_gb"
            + ("" if ask.state_ratio is None else " or mamba_memory_ratio")
        )
    if ask.max_requests % ask.tensor_parallel_size:
        raise ConfigError(
            f"max_requests is {ask.max_requests:,}, it must be a multiple of the tensor parallel size "
            f"{ask.tensor_parallel_size}; round it up"
        )
    if ask.max_requests > max_tokens:
        raise ConfigError(
            f"max_requests is {ask.max_requests:,}, the limit is max_tokens = {max_tokens:,} (a decoding request takes "
            "one token of a step); raise max_tokens or lower max_requests"
        )
    return ask.max_requests

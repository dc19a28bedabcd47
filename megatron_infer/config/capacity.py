"""How many blocks, state slots and requests a number of bytes holds. Pure arithmetic on ints.

The rules are those of Megatron's dynamic context; `config.sizing` applies them to the options and a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_infer.errors import CapacityError, ConfigError

GIB = 1 << 30
REQUEST_ROUNDER = 4
AVAILABLE_SHARE_LIMIT = 0.8
AVAILABLE_SHARE_CAP = 0.6
"""A buffer above 80 % of the memory that is free leaves too little for weights and activations: it is cut to 60 %."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens. Example: 45 tokens, B=16 -> 3."""
    return -(-num_tokens // block_size)


def cap_to_memory(buffer_bytes: int, paused_bytes: int, available_bytes: int | None) -> tuple[int, int, str]:
    """(buffer, paused, note): a buffer above 80 % of the free memory is cut to 60 %, and the paused part with it.

    note: why the buffer was cut; "" if it was not. available_bytes: None if unknown.
    """
    if available_bytes is None or buffer_bytes <= AVAILABLE_SHARE_LIMIT * available_bytes:
        return buffer_bytes, paused_bytes, ""
    capped = int(AVAILABLE_SHARE_CAP * available_bytes)
    note = (
        f"buffer_size_gb asks for {buffer_bytes / GIB:.2f} GiB, more than {AVAILABLE_SHARE_LIMIT:.0%} of the "
        f"{available_bytes / GIB:.2f} GiB available: capped to {AVAILABLE_SHARE_CAP:.0%} = {capped / GIB:.2f} GiB"
    )
    return capped, paused_bytes * capped // buffer_bytes, note


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSplit:
    """How the two buffers divide into blocks and recurrent-state slots."""

    num_blocks: int
    """Blocks the buffer holds, before the paused buffer of unified memory is added."""
    paused_blocks: int
    state_slots: int | None
    """Requests whose recurrent state fits; None: only the blocks limit them."""


def split_pool(
    buffer_bytes: int,
    paused_bytes: int,
    *,
    block_bytes: int,
    state_bytes: int = 0,
    state_ratio: float | None = None,
    max_requests: int | None = None,
) -> PoolSplit:
    """Divide the buffers between KV blocks and recurrent states.

    block_bytes: 0 without attention layers. state_bytes: of one request; 0 for attention-only models.
    A ratio gives that share of both buffers to states. Without one, a given max_requests reserves exactly the states
    of those requests, in proportion from both buffers. Without either, every block brings one state slot with it.
    Blocks without bytes leave both buffers, or the ratio's share of them, to states.
    Raises ConfigError (a ratio without states) or CapacityError (reserved states exceed the buffers).
    """
    total_bytes = buffer_bytes + paused_bytes
    if state_ratio is not None:
        if not state_bytes:
            raise ConfigError("mamba_memory_ratio is set, but the model keeps no recurrent state; leave it None")
        slots, kv_share = int(total_bytes * state_ratio // state_bytes), 1.0 - state_ratio
    elif not block_bytes:
        slots, kv_share = total_bytes // state_bytes, 0.0
    elif state_bytes and max_requests is not None:
        reserved = max_requests * state_bytes
        if reserved >= total_bytes:
            raise CapacityError(
                f"recurrent states of {max_requests:,} requests (max_requests) need {reserved:,} bytes, the buffers "
                f"hold {total_bytes:,}; lower max_requests or raise buffer_size_gb"
            )
        slots, kv_share = max_requests, 1.0 - reserved / total_bytes
    else:
        unit = block_bytes + state_bytes
        return PoolSplit(num_blocks=buffer_bytes // unit, paused_blocks=paused_bytes // unit, state_slots=None)
    if not block_bytes:
        return PoolSplit(num_blocks=0, paused_blocks=0, state_slots=slots)
    return PoolSplit(
        num_blocks=int(buffer_bytes * kv_share) // block_bytes,
        paused_blocks=int(paused_bytes * kv_share) // block_bytes,
        state_slots=slots,
    )


def derive_max_requests(limit: int, *, tensor_parallel_size: int = 1, max_tokens: int | None = None) -> int:
    """The largest request count <= `limit` (and max_tokens) divisible by TP, and by 4 where that leaves any.

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
    step = math.lcm(tensor_parallel_size, REQUEST_ROUNDER)
    return whole // step * step or whole


def host_places(
    swap_bytes: int, *, block_bytes: int, slot_bytes: int, max_requests: int, max_blocks_per_row: int
) -> tuple[int, int]:
    """(blocks, states) of evicted requests that so much host memory holds: each request needs its state and blocks.

    For every state there is room for the blocks of half a longest sequence, where the memory holds so many, and there
    are no more states than max_requests. Memory for less than one such request goes to one state and blocks.
    Example: 100 bytes, blocks of 5, states of 10, 8 blocks a row -> 3 requests of 10 + 4 x 5: (14, 3).
    """
    if not slot_bytes:
        return (swap_bytes // block_bytes if block_bytes else 0), 0
    if not block_bytes:
        return 0, 0  # blocks that take no memory never run out, so no request is evicted
    if swap_bytes < slot_bytes + block_bytes:
        return 0, 0
    typical = slot_bytes + -(-max_blocks_per_row // 2) * block_bytes
    num_states = min(max(1, swap_bytes // typical), max_requests)
    return (swap_bytes - num_states * slot_bytes) // block_bytes, num_states

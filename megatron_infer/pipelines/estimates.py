"""Memory of a model and its engine, from the shape alone: what a length, a batch and a share of the memory come to."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_infer.config.capacity import AVAILABLE_SHARE_LIMIT, GIB, blocks_for
from megatron_infer.config.graph_memory import GraphMemory
from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.config.model_shape import ModelShape, kv_block_bytes
from megatron_infer.errors import CapacityError

MOST_REQUESTS = 512
"""Requests at once by default, where memory and the tokens of a step allow more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of one rank, in bytes, by estimate."""

    free: int
    """Free memory of the device, for one engine."""
    weights: int
    activations: int
    """Of a step of the most tokens."""
    cache: int
    """Keys, values and recurrent states: the buffer."""

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.cache


def weights_bytes(shape: ModelShape) -> int:
    """The parameters of a rank."""
    return shape.num_parameters * shape.kv_dtype_bytes


def activation_bytes(shape: ModelShape, *, max_tokens: int, max_length: int) -> int:
    """What a step of so many prompt tokens needs beside weights and cache."""
    memory = GraphMemory(model=shape, max_keys=max_length)
    return memory.of(GraphShape(num_tokens=max_tokens, num_prefill=1, num_decode=0)).live


def page_bytes(shape: ModelShape, page_size: int) -> int:
    """Keys and values of a block, over all layers of a rank."""
    return kv_block_bytes(
        num_layers=shape.num_attention_layers,
        block_size=page_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype_bytes=shape.kv_dtype_bytes,
    )


def sequence_bytes(shape: ModelShape, *, length: int, page_size: int) -> int:
    """The cache of one request of so many tokens: its blocks, and its recurrent state."""
    state = 0 if shape.state is None else shape.state.slot_bytes
    return blocks_for(length, page_size) * page_bytes(shape, page_size) + state


def room_for_cache(shape: ModelShape, *, free: int, utilization: float, max_tokens: int, max_length: int) -> int:
    """What a share of the free memory leaves for the cache beside weights and activations; may be below 0.

    At most what the engine takes of the memory that is free once the weights are loaded.
    """
    weights = weights_bytes(shape)
    left = int(free * utilization) - weights - activation_bytes(shape, max_tokens=max_tokens, max_length=max_length)
    return min(left, int(AVAILABLE_SHARE_LIMIT * max(0, free - weights)))


def cache_bytes(shape: ModelShape, *, room: int, max_length: int, max_batch: int, page_size: int) -> int:
    """The buffer: room for max_batch requests of max_length and the dummies beside them, no more than there is."""
    spare = page_bytes(shape, page_size) + (0 if shape.state is None else shape.state.slot_bytes)
    wanted = max_batch * sequence_bytes(shape, length=max_length, page_size=page_size) + spare
    return min(room, wanted)


def longest_that_fits(shape: ModelShape, *, room: int, page_size: int) -> int:
    """Tokens of the longest sequence whose cache fits beside the dummies; 0: not one block."""
    state = 0 if shape.state is None else 2 * shape.state.slot_bytes
    page = page_bytes(shape, page_size)
    if not page:
        return (1 << 62) if room >= state else 0
    return max(0, (room - state) // page - 1) * page_size


def batch_size(shape: ModelShape, *, room: int, max_tokens: int, page_size: int) -> int:
    """Requests at once that suit the memory: each has a block and its state, states take half of it at most."""
    page, state = page_bytes(shape, page_size), 0 if shape.state is None else shape.state.slot_bytes
    limits = [MOST_REQUESTS, max_tokens]
    if page:
        limits.append(room // (page + state) - 1)
    if state:
        limits.append(room // 2 // state if page else room // state - 1)
    return max(1, min(limits))


def too_little(
    shape: ModelShape, *, free: int, utilization: float, max_tokens: int, max_length: int, page_size: int
) -> CapacityError:
    """The error for memory that does not hold weights, activations and one sequence, with values that would fit."""
    weights = weights_bytes(shape)
    activations = activation_bytes(shape, max_tokens=max_tokens, max_length=max_length)
    room = room_for_cache(shape, free=free, utilization=utilization, max_tokens=max_tokens, max_length=max_length)
    cache = sequence_bytes(shape, length=max_length, page_size=page_size) + page_bytes(shape, page_size)
    remedies = []
    longest = longest_that_fits(shape, room=room, page_size=page_size)
    if longest >= 2:
        remedies.append(f"max_length={longest}")
    least = (weights + activations + cache) / free if free else 2.0
    if utilization < least <= 1.0 and weights + cache / AVAILABLE_SHARE_LIMIT <= free:
        remedies.append(f"device_memory_utilization={min(1.0, int(least * 100 + 1) / 100)}")
    if max_tokens > 256:
        fewer = activation_bytes(shape, max_tokens=256, max_length=max_length)
        if room + activations - fewer >= cache:
            remedies.append("max_batch_input_tokens=256")
    if shape.dtype == "float32" and free * utilization >= (weights + activations + cache) / 2:
        remedies.append("quantization_encoding=bfloat16")
    fits = "; what would fit: " + ", or ".join(remedies[:3]) if remedies else ""
    return CapacityError(
        f"{utilization:.0%} of {free / GIB:.2f} GiB (device_memory_utilization) do not hold the weights "
        f"({weights / GIB:.2f} GiB), the activations of {max_tokens:,} tokens ({activations / GIB:.2f} GiB) and one "
        f"sequence of {max_length:,} tokens ({cache / GIB:.2f} GiB){fits or '; take a smaller model or more memory'}"
    )

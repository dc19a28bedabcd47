"""Memory of a model and its engine, from the shape alone: what a length, a batch and a share of the memory come to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_infer.config.capacity import AVAILABLE_SHARE_LIMIT, GIB, blocks_for
from megatron_infer.config.graph_memory import GraphMemory
from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.config.model_shape import ModelShape, kv_token_bytes, state_bytes
from megatron_infer.errors import CapacityError
from megatron_infer.kernels.weight_dtypes import OUTPUT_DTYPE, WEIGHT_DTYPE_BYTES, weight_bytes

MOST_REQUESTS = 512
"""Requests at once by default, where memory and the tokens of a step allow more."""
FEWER_TOKENS = 256
"""Tokens of a step that are proposed where activations take too much."""
SNAPSHOT_SHARE = 1 / 9
"""Share of the room for recurrent states that the prefix cache keeps: at most an eighth of the buffer beside it."""


def packed_bytes(shape: ModelShape, *, has_own_embedding: bool, weight_dtype: str, replaces: bool) -> int:
    """Bytes that packed linear weights take beside the parameters.

    They are of all parameters but an input embedding that is not the output layer, too. replaces: in the model's own
    dtype they take the place of parameters. In that dtype the output layer is there in 8 bits as well, with which
    greedy tokens are found.
    """
    output = shape.padded_vocab_size * shape.hidden_size
    weights = max(0, shape.num_parameters - (output if has_own_embedding else 0))
    if weight_dtype in WEIGHT_DTYPE_BYTES:
        return weight_bytes(weight_dtype, weights, min(output, weights))
    weights = 0 if replaces else weights
    return weights * shape.kv_dtype_bytes + output_copy_bytes(shape)


def output_copy_bytes(shape: ModelShape) -> int:
    """Bytes of the output layer in 8 bits, see `packed_bytes`."""
    return int(shape.padded_vocab_size * shape.hidden_size * WEIGHT_DTYPE_BYTES[OUTPUT_DTYPE])


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of one rank, in bytes, by estimate."""

    free: int
    """Free memory of the device, for one engine."""
    weights: int
    """Parameters, and on a CPU what the packed copies of linear weights take beside them."""
    activations: int
    """Bytes of activations of a step with the most tokens."""
    cache: int
    """Keys, values and recurrent states."""

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """What fits beside one rank's share of a model."""

    shape: ModelShape
    free: int
    """Free memory of the device, for one engine, in bytes."""
    utilization: float
    """Share of it for weights, activations and cache."""
    page_size: int
    kv_element_bytes: int
    max_tokens: int
    """Tokens of a step, at most."""
    draft: ModelShape | None = None
    """One rank's share of the model that drafts."""
    packed: int = 0
    """Bytes that copies of linear weights in the layout of a CPU's kernels add, see `packed_bytes`."""
    weight_dtype: str = "auto"
    """The option: unless it is auto, the copies have as many bits in every dtype of a model."""
    keeps_snapshots: bool
    """The prefix cache keeps recurrent states, on top of the buffer."""
    buffer: int | None = None
    """The buffer asked for, in bytes. None: what the share leaves."""

    @property
    def weights(self) -> int:
        """Bytes of the parameters of the rank, those of a draft model, and packed copies of both."""
        return self.packed + sum(shape.weight_bytes for shape in self._shapes)

    @property
    def _shapes(self) -> list[ModelShape]:
        """The model, and the model that drafts."""
        return [self.shape] if self.draft is None else [self.shape, self.draft]

    def activations(self, max_length: int) -> int:
        """Bytes that a step of the most tokens needs beside weights and cache."""
        return self._activations(self.max_tokens, max_length)

    def _activations(self, max_tokens: int, max_length: int) -> int:
        memory = GraphMemory(model=self.shape, max_keys=max_length)
        return memory.of(GraphShape(num_tokens=max_tokens, num_prefill=1, num_decode=0)).live

    @property
    def page(self) -> int:
        """Bytes of keys and values of a block, over all layers of the rank and of a draft model; 0 without attention
        layers."""
        return self.page_size * sum(kv_token_bytes(shape, self.kv_element_bytes) for shape in self._shapes)

    @property
    def state(self) -> int:
        """Bytes of a request's recurrent state; 0 without Mamba layers."""
        return state_bytes(self.shape)

    @property
    def _output_copies(self) -> int:
        """Bytes of the output layers in 8 bits, which are the same in every dtype of a model."""
        return sum(output_copy_bytes(shape) for shape in self._shapes)

    def room(self, max_length: int) -> int:
        """Bytes for the buffer beside weights and activations; 0 or less: there is none.

        At most the share that an engine takes of what is free once the weights are loaded.
        """
        most = int(AVAILABLE_SHARE_LIMIT * max(0, self.free - self.weights))
        if self.buffer is not None:
            return min(self.buffer, most)
        left = min(int(self.free * self.utilization) - self.weights - self.activations(max_length), most)
        return left - int(left * SNAPSHOT_SHARE) if self.keeps_snapshots else left

    def sequence(self, length: int) -> int:
        """Bytes of the cache of one request of so many tokens: its blocks and its state."""
        return blocks_for(length, self.page_size) * self.page + self.state

    def longest(self, room: int) -> int:
        """Tokens of the longest sequence that fits beside the dummy block and state; 0: none."""
        if not self.page:
            return (1 << 62) if room >= 2 * self.state else 0
        return max(0, (room - 2 * self.state) // self.page - 1) * self.page_size

    def batch_size(self, room: int) -> int:
        """Requests at once that suit the memory: each has a block and its state, and states take half of it at most."""
        limits = [MOST_REQUESTS, self.max_tokens]
        if self.page:
            limits.append(room // (self.page + self.state) - 1)
        if self.state:
            limits.append(room // 2 // self.state if self.page else room // self.state - 1)
        return max(1, min(limits))

    def buffer_bytes(self, room: int, *, max_length: int, max_batch: int) -> int:
        """The buffer: max_batch requests of max_length and the dummies beside them, no more than there is room."""
        return min(room, max_batch * self.sequence(max_length) + self.page + self.state)

    def fits(self, max_length: int) -> bool:
        """Whether one sequence of so many tokens fits beside weights and activations."""
        return self.longest(self.room(max_length)) >= max_length

    def too_little(self, max_length: int) -> CapacityError:
        """The error for memory that does not hold weights, activations and one sequence, with values that would fit."""
        weights, activations = self.weights, self.activations(max_length)
        cache = self.sequence(max_length) + self.page + self.state
        longest = self.longest(self.room(max_length))
        remedies = [f"max_length={longest}"] if longest >= self.page_size else []
        remedies += [text for text, changed in self._changed(weights + activations + cache) if changed.fits(max_length)]
        fits = f"what would fit: {', or '.join(remedies[:3])}" if remedies else "take a smaller model or more memory"
        share = f"{self.utilization:.0%} of {self.free / GIB:.3f} GiB (device_memory_utilization) do"
        if self.buffer is not None:
            share = f"buffer_size_gb={self.buffer / GIB:.3f} beside the weights in {self.free / GIB:.3f} GiB does"
        return CapacityError(
            f"{share} not hold the weights ({weights / GIB:.3f} GiB), the activations of {self.max_tokens:,} tokens "
            f"({activations / GIB:.3f} GiB) and the cache of one sequence of {max_length:,} tokens "
            f"({cache / GIB:.3f} GiB); {fits}"
        )

    def _changed(self, needed: int) -> Iterator[tuple[str, Estimator]]:
        """(field and value, the estimator with it) of changes that may help. needed: bytes in all."""
        if self.buffer is not None:
            gib = math.ceil((self.buffer + needed - self.weights) / GIB * 1e3) / 1e3
            yield f"buffer_size_gb={gib}", replace(self, buffer=int(gib * GIB))
        else:
            share = math.ceil(needed * (1 + 2 * SNAPSHOT_SHARE * self.keeps_snapshots) / max(1, self.free) * 100) / 100
            if self.utilization < share <= 1.0:
                yield f"device_memory_utilization={share}", replace(self, utilization=share)
            if self.max_tokens > FEWER_TOKENS:
                yield f"max_batch_input_tokens={FEWER_TOKENS}", replace(self, max_tokens=FEWER_TOKENS)
        if self.shape.dtype == "float32":
            state = None if self.shape.state is None else replace(self.shape.state, conv_dtype="bfloat16")
            shape = replace(self.shape, dtype="bfloat16", kv_dtype_bytes=2, state=state)
            size = min(2, self.kv_element_bytes)
            rounded = self.packed if self.weight_dtype != "auto" else min(self.packed, self._output_copies)
            packed = rounded + (self.packed - rounded) // 2
            yield (
                "quantization_encoding=bfloat16",
                replace(self, shape=shape, kv_element_bytes=size, packed=packed),
            )

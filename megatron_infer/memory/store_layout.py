"""Where in one region of bytes the KV cache and the recurrent states are.

    [ KV: layers, 2, num_blocks, B, K, H | up to a page | states: slots, bytes of a slot ]

Shape legend: S state slots, L Mamba layers, C channels, W taps, H heads, P head dim, N state dim, X bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_infer.config.model_shape import StateShape
from megatron_infer.kernels.ssm import LayerStates

PAGE_BYTES = 4096
"""States begin on a page of their own, so that neither pool's pages hold the other's content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLayout:
    """Sizes and views of the two pools."""

    kv_shape: tuple[int, int, int, int, int, int]
    """[layers, 2, num_blocks, B, K, H]"""
    dtype: torch.dtype
    state: StateShape | None
    num_state_slots: int

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, 2, B, K, H]"""
        layers, two, _, size, heads, dim = self.kv_shape
        return layers, two, size, heads, dim

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Of one slot."""
        return 0 if self.state is None else self.state.slot_bytes

    @property
    def state_start(self) -> int:
        kv_bytes = self.kv_shape[2] * self.block_bytes
        return kv_bytes if self.state is None else -(-kv_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def num_bytes(self) -> int:
        return self.state_start + self.num_state_slots * self.state_bytes

    def cache(self, region_X: Tensor) -> Tensor:
        """The KV cache in the region."""
        return region_X[: self.kv_shape[2] * self.block_bytes].view(self.dtype).view(self.kv_shape)

    def slots(self, region_X: Tensor) -> Tensor:
        """The state slots in the region, bytes [slots, slot_bytes]."""
        return region_X[self.state_start : self.num_bytes].view(self.num_state_slots, self.state_bytes)

    def block_layers(self, cache: Tensor) -> list[list[Tensor]]:
        """The cache by layer, one part [num_blocks, 2, B, K, H] each."""
        return [[layer.transpose(0, 1)] for layer in cache]

    def state_layers(self, slots_SX: Tensor) -> list[list[Tensor]]:
        """The slots' bytes by Mamba layer, in two parts, [slots, bytes] each; what pads them goes with the last."""
        state = self.state
        assert state is not None
        conv = _edges(state.num_layers, 0, state.conv_bytes, state.conv_shape, state.conv_dtype)
        ssm = _edges(state.num_layers, state.conv_bytes, state.slot_bytes, state.ssm_shape, state.ssm_dtype)
        pairs = zip(conv, ssm, strict=True)
        return [[slots_SX[:, first:last] for first, last in pair] for pair in pairs]

    def ranges(self, blocks: Iterable[int], state_slots: Iterable[int]) -> Iterator[tuple[int, int]]:
        """(begin, end) of these blocks' and states' bytes; neighbours as one."""
        num_lanes = self.kv_shape[0] * 2
        if self.block_bytes:
            yield from _ranges(0, num_lanes, self.kv_shape[2], self.block_bytes // num_lanes, blocks)
        if self.state is not None:
            yield from _ranges(self.state_start, 1, self.num_state_slots, self.state_bytes, state_slots)


class StateTensors:
    """Typed views of the state slots' bytes; slot s of every view is contiguous.

    slot:  [ conv of all layers, padded to 64 B | SSM of all layers, padded to 64 B ]
    """

    def __init__(self, slots_SX: Tensor, shape: StateShape) -> None:
        """slots_SX: bytes, [slots, slot_bytes]."""
        conv, ssm = (shape.num_layers, *shape.conv_shape), (shape.num_layers, *shape.ssm_shape)
        self.conv_SLCW = _typed(slots_SX, 0, conv, getattr(torch, shape.conv_dtype))
        self.ssm_SLHPN = _typed(slots_SX, shape.conv_bytes, ssm, getattr(torch, shape.ssm_dtype))
        self._layers = [LayerStates(self.conv_SLCW[:, i], self.ssm_SLHPN[:, i]) for i in range(shape.num_layers)]

    def layer(self, number: int) -> LayerStates:
        """The states of Mamba layer `number`, counted among the Mamba layers of this rank."""
        return self._layers[number]


def _edges(num_layers: int, start: int, stop: int, shape: Sequence[int], dtype: str) -> list[tuple[int, int]]:
    """(first, last) byte of each layer's part between start and stop."""
    size = math.prod(shape) * getattr(torch, dtype).itemsize
    first = [start + layer * size for layer in range(num_layers)]
    return list(zip(first, [*first[1:], stop], strict=True))


def _typed(slots_SX: Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    return slots_SX[:, start : start + num_bytes].view(dtype).unflatten(1, tuple(shape))


def _ranges(
    start: int, num_lanes: int, num_places: int, place_bytes: int, places: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """(begin, end) of places in each of num_lanes lanes [num_places, place_bytes] from `start`.

    Example: from 0, 2 lanes of 8 places of 10 bytes, places 1, 2 and 5 -> (10, 30), (50, 60), (90, 110), (130, 140).
    """
    runs: list[list[int]] = []
    for place in sorted(places):
        if runs and runs[-1][1] == place:
            runs[-1][1] += 1
        else:
            runs.append([place, place + 1])
    for lane in range(num_lanes):
        base = start + lane * num_places * place_bytes
        yield from ((base + first * place_bytes, base + end * place_bytes) for first, end in runs)

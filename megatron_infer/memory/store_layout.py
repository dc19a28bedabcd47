"""Where the KV cache and the recurrent states lie in one region of bytes.

    [ KV: layers, 2, num_blocks, B, K, H | KV of the draft model, the same num_blocks | up to a page | states: slots ]

Shape legend: S state slots, L Mamba layers, C channels, W taps, H heads, P head dim, N state dim, X bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_infer.config.model_shape import ModelShape, StateShape
from megatron_infer.config.resolved_sizes import ResolvedSizes
from megatron_infer.kernels.ssm import LayerStates

PAGE_BYTES = 4096
"""States begin on a page of their own, so that neither pool's pages hold the other's content."""
BLOCKS, DRAFT_BLOCKS, STATES = "blocks", "draft blocks", "states"
Layer = tuple[str, int]
"""(BLOCKS, DRAFT_BLOCKS or STATES, number of the layer among those that have them)."""
KVShape = tuple[int, int, int, int, int, int]
"""[layers, 2, num_blocks, B, K, H]; of latents [layers, 1, num_blocks, B, 1, H] (see `ModelShape.kv_planes`)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLayout:
    """Sizes of the two pools, their places in the region, and views of them."""

    kv_shape: KVShape
    """layers: attention layers, 0 or more."""
    dtype: torch.dtype
    """The dtype of keys and values."""
    draft_kv_shape: KVShape | None = None
    """The draft model's keys and values, under the same block ids; None: no model drafts."""
    draft_dtype: torch.dtype | None = None
    state: StateShape | None = None
    num_state_slots: int = 0
    dummy_state_slot: int | None = None
    """The slot that padding may write to; None without states."""
    layer_order: Sequence[str] | None = None
    """"blocks" for an attention layer, "states" for a Mamba layer, in the order in which a step runs them; None:
    attention first."""

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        sizes: ResolvedSizes,
        *,
        dtype: torch.dtype,
        layer_order: Sequence[str],
        draft: ModelShape | None = None,
        draft_dtype: torch.dtype | None = None,
    ) -> StoreLayout:
        """dtype, draft_dtype: of keys and values."""
        return cls(
            kv_shape=_kv_shape(shape, sizes),
            dtype=dtype,
            draft_kv_shape=None if draft is None else _kv_shape(draft, sizes),
            draft_dtype=draft_dtype,
            state=shape.state,
            num_state_slots=sizes.num_state_slots,
            dummy_state_slot=None if shape.state is None else sizes.max_requests,
            layer_order=layer_order,
        )

    def __post_init__(self) -> None:
        dummy, num_slots = self.dummy_state_slot, self.num_state_slots
        if self.state is not None:
            assert dummy is not None and 0 <= dummy < num_slots, f"dummy state slot {dummy} of {num_slots}"

    @property
    def layers(self) -> list[Layer]:
        """The layers that keep something, in the order in which a step runs them."""
        counts = Counter(blocks=self.kv_shape[0], states=0 if self.state is None else self.state.num_layers)
        kinds = list(counts.elements() if self.layer_order is None else self.layer_order)
        assert Counter(kinds) == counts, kinds
        num_draft = 0 if self.draft_kv_shape is None else self.draft_kv_shape[0]  # a draft model runs first
        of_model = [(kind, kinds[:i].count(kind)) for i, kind in enumerate(kinds)]
        return [*((DRAFT_BLOCKS, layer) for layer in range(num_draft)), *of_model]

    @property
    def num_blocks(self) -> int:
        return self.kv_shape[2]

    @property
    def dummy_block(self) -> int:
        """The block that padding may write to: the last one."""
        return self.num_blocks - 1

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.kv_shape[3]

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, 2, B, K, H]"""
        return _without_places(self.kv_shape)

    @property
    def draft_block_shape(self) -> tuple[int, int, int, int, int]:
        """The same of the draft model."""
        assert self.draft_kv_shape is not None, "no model drafts"
        return _without_places(self.draft_kv_shape)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, without the draft model's."""
        return math.prod(self.block_shape) * self.dtype.itemsize

    @property
    def draft_block_bytes(self) -> int:
        """Bytes of one block in all layers of the draft model; 0 without one."""
        if self.draft_kv_shape is None or self.draft_dtype is None:
            return 0
        return math.prod(self.draft_block_shape) * self.draft_dtype.itemsize

    @property
    def draft_start(self) -> int:
        """The byte of the region at which the draft model's keys and values begin."""
        kv_bytes = self.num_blocks * self.block_bytes
        return kv_bytes if self.draft_kv_shape is None else -(-kv_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def state_bytes(self) -> int:
        """Bytes of one state slot."""
        return 0 if self.state is None else self.state.slot_bytes

    @property
    def state_start(self) -> int:
        """The byte of the region at which the states begin."""
        kv_bytes = self.draft_start + self.num_blocks * self.draft_block_bytes
        return kv_bytes if self.state is None else -(-kv_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes of the region; at least 1, since no region is empty."""
        return max(1, self.state_start + self.num_state_slots * self.state_bytes)

    def cache(self, region_X: Tensor, *, of: str = BLOCKS) -> Tensor:
        """The KV cache in the region; of: BLOCKS, or DRAFT_BLOCKS for the draft model's."""
        if of == BLOCKS:
            return region_X[: self.num_blocks * self.block_bytes].view(self.dtype).view(self.kv_shape)
        assert self.draft_kv_shape is not None and self.draft_dtype is not None, "no model drafts"
        end = self.draft_start + self.num_blocks * self.draft_block_bytes
        return region_X[self.draft_start : end].view(self.draft_dtype).view(self.draft_kv_shape)

    def slots(self, region_X: Tensor) -> Tensor:
        """The state slots in the region, bytes [slots, slot_bytes]."""
        return region_X[self.state_start : self.num_bytes].view(self.num_state_slots, self.state_bytes)

    def block_layers(self, cache: Tensor) -> list[list[Tensor]]:
        """The cache by layer, one part [num_blocks, 2, B, K, H] each."""
        return [[layer.transpose(0, 1)] for layer in cache]

    def state_layers(self, slots_SX: Tensor) -> list[list[Tensor]]:
        """The slots' bytes by Mamba layer, in two parts, [slots, bytes] each; padding belongs to the last layer's."""
        state = self.state
        assert state is not None
        conv = _edges(state.num_layers, 0, state.conv_bytes, state.conv_shape, state.conv_dtype)
        ssm = _edges(state.num_layers, state.conv_bytes, state.slot_bytes, state.ssm_shape, state.ssm_dtype)
        pairs = zip(conv, ssm, strict=True)
        return [[slots_SX[:, first:last] for first, last in pair] for pair in pairs]


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


def _kv_shape(shape: ModelShape, sizes: ResolvedSizes) -> KVShape:
    places = sizes.num_blocks, sizes.block_size
    return shape.num_attention_layers, shape.kv_planes, *places, shape.num_kv_heads, shape.head_dim


def _without_places(kv_shape: KVShape) -> tuple[int, int, int, int, int]:
    layers, planes, _, size, heads, dim = kv_shape
    return layers, planes, size, heads, dim


def _edges(num_layers: int, start: int, stop: int, shape: Sequence[int], dtype: str) -> list[tuple[int, int]]:
    """(first, last) byte of each layer's part between start and stop."""
    size = math.prod(shape) * getattr(torch, dtype).itemsize
    first = [start + layer * size for layer in range(num_layers)]
    return list(zip(first, [*first[1:], stop], strict=True))


def _typed(slots_SX: Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    return slots_SX[:, start : start + num_bytes].view(dtype).unflatten(1, tuple(shape))

"""The pools that a block id names a place of: the model's keys and values, and those of a draft model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_infer.kernels.kv_rounding import movable
from megatron_infer.memory.copy_pipeline import CopyPipeline
from megatron_infer.memory.host_arena import device_index
from megatron_infer.memory.pool import PoolMemory
from megatron_infer.memory.store_layout import BLOCKS, DRAFT_BLOCKS, StoreLayout
from megatron_infer.scheduler.context.copies import Copy


class BlockPools:
    """What happens to a block happens to it in each pool. Without attention layers there is none, and nothing happens.

    The memory is the caller's: `bind` says where it is, as long as it is there.
    """

    def __init__(
        self, layout: StoreLayout, *, device: torch.device, pipeline: CopyPipeline | None, num_host_slots: int
    ) -> None:
        self._layout, self._pipeline = layout, pipeline
        self._dtypes = {BLOCKS: layout.dtype} if layout.block_bytes else {}
        if layout.draft_dtype is not None:
            self._dtypes[DRAFT_BLOCKS] = layout.draft_dtype
        shapes = {BLOCKS: layout.block_shape} | ({DRAFT_BLOCKS: layout.draft_block_shape} if layout.draft_dtype else {})
        self.pools = [
            PoolMemory(
                noun,
                shapes[noun],
                movable(torch.empty(0, dtype=dtype)).dtype,
                dummy=layout.dummy_block,
                device=device,
                num_host_slots=num_host_slots,
                pipeline=pipeline,
            )
            for noun, dtype in self._dtypes.items()
        ]
        self._caches: dict[str, Tensor] = {}

    def bind(self, region_X: Tensor) -> None:
        """The pools are in this region now, content undefined."""
        layout = self._layout
        self._caches = {noun: layout.cache(region_X, of=noun) for noun in self._dtypes}
        for pool in self.pools:
            content = movable(self._caches[pool.noun])
            pool.bind(content.permute(2, 0, 1, 3, 4, 5), layout.block_layers(content))

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy whole blocks in every layer; no destination comes twice or is a source, so order does not matter."""
        index = device_index(self._pipeline, [place for copy in copies for place in copy[1:]])
        for cache in map(movable, self._caches.values()):
            cache.index_copy_(2, index[1::2], cache.index_select(2, index[::2]))

    def free_host_slots(self, slots: Iterable[int]) -> None:
        """Drop what these host slots hold."""
        freed = list(slots)
        for pool in self.pools:
            pool.free_host_slots(freed)

    def read(self, blocks: Sequence[int]) -> dict[str, Tensor]:
        """Copies on the host, [len(blocks), layers, 2, B, K, H], by noun of the pool."""
        return {pool.noun: pool.read(blocks).view(self._dtypes[pool.noun]) for pool in self.pools}

    def write(self, blocks: Sequence[int], content: Mapping[str, Tensor]) -> None:
        """Put what `read` gave (same layout) into `blocks`."""
        for pool in self.pools:
            pool.write(blocks, movable(content[pool.noun]))

    @property
    def copy_s(self) -> float:
        """Seconds to copy one block to the host or back, as last measured or seen; 0.0 before, and without memory."""
        return sum(pool.copy_s for pool in self.pools)

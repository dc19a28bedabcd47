"""The large tensors: the KV cache. Knows bytes and devices, not who owns a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_infer.context.host import Move


class StateStore:
    """Holds `kv_cache` [layers, 2, num_blocks, B, K, H]. On a CPU an untouched page costs nothing."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_slots: int = 0,
    ) -> None:
        self.block_size = block_size
        self.dummy_block = num_blocks - 1
        self.kv_cache: Tensor = torch.empty(
            (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), dtype=dtype, device=device
        )
        self.kv_cache[:, :, self.dummy_block].zero_()
        self.host: Tensor = torch.empty(
            (num_host_slots, num_layers, 2, block_size, num_kv_heads, head_dim), dtype=dtype, device="cpu"
        )
        """[num_host_slots, layers, 2, B, K, H]: blocks of requests that wait."""

    @property
    def num_bytes(self) -> int:
        return self.kv_cache.numel() * self.kv_cache.element_size()

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """A copy of blocks on the host, [len(blocks), layers, 2, B, K, H]."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.kv_cache.device)
        return self.kv_cache.index_select(2, index).permute(2, 0, 1, 3, 4, 5).contiguous().cpu()

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        """Put what `read_blocks` gave (same layout) into `blocks`."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.kv_cache.device)
        self.kv_cache.index_copy_(2, index, content.to(self.kv_cache.device).permute(1, 2, 0, 3, 4, 5))

    def run_moves(self, moves: Sequence[Move]) -> None:
        """Copy whole blocks between device and host, in order (see `context.host.HostSlots`)."""
        for direction, block, slot in moves:
            if direction == "out":
                self.host[slot].copy_(self.kv_cache[:, :, block])
            else:
                self.kv_cache[:, :, block].copy_(self.host[slot])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer; destinations are fresh, so order does not matter."""
        if not pairs:
            return
        index = torch.tensor(pairs, dtype=torch.int64).to(self.kv_cache.device, non_blocking=True)
        self.kv_cache.index_copy_(2, index[:, 1], self.kv_cache.index_select(2, index[:, 0]))

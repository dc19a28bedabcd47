"""What the pools hold: read, written and moved, as long as they have memory. `memory.store` says when that is.

pool  <-- run_copies -->  host slots: blocks and states of evicted requests while the pool is in use

While a restore is under way everything here comes, on the device, behind all of it; a step alone asks layer by layer
(see `arrival`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_infer.context.copies import Copy, CopyKind
from megatron_infer.errors import StateReleased
from megatron_infer.kernels.kv_rounding import movable
from megatron_infer.memory.copy_pipeline import CopyPipeline
from megatron_infer.memory.host_arena import device_index
from megatron_infer.memory.layerwise_restore import LayerwiseRestore
from megatron_infer.memory.pool import PoolMemory


class PoolContent:
    """The KV cache's blocks and the recurrent states; either may be missing, copying it then does nothing."""

    def __init__(self, blocks: PoolMemory | None, states: PoolMemory | None, pipeline: CopyPipeline | None) -> None:
        self._blocks, self._states, self._pipeline = blocks, states, pipeline
        self._pools = [pool for pool in (blocks, states) if pool is not None]
        self._kv_cache: Tensor | None = None
        """None while the pools have no memory."""
        self._arrival: LayerwiseRestore | None = None
        """A restore whose copies may still run."""
        self.arrived_s: float | None = None
        """Seconds that the copies of the last restore took, by the device's clock where it is not the CPU; None while
        they may still run, and before any."""

    @property
    def kv_cache(self) -> Tensor:
        """[layers, 2, num_blocks, B, K, H]. Raises StateReleased between release (or offload) and restore."""
        self._check_held()
        assert self._kv_cache is not None
        return self._kv_cache

    def arrival(self) -> LayerwiseRestore | None:
        """Layers that what comes next on the device has to wait for, each before it is used; None: all are there.

        Does not wait; what only the restore needed is let go of once it is done.
        """
        if self._arrival is None:
            return None
        if self._arrival.is_done():
            self._finish_arrival()
            return None
        return None if self._arrival.is_awaited else self._arrival

    def _finish_arrival(self) -> float:
        """Wait for a restore that is under way -> `arrived_s`, 0.0 where none is; its host copy is let go of."""
        arrival = self._arrival
        if arrival is None:
            return 0.0
        self.arrived_s = seconds = arrival.finish()
        arrival.await_all()
        self._let_go()
        self._arrival = None
        return seconds

    def _let_go(self) -> None:
        """A restore is over: of its host copy, and of what pinned memory is too much to keep."""
        self._drop_staging()
        for pool in self._pools:
            pool.drop_copy()
        self.trim_host()

    def _drop_staging(self) -> None:
        """The device memory that copies took on the way is torch's again."""
        if self._pipeline is not None:
            self._pipeline.drop_staging()

    @property
    def is_released(self) -> bool:
        return self._kv_cache is None

    # ------------------------------------------------------------------ on the host

    def host_bytes(self) -> int:
        """Bytes of host memory taken now by the copy of an offload and by what was swapped out (CUDA: may be)."""
        return sum(pool.host_bytes() for pool in self._pools)

    def idle_host_bytes(self) -> int:
        """Pinned host memory kept for the next offload."""
        return 0 if self._pipeline is None else self._pipeline.host.idle_bytes()

    def trim_host(self, keep_bytes: int | None = None) -> int:
        """Unpin idle host memory beyond keep_bytes (None: a small share of the machine's) -> bytes unpinned."""
        return 0 if self._pipeline is None else self._pipeline.host.trim(keep_bytes)

    @property
    def copy_s_per_block(self) -> float:
        """Seconds to move one block to the host or back, as last measured or seen; 0.0 before, and without memory."""
        return 0.0 if self._blocks is None else self._blocks.copy_s

    @property
    def copy_s_per_state(self) -> float:
        """The same of one state slot; 0.0 without recurrent state."""
        return 0.0 if self._states is None else self._states.copy_s

    # ------------------------------------------------------------------ moving

    def run_copies(self, copies: Sequence[Copy]) -> None:
        """Copy blocks and states within the pools, to host slots and back, with the result of doing one copy after the
        other. Blocks or states that only other pipeline stages keep are left out.

        On CUDA they are enqueued on the current stream and nothing waits. Raises MemoryError when the host has no
        room within num_host_slots and num_host_states.
        """
        if not copies:
            return
        self._check_held()
        for kind, group in _groups(copies):
            pool = self._blocks if kind in _OF_BLOCKS else self._states
            if pool is None:
                continue
            if kind is CopyKind.BLOCK:
                self._copy_blocks(group)
            elif kind is CopyKind.STATE:
                pool.copy((copy.source, copy.destination) for copy in group)
            elif kind in _OUT:  # by host slot: neighbours are copied as one
                group.sort(key=lambda copy: copy.destination)
                pool.swap_out([copy.source for copy in group], [copy.destination for copy in group])
            else:
                group.sort(key=lambda copy: copy.source)
                pool.swap_in([copy.destination for copy in group], [copy.source for copy in group])

    def free_host_slots(self, slots: Iterable[int]) -> None:
        """Drop the blocks these slots hold; slots that were never written are fine."""
        if self._blocks is not None:
            self._blocks.free_host_slots(slots)

    def free_host_states(self, slots: Iterable[int]) -> None:
        """The same of host states."""
        if self._states is not None:
            self._states.free_host_slots(slots)

    def measure_copy_s_per_block(self) -> float:
        """`copy_s_per_block` measured now, on the dummy block."""
        self._check_held()
        return 0.0 if self._blocks is None else self._blocks.measure_copy_s()

    def measure_copy_s_per_state(self) -> float:
        """`copy_s_per_state` measured now, on the dummy slot."""
        self._check_held()
        return 0.0 if self._states is None else self._states.measure_copy_s()

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """A copy of blocks on the host, [len(blocks), layers, 2, B, K, H]."""
        self._check_held()
        assert self._blocks is not None, "blocks of a model without attention layers hold nothing"
        return self._blocks.read(blocks).view(self.kv_cache.dtype)

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        """Put what `read_blocks` gave (same layout) into `blocks`."""
        self._check_held()
        assert self._blocks is not None, "blocks of a model without attention layers hold nothing"
        self._blocks.write(blocks, movable(content))

    def _copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy whole blocks in every layer; no destination comes twice or is a source, so order does not matter."""
        cache = movable(self.kv_cache)
        index = device_index(self._pipeline, [place for copy in copies for place in copy[1:]])
        cache.index_copy_(2, index[1::2], cache.index_select(2, index[::2]))

    def read_states(self, slots: Sequence[int]) -> Tensor:
        """A copy of state slots on the host, bytes [len(slots), slot_bytes]."""
        return self._state_pool().read(slots).view(torch.uint8)

    def write_states(self, slots: Sequence[int], content: Tensor) -> None:
        """Put what `read_states` gave into `slots`."""
        pool = self._state_pool()
        assert content.shape == (len(slots), pool.place_bytes), f"{tuple(content.shape)}, slots of {pool.place_bytes:,}"
        pool.write(slots, content.contiguous().view(torch.int64))

    def _check_held(self) -> None:
        """The pools have memory, and whoever uses it now on the device finds all that is to come back."""
        if self._kv_cache is None:
            raise _away(self._pools)
        if self._arrival is not None:
            self._arrival.await_all()

    def _state_pool(self) -> PoolMemory:
        self._check_held()
        assert self._states is not None, "the model keeps no recurrent state"
        return self._states


def _away(pools: Sequence[PoolMemory]) -> StateReleased:
    kept = ", ".join(f"{pool.num_kept:,} {pool.noun}" for pool in pools)
    return StateReleased(
        f"the cache is released ({kept} of it are kept on the host); resume before anything that reads or writes it"
    )


def _groups(copies: Sequence[Copy]) -> Iterator[tuple[CopyKind, list[Copy]]]:
    """Cut copies into runs of one kind, (kind, copies), in which no copy depends on one before: their order is free.

    Copies within the state pool are done one after the other, so a run of them is not cut.
    """
    group: list[Copy] = []
    targets: set[int] = set()
    for copy in copies:
        kind, source, destination = copy
        depends = destination in targets or (kind is CopyKind.BLOCK and source in targets)
        if group and (group[0].kind is not kind or (depends and kind is not CopyKind.STATE)):
            yield group[0].kind, group
            group, targets = [], set()
        group.append(copy)
        targets.add(destination)
    if group:
        yield group[0].kind, group


_OF_BLOCKS = (CopyKind.BLOCK, CopyKind.BLOCK_OUT, CopyKind.BLOCK_IN)
_OUT = (CopyKind.BLOCK_OUT, CopyKind.STATE_OUT)

"""The large tensors: the KV cache. Knows bytes and devices, not who owns a block.

        offload(blocks)                       restore(keep)
pool  -------------------->  host copy  ------------------------>  pool, other blocks undefined
      release()  -> nothing is left     restore(())

pool  <-- run_moves -->  host slots: blocks of evicted requests while the pool is in use
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_infer.context.host import Move
from megatron_infer.context.memory import HostArena
from megatron_infer.context.modes import make_region, wait
from megatron_infer.errors import StateReleased

Tick = Callable[[str], None]
"""Called with what comes next before every piece of work; it may raise to stop there."""
NUM_TIMINGS = 5
MOVE_SMOOTHING = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """What a release, an offload or a restore did."""

    seconds: float
    bytes_copied: int
    """Between pool and host copy."""
    bytes_freed: int
    """Of the memory the pool is in, measured: before minus after, negative where it was taken. On a CPU the host copy
    is in the same memory and counts against it."""
    bytes_resident: int
    """What the pool takes now."""
    num_blocks: int
    """Blocks copied."""


class StateStore:
    """Holds `kv_cache` [layers, 2, num_blocks, B, K, H]. On a CPU an untouched page costs nothing.

    Not to be kept: over a release the tensor may change, so ask `kv_cache` again at each step.
    """

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
        static_pointers: bool,
        unified_memory: bool,
        num_host_slots: int = 0,
    ) -> None:
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        block_shape = (num_layers, 2, block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dummy_block = num_blocks - 1
        self.block_bytes = math.prod(block_shape) * dtype.itemsize
        self.num_host_slots = num_host_slots
        self._device = device
        self._region = make_region(shape, dtype, device, static_pointers=static_pointers, unified_memory=unified_memory)
        pinned = device.type == "cuda"
        self._swapped = HostArena(block_shape, dtype, pinned=pinned, max_slots=num_host_slots)
        self._offloaded = HostArena(block_shape, dtype, pinned=pinned)
        self._trial = HostArena(block_shape, dtype, pinned=pinned, max_slots=1)
        self._slot_of: dict[int, int] = {}
        self._is_released = False
        self.copy_s_per_block = 0.0
        """Seconds to move one block to the host or back, as last seen; 0.0: nobody has asked or moved yet."""
        self._zero_dummy()

    @property
    def kv_cache(self) -> Tensor:
        """[layers, 2, num_blocks, B, K, H]. Raises StateReleased between release (or offload) and restore."""
        if self._is_released:
            raise StateReleased(
                f"the KV cache is released ({len(self._slot_of):,} blocks of it are kept on the host); "
                "resume before anything that reads or writes it"
            )
        return self._region.tensor

    @property
    def is_released(self) -> bool:
        return self._is_released

    @property
    def addresses_stable(self) -> bool:
        """`kv_cache` keeps its data pointer over release and restore."""
        return self._region.addresses_stable

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool when every page of it is touched."""
        return self.num_blocks * self.block_bytes

    def resident_bytes(self) -> int:
        """Bytes the pool takes now (see `Region.resident_bytes`)."""
        return self._region.resident_bytes()

    def host_bytes(self) -> int:
        """Bytes of host memory taken now by the copy of an offload and by swapped-out blocks."""
        return self._offloaded.resident_bytes() + self._swapped.resident_bytes()

    def release(self, tick: Tick) -> StoreReport:
        """Give the pool's memory back; every block's content is lost. Raises what `tick` raises, then nothing is."""
        start, before = time.perf_counter(), self._pool_memory_bytes()
        self._check_held()
        tick("release the KV cache")
        self._region.release()
        self._is_released = True
        return self._report(start, before, num_blocks=0)

    def offload(self, blocks: Sequence[int], tick: Tick) -> StoreReport:
        """Copy exactly these blocks to the host, then give the pool's memory back.

        Whatever raises on the way (`tick`, no host memory) leaves the pool as it was and no host copy.
        """
        assert len(set(blocks)) == len(blocks), f"{len(blocks)} blocks, some twice"
        start, before, pool_NX = time.perf_counter(), self._pool_memory_bytes(), self._pool_NX()
        try:
            for first, piece in self._pieces(blocks):
                tick(f"copy blocks {first} .. {first + len(piece) - 1} of {len(blocks)} to the host")
                self._offloaded.save(range(first, first + len(piece)), pool_NX, piece)
            wait(self._device)
            tick("release the KV cache")
            del pool_NX
            self._region.release()
        except BaseException:
            self._offloaded.clear()
            raise
        self._slot_of = {block: slot for slot, block in enumerate(blocks)}
        self._is_released = True
        return self._report(start, before, num_blocks=len(blocks))

    def drop_copy(self) -> int:
        """Give up what an offload kept on the host -> bytes given back; the next restore brings an empty pool."""
        before = self._offloaded.resident_bytes()
        self._offloaded.clear()
        self._slot_of = {}
        return before - self._offloaded.resident_bytes()

    def restore(self, keep: Set[int], tick: Tick) -> StoreReport:
        """Memory for the pool again, the dummy block zeroed, offloaded blocks in `keep` as they were; the rest of the
        pool is undefined, the rest of the host copy is dropped.

        Whatever raises on the way (`tick`, MemoryError, torch.OutOfMemoryError) leaves it released with its host copy:
        try again.
        """
        assert self._is_released, "the KV cache is not released"
        lost = keep - self._slot_of.keys()
        assert not lost, f"blocks {sorted(lost)[:8]} ({len(lost)} in all) were not offloaded: their content is gone"
        start, before = time.perf_counter(), self._pool_memory_bytes()
        blocks = [block for block in self._slot_of if block in keep]
        tick("allocate the KV cache")
        self._region.restore()
        try:
            self._zero_dummy()
            pool_NX = _block_major(self._region.tensor)
            for first, piece in self._pieces(blocks):
                tick(f"copy blocks {first} .. {first + len(piece) - 1} of {len(blocks)} from the host")
                self._offloaded.load([self._slot_of[block] for block in piece], pool_NX, piece)
            wait(self._device)
        except BaseException:
            self._region.release()
            raise
        self._is_released = False
        self._slot_of = {}
        self._offloaded.clear()
        return self._report(start, before, num_blocks=len(blocks))

    def run_moves(self, moves: Sequence[Move]) -> None:
        """Copy blocks to host slots and back, with the result of doing one move after the other.

        On CUDA they are enqueued on the current stream and nothing waits. Raises MemoryError when the host has no
        room for a block within its num_host_slots.
        """
        if not moves:
            return
        started = time.perf_counter()
        pool_NX = self._pool_NX()
        for group in _groups(moves):
            # No target comes twice in a group, so its order is free: by slot, neighbours are copied as one.
            group.sort(key=lambda move: move[2])
            slots, blocks = [slot for _, _, slot in group], [block for _, block, _ in group]
            copy = self._swapped.save if group[0][0] == "out" else self._swapped.load
            copy(slots, pool_NX, blocks)
        if self._device.type == "cpu":  # elsewhere they have only been enqueued
            reading = (time.perf_counter() - started) / len(moves)
            self.copy_s_per_block += MOVE_SMOOTHING * (reading - self.copy_s_per_block)

    def free_host_slots(self, slots: Iterable[int]) -> None:
        """Drop what these slots hold; slots that were never written are fine."""
        self._swapped.forget(list(slots))

    def measure_copy_s_per_block(self) -> float:
        """Seconds to copy one block one way (half a round trip, the median of a few), measured on the dummy block."""
        pool_NX, seconds = self._pool_NX(), []
        for _ in range(NUM_TIMINGS + 1):
            wait(self._device)
            start = time.perf_counter()
            self._trial.save((0,), pool_NX, (self.dummy_block,))
            self._trial.load((0,), pool_NX, (self.dummy_block,))
            wait(self._device)
            seconds.append((time.perf_counter() - start) / 2)
        self._trial.clear()
        self._zero_dummy()
        return statistics.median(seconds[1:])  # the first one pays for the memory

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """A copy of blocks on the host, [len(blocks), layers, 2, B, K, H]."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        return self._pool_NX().index_select(0, index).cpu()

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        """Put what `read_blocks` gave (same layout) into `blocks`."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        self._pool_NX().index_copy_(0, index, content.to(self._device))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer; destinations are fresh, so order does not matter."""
        if not pairs:
            return
        cache, index = self.kv_cache, torch.tensor(pairs, dtype=torch.int64).to(self._device, non_blocking=True)
        cache.index_copy_(2, index[:, 1], cache.index_select(2, index[:, 0]))

    def _pool_NX(self) -> Tensor:
        return _block_major(self.kv_cache)

    def _zero_dummy(self) -> None:
        self._region.tensor[:, :, self.dummy_block].zero_()

    def _check_held(self) -> None:
        assert self.kv_cache is not None

    def _pieces(self, blocks: Sequence[int]) -> Iterable[tuple[int, Sequence[int]]]:
        size = self._offloaded.slots_per_piece
        return ((first, blocks[first : first + size]) for first in range(0, len(blocks), size))

    def _pool_memory_bytes(self) -> int:
        """Bytes taken of the memory that the pool is in."""
        shared = self._device.type == "cpu"
        return self._region.resident_bytes() + (self._offloaded.resident_bytes() if shared else 0)

    def _report(self, start: float, before: int, *, num_blocks: int) -> StoreReport:
        return StoreReport(
            seconds=time.perf_counter() - start,
            bytes_copied=num_blocks * self.block_bytes,
            bytes_freed=before - self._pool_memory_bytes(),
            bytes_resident=self._region.resident_bytes(),
            num_blocks=num_blocks,
        )


def _block_major(cache: Tensor) -> Tensor:
    return cache.permute(2, 0, 1, 3, 4, 5)


def _groups(moves: Sequence[Move]) -> Iterable[list[Move]]:
    """Cut moves into runs of one kind in which no target comes twice: within one, order does not matter."""
    group: list[Move] = []
    targets: set[int] = set()
    for move in moves:
        kind, block, slot = move
        target = slot if kind == "out" else block
        if group and (group[0][0] != kind or target in targets):
            yield group
            group, targets = [], set()
        group.append(move)
        targets.add(target)
    if group:
        yield group

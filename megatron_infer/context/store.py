"""The large tensors: KV cache and recurrent states. Knows bytes and devices, not who owns a block or a state.

                    one region of bytes                   offload(blocks, states)
    [ KV: layers, 2, num_blocks, B, K, H | states ]  ------------------------------>  host copy
                                                     <------------------------------  restore(keep): the rest undefined
                                                      release(): nothing is left

    pool  <-- run_moves -->  host slots: blocks and states of evicted requests while the pool is in use

One region, so that its memory goes and comes back whole or not at all. Shape legend: S state slots, L Mamba layers,
C channels, W taps, H heads, P head dim, N state dim.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_infer.context.host import Move
from megatron_infer.context.layout import StateShape
from megatron_infer.context.modes import make_region, wait
from megatron_infer.context.pool_memory import PoolMemory, Tick
from megatron_infer.errors import StateReleased
from megatron_infer.kernels.ssm import LayerStates

PAGE_BYTES = 4096
"""States begin on a page of their own, so that neither pool's pages hold the other's content."""


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
    num_states: int
    """Recurrent states copied."""


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


def _typed(slots_SX: Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    return slots_SX[:, start : start + num_bytes].view(dtype).unflatten(1, tuple(shape))


class StateStore:
    """Holds `kv_cache` [layers, 2, num_blocks, B, K, H] and `states`. On a CPU an untouched page costs nothing.

    Without attention layers blocks only name positions: they have no memory, and copying them does nothing. So it is
    with states in a pipeline stage without Mamba layers.
    Not to be kept: over a release the tensors may change, so ask for them again at each step.
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
        state: StateShape | None = None,
        num_state_slots: int = 0,
        num_host_states: int = 0,
        dummy_state_slot: int | None = None,
    ) -> None:
        """num_layers: attention layers, 0 or more. dummy_state_slot: the slot that padding may write to."""
        self._kv_shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        block_shape = (num_layers, 2, block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dummy_block = num_blocks - 1
        self.block_bytes = math.prod(block_shape) * dtype.itemsize
        self.state, self.num_state_slots = state, num_state_slots
        self._dtype, self._device = dtype, device
        self._blocks: PoolMemory | None = None
        self._states: PoolMemory | None = None
        if self.block_bytes:
            self._blocks = PoolMemory(
                "blocks",
                block_shape,
                dtype,
                num_places=num_blocks,
                dummy=self.dummy_block,
                device=device,
                num_host_slots=num_host_slots,
            )
        if state is not None:
            self._states = _state_memory(state, num_state_slots, dummy_state_slot, device, num_host_states)
        self._pools = [pool for pool in (self._blocks, self._states) if pool is not None]
        kv_bytes = num_blocks * self.block_bytes
        self._state_start = kv_bytes if state is None else -(-kv_bytes // PAGE_BYTES) * PAGE_BYTES
        self.num_bytes = self._state_start + (0 if state is None else num_state_slots * state.slot_bytes)
        """Bytes of the pools when every page of them is touched."""
        self._region = make_region(
            (max(self.num_bytes, 1),),
            torch.uint8,
            device,
            static_pointers=static_pointers,
            unified_memory=unified_memory,
        )
        self._kv_cache: Tensor | None = None
        self._state_tensors: StateTensors | None = None
        self._bind()

    # ------------------------------------------------------------------ what is there

    @property
    def kv_cache(self) -> Tensor:
        """[layers, 2, num_blocks, B, K, H]. Raises StateReleased between release (or offload) and restore."""
        cache = self._kv_cache
        if cache is None:
            raise _away(self._pools)
        return cache

    @property
    def states(self) -> StateTensors | None:
        """The recurrent states, None without any. Raises StateReleased between release (or offload) and restore."""
        self._check_held()
        return self._state_tensors

    @property
    def is_released(self) -> bool:
        return self._kv_cache is None

    @property
    def addresses_stable(self) -> bool:
        """`kv_cache` and `states` keep their data pointers over release and restore."""
        return self._region.addresses_stable

    def resident_bytes(self) -> int:
        """Bytes the pools take now (see `Region.resident_bytes`)."""
        return self._region.resident_bytes()

    def host_bytes(self) -> int:
        """Bytes of host memory taken now by the copy of an offload and by what was swapped out."""
        return sum(pool.host_bytes() for pool in self._pools)

    @property
    def copy_s_per_block(self) -> float:
        """Seconds to move one block to the host or back, as last measured or seen; 0.0 before, and without memory."""
        return 0.0 if self._blocks is None else self._blocks.copy_s

    @property
    def copy_s_per_state(self) -> float:
        """The same of one state slot; 0.0 without recurrent state."""
        return 0.0 if self._states is None else self._states.copy_s

    # ------------------------------------------------------------------ giving memory back

    def release(self, tick: Tick) -> StoreReport:
        """Give the pools' memory back; all content is lost. Raises what `tick` raises, then nothing is."""
        start, before = time.perf_counter(), self._pool_memory_bytes()
        self._check_held()
        tick("release the cache")
        self._region.release()
        self._unbind()
        return self._report(start, before)

    def offload(self, blocks: Sequence[int], tick: Tick, *, state_slots: Sequence[int] = ()) -> StoreReport:
        """Copy exactly these blocks and states to the host, then give the pools' memory back.

        Whatever raises on the way (`tick`, no host memory) leaves the pools as they were and no host copy.
        """
        start, before = time.perf_counter(), self._pool_memory_bytes()
        self._check_held()
        try:
            for pool, places in self._places(blocks, state_slots):
                pool.copy_out(places, tick)
            wait(self._device)
            tick("release the cache")
            self._region.release()
        except BaseException:
            for pool in self._pools:
                pool.drop_copy()
            raise
        self._unbind()
        return self._report(start, before, num_blocks=_kept(self._blocks), num_states=_kept(self._states))

    def drop_copy(self) -> int:
        """Give up what an offload kept on the host -> bytes given back; the next restore brings empty pools."""
        before = self.host_bytes()
        for pool in self._pools:
            pool.drop_copy()
        return before - self.host_bytes()

    def restore(self, keep: Set[int], tick: Tick, *, keep_states: Set[int] = frozenset()) -> StoreReport:
        """Memory for the pools again, the dummies zeroed, offloaded blocks in `keep` and states in `keep_states` as
        they were; the rest of the pools is undefined, the rest of the host copy is dropped.

        Whatever raises on the way (`tick`, MemoryError, torch.OutOfMemoryError) leaves it released with its host copy:
        try again.
        """
        assert self.is_released, "the cache is not released"
        work = self._places(keep, keep_states)
        for pool, places in work:
            pool.check_kept(set(places))
        start, before = time.perf_counter(), self._pool_memory_bytes()
        tick("allocate the cache")
        self._region.restore()
        try:
            self._bind()
            for pool, places in work:
                pool.copy_back(set(places), tick)
            wait(self._device)
        except BaseException:
            self._region.release()
            self._unbind()
            raise
        for pool in self._pools:
            pool.drop_copy()
        num_blocks, num_states = (len(keep) if self._blocks else 0), len(keep_states)
        return self._report(start, before, num_blocks=num_blocks, num_states=num_states)

    # ------------------------------------------------------------------ moving content

    def run_moves(self, moves: Sequence[Move]) -> None:
        """Copy blocks and states to host slots and back, and states to other states' slots, with the result of doing
        one move after the other.

        On CUDA they are enqueued on the current stream and nothing waits. Raises MemoryError when the host has no
        room within num_host_slots and num_host_states.
        """
        if not moves:
            return
        self._check_held()
        for kind, group in _groups(moves):
            pool = self._states if kind.startswith("state") else self._blocks
            if pool is not None:  # None: blocks or states that only other pipeline stages keep
                _run(pool, kind, group)

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
        return self._blocks.read(blocks)

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        """Put what `read_blocks` gave (same layout) into `blocks`."""
        self._check_held()
        assert self._blocks is not None, "blocks of a model without attention layers hold nothing"
        self._blocks.write(blocks, content)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer; destinations are fresh, so order does not matter."""
        cache = self.kv_cache
        if not pairs or self._blocks is None:
            return
        index = torch.tensor(pairs, dtype=torch.int64).to(self._device, non_blocking=True)
        cache.index_copy_(2, index[:, 1], cache.index_select(2, index[:, 0]))

    def read_states(self, slots: Sequence[int]) -> Tensor:
        """A copy of state slots on the host, bytes [len(slots), slot_bytes]."""
        return self._state_pool().read(slots).view(torch.uint8)

    def write_states(self, slots: Sequence[int], content: Tensor) -> None:
        """Put what `read_states` gave into `slots`."""
        pool = self._state_pool()
        assert content.shape == (len(slots), pool.place_bytes), f"{tuple(content.shape)}, slots of {pool.place_bytes:,}"
        pool.write(slots, content.contiguous().view(torch.int64))

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states (source slot, destination slot), one after the other; nothing in a pipeline stage without any."""
        if pairs and self._states is not None:
            self._state_pool().copy(pairs)

    # ------------------------------------------------------------------ parts

    def _bind(self) -> None:
        """Make the views of a region that has just got its memory."""
        region = self._region.tensor
        with torch.inference_mode(False):  # they outlive the step that may be running
            if self._states is not None:
                assert self.state is not None
                slots_SX = region[self._state_start :].view(self.num_state_slots, self.state.slot_bytes)
                self._states.bind(slots_SX.view(torch.int64))
                self._state_tensors = StateTensors(slots_SX, self.state)
            cache = region[: self.num_blocks * self.block_bytes].view(self._dtype).view(self._kv_shape)
            if self._blocks is not None:
                self._blocks.bind(cache.permute(2, 0, 1, 3, 4, 5))
            self._kv_cache = cache

    def _unbind(self) -> None:
        self._kv_cache = self._state_tensors = None
        for pool in self._pools:
            pool.unbind()

    def _check_held(self) -> None:
        if self._kv_cache is None:
            raise _away(self._pools)

    def _state_pool(self) -> PoolMemory:
        self._check_held()
        assert self._states is not None, "the model keeps no recurrent state"
        return self._states

    def _places(self, blocks: Iterable[int], state_slots: Iterable[int]) -> list[tuple[PoolMemory, list[int]]]:
        """Which places of which pool; blocks and states without memory are left out."""
        both = ((self._blocks, list(blocks)), (self._states, list(state_slots)))
        return [(pool, places) for pool, places in both if pool is not None]

    def _pool_memory_bytes(self) -> int:
        """Bytes taken of the memory that the pools are in."""
        shared = self._device.type == "cpu"
        return self._region.resident_bytes() + (sum(pool.kept_bytes() for pool in self._pools) if shared else 0)

    def _report(self, start: float, before: int, *, num_blocks: int = 0, num_states: int = 0) -> StoreReport:
        state_bytes = 0 if self.state is None else self.state.slot_bytes
        return StoreReport(
            seconds=time.perf_counter() - start,
            bytes_copied=num_blocks * self.block_bytes + num_states * state_bytes,
            bytes_freed=before - self._pool_memory_bytes(),
            bytes_resident=self._region.resident_bytes(),
            num_blocks=num_blocks,
            num_states=num_states,
        )


def _state_memory(
    state: StateShape, num_slots: int, dummy: int | None, device: torch.device, num_host_states: int
) -> PoolMemory:
    assert dummy is not None and 0 <= dummy < num_slots, f"dummy state slot {dummy} of {num_slots}"
    # Moved as words: torch copies elements of eight bytes several times faster than eight of one.
    words = (state.slot_bytes // 8,)
    return PoolMemory(
        "states",
        words,
        torch.int64,
        num_places=num_slots,
        dummy=dummy,
        device=device,
        num_host_slots=num_host_states,
    )


def _run(pool: PoolMemory, kind: str, group: list[Move]) -> None:
    """Carry out a group of `_groups`."""
    if kind == "state copy":
        pool.copy((source, destination) for _, destination, source in group)
        return
    # No target comes twice in a group, so its order is free: by slot, neighbours are copied as one.
    group.sort(key=lambda move: move[2])
    swap = pool.swap_out if kind.endswith("out") else pool.swap_in
    swap([place for _, place, _ in group], [slot for _, _, slot in group])


def _away(pools: Sequence[PoolMemory]) -> StateReleased:
    kept = ", ".join(f"{pool.num_kept:,} {pool.noun}" for pool in pools)
    return StateReleased(
        f"the cache is released ({kept} of it are kept on the host); resume before anything that reads or writes it"
    )


def _kept(pool: PoolMemory | None) -> int:
    return 0 if pool is None else pool.num_kept


def _groups(moves: Sequence[Move]) -> Iterator[tuple[str, list[Move]]]:
    """Cut moves into runs of one kind, (kind, moves), in which no target comes twice: order within one does not matter.

    State copies are the exception: they read and write the same pool, so a run of them is done in its order.
    """
    group: list[Move] = []
    targets: set[int] = set()
    for move in moves:
        kind, place, slot = move
        target = slot if kind.endswith("out") else place
        if group and (group[0][0] != kind or (target in targets and kind != "state copy")):
            yield group[0][0], group
            group, targets = [], set()
        group.append(move)
        targets.add(target)
    if group:
        yield group[0][0], group

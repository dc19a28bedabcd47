"""The large tensors: KV cache and recurrent states. Knows bytes and devices, not who owns a block or a state.

                    one region of bytes                   offload(blocks, states)
    [ KV: layers, 2, num_blocks, B, K, H | states ]  ------------------------------>  host copy
                                                     <------------------------------  restore(keep): the rest undefined
                                                      release(): nothing is left

One region, so that its memory goes and comes back whole or not at all. What was in it goes and comes layer by layer, in
the order in which steps use them: with a pipeline (CUDA) `restore` returns while the copies run, see
`memory.layerwise_restore`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch

from megatron_infer.config.model_shape import StateShape
from megatron_infer.kernels.kv_rounding import movable
from megatron_infer.memory.copy_pipeline import CopyPipeline, Stopwatch, make_pipeline
from megatron_infer.memory.host_arena import Tick
from megatron_infer.memory.layerwise_restore import LayerwiseRestore
from megatron_infer.memory.pool import PoolMemory
from megatron_infer.memory.regions.choose import make_region, wait
from megatron_infer.memory.store_content import PoolContent
from megatron_infer.memory.store_layout import StateTensors as StateTensors
from megatron_infer.memory.store_layout import StoreLayout


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
    copy_s: float
    """Seconds in which they were copied, by the device's clock where it is not the CPU; 0.0: see bytes_under_way."""
    bytes_under_way: int = 0
    """Of bytes_copied, when `seconds` were over; how long they take is `PoolContent.arrived_s` later."""


class StateStore(PoolContent):
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
        spill_bytes: int = 0,
        num_host_slots: int = 0,
        state: StateShape | None = None,
        num_state_slots: int = 0,
        num_host_states: int = 0,
        dummy_state_slot: int | None = None,
        layer_order: Sequence[str] | None = None,
    ) -> None:
        """num_layers: attention layers, 0 or more. spill_bytes: of unified memory, what may lie beyond the device's.
        dummy_state_slot: the slot that padding may write to. layer_order: "blocks" for an attention layer, "states" for
        a Mamba layer, as a step comes to them; None: attention first."""
        self._layout = layout = StoreLayout(
            kv_shape=(num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim),
            dtype=dtype,
            state=state,
            num_state_slots=num_state_slots,
        )
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dummy_block = num_blocks - 1
        self.block_bytes = layout.block_bytes
        self.state, self.num_state_slots = state, num_state_slots
        num_mixers = 0 if state is None else state.num_layers
        in_order = ["blocks"] * num_layers + ["states"] * num_mixers if layer_order is None else layer_order
        assert (in_order.count("blocks"), in_order.count("states")) == (num_layers, num_mixers), in_order
        self._order = [(kind, in_order[:i].count(kind)) for i, kind in enumerate(in_order)]
        self._device, pipeline = device, make_pipeline(device)
        kv, states = None, None
        if self.block_bytes:
            kv = PoolMemory(
                "blocks",
                layout.block_shape,
                movable(torch.empty(0, dtype=dtype)).dtype,
                num_places=num_blocks,
                dummy=self.dummy_block,
                device=device,
                num_host_slots=num_host_slots,
                pipeline=pipeline,
            )
        if state is not None:
            states = _state_memory(state, num_state_slots, dummy_state_slot, device, num_host_states, pipeline)
        super().__init__(kv, states, pipeline)
        self.num_bytes = layout.num_bytes
        """Bytes of the pools when every page of them is touched."""
        self._region = make_region(
            (max(self.num_bytes, 1),),
            torch.uint8,
            device,
            static_pointers=static_pointers,
            unified_memory=unified_memory,
            spill_bytes=spill_bytes,
        )
        self._state_tensors: StateTensors | None = None
        if pipeline is not None:  # who drops the store drops memory that its streams may still write to
            weakref.finalize(self, wait, device).atexit = False
        self._bind()

    # ------------------------------------------------------------------ what is there

    @property
    def states(self) -> StateTensors | None:
        """The recurrent states, None without any. Raises StateReleased between release (or offload) and restore."""
        self._check_held()
        return self._state_tensors

    @property
    def addresses_stable(self) -> bool:
        """`kv_cache` and `states` keep their data pointers over release and restore: what was captured with them in it
        may be replayed. Where the addresses cannot be had again `restore` fails; it takes no others."""
        return self._region.addresses_stable

    def resident_bytes(self) -> int:
        """Bytes the pools take now (see `Region.resident_bytes`)."""
        return self._region.resident_bytes()

    # ------------------------------------------------------------------ giving memory back

    def release(self, tick: Tick) -> StoreReport:
        """Give the pools' memory back; all content is lost. Raises what `tick` raises, then nothing is."""
        start, before = time.perf_counter(), self._pool_memory_bytes()
        self._check_held()
        self._finish_arrival()
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
        self._finish_arrival()
        work = self._places(blocks, state_slots)
        try:
            watch = Stopwatch(self._pipeline)
            for pool, places in work.values():
                pool.begin_copy(places)
            for kind, layer in self._order:
                if kind in work:
                    work[kind][0].copy_out(layer, tick)
            copy_s = watch.stop()
            self._drop_staging()
            wait(self._device)
            tick("release the cache")
            self._region.release()
        except BaseException:
            self._drop_staging()
            wait(self._device)  # nothing reads or writes what is given back here
            for pool in self._pools:
                pool.drop_copy()
            raise
        self._unbind()
        kept = _kept(self._blocks), _kept(self._states)
        return self._report(start, before, num_blocks=kept[0], num_states=kept[1], copy_s=copy_s)

    def drop_copy(self) -> int:
        """Give up what an offload kept on the host -> bytes given back; the next restore brings empty pools."""
        before = self.host_bytes()
        self._finish_arrival()
        for pool in self._pools:
            pool.drop_copy()
        return before - self.host_bytes()

    def restore(self, keep: Set[int], tick: Tick, *, keep_states: Set[int] = frozenset()) -> StoreReport:
        """Memory for the pools again, the dummies zeroed, offloaded blocks in `keep` and states in `keep_states` as
        they were; the rest of the pools is undefined, the rest of the host copy is dropped.

        With a pipeline the copies may still run afterwards: on the device, whoever uses a layer comes behind its
        arrival. Whatever raises on the way (`tick`, MemoryError, torch.OutOfMemoryError) leaves it released with its
        host copy: try again.
        """
        assert self.is_released, "the cache is not released"
        work = self._places(keep, keep_states)
        for pool, places in work.values():
            pool.check_kept(set(places))
        start, before = time.perf_counter(), self._pool_memory_bytes()
        tick("allocate the cache")
        self._region.restore()
        try:
            self._bind()
            copy_s = self._bring_back(work, tick)
        except BaseException:
            self._arrival = None
            self._drop_staging()
            wait(self._device)  # nothing writes to what is given back here
            self._region.release()
            self._unbind()
            raise
        if self._arrival is None:
            self.arrived_s = copy_s
            self._let_go()
        elif self._arrival.is_done():
            copy_s = self._finish_arrival()
        num_blocks, num_states = (len(keep) if self._blocks else 0), len(keep_states)
        return self._report(start, before, num_blocks=num_blocks, num_states=num_states, copy_s=copy_s)

    def lend(self) -> None:
        """Nobody runs for a while, all content is wanted: unified memory may leave the device as others need room."""
        self._check_held()
        self._finish_arrival()
        self._region.lend()

    def settle(self, blocks: Sequence[int], *, state_slots: Sequence[int] = ()) -> int:
        """The end of `lend`: call these blocks and states in -> bytes asked for, those present among them."""
        self._check_held()
        return self._region.settle(self._layout.ranges(blocks, state_slots))

    # ------------------------------------------------------------------ parts

    def _bind(self) -> None:
        """Make the views of a region that has just got its memory."""
        region = self._region.tensor
        with torch.inference_mode(False):  # they outlive the step that may be running
            if self._states is not None and self.state is not None:
                slots_SX = self._layout.slots(region)
                self._states.bind(slots_SX.view(torch.int64), self._layout.state_layers(slots_SX))
                self._state_tensors = StateTensors(slots_SX, self.state)
            cache = self._layout.cache(region)
            if self._blocks is not None:
                content = movable(cache)
                self._blocks.bind(content.permute(2, 0, 1, 3, 4, 5), self._layout.block_layers(content))
            self._kv_cache = cache

    def _bring_back(self, work: dict[str, tuple[PoolMemory, list[int]]], tick: Tick) -> float:
        """Copy the host copy back -> seconds it took; 0.0 with a pipeline, which has then only begun."""
        start, arrival = time.perf_counter(), None
        for pool, places in work.values():
            pool.begin_return(set(places))
        if self._pipeline is not None and work:
            assert self._kv_cache is not None
            arrival = LayerwiseRestore(self._pipeline.lane, self._kv_cache, self._state_tensors)
        for kind, layer in self._order:
            if kind in work:
                work[kind][0].copy_back(layer, tick)
                if arrival is not None:
                    arrival.landed((kind, layer))
        if arrival is None:
            return time.perf_counter() - start
        self._arrival, self.arrived_s = arrival, None
        return 0.0

    def _unbind(self) -> None:
        self._kv_cache = self._state_tensors = None
        for pool in self._pools:
            pool.unbind()

    def _places(self, blocks: Iterable[int], state_slots: Iterable[int]) -> dict[str, tuple[PoolMemory, list[int]]]:
        """Which places of which pool, by its noun, where there are any; those without memory are left out."""
        both = ((self._blocks, list(blocks)), (self._states, list(state_slots)))
        return {pool.noun: (pool, places) for pool, places in both if pool is not None and places}

    def _pool_memory_bytes(self) -> int:
        """Bytes taken of the memory that the pools are in."""
        shared = self._device.type == "cpu"
        return self._region.resident_bytes() + (sum(pool.kept_bytes() for pool in self._pools) if shared else 0)

    def _report(
        self, start: float, before: int, *, num_blocks: int = 0, num_states: int = 0, copy_s: float = 0.0
    ) -> StoreReport:
        num_bytes = num_blocks * self.block_bytes + num_states * self._layout.state_bytes
        return StoreReport(
            seconds=time.perf_counter() - start,
            bytes_copied=num_bytes,
            bytes_freed=before - self._pool_memory_bytes(),
            bytes_resident=self._region.resident_bytes(),
            num_blocks=num_blocks,
            num_states=num_states,
            copy_s=copy_s,
            bytes_under_way=0 if self._arrival is None else num_bytes,
        )


def _state_memory(
    state: StateShape,
    num_slots: int,
    dummy: int | None,
    device: torch.device,
    num_host_states: int,
    pipeline: CopyPipeline | None,
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
        pipeline=pipeline,
    )


def _kept(pool: PoolMemory | None) -> int:
    return 0 if pool is None else pool.num_kept

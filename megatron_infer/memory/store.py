"""The large tensors: KV cache and recurrent states. Knows bytes and devices, not who owns a block or a state.

                    one region of bytes                   offload(blocks, states)
    [ KV | KV of the draft model | states ]          ------------------------------>  host copy (SuspendCopy)
         ^                                           <------------------------------  restore(keep): the rest undefined
         |                                            release(): nothing is left
         +-- run_copies --> host slots of each pool: blocks and states of evicted requests, while the pools are in use

One region, so that its memory is given back and taken again whole or not at all. Its content is copied layer by layer,
in the order in which steps use the layers: with a pipeline (CUDA) `restore` returns while the copies run. Until they
are done everything here but `pending_restore` runs, on the device, behind all of them; a step asks `pending_restore`
and waits layer by layer (see `memory.layerwise_restore`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_infer.errors import StateReleased
from megatron_infer.kernels.kv_rounding import movable
from megatron_infer.memory.copy_pipeline import make_pipeline
from megatron_infer.memory.host_arena import Progress, device_index
from megatron_infer.memory.layerwise_restore import LayerwiseRestore
from megatron_infer.memory.pool import PoolMemory
from megatron_infer.memory.regions.choose import Region, wait
from megatron_infer.memory.store_layout import BLOCKS, DRAFT_BLOCKS, STATES, StateTensors, StoreLayout
from megatron_infer.memory.suspend_copy import Places, SuspendCopy
from megatron_infer.scheduler.context.copies import Copy, CopyKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """What a release, an offload or a restore did."""

    bytes_copied: int
    """Bytes copied between the pools and the host copy."""
    bytes_freed: int
    """Bytes in use before minus after, measured in the memory that the pools are in; negative where memory was taken.
    On a CPU the host copy is in the same memory and counts against it."""
    copy_s: float
    """Seconds in which they were copied, by the device's clock where it is not the CPU; 0.0: see bytes_under_way."""
    bytes_under_way: int = 0
    """The part of bytes_copied that was still being copied at the return; how long that takes is
    `CacheStore.restore_copy_s` later."""


class CacheStore:
    """Owns the memory of both pools, KV blocks and recurrent states, and what of them was copied to the host.

    The tensors are `kv_cache` [layers, 2, num_blocks, B, K, H] and `states`. Do not keep them: over a release they may
    change, so ask again at each step. On a CPU an untouched page costs nothing.

    Without attention layers blocks only name positions: they have no memory, and copying them does nothing. The same
    holds for states in a pipeline stage without Mamba layers.
    """

    def __init__(self, layout: StoreLayout, region: Region, host_slots: tuple[int, int] = (0, 0)) -> None:
        """region: memory for `layout.num_bytes`, which the store owns from now on. host_slots: places on the host for
        (blocks, states) that are swapped out."""
        self.layout, self._region = layout, region
        self._device = region.tensor.device
        self._pipeline = make_pipeline(self._device)
        make: dict[str, Any] = {"device": self._device, "pipeline": self._pipeline}
        kinds = [(BLOCKS, layout.block_shape, layout.dtype)] if layout.block_bytes else []
        if layout.draft_dtype is not None:
            kinds.append((DRAFT_BLOCKS, layout.draft_block_shape, layout.draft_dtype))
        self._dtypes = {noun: dtype for noun, _, dtype in kinds}
        of_blocks: dict[str, Any] = {"dummy": layout.dummy_block, "num_host_slots": host_slots[0], **make}
        self._block_pools = [
            PoolMemory(noun, shape, movable(torch.empty(0, dtype=dtype)).dtype, **of_blocks)
            for noun, shape, dtype in kinds
        ]
        """What happens to a block happens to it in each of these."""
        self._states: PoolMemory | None = None
        if layout.dummy_state_slot is not None:
            # As words: torch copies elements of eight bytes several times faster than eight elements of one.
            words, dummy = (layout.state_bytes // 8,), layout.dummy_state_slot
            self._states = PoolMemory(STATES, words, torch.int64, dummy=dummy, num_host_slots=host_slots[1], **make)
        self._pools = [pool for pool in (*self._block_pools, self._states) if pool is not None]
        self._host_copy = SuspendCopy(self._pools, layout.layers, self._pipeline)
        self._caches: dict[str, Tensor] = {}
        """Keys and values by noun, BLOCKS among them; empty while the pools have no memory."""
        self._state_tensors: StateTensors | None = None
        if self._pipeline is not None:  # a dropped store gives back memory that its streams may still write to
            weakref.finalize(self, wait, self._device).atexit = False
        self._bind()

    # ------------------------------------------------------------------ what steps use

    @property
    def kv_cache(self) -> Tensor:
        """[layers, 2, num_blocks, B, K, H]. Raises StateReleased between release (or offload) and restore."""
        self._check_held()
        return self._caches[BLOCKS]

    @property
    def draft_kv_cache(self) -> Tensor:
        """The draft model's, under the same block ids; raises StateReleased as `kv_cache` does."""
        self._check_held()
        assert DRAFT_BLOCKS in self._caches, "no model drafts"
        return self._caches[DRAFT_BLOCKS]

    @property
    def states(self) -> StateTensors | None:
        """The recurrent states, None without any. Raises StateReleased between release (or offload) and restore."""
        self._check_held()
        return self._state_tensors

    @property
    def addresses_stable(self) -> bool:
        """`kv_cache` and `states` keep their data pointers over release and restore, so that CUDA graphs captured with
        them may be replayed. Where the same addresses cannot be had again `restore` fails; it takes no others."""
        return self._region.addresses_stable

    @property
    def is_released(self) -> bool:
        return not self._caches

    def pending_restore(self) -> LayerwiseRestore | None:
        """The restore whose layers the next step has to wait for, each before it is used; None: all are there.

        Does not wait for the device; drops the host copy once the restore is done.
        """
        restore = self._host_copy.pending
        if restore is not None and restore.is_done():
            self._host_copy.finish()
            restore = None
        return None if restore is None or restore.needs_no_wait else restore

    @property
    def restore_copy_s(self) -> float | None:
        """Seconds that the copies of the last restore took, by the device's clock where it is not the CPU; None while
        they may still run, and before the first restore."""
        return self._host_copy.reload_s

    def _check_held(self) -> None:
        """Raise StateReleased without memory; else order the steps' stream behind all that a restore still copies."""
        if self.is_released:
            raise _released(self._host_copy)
        if self._host_copy.pending is not None:
            self._host_copy.pending.wait_for_all()

    # ------------------------------------------------------------------ memory given back and taken again

    def release(self, progress: Progress) -> StoreReport:
        """Give the pools' memory back; all content is lost. When it raises (`progress` may), nothing was given back."""
        before = self._pool_memory_bytes()
        self._check_held()
        self._host_copy.finish()
        progress("release the cache")
        self._region.release()
        self._unbind()
        return self._report(before, {})

    def offload(self, blocks: Sequence[int], progress: Progress, *, state_slots: Sequence[int] = ()) -> StoreReport:
        """Copy exactly these blocks and states to the host, then give the pools' memory back.

        When anything raises on the way (`progress`, no host memory), the pools are as before and there is no host copy.
        """
        before = self._pool_memory_bytes()
        self._check_held()
        self._host_copy.finish()
        places = self._places(blocks, state_slots)
        try:
            copy_s = self._host_copy.offload(places, progress)
            wait(self._device)
            progress("release the cache")
            self._region.release()
        except BaseException:
            self._host_copy.drop_staging()
            wait(self._device)  # nothing may read or write the memory that is given back here
            self._host_copy.drop()
            raise
        self._unbind()
        return self._report(before, places, copy_s)

    def restore(self, keep: Set[int], progress: Progress, *, keep_states: Set[int] = frozenset()) -> StoreReport:
        """Take memory for the pools again, zero the dummies, copy back offloaded blocks in `keep` and states in
        `keep_states`. The rest of the pools is undefined, the rest of the host copy is dropped.

        With a pipeline the copies may still run afterwards; the device orders each use of a layer behind its copies.
        When anything raises on the way (`progress`, MemoryError, torch.OutOfMemoryError) the store is still released
        and still has its host copy: try again.
        """
        assert self.is_released, "the cache is not released"
        places = self._places(keep, keep_states)
        self._host_copy.check_holds(places)
        before = self._pool_memory_bytes()
        progress("allocate the cache")
        self._region.restore()
        try:
            self._host_copy.reload(places, *self._bind(), progress)
        except BaseException:
            self._host_copy.abandon_reload()
            wait(self._device)  # nothing may write to the memory that is given back here
            self._region.release()
            self._unbind()
            raise
        return self._report(before, places, self._host_copy.end_if_done())

    def drop_host_copy(self) -> int:
        """Drop the host copy of an offload -> bytes given back; the next restore gives empty pools."""
        before = self.host_bytes()
        self._host_copy.finish()
        self._host_copy.drop()
        return before - self.host_bytes()

    def allow_migration(self) -> None:
        """Until `end_migration`, while no step runs: pages of unified memory may leave with their content."""
        self._check_held()
        self._host_copy.finish()
        self._region.allow_migration()

    def end_migration(self) -> None:
        """Pages that left come back when a step uses them."""
        self._check_held()
        self._region.end_migration()

    def resident_bytes(self) -> int:
        """Bytes the pools take now (see `Region.resident_bytes`)."""
        return self._region.resident_bytes()

    def host_bytes(self) -> int:
        """Bytes of host memory taken now by the copy of an offload and by swapped-out blocks and states (on CUDA: by
        all host slots)."""
        return self._host_copy.resident_bytes() + sum(pool.host_bytes() for pool in self._pools)

    def idle_host_bytes(self) -> int:
        """Pinned host memory kept for the next offload."""
        return 0 if self._pipeline is None else self._pipeline.pinned.idle_bytes()

    def trim_host(self, keep_bytes: int | None = None) -> int:
        """Unpin idle host memory beyond keep_bytes (None: a small share of the machine's) -> bytes unpinned."""
        return 0 if self._pipeline is None else self._pipeline.pinned.trim(keep_bytes)

    # ------------------------------------------------------------------ content

    def run_copies(self, copies: Sequence[Copy]) -> None:
        """Copy blocks and states within the pools, to host slots and back, with the result of doing one copy after the
        other. Blocks or states that only other pipeline stages keep are left out.

        On CUDA they are enqueued on the current stream and nothing waits. Raises MemoryError when the host has no
        room for all host slots.
        """
        if not copies:
            return
        self._check_held()
        for kind, group in _groups(copies):
            if kind is CopyKind.BLOCK:
                self._copy_blocks(group)
                continue
            for pool in self._block_pools if kind in _OF_BLOCKS else [self._states]:
                if pool is not None:
                    _run(pool, kind, group)

    def free_host_slots(self, blocks: Iterable[int] = (), states: Iterable[int] = ()) -> None:
        """Drop what these host slots of blocks and of states hold; slots that were never written are fine."""
        freed = list(blocks)
        for pool in self._block_pools:
            pool.free_host_slots(freed)
        if self._states is not None:
            self._states.free_host_slots(states)

    def read_blocks(self, blocks: Sequence[int]) -> dict[str, Tensor]:
        """Copies of blocks on the host, [len(blocks), layers, 2, B, K, H], by noun: BLOCKS, and DRAFT_BLOCKS where a
        model drafts."""
        self._check_held()
        return {pool.noun: pool.read(blocks).view(self._dtypes[pool.noun]) for pool in self._block_pools}

    def write_blocks(self, blocks: Sequence[int], content: Mapping[str, Tensor]) -> None:
        """Put what `read_blocks` gave (same layout) into `blocks`."""
        self._check_held()
        for pool in self._block_pools:
            pool.write(blocks, movable(content[pool.noun]))

    def read_states(self, slots: Sequence[int]) -> Tensor:
        """A copy of state slots on the host, bytes [len(slots), slot_bytes]."""
        return self._held(self._states).read(slots).view(torch.uint8)

    def write_states(self, slots: Sequence[int], content: Tensor) -> None:
        """Put what `read_states` gave into `slots`."""
        slot_bytes = self.layout.state_bytes
        assert content.shape == (len(slots), slot_bytes), f"{tuple(content.shape)}, slots of {slot_bytes:,}"
        self._held(self._states).write(slots, content.contiguous().view(torch.int64))

    def measure_copies(self) -> None:
        """Measure both of the following now, on the dummies."""
        self._check_held()
        for pool in self._pools:
            pool.measure_copy_s()

    @property
    def copy_s_per_block(self) -> float:
        """Seconds to copy one block to the host or back, as last measured or seen; 0.0 before, and without memory."""
        return sum(pool.copy_s for pool in self._block_pools)

    @property
    def copy_s_per_state(self) -> float:
        """Seconds to copy one state to the host or back, as last measured or seen; 0.0 before, and without states."""
        return 0.0 if self._states is None else self._states.copy_s

    # ------------------------------------------------------------------ parts

    def _copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy whole blocks in every layer; no destination comes twice or is a source, so order does not matter."""
        index = device_index(self._pipeline, [place for copy in copies for place in copy[1:]])
        for pool in self._block_pools:
            cache = movable(self._caches[pool.noun])
            cache.index_copy_(2, index[1::2], cache.index_select(2, index[::2]))

    def _held(self, pool: PoolMemory | None) -> PoolMemory:
        """A pool that can be read and written now."""
        self._check_held()
        assert pool is not None, "this rank has no layers of the kind that keeps these"
        return pool

    def _places(self, blocks: Iterable[int], state_slots: Iterable[int]) -> Places:
        """Places by the noun of their pool, where there are any; those without memory are left out."""
        held, slots = list(blocks), list(state_slots)
        found = {pool.noun: held for pool in self._block_pools if held}
        return found | ({STATES: slots} if self._states is not None and slots else {})

    def _bind(self) -> tuple[Tensor, StateTensors | None]:
        """Make the views of a region that has just got its memory -> (kv_cache, states)."""
        region_X, layout = self._region.tensor, self.layout
        with torch.inference_mode(False):  # they outlive the step that may be running
            if self._states is not None and layout.state is not None:
                slots_SX = layout.slots(region_X)
                self._states.bind(slots_SX.view(torch.int64), layout.state_layers(slots_SX))
                self._state_tensors = StateTensors(slots_SX, layout.state)
            nouns = [BLOCKS] if layout.draft_kv_shape is None else [BLOCKS, DRAFT_BLOCKS]
            self._caches = {noun: layout.cache(region_X, of=noun) for noun in nouns}
            for pool in self._block_pools:
                content = movable(self._caches[pool.noun])
                pool.bind(content.permute(2, 0, 1, 3, 4, 5), layout.block_layers(content))
        return self._caches[BLOCKS], self._state_tensors

    def _unbind(self) -> None:
        self._caches = {}
        self._state_tensors = None
        for pool in self._pools:
            pool.unbind()

    def _pool_memory_bytes(self) -> int:
        """Bytes taken of the memory that the pools are in."""
        shared = self._device.type == "cpu"
        return self._region.resident_bytes() + (self._host_copy.resident_bytes() if shared else 0)

    def _report(self, before: int, places: Places, copy_s: float = 0.0) -> StoreReport:
        """before: memory taken when the command began. places: what was copied."""
        num_bytes = sum(pool.place_bytes * len(places.get(pool.noun, ())) for pool in self._pools)
        return StoreReport(
            bytes_copied=num_bytes,
            bytes_freed=before - self._pool_memory_bytes(),
            copy_s=copy_s,
            bytes_under_way=0 if self._host_copy.pending is None else num_bytes,
        )


class StepCache(Protocol):
    """The memory that a model's steps use: a `CacheStore`, or its `DraftCache`."""

    @property
    def layout(self) -> StoreLayout: ...

    @property
    def kv_cache(self) -> Tensor: ...

    @property
    def states(self) -> StateTensors | None: ...

    def pending_restore(self) -> LayerwiseRestore | None: ...


class DraftCache:
    """The part of a store that a draft model's steps use: keys and values under the store's block ids, no states."""

    states = None

    def __init__(self, store: CacheStore) -> None:
        self._store = store

    @property
    def layout(self) -> StoreLayout:
        return self._store.layout

    @property
    def kv_cache(self) -> Tensor:
        return self._store.draft_kv_cache

    def pending_restore(self) -> None:
        """`kv_cache` waits, on the device, for a restore as a whole."""


def _released(host_copy: SuspendCopy) -> StateReleased:
    kept = ", ".join(f"{count:,} {noun}" for noun, count in host_copy.num_places().items())
    return StateReleased(
        f"the cache is released ({kept} of it are kept on the host); resume before anything that reads or writes it"
    )


def _run(pool: PoolMemory, kind: CopyKind, group: list[Copy]) -> None:
    """Carry out a group of `_groups`, but for copies of blocks to blocks."""
    if kind is CopyKind.STATE:
        pool.copy((copy.source, copy.destination) for copy in group)
    elif kind in _OUT:  # by host slot: neighbours are copied as one
        group.sort(key=lambda copy: copy.destination)
        pool.swap_out([copy.source for copy in group], [copy.destination for copy in group])
    else:
        group.sort(key=lambda copy: copy.source)
        pool.swap_in([copy.destination for copy in group], [copy.source for copy in group])


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

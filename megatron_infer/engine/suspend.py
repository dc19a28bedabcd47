"""Suspend and resume: what each mode and tag does with memory, in which order, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from megatron_infer.config.inference import InferenceConfig, KVCacheManagementMode
from megatron_infer.engine.executor import Executor
from megatron_infer.engine.lifecycle_commands import GRAPHS, KV_CACHE, TAGS, WEIGHTS
from megatron_infer.engine.states import EngineState, Lifecycle, Transition
from megatron_infer.engine.step_loop import StepLoop
from megatron_infer.errors import ConfigError, check_known, unknown_name
from megatron_infer.memory.device import Device
from megatron_infer.memory.store import StoreReport
from megatron_infer.models.weights.manager import WeightManager, no_tick
from megatron_infer.runner.cuda_graphs.padded_step import StepGraphs
from megatron_infer.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class TagReport:
    """What a command did with one tag's memory, in bytes."""

    bytes_freed: int = 0
    """Given back to the system or the device's allocator (negative: taken), measured; host copies are counted."""
    bytes_copied: int = 0
    """Moved to or from host memory."""
    bytes_resident: int = 0
    """Memory that the tag occupies afterwards, copies on the host included."""
    copy_s: float = 0.0
    """Seconds of copying the cache, by the device's clock where there is one; 0.0: nothing was copied, or not timed."""
    bytes_under_way: int = 0
    """Part of bytes_copied whose copies still ran when the command returned: steps wait for them on the device, layer
    by layer. Their time is known later (`Suspension.arrived_s`)."""

    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes a second, as measured; None where nothing was timed."""
        return self.bytes_copied / self.copy_s / 1e9 if self.bytes_copied and self.copy_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What a suspend or resume did; `str()` is a small table."""

    command: str
    mode: str
    """What became of the KV cache: "persist" (it stayed), "offload" or "recompute"."""
    state: str
    seconds: float
    tags: dict[str, TagReport]
    process_bytes_before: int
    """Memory in use by the process (CPU: its resident set) or on the device (CUDA)."""
    process_bytes_after: int
    num_requests: int
    """Unfinished requests, all of which go on after the resume."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.command} ({self.mode}): {self.seconds * 1e3:.1f} ms, {self.num_requests} requests held, "
            f"in use {_mib(self.process_bytes_before)} -> {_mib(self.process_bytes_after)} MiB"
        ]
        lines += [
            f"  {tag:<9} freed {_mib(r.bytes_freed):>9}  copied {_mib(r.bytes_copied):>9}  "
            f"resident {_mib(r.bytes_resident):>9} MiB"
            + ("" if r.gb_per_s is None else f"  {r.gb_per_s:.1f} GB/s")
            + (f"  of it under way {_mib(r.bytes_under_way)} MiB" if r.bytes_under_way else "")
            for tag, r in self.tags.items()
        ]
        return "\n".join(lines)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"


class CacheSuspension:
    """The tag kv_cache: memory of keys, values and recurrent states while an engine is suspended."""

    def __init__(self, scheduler: Scheduler, executor: Executor, config: InferenceConfig) -> None:
        self._scheduler, self._executor, self._store = scheduler, executor, executor.runner.store
        self._context, self._is_unified = scheduler.context, config.unified_memory_level > 0
        self.mode = KVCacheManagementMode.PERSIST
        """How the cache is suspended; PERSIST while it is not."""

    @property
    def resident_bytes(self) -> int:
        """Memory of the cache now, on the device and on the host."""
        store = self._store
        return store.resident_bytes() + store.host_bytes() + store.idle_host_bytes()

    def moves(self, mode: KVCacheManagementMode) -> bool:
        """Whether suspending it as `mode` frees its memory. Raises ConfigError for a mode that is not possible."""
        if mode is KVCacheManagementMode.OFFLOAD and self._is_unified:
            raise ConfigError('mode="offload" with unified_memory_level=1: it moves by itself; take "persist"')
        if _STRENGTH[mode] < _STRENGTH[self.mode]:
            raise ConfigError(
                f'mode="{mode.value}": the cache is suspended as "{self.mode.value}" already; resume() first'
            )
        return mode is not self.mode

    def offload(self, mode: KVCacheManagementMode, transition: Transition) -> StoreReport | None:
        """The part of a suspend that can fail, and is undone if it fails on another rank; None: nothing is copied."""
        if mode is not KVCacheManagementMode.OFFLOAD:
            if not self._store.is_released:
                transition.tick("release the cache")
            return None
        blocks, states = self._context.held_blocks(), self._context.held_state_slots()
        done = self._store.offload(blocks, transition.tick, state_slots=states)
        transition.undo("the offload", partial(self._store.restore, set(blocks), no_tick, keep_states=set(states)))
        return done

    def release(self, offloaded: StoreReport | None) -> TagReport:
        """The rest of a suspend, which cannot fail. offloaded: what `offload` gave."""
        if offloaded is not None:
            self._context.forget_free()
            return self._report(offloaded)
        store = self._store
        freed = store.drop_host_copy() if store.is_released else store.release(no_tick).bytes_freed
        freed += self._requeue_all()
        store.trim_host(keep_bytes=0)
        return TagReport(bytes_freed=freed, bytes_resident=self.resident_bytes)

    def persist(self, transition: Transition) -> TagReport:
        """Content and addresses stay; unified memory may leave the device when others need room."""
        self._store.allow_migration()
        transition.undo("the release of unified memory", self._store.end_migration)
        return TagReport(bytes_resident=self.resident_bytes)

    def restore(self, transition: Transition) -> TagReport:
        """Undo a suspend in any mode."""
        store, context = self._store, self._context
        if not store.is_released:
            store.end_migration()
            return TagReport(bytes_resident=self.resident_bytes)
        context.forget_free()  # cached blocks of requests that ended meanwhile: their content is not restored
        blocks, states = context.held_blocks(), context.held_state_slots()
        done = store.restore(set(blocks), transition.tick, keep_states=set(states))
        if self.mode is KVCacheManagementMode.OFFLOAD:
            transition.undo("the restore", partial(store.offload, blocks, no_tick, state_slots=states))
        else:
            transition.undo("the restore", partial(store.release, no_tick))
        return self._report(done)

    def require_no_loop_by_hand(self) -> None:
        """Raise ConfigError while rows are held that no scheduler recomputes; nothing is in flight."""
        if num_rows := self._executor.num_rows_by_hand:
            raise ConfigError(
                f"mode='recompute' drops the cache, and {num_rows} sequences claimed by hand are not recomputed; "
                "release them first (kv_manager.release), or take mode='offload'"
            )

    def _requeue_all(self) -> int:
        """All requests are recomputed -> bytes of host memory that swapped requests freed."""
        before = self._store.host_bytes()
        self._scheduler.requeue_all()
        self._context.forget_all()
        self._executor.free_host_slots()
        return before - self._store.host_bytes()

    def _report(self, done: StoreReport) -> TagReport:
        return TagReport(
            bytes_freed=done.bytes_freed,
            bytes_copied=done.bytes_copied,
            bytes_resident=self.resident_bytes,
            copy_s=done.copy_s,
            bytes_under_way=done.bytes_under_way,
        )


class Suspension:
    """Which tags are suspended, and how they go and come back. A transition that fails leaves everything as it was.

        suspend:  step in flight committed -> live weights* -> KV cache -> (nothing fails from here) graphs that would
                  read memory at new addresses -> derived copies
        resume:   live weights* -> changed weights accepted, derived copies rebuilt -> KV cache
                                                                                  * if the engine owns them
    What can fail comes before what cannot be undone. PERSIST and OFFLOAD do not affect requests; RECOMPUTE puts all of
    them back into the queue, in their order.
    """

    def __init__(
        self,
        loop: StepLoop,
        lifecycle: Lifecycle,
        executor: Executor,
        scheduler: Scheduler,
        weights: WeightManager,
        device: Device,
        graphs: StepGraphs | None,
        config: InferenceConfig,
    ) -> None:
        self._loop, self._lifecycle, self._weights = loop, lifecycle, weights
        self._cache, self._graphs = CacheSuspension(scheduler, executor, config), graphs
        self._device = device
        self._rank_group = executor.rank_group
        self._store = executor.runner.store
        self._default_mode = config.kv_cache_management_mode
        self._away: set[str] = set()
        self._returns_to = EngineState.RUNNING

    @property
    def tags(self) -> frozenset[str]:
        """What is suspended now."""
        return frozenset(self._away)

    @property
    def arrived_s(self) -> float | None:
        """Seconds that the cache's copies of the latest resume took; None while they run, and before the first."""
        return self._store.restore_copy_s

    def suspend(
        self, *, mode: str | KVCacheManagementMode | None, tags: Iterable[str] | None, timeout_s: float | None
    ) -> MemoryReport:
        """See `EngineCommands.suspend`."""
        wanted = _known(tags)
        chosen = self._default_mode if mode is None else _mode(mode)
        frees_cache = KV_CACHE in wanted and self._cache.moves(chosen)
        # PERSIST moves nothing: the next weights are packed over these copies, unless the caller names their tag.
        copies_stay = tags is None and chosen is KVCacheManagementMode.PERSIST
        with self._lifecycle.transition("suspend", timeout_s=timeout_s) as transition:
            start = _Start(self._device)
            self._loop.quiesce(transition.tick)
            if frees_cache and chosen is KVCacheManagementMode.RECOMPUTE:
                self._cache.require_no_loop_by_hand()
            fresh = wanted - self._away
            reports = {tag: TagReport() for tag in TAGS if tag in fresh}
            moves = frees_cache and not self._store.addresses_stable
            if moves and self._graphs is not None:
                # Undoing a failure moves the cache of some ranks only: all capture again, or none.
                transition.undo("the graphs", partial(self._graphs.pool.drop, "a suspend failed"))
            with self._rank_group.together("giving memory back"):
                if WEIGHTS in fresh:
                    transition.undo("offloading the weights", partial(self._weights.reload, no_tick))
                    self._weights.offload(transition.tick)
                offloaded = self._cache.offload(chosen, transition) if frees_cache else None
            if frees_cache:
                reports[KV_CACHE] = self._cache.release(offloaded)
            elif KV_CACHE in fresh:
                reports[KV_CACHE] = self._cache.persist(transition)
            # From here on nothing fails.
            if GRAPHS in wanted:
                reports[GRAPHS] = self._suspend_graphs(named=tags is not None, moves=moves)
            elif moves and self._graphs is not None:
                # Its next address may be the old one on some ranks only: all capture again, or none.
                self._graphs.pool.drop("the cache moves")
            if WEIGHTS in fresh or (WEIGHTS in wanted and not copies_stay and self._weights.derived.num_bytes):
                reports[WEIGHTS] = self._release_derived(keep_memory=copies_stay)
            if frees_cache or not copies_stay or self._device.is_cuda:
                self._device.trim()
            if KV_CACHE in wanted:
                self._cache.mode = chosen
            self._weights.hold_weakly()
            if not self._away:
                self._returns_to = transition.source
            self._away |= wanted
        return self._report("suspend", self._cache.mode, start, reports)

    def resume(self, *, tags: Iterable[str] | None, timeout_s: float | None) -> MemoryReport:
        """See `EngineCommands.resume`."""
        self._lifecycle.require("resume()", EngineState.SUSPENDED)
        wanted = set(self._away) if tags is None else _known(tags)
        if wanted - self._away:
            missing, away = ", ".join(sorted(wanted - self._away)), ", ".join(sorted(self._away))
            raise ConfigError(f"resume(tags={sorted(wanted)}): {missing} not suspended; suspended now: {away}")
        with self._lifecycle.transition("resume", timeout_s=timeout_s) as transition:
            start, left, mode = _Start(self._device), self._away - wanted, self._cache.mode
            reports = {tag: TagReport() for tag in TAGS if tag in wanted}
            if WEIGHTS in wanted:
                reports[WEIGHTS] = self._reload_weights(transition)
            if not left:
                reports[WEIGHTS] = self._catch_up_weights(transition, reports.get(WEIGHTS, TagReport()))
            if KV_CACHE in wanted:
                with self._rank_group.together("taking the cache back"):
                    reports[KV_CACHE] = self._cache.restore(transition)
                self._cache.mode = KVCacheManagementMode.PERSIST
            if not left:
                self._weights.hold()
                if self._graphs is not None:  # else the first request would wait for them
                    self._graphs.pool.capture_missing()
            if GRAPHS in wanted and self._graphs is not None:
                reports[GRAPHS] = TagReport(bytes_resident=self._graphs.pool.num_bytes)
            transition.target = EngineState.SUSPENDED if left else self._returns_to
            self._away = left
        return self._report("resume", mode, start, reports)

    # ------------------------------------------------------------------ graphs and weights

    def _suspend_graphs(self, *, named: bool, moves: bool) -> TagReport:
        """Graphs stay as long as the memory that they read keeps its addresses, unless the caller names their tag.

        moves: the cache comes back at other addresses. So do weights that are offloaded.
        """
        if self._graphs is None:
            return TagReport()
        freed = 0
        if named or moves or self._weights.offloaded_bytes:
            freed = self._graphs.pool.drop("suspended")
        return TagReport(bytes_freed=freed, bytes_resident=self._graphs.pool.num_bytes)

    def _release_derived(self, *, keep_memory: bool) -> TagReport:
        weights = self._weights
        freed, offloaded = weights.derived.num_bytes, weights.offloaded_bytes
        weights.derived.release(keep_memory=keep_memory)
        freed -= weights.derived.num_bytes
        return TagReport(
            bytes_freed=freed + offloaded, bytes_copied=offloaded, bytes_resident=weights.num_bytes + offloaded
        )

    def _reload_weights(self, transition: Transition) -> TagReport:
        before = self._weights.num_bytes
        with self._rank_group.together("taking the weights back"):
            if self._weights.offloaded_bytes:
                self._weights.reload(transition.tick)
                transition.undo("reloading the weights", partial(self._weights.offload, no_tick))
        taken = self._weights.num_bytes - before
        return TagReport(bytes_freed=-taken, bytes_copied=taken, bytes_resident=before + taken)

    def _catch_up_weights(self, transition: Transition, so_far: TagReport) -> TagReport:
        """Before the engine runs again: accept changed weights, rebuild derived copies."""
        weights = self._weights
        before = weights.derived.num_bytes
        if weights.derived.is_released:
            transition.undo("the rebuilt copies", partial(weights.derived.release, keep_memory=before > 0))
        weights.catch_up(transition.tick)
        return TagReport(
            bytes_freed=so_far.bytes_freed - (weights.derived.num_bytes - before),
            bytes_copied=so_far.bytes_copied,
            bytes_resident=weights.num_bytes,
        )

    def _report(
        self, command: str, mode: KVCacheManagementMode, start: _Start, tags: dict[str, TagReport]
    ) -> MemoryReport:
        seconds = time.perf_counter() - start.at_s
        self._loop.output_processor.meter.transition(command, seconds)
        return MemoryReport(
            command=command,
            mode=mode.value,
            state=self._lifecycle.state.value,
            seconds=seconds,
            tags={tag: tags[tag] for tag in TAGS if tag in tags},
            process_bytes_before=start.used_bytes,
            process_bytes_after=self._device.used_bytes(),
            num_requests=len(self._loop.output_processor),
        )


_STRENGTH = {mode: place for place, mode in enumerate(KVCacheManagementMode)}
"""PERSIST < OFFLOAD < RECOMPUTE: a suspended cache can be suspended in a later mode only."""


class _Start:
    """Clock and memory in use when a command began."""

    def __init__(self, device: Device) -> None:
        self.at_s, self.used_bytes = time.perf_counter(), device.used_bytes()


def _known(tags: Iterable[str] | None) -> set[str]:
    wanted = set(TAGS) if tags is None else {tags} if isinstance(tags, str) else set(tags)
    check_known("tag", sorted(wanted), TAGS, lists_known=True)
    if not wanted:
        raise ConfigError(f"no tags given; any of {', '.join(TAGS)}")
    return wanted


def _mode(mode: str | KVCacheManagementMode) -> KVCacheManagementMode:
    try:
        return KVCacheManagementMode(mode)
    except ValueError:
        known = [member.value for member in KVCacheManagementMode]
        raise ConfigError(f"{unknown_name('mode', str(mode), known)}; one of {', '.join(known)}") from None

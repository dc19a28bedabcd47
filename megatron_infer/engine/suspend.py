"""Giving memory back and taking it again: what each mode and tag does, in which order, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from megatron_infer.config.inference import KVCacheManagementMode
from megatron_infer.engine.build import Assembly
from megatron_infer.engine.states import EngineState, Lifecycle, Transition
from megatron_infer.engine.step_loop import StepLoop
from megatron_infer.errors import ConfigError, unknown_name
from megatron_infer.memory.store import StateStore, StoreReport

WEIGHTS, GRAPHS, KV_CACHE = "weights", "graphs", "kv_cache"
TAGS = (WEIGHTS, GRAPHS, KV_CACHE)
"""In the order they come back: weights are pushed before the cache takes its memory again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagReport:
    """What one tag's memory did, in bytes."""

    bytes_freed: int = 0
    """Given back to the system or the device's allocator (negative: taken), measured; copies made for it count."""
    bytes_copied: int = 0
    """Moved to or from host memory."""
    bytes_resident: int = 0
    """What the tag still occupies now, host copies included."""
    copy_s: float = 0.0
    """Seconds of copying the cache, by the device's clock where there is one; 0.0: nothing was copied, or not timed."""
    bytes_under_way: int = 0
    """Of bytes_copied, those whose copies still ran when the command returned: steps wait for them on the device, layer
    by layer. How long they took is known later (`StateStore.restore_copy_s`)."""

    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes a second, as measured; None where nothing was timed."""
        return self.bytes_copied / self.copy_s / 1e9 if self.bytes_copied and self.copy_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What a suspend or resume did; `str()` is a small table."""

    command: str
    mode: str
    """How the KV cache is, or was, away: "persist" (where it was), "offload" or "recompute"."""
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


class Suspension:
    """Which tags are away, and how they go and come back. A transition that fails leaves everything as it was.

        suspend:  step in flight committed -> live weights* -> KV cache -> (nothing fails from here) graphs that would
                  read memory which is elsewhere by then -> derived copies
        resume:   live weights* -> weights looked at, derived copies rebuilt -> KV cache      * if the engine owns them

    What may fail comes before what cannot be undone. PERSIST and OFFLOAD do not touch requests; RECOMPUTE sends all of
    them back to the queue, in their order.
    """

    def __init__(self, parts: Assembly, loop: StepLoop, lifecycle: Lifecycle) -> None:
        self._parts, self._loop, self._lifecycle = parts, loop, lifecycle
        self._away: set[str] = set()
        self._mode = KVCacheManagementMode.PERSIST
        """How the cache is away; PERSIST while it is not."""
        self._returns_to = EngineState.RUNNING

    @property
    def tags(self) -> frozenset[str]:
        """What is suspended now."""
        return frozenset(self._away)

    def suspend(
        self, *, mode: str | KVCacheManagementMode | None, tags: Iterable[str] | None, timeout_s: float | None
    ) -> MemoryReport:
        """See `EngineControls.suspend`."""
        wanted = _known(tags)
        chosen = self._parts.config.kv_cache_management_mode if mode is None else _mode(mode)
        cache_leaves = KV_CACHE in wanted and self._leaves(chosen)
        # PERSIST moves nothing: the next weights are packed over these copies. Who names the tag wants the memory.
        copies_stay = tags is None and chosen is KVCacheManagementMode.PERSIST
        with self._lifecycle.transition("suspend", timeout_s=timeout_s) as transition:
            meter = _Meter(self._parts)
            self._loop.quiesce(transition.tick)
            fresh = wanted - self._away
            reports = {tag: TagReport() for tag in TAGS if tag in fresh}
            moves = cache_leaves and not self._parts.runner.store.addresses_stable
            if moves and self._parts.graphs is not None:
                # A failure's way back moves the cache of some ranks only; all capture again, or none.
                transition.undo("the graphs", partial(self._parts.graphs.pool.drop, "a suspend failed"))
            with self._parts.rank_group.together("giving memory back"):
                if WEIGHTS in fresh:
                    self._parts.offload_weights(transition)
                done = self._put_cache_away(chosen, transition) if cache_leaves else None
            if cache_leaves:
                reports[KV_CACHE] = self._drop_cache(chosen, done)
            elif KV_CACHE in fresh:
                self._lend_cache(transition)
                reports[KV_CACHE] = TagReport(bytes_resident=_resident(self._parts.runner.store))
            # From here on nothing fails.
            if GRAPHS in wanted:
                reports[GRAPHS] = self._put_graphs_away(named=tags is not None, moves=moves)
            if WEIGHTS in fresh or (WEIGHTS in wanted and not copies_stay and self._parts.derived.num_bytes):
                reports[WEIGHTS] = self._release_derived(keep_memory=copies_stay)
            if cache_leaves or not copies_stay or self._parts.device.is_cuda:
                self._parts.device.trim()
            if KV_CACHE in wanted:
                self._mode = chosen
            if not self._away:
                self._returns_to = transition.source
            self._away |= wanted
        return self._report("suspend", self._mode, meter, reports)

    def resume(self, *, tags: Iterable[str] | None, timeout_s: float | None) -> MemoryReport:
        """See `EngineControls.resume`."""
        self._lifecycle.require("resume()", EngineState.SUSPENDED)
        wanted = set(self._away) if tags is None else _known(tags)
        if wanted - self._away:
            missing, away = ", ".join(sorted(wanted - self._away)), ", ".join(sorted(self._away))
            raise ConfigError(f"resume(tags={sorted(wanted)}): {missing} not suspended; suspended now: {away}")
        with self._lifecycle.transition("resume", timeout_s=timeout_s) as transition:
            meter, left, mode = _Meter(self._parts), self._away - wanted, self._mode
            reports = {tag: TagReport() for tag in TAGS if tag in wanted}
            if WEIGHTS in wanted:
                before = self._parts.weight_bytes()
                with self._parts.rank_group.together("taking the weights back"):
                    self._parts.reload_weights(transition)
                taken = self._parts.weight_bytes() - before
                reports[WEIGHTS] = TagReport(bytes_freed=-taken, bytes_copied=taken, bytes_resident=before + taken)
            if not left:
                reports[WEIGHTS] = self._settle_weights(transition, reports.get(WEIGHTS, TagReport()))
            if KV_CACHE in wanted:
                with self._parts.rank_group.together("taking the cache back"):
                    reports[KV_CACHE] = self._restore_cache(transition)
                self._mode = KVCacheManagementMode.PERSIST
            if GRAPHS in wanted and self._parts.graphs is not None:  # captured again when a step needs them
                reports[GRAPHS] = TagReport(bytes_resident=self._parts.graphs.pool.num_bytes)
            transition.target = EngineState.SUSPENDED if left else self._returns_to
            self._away = left
        return self._report("resume", mode, meter, reports)

    # ------------------------------------------------------------------ the tags

    def _leaves(self, mode: KVCacheManagementMode) -> bool:
        """Whether the cache's memory has to go for `mode`. Raises ConfigError for what cannot be."""
        if mode is KVCacheManagementMode.OFFLOAD and self._parts.config.unified_memory_level:
            raise ConfigError('mode="offload" with unified_memory_level=1: it moves by itself; take "persist"')
        if _STRENGTH[mode] < _STRENGTH[self._mode]:
            raise ConfigError(
                f'mode="{mode.value}": the cache is suspended as "{self._mode.value}" already; resume() first'
            )
        return mode is not self._mode

    def _put_cache_away(self, mode: KVCacheManagementMode, transition: Transition) -> StoreReport | None:
        """What may fail, and can be undone as long as other ranks may fail."""
        store, context = self._parts.runner.store, self._parts.context
        if mode is not KVCacheManagementMode.OFFLOAD:
            if not store.is_released:
                transition.tick("release the cache")
            return None
        blocks, states = context.held_blocks(), context.held_state_slots()
        done = store.offload(blocks, transition.tick, state_slots=states)
        transition.undo("the offload", partial(store.restore, set(blocks), _no_tick, keep_states=set(states)))
        return done

    def _drop_cache(self, mode: KVCacheManagementMode, done: StoreReport | None) -> TagReport:
        """What is left, which nothing can stop."""
        store = self._parts.runner.store
        if done is not None:
            self._parts.context.forget_free()
            return _cache_report(done, store)
        freed = store.drop_host_copy() if store.is_released else store.release(_no_tick).bytes_freed
        freed += self._drop_requests()
        store.trim_host(keep_bytes=0)
        return TagReport(bytes_freed=freed, bytes_resident=_resident(store))

    def _lend_cache(self, transition: Transition) -> None:
        """The mode persist: content and addresses stay, and where pages can leave on their own they may."""
        self._parts.runner.store.allow_migration()
        transition.undo("lending the cache", self._settle_cache)

    def _settle_cache(self) -> None:
        context = self._parts.context
        self._parts.runner.store.prefetch(context.held_blocks(), state_slots=context.held_state_slots())

    def _drop_requests(self) -> int:
        """Everyone computes anew -> bytes of host memory that evicted requests gave back."""
        store = self._parts.runner.store
        before = store.host_bytes()
        self._parts.scheduler.requeue_all()
        self._parts.context.forget_all()
        self._parts.free_host_slots()
        return before - store.host_bytes()

    def _restore_cache(self, transition: Transition) -> TagReport:
        store, context = self._parts.runner.store, self._parts.context
        if not store.is_released:
            self._settle_cache()
            return TagReport(bytes_resident=_resident(store))
        context.forget_free()  # of requests that ended meanwhile: the books still had it, nothing brings it back
        blocks, states = context.held_blocks(), context.held_state_slots()
        done = store.restore(set(blocks), transition.tick, keep_states=set(states))
        if self._mode is KVCacheManagementMode.OFFLOAD:
            transition.undo("the restore", partial(store.offload, blocks, _no_tick, state_slots=states))
        else:
            transition.undo("the restore", partial(store.release, _no_tick))
        return _cache_report(done, store)

    def _put_graphs_away(self, *, named: bool, moves: bool) -> TagReport:
        """Graphs stay for as long as what they read stays where it is, unless somebody names their memory.

        moves: the cache comes back elsewhere. So do weights that are laid up.
        """
        graphs = self._parts.graphs
        if graphs is None:
            return TagReport()
        freed = 0
        if named or moves or self._parts.offloaded_weight_bytes():
            freed = graphs.pool.drop("suspended")
        return TagReport(bytes_freed=freed, bytes_resident=graphs.pool.num_bytes)

    def _release_derived(self, *, keep_memory: bool) -> TagReport:
        parts = self._parts
        derived, laid_up = parts.derived.num_bytes, parts.offloaded_weight_bytes()
        parts.derived.release(keep_memory=keep_memory)
        derived -= parts.derived.num_bytes
        return TagReport(
            bytes_freed=derived + laid_up, bytes_copied=laid_up, bytes_resident=parts.weight_bytes() + laid_up
        )

    def _settle_weights(self, transition: Transition, so_far: TagReport) -> TagReport:
        """Before the engine runs again: changed weights are seen, derived copies rebuilt."""
        parts = self._parts
        before = parts.derived.num_bytes
        if parts.derived.is_released:
            transition.undo("the rebuilt copies", partial(parts.derived.release, keep_memory=before > 0))
        with parts.rank_group.together("the look whether weights changed"):
            transition.tick("the look whether weights changed")
        parts.catch_up_with_weights(transition.tick)
        return TagReport(
            bytes_freed=so_far.bytes_freed - (parts.derived.num_bytes - before),
            bytes_copied=so_far.bytes_copied,
            bytes_resident=parts.weight_bytes(),
        )

    def _report(
        self, command: str, mode: KVCacheManagementMode, meter: _Meter, tags: dict[str, TagReport]
    ) -> MemoryReport:
        seconds = time.perf_counter() - meter.started
        self._loop.output_processor.meter.transition(command, seconds)
        return MemoryReport(
            command=command,
            mode=mode.value,
            state=self._lifecycle.state.value,
            seconds=seconds,
            tags={tag: tags[tag] for tag in TAGS if tag in tags},
            process_bytes_before=meter.in_use,
            process_bytes_after=self._parts.device.used_bytes(),
            num_requests=len(self._loop.output_processor),
        )


_STRENGTH = {mode: place for place, mode in enumerate(KVCacheManagementMode)}
"""PERSIST < OFFLOAD < RECOMPUTE: a suspended cache may only go further away."""


def _no_tick(what: str) -> None:
    """For work that is not to be stopped."""


class _Meter:
    """Clock and memory in use when a command began."""

    def __init__(self, parts: Assembly) -> None:
        self.started, self.in_use = time.perf_counter(), parts.device.used_bytes()


def _resident(store: StateStore) -> int:
    return store.resident_bytes() + store.host_bytes() + store.idle_host_bytes()


def _cache_report(done: StoreReport, store: StateStore) -> TagReport:
    return TagReport(
        bytes_freed=done.bytes_freed,
        bytes_copied=done.bytes_copied,
        bytes_resident=_resident(store),
        copy_s=done.copy_s,
        bytes_under_way=done.bytes_under_way,
    )


def _known(tags: Iterable[str] | None) -> set[str]:
    wanted = set(TAGS) if tags is None else {tags} if isinstance(tags, str) else set(tags)
    for tag in sorted(wanted):
        if tag not in TAGS:
            raise ConfigError(f"{unknown_name('tag', str(tag), TAGS)}; one of {', '.join(TAGS)}")
    if not wanted:
        raise ConfigError(f"no tags given; any of {', '.join(TAGS)}")
    return wanted


def _mode(mode: str | KVCacheManagementMode) -> KVCacheManagementMode:
    try:
        return KVCacheManagementMode(mode)
    except ValueError:
        known = [member.value for member in KVCacheManagementMode]
        raise ConfigError(f"{unknown_name('mode', str(mode), known)}; one of {', '.join(known)}") from None

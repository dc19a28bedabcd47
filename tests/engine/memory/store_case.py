"""Shared by tests of the store: stores, small pieces, a progress callback that fails at a given call, random copies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from megatron_infer.memory import host_arena
from megatron_infer.memory.regions.choose import make_region
from megatron_infer.memory.store import CacheStore
from megatron_infer.memory.store_layout import StoreLayout
from megatron_infer.scheduler.context.copies import Copy, CopyKind

copy_block, block_out, block_in = (
    partial(Copy, kind) for kind in (CopyKind.BLOCK, CopyKind.BLOCK_OUT, CopyKind.BLOCK_IN)
)
copy_state, state_out, state_in = (
    partial(Copy, kind) for kind in (CopyKind.STATE, CopyKind.STATE_OUT, CopyKind.STATE_IN)
)
"""Each of (source, destination)."""


def cut_pieces(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Chunks and pieces of so many bytes, so that small tests cross their borders."""
    monkeypatch.setattr(host_arena, "PIECE_BYTES", num_bytes)
    monkeypatch.setattr(host_arena, "MAX_CHUNK_BYTES", 0)


def quiet(what: str) -> None:
    """A progress callback that does nothing."""


def build_store(
    layout: StoreLayout,
    *,
    device: str | torch.device = "cpu",
    static: bool = False,
    unified: bool = False,
    host_slots: tuple[int, int] = (0, 0),
) -> CacheStore:
    """A store in the memory that the options `static_kv_memory_pointers` and `unified_memory_level` give."""
    where = torch.device(device)
    region = make_region((layout.num_bytes,), torch.uint8, where, static_pointers=static, unified_memory=unified)
    return CacheStore(layout, region, host_slots)


class Recorder:
    """A progress callback that raises `error` at call number fail_at."""

    def __init__(self, fail_at: int | None = None, error: type[BaseException] = TimeoutError) -> None:
        self.calls: list[str] = []
        self.fail_at, self.error = fail_at, error

    def __call__(self, what: str) -> None:
        self.calls.append(what)
        if self.fail_at == len(self.calls) - 1:
            raise self.error(what)


class RandomCopies:
    """Copies between pools and host slots, and which content is where after all of them, done one after the other."""

    def __init__(
        self, rng: random.Random, *, num_slots: int, kinds: Sequence[CopyKind] = tuple(CopyKind), **pools: Sequence[int]
    ) -> None:
        """pools: "block" or "state" -> its places."""
        self.rng, self.pools = rng, {**pools, **{f"host {pool}": range(num_slots) for pool in pools}}
        self.held = {(pool, place): place for pool, places in pools.items() for place in places}
        """(pool, place) or ("host " + pool, slot) -> the place it was filled as."""
        self._kinds = [kind for kind in kinds if kind.value.split()[0] in pools]

    def draw(self, most: int) -> list[Copy]:
        """Up to so many copies; `held` is what it is after them."""
        copies: list[Copy] = []
        for _ in range(self.rng.randint(0, most)):
            kind = self.rng.choice(self._kinds)
            pool, _, way = kind.value.partition(" ")
            source, destination = (f"host {pool}" if host else pool for host in (way == "in", way == "out"))
            copy = Copy(kind, self.rng.choice(self.pools[source]), self.rng.choice(self.pools[destination]))
            if (source, copy.source) in self.held and (source != destination or copy.source != copy.destination):
                self.held[destination, copy.destination] = self.held[source, copy.source]
                copies.append(copy)
        return copies

    def free(self, pool: str) -> list[int]:
        """Host slots to free; some of them hold nothing."""
        freed = [slot for slot in self.pools[f"host {pool}"] if self.rng.random() < 0.2]
        for slot in freed:
            self.held.pop((f"host {pool}", slot), None)
        return freed

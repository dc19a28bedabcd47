"""Shared by tests of the store: stores, small pieces, a progress callback that fails at a given call, random moves."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from megatron_infer.context.swap_slots import Move
from megatron_infer.memory import host_arena
from megatron_infer.memory.regions.choose import make_region
from megatron_infer.memory.store import StateStore
from megatron_infer.memory.store_layout import StoreLayout


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
) -> StateStore:
    """A store in the memory that the options `static_kv_memory_pointers` and `unified_memory_level` give."""
    where = torch.device(device)
    region = make_region((layout.num_bytes,), torch.uint8, where, static_pointers=static, unified_memory=unified)
    return StateStore(layout, region, host_slots)


class Recorder:
    """A progress callback that raises `error` at call number fail_at."""

    def __init__(self, fail_at: int | None = None, error: type[BaseException] = TimeoutError) -> None:
        self.calls: list[str] = []
        self.fail_at, self.error = fail_at, error

    def __call__(self, what: str) -> None:
        self.calls.append(what)
        if self.fail_at == len(self.calls) - 1:
            raise self.error(what)


class RandomMoves:
    """Moves between pools and host slots, and which content is where after all of them, done one after the other."""

    def __init__(self, rng: random.Random, *, num_slots: int, **pools: Sequence[int]) -> None:
        """pools: "block" or "state" -> its places."""
        self.rng, self.num_slots, self.pools = rng, num_slots, pools
        self.held = {(pool, place): place for pool, places in pools.items() for place in places}
        """(pool, place) or ("host " + pool, slot) -> the place it was filled as."""
        self._kinds = [kind for pool in pools for kind in ((pool, "out"), (pool, "in"))]
        self._kinds += [("state", "copy")] * 2 if "state" in pools else []

    def draw(self, most: int) -> list[Move]:
        """Up to so many moves; `held` is what it is after them."""
        moves: list[Move] = []
        for _ in range(self.rng.randint(0, most)):
            pool, how = self.rng.choice(self._kinds)
            name = how if pool == "block" else f"{pool} {how}"
            place, slot = self.rng.choice(self.pools[pool]), self.rng.randrange(self.num_slots)
            if how == "copy":
                place, slot = self.rng.sample(self.pools[pool], 2)
                self.held[pool, place] = self.held[pool, slot]
            elif how == "out":
                self.held[f"host {pool}", slot] = self.held[pool, place]
            elif (f"host {pool}", slot) in self.held:
                self.held[pool, place] = self.held[f"host {pool}", slot]
            else:
                continue
            moves.append((name, place, slot))
        return moves

    def free(self, pool: str) -> list[int]:
        """Host slots to free; some of them hold nothing."""
        freed = [slot for slot in range(self.num_slots) if self.rng.random() < 0.2]
        for slot in freed:
            self.held.pop((f"host {pool}", slot), None)
        return freed

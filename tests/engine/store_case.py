"""What tests of the large tensors share: small pieces, work that fails at a given point, random copies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest

from megatron_infer.context.copies import Copy, CopyKind
from megatron_infer.memory import host_arena

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
    """For work that is not to be stopped."""


class Recorder:
    """A tick that raises `error` at its fail_at-th call."""

    def __init__(self, fail_at: int | None = None, error: type[BaseException] = TimeoutError) -> None:
        self.said: list[str] = []
        self.fail_at, self.error = fail_at, error

    def __call__(self, what: str) -> None:
        self.said.append(what)
        if self.fail_at == len(self.said) - 1:
            raise self.error(what)


class RandomCopies:
    """Copies between pools and host slots, and what is where when they have been done one after the other."""

    def __init__(
        self, rng: random.Random, *, num_slots: int, kinds: Sequence[CopyKind] = tuple(CopyKind), **pools: Sequence[int]
    ) -> None:
        """pools: "block" or "state" -> its places."""
        self.rng, self.pools = rng, {**pools, **{f"host {pool}": range(num_slots) for pool in pools}}
        self.held = {(pool, place): place for pool, places in pools.items() for place in places}
        """(pool, place) or ("host " + pool, slot) -> the place it was filled as."""
        self._kinds = [kind for kind in kinds if kind.value.split()[0] in pools]

    def draw(self, most: int) -> list[Copy]:
        """Up to so many copies, of which `held` knows from now on."""
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
        """Slots that are not needed any more; some of them hold nothing."""
        freed = [slot for slot in self.pools[f"host {pool}"] if self.rng.random() < 0.2]
        for slot in freed:
            self.held.pop((f"host {pool}", slot), None)
        return freed

"""State slots of the prefix cache: which one holds the recurrent state behind which published block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class _CachedState:
    slot: int
    since: int
    """Step whose forward writes it: plans of later steps may read it."""
    num_loads: int = 0


class CachedStateSlots:
    """Slots first_slot .. first_slot + count - 1 and what they hold.

        free --take--> pending (at a position of a lease) --attach--> cached behind a block --evicted--> free
                          +-- release: no block of that content was published     (oldest first, or with its block)

    A state cached behind a block is every Mamba layer's state after the sequence that ends with that block, so it
    serves every lease on the block. A hit copies it to the row's own slot: no step computes in a slot of this pool.
    What the step being planned writes can be read by later steps only, because within a step all rows advance at once.
    """

    def __init__(self, first_slot: int, count: int) -> None:
        self.first_slot, self.count = first_slot, count
        self._free = list(range(first_slot, first_slot + count))[::-1]
        self._pending: dict[int, int] = {}
        """Slot -> step that writes it."""
        self._cached: OrderedDict[int, _CachedState] = OrderedDict()
        """By block, the next one to be evicted first."""
        self._freed_in_step: list[int] = []
        """Freed while the step being planned writes them: two of its rows must not get the same slot."""
        self._step = 0

    def begin_step(self) -> None:
        """A step is planned from here on: what was planned before it has been launched."""
        self._step += 1
        self._free += self._freed_in_step
        self._freed_in_step = []

    def take(self, *, evict: bool) -> int | None:
        """A slot for a state that the step being planned writes; None when there is none.

        evict: with no slot free, take the one of the least recently used state; never one that this step writes.
        """
        if not self._free and evict:
            block = next((block for block, cached in self._cached.items() if cached.since < self._step), None)
            if block is not None:
                self.forget(block)
        if not self._free:
            return None
        slot = self._free.pop()
        self._pending[slot] = self._step
        return slot

    def attach(self, slot: int, block: int, *, evict_first: bool) -> bool:
        """Cache the pending state in `slot` behind published `block`; False, and the slot is free, if that has a state.

        evict_first: it is the next to be evicted until a lease loads it.
        """
        since = self._pending.pop(slot)
        if block in self._cached:
            self._free_slot(slot, since)
            return False
        self._cached[block] = _CachedState(slot, since)
        if evict_first:
            self._cached.move_to_end(block, last=False)
        return True

    def release(self, slot: int) -> None:
        """A pending slot is not needed any more."""
        self._free_slot(slot, self._pending.pop(slot))

    def any_behind(self, blocks: Collection[int]) -> bool:
        """Whether a state is cached behind any of them."""
        return not self._cached.keys().isdisjoint(blocks)

    def is_ready(self, block: int) -> bool:
        """Whether the step being planned may read the state behind `block`."""
        cached = self._cached.get(block)
        return cached is not None and cached.since < self._step

    def is_coming(self, block: int) -> bool:
        """Whether the step being planned writes the state behind `block`."""
        cached = self._cached.get(block)
        return cached is not None and cached.since == self._step

    def load(self, block: int) -> int:
        """The slot of the state behind `block`, which becomes the last to be evicted."""
        cached = self._cached[block]
        cached.num_loads += 1
        self._cached.move_to_end(block)
        return cached.slot

    def forget(self, block: int) -> None:
        """`block` has lost its content, or its state must go; does nothing if it has none."""
        cached = self._cached.pop(block, None)
        if cached is not None:
            self._free_slot(cached.slot, cached.since)

    def forget_unused(self, block: int) -> None:
        """Like `forget`, if no lease has loaded it."""
        cached = self._cached.get(block)
        if cached is not None and not cached.num_loads:
            self.forget(block)

    def forget_all(self) -> None:
        """No state is cached behind any block; pending slots stay with their leases."""
        for block in list(self._cached):
            self.forget(block)

    def slots_of(self, blocks: Collection[int]) -> list[int]:
        """Slots of states cached behind these blocks, and pending ones."""
        return sorted([*self._pending, *(cached.slot for block, cached in self._cached.items() if block in blocks)])

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def check(self, pending: list[int], published: Collection[int]) -> None:
        """Assert that slots add up, `pending` being those of leases, and states lie behind published blocks."""
        assert sorted(pending) == sorted(self._pending), f"pending {sorted(self._pending)}, leases have {pending}"
        cached = [cached.slot for cached in self._cached.values()]
        slots = sorted([*self._free, *self._freed_in_step, *self._pending, *cached])
        assert slots == list(range(self.first_slot, self.first_slot + self.count)), f"slots {slots}"
        lost = [block for block in self._cached if block not in published]
        assert not lost, f"states are cached behind blocks {lost}, which are not published"

    def _free_slot(self, slot: int, since: int) -> None:
        (self._free if since < self._step else self._freed_in_step).append(slot)

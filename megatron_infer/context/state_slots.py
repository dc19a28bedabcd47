"""Which state slot keeps the recurrent state behind which published block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class _Kept:
    slot: int
    since: int
    """Step whose forward writes it: plans of later steps may read it."""
    num_loads: int = 0


class StateSlots:
    """State slots of the prefix cache.

        free --take--> unnamed (its owner's lease knows the position) --name--> kept behind a block --reclaimed--> free
                          +-- give_back: no block of that content was published      (oldest first, or with its block)

    A state kept behind a block is what every Mamba layer knows after the sequence that ends with it, so it is good for
    whoever holds that block. A hit copies it: nobody computes in a slot of this pool. What the step being planned
    writes can be read by later steps only, for within a step all rows advance at once.
    """

    def __init__(self, first_slot: int, count: int) -> None:
        assert count >= 1, f"{count} snapshots"
        self.first_slot, self.count = first_slot, count
        self._free = list(range(first_slot, first_slot + count))[::-1]
        self._unnamed: dict[int, int] = {}
        """Slot -> step that writes it."""
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        """By block, the next one to be reclaimed first."""
        self._leaving: list[int] = []
        """Given up while the step being planned writes them: two of its rows must not get the same slot."""
        self._now = 0

    def begin_step(self) -> None:
        """A step is planned from here on: what was planned before it has been launched."""
        self._now += 1
        self._free += self._leaving
        self._leaving = []

    def take(self, *, reclaim: bool) -> int | None:
        """A slot for a state that the step being planned writes; None when there is none.

        reclaim: take the one that was not used for longest if none is free; never one that this step writes.
        """
        if not self._free and reclaim:
            block = next((block for block, kept in self._kept.items() if kept.since < self._now), None)
            if block is not None:
                self.forget(block)
        if not self._free:
            return None
        slot = self._free.pop()
        self._unnamed[slot] = self._now
        return slot

    def name(self, slot: int, block: int, *, first_to_go: bool) -> bool:
        """From now on `slot` is kept behind published `block`; False, and it is free, if that has a state already."""
        since = self._unnamed.pop(slot)
        if block in self._kept:
            self._give_up(slot, since)
            return False
        self._kept[block] = _Kept(slot, since)
        if first_to_go:
            self._kept.move_to_end(block, last=False)
        return True

    def give_back(self, slot: int) -> None:
        """An unnamed slot that is not needed."""
        self._give_up(slot, self._unnamed.pop(slot))

    def any_behind(self, blocks: Collection[int]) -> bool:
        """Whether a state is kept behind any of them."""
        return not self._kept.keys().isdisjoint(blocks)

    def is_ready(self, block: int) -> bool:
        """Whether the step being planned may read the state behind `block`."""
        kept = self._kept.get(block)
        return kept is not None and kept.since < self._now

    def is_coming(self, block: int) -> bool:
        """Whether the step being planned writes it."""
        kept = self._kept.get(block)
        return kept is not None and kept.since == self._now

    def use(self, block: int) -> int:
        """The slot behind `block`, which becomes the last to be reclaimed."""
        kept = self._kept[block]
        kept.num_loads += 1
        self._kept.move_to_end(block)
        return kept.slot

    def forget(self, block: int) -> None:
        """`block` has lost its content, or its state must go; fine if it has none."""
        kept = self._kept.pop(block, None)
        if kept is not None:
            self._give_up(kept.slot, kept.since)

    def _give_up(self, slot: int, since: int) -> None:
        (self._free if since < self._now else self._leaving).append(slot)

    def forget_unused(self, block: int) -> None:
        """Like `forget`, if nobody has gone on from it."""
        kept = self._kept.get(block)
        if kept is not None and not kept.num_loads:
            self.forget(block)

    def forget_all(self) -> None:
        """Nothing is kept behind any block; unnamed slots stay their owners'."""
        for block in list(self._kept):
            self.forget(block)

    def slots_of(self, blocks: Collection[int]) -> list[int]:
        """Slots kept behind these blocks, and unnamed ones."""
        return sorted([*self._unnamed, *(kept.slot for block, kept in self._kept.items() if block in blocks)])

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def check(self, unnamed: list[int], published: Collection[int]) -> None:
        """Assert that slots add up, `unnamed` being those that leases know, and states lie behind published blocks."""
        assert sorted(unnamed) == sorted(self._unnamed), f"unnamed {sorted(self._unnamed)}, leases know {unnamed}"
        slots = sorted([*self._free, *self._leaving, *self._unnamed, *(kept.slot for kept in self._kept.values())])
        assert slots == list(range(self.first_slot, self.first_slot + self.count)), f"slots {slots}"
        lost = [block for block in self._kept if block not in published]
        assert not lost, f"states are kept behind blocks {lost}, which nobody can find"

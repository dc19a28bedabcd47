"""Numbered places that are handed out one at a time: request rows."""

from __future__ import annotations


class RowPool:
    """Hands out the numbers 0 .. count-1, each to one owner at a time; low numbers first while none was returned."""

    def __init__(self, count: int) -> None:
        assert count >= 1, f"a pool of {count} slots"
        self.count = count
        self._free = list(range(count))[::-1]
        self._taken = [False] * count

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free number, or None when all are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._taken[slot] = True
        return slot

    def give_back(self, slot: int) -> None:
        assert self._taken[slot], f"slot {slot} was given back but is free"
        self._taken[slot] = False
        self._free.append(slot)

    def check(self, held: list[int]) -> None:
        """Assert that exactly the numbers in `held` are taken."""
        assert len(set(held)) == len(held), f"a slot is held twice: {sorted(held)}"
        taken = [slot for slot, is_taken in enumerate(self._taken) if is_taken]
        assert sorted(held) == taken, f"slots held {sorted(held)} != slots taken {taken}"
        assert sorted(self._free + taken) == list(range(self.count)), f"free {sorted(self._free)}, taken {taken}"

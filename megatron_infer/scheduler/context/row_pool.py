"""Numbered places that are given out one at a time: request rows, host places of recurrent states."""

from __future__ import annotations


class RowPool:
    """Gives out the numbers 0 .. count-1, each to one owner at a time; low numbers first while none was released."""

    def __init__(self, count: int) -> None:
        assert count >= 1, f"a pool of {count} rows"
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
        row = self._free.pop()
        self._taken[row] = True
        return row

    def release(self, row: int) -> None:
        assert self._taken[row], f"row {row} was released but is free"
        self._taken[row] = False
        self._free.append(row)

    def check(self, held: list[int]) -> None:
        """Assert that exactly the numbers in `held` are taken."""
        assert len(set(held)) == len(held), f"a row is held twice: {sorted(held)}"
        taken = [row for row, is_taken in enumerate(self._taken) if is_taken]
        assert sorted(held) == taken, f"rows held {sorted(held)} != rows taken {taken}"
        assert sorted(self._free + taken) == list(range(self.count)), f"free {sorted(self._free)}, taken {taken}"

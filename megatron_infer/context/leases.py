"""Leases: a row and blocks for each sequence, how they grow and go back, and the journal of block-table writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_infer.context.block_pool import BlockPool
from megatron_infer.context.row_pool import RowPool


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """What one sequence holds in the context, from admission to release: a row for life and its blocks in order."""

    row: int
    """Also the slot of its recurrent state, in models that keep one."""
    blocks: list[int]
    capacity: int
    """Tokens that fit: len(blocks) * block_size."""
    cached: int
    """Leading tokens whose keys and values were there at admission (prefix hit) or fork."""
    digests: list[bytes]
    """Content digests of the leading blocks that were hit or published: a chain that starts at `root`."""
    root: bytes
    """Names what its blocks are computed with; b"" once it may publish no more (mixed weights, collision, reset)."""
    hashed: list[bytes] = field(default_factory=list)
    """What `digests` was when it was last cut back, so that a prompt in chunks is not hashed to its end by each."""
    begins_behind: int | None = None
    """Published block whose recurrent state it goes on from, until that is loaded."""
    waits: bool = False
    """A state that lets it skip more is written by the step being planned."""
    keep_at: set[int] = field(default_factory=set)
    """Positions, multiples of block_size, behind which the prefix cache wants its recurrent state."""
    unnamed: dict[int, int] = field(default_factory=dict)
    """Position -> slot that holds (or will hold) the state there, while the block it belongs to is not published."""
    drawn: set[int] = field(default_factory=set)
    """Those of them that were reached by decoding."""
    drawn_block: int | None = None
    """Block behind which the last such state is kept."""


class LeaseBook:
    """The books of who holds which row and which blocks; `num_blocks` excludes the dummy block."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        max_blocks_per_row: int,
        keep_cached: bool,
        on_forget: Callable[[int], None] | None = None,
    ) -> None:
        assert block_size >= 1 and max_blocks_per_row >= 1, f"block_size {block_size}, per row {max_blocks_per_row}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_rows = num_rows
        self.max_blocks_per_row = max_blocks_per_row
        self.pool = BlockPool(num_blocks, keep_cached=keep_cached, on_forget=on_forget)
        self._rows = RowPool(num_rows)
        self._leases: dict[int, Lease] = {}
        self._table_writes: list[tuple[int, int, int]] = []

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_free_rows(self) -> int:
        return self._rows.num_free

    @property
    def max_stored_tokens(self) -> int:
        """Tokens the largest sequence can keep when it is alone."""
        return min(self.num_blocks, self.max_blocks_per_row) * self.block_size

    def extend(self, lease: Lease, num_tokens: int) -> bool:
        """Grow `lease` until it can hold `num_tokens` tokens; all or nothing.

        Returns False and changes nothing if the pool lacks blocks (the caller pauses or evicts).
        """
        missing = num_tokens - lease.capacity
        if missing <= 0:
            return True
        size = self.block_size
        need = -(-missing // size)
        new = self.pool.try_alloc(need)
        if new is None:
            return False
        blocks, row = lease.blocks, lease.row
        column = len(blocks)
        assert column + need <= self.max_blocks_per_row, f"{num_tokens} tokens need more than {self.max_blocks_per_row}"
        for block in new:
            self._table_writes.append((row, column, block))
            column += 1
        blocks += new
        lease.capacity += need * size
        return True

    def release(self, lease: Lease) -> None:
        """Take back the row and one reference to every block, last block first (see `BlockPool`)."""
        assert self._leases.get(lease.row) is lease, f"release of a lease on row {lease.row} that is not held"
        del self._leases[lease.row]
        unref = self.pool.unref
        for block in reversed(lease.blocks):
            unref(block)
        self._rows.give_back(lease.row)

    def held_blocks(self) -> list[int]:
        """Every block some lease holds, once, in order."""
        return self.pool.held()

    def num_exclusive_blocks(self, lease: Lease) -> int:
        """Blocks that nobody else references: what its release would free."""
        return self.pool.num_exclusive(lease.blocks)

    def take_table_writes(self) -> list[tuple[int, int, int]]:
        """(row, column, block) writes since the last call, in order: apply them all and the block tables are right.

        Entries behind a sequence's last block are stale: readers go by its length.
        """
        writes, self._table_writes = self._table_writes, []
        return writes

    def repeat_table_writes(self) -> None:
        """Journal every lease's blocks again: the reader may have lost the writes it took."""
        self._table_writes = []
        for lease in self._leases.values():
            self._journal(lease)

    def check(self) -> None:
        """Assert that references, rows and capacities agree with the leases issued."""
        held = [0] * self.num_blocks
        column_of: dict[int, int] = {}
        for row, lease in self._leases.items():
            assert lease.row == row, f"lease on row {lease.row} is booked on row {row}"
            assert lease.capacity == len(lease.blocks) * self.block_size, f"row {row}: capacity {lease.capacity}"
            assert len(lease.blocks) <= self.max_blocks_per_row, f"row {row} holds {len(lease.blocks)} blocks"
            assert len(lease.digests) <= len(lease.blocks), f"row {row}: {len(lease.digests)} digests"
            for column, block in enumerate(lease.blocks):
                held[block] += 1
                assert column_of.setdefault(block, column) == column, f"block {block} is held at two positions"
        self.pool.check(held)
        self._rows.check([lease.row for lease in self._leases.values()])

    def _issue(self, lease: Lease) -> None:
        self._leases[lease.row] = lease
        self._journal(lease)

    def _move(self, lease: Lease, column: int, block: int) -> None:
        """Hold `block` at `column` in place of the block there."""
        self.pool.share(block)
        self.pool.unref(lease.blocks[column])
        lease.blocks[column] = block
        self._table_writes.append((lease.row, column, block))

    def _journal(self, lease: Lease) -> None:
        self._table_writes.extend((lease.row, column, block) for column, block in enumerate(lease.blocks))

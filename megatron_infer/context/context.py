"""Which request holds which row and which blocks. Knows token ids and block ids, never requests or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_infer.context.block_pool import BlockPool
from megatron_infer.context.host import HostSlots, Move, Swapped
from megatron_infer.context.prefix import chain
from megatron_infer.context.slots import SlotPool


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """What one sequence holds in the context, from admission to release: a row for life and its blocks in order."""

    row: int
    blocks: list[int]
    capacity: int
    """Tokens that fit: len(blocks) * block_size."""
    cached: int
    """Leading tokens whose keys and values were there at admission (prefix hit) or fork."""
    digests: list[bytes]
    """Content digests of the leading blocks that were hit or committed: a chain that starts at `root`."""
    root: bytes
    """Names the weights its blocks are computed with; b"" once they are a mixture of several."""


class DynamicInferenceContext:
    """Issues and takes back leases on rows and blocks; every call either succeeds whole or changes nothing.

    A block with several references is full and is never written again. `num_blocks` excludes the dummy block.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        max_blocks_per_row: int,
        prefix_caching: bool = False,
        keep_cached: bool = False,
        num_host_slots: int = 0,
    ) -> None:
        assert block_size >= 1 and max_blocks_per_row >= 1, f"block_size {block_size}, per row {max_blocks_per_row}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_rows = num_rows
        self.max_blocks_per_row = max_blocks_per_row
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, keep_cached=prefix_caching and keep_cached)
        self.host = HostSlots(num_host_slots) if num_host_slots else None
        """Host memory for blocks of sequences that wait; None: there is none, and nothing is ever swapped."""
        self._rows = SlotPool(num_rows)
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

    def admit(self, tokens: Sequence[int], *, root: bytes, use_cache: bool = True) -> Lease | None:
        """A lease on a free row with the longest cached prefix of `tokens`; None when no row is free.

        The last token is never served from the cache: a request needs at least one query to draw from.
        Call `extend` for the rest.
        """
        row = self._rows.take()
        if row is None:
            return None
        blocks: list[int] = []
        digests: list[bytes] = []
        if use_cache and self.prefix_caching:
            size, digest = self.block_size, root
            for start in range(0, len(tokens) - size, size):
                digest = chain(digest, tokens[start : start + size])
                block = self.pool.lookup(digest)
                if block is None:
                    break
                blocks.append(block)
                digests.append(digest)
        for block in blocks:
            self.pool.share(block)
        cached = len(blocks) * self.block_size
        lease = Lease(row=row, blocks=blocks, capacity=cached, cached=cached, digests=digests, root=root)
        self._issue(lease)
        return lease

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

    def fork(self, lease: Lease, num_tokens: int) -> tuple[Lease, tuple[int, int] | None] | None:
        """A second lease on the first `num_tokens` tokens of `lease`: full blocks are shared, a partial tail is not.

        Returns the new lease and the (source, destination) copy of the tail block, which must happen once the source
        holds those tokens and before the new lease is used; None in its place when the tail is full. Returns None and
        changes nothing when a row or the tail's block is lacking.
        """
        assert num_tokens <= lease.capacity, f"fork at {num_tokens} tokens of a lease that holds {lease.capacity}"
        num_full, tail = divmod(num_tokens, self.block_size)
        if tail and not self.pool.num_free:
            return None
        row = self._rows.take()
        if row is None:
            return None
        blocks = lease.blocks[:num_full]
        for block in blocks:
            self.pool.share(block)
        copy = None
        if tail:
            copy = (lease.blocks[num_full], self.pool.alloc(1)[0])
            blocks.append(copy[1])
        child = Lease(
            row=row,
            blocks=blocks,
            capacity=len(blocks) * self.block_size,
            cached=num_tokens,
            digests=lease.digests[:num_full],
            root=lease.root,
        )
        self._issue(child)
        return child, copy

    def commit(self, lease: Lease, tokens: Sequence[int], computed: int) -> None:
        """Publish the full blocks among the first `computed` tokens, whose keys and values are in the cache by now.

        Does nothing without prefix caching. Where another block already holds the same content, the lease moves to
        that one and gives its own back: a sequence then holds every block its published ones follow. Steps launched
        before still read the old block, and later writes to it come after them.
        """
        assert computed <= len(tokens), f"{computed} tokens computed, {len(tokens)} known"
        if not self.prefix_caching:
            return
        size, digests = self.block_size, lease.digests
        for column in range(len(digests), computed // size):
            digest = chain(digests[-1] if digests else lease.root, tokens[column * size : (column + 1) * size])
            digests.append(digest)
            self._settle(lease, column)

    def commit_fork(self, child: Lease, parent: Lease) -> None:
        """Give `child` the digests that `parent` has got since the fork for the blocks they share."""
        for column in range(len(child.digests), min(len(parent.digests), child.cached // self.block_size)):
            child.digests.append(parent.digests[column])
            self._settle(child, column)

    def release(self, lease: Lease) -> None:
        """Take back the row and one reference to every block, last block first (see `BlockPool`)."""
        assert self._leases.get(lease.row) is lease, f"release of a lease on row {lease.row} that is not held"
        del self._leases[lease.row]
        unref = self.pool.unref
        for block in reversed(lease.blocks):
            unref(block)
        self._rows.give_back(lease.row)

    def num_exclusive_blocks(self, lease: Lease) -> int:
        """Blocks that nobody else references: what its release would free."""
        return self.pool.num_exclusive(lease.blocks)

    def swap_out(self, lease: Lease, num_tokens: int) -> Swapped | None:
        """Move the first `num_tokens` tokens of `lease`, all of them computed, to the host and release the lease.

        None, and nothing changes, when the host has no room. Steps of the lease must not be in flight.
        """
        if self.host is None:
            return None
        blocks = lease.blocks[: -(-num_tokens // self.block_size)]
        swapped = self.host.store(blocks, num_tokens=num_tokens, digests=lease.digests, root=lease.root)
        if swapped is not None:
            self.release(lease)
        return swapped

    def swap_in(self, swapped: Swapped, *, capacity: int, headroom: int = 0) -> Lease | None:
        """A lease that holds what `swapped` held, with room for `capacity` tokens; the host slots are given back.

        None, and nothing changes, without a free row or when less than `headroom` blocks would be left. Leading blocks
        whose content is published on the device are shared. The others are published by the next `commit`, that is
        once their content has arrived for sure.
        """
        assert self.host is not None and capacity >= swapped.num_tokens, f"{capacity} for {swapped.num_tokens} tokens"
        hits: list[int] = []
        for digest in swapped.digests:
            block = self.pool.lookup(digest)
            if block is None:
                break
            hits.append(block)
        need = -(-capacity // self.block_size) - len(hits)
        assert need + len(hits) <= self.max_blocks_per_row, (
            f"{capacity} tokens need more than {self.max_blocks_per_row}"
        )
        num_cached = sum(not self.pool.refs(block) for block in hits)
        if need > self.pool.num_free - num_cached - headroom:
            return None
        row = self._rows.take()
        if row is None:
            return None
        for block in hits:
            self.pool.share(block)
        blocks = hits + self.pool.alloc(need)
        for column in range(len(hits), len(swapped.slots)):
            self.host.fetch(swapped, column, blocks[column])
        self.host.drop(swapped)
        lease = Lease(
            row=row,
            blocks=blocks,
            capacity=len(blocks) * self.block_size,
            cached=swapped.num_tokens,
            digests=swapped.digests[: len(hits)],
            root=swapped.root,
        )
        self._issue(lease)
        return lease

    def drop_swapped(self, swapped: Swapped) -> None:
        """Give back its host slots: what they hold is lost."""
        assert self.host is not None
        self.host.drop(swapped)

    def take_moves(self) -> list[Move]:
        """Moves since the last call: execute them in order before the next forward (see `HostSlots`)."""
        return self.host.take_moves() if self.host is not None else []

    def forget_all(self) -> None:
        """Drop all cached content: no later admission hits anything computed before."""
        self.pool.forget_all()

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
        """Assert that references, rows, capacities and digests agree with the leases issued."""
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
        if self.host is not None:
            self.host.check(self.block_size)

    def _issue(self, lease: Lease) -> None:
        self._leases[lease.row] = lease
        self._journal(lease)

    def _journal(self, lease: Lease) -> None:
        self._table_writes.extend((lease.row, column, block) for column, block in enumerate(lease.blocks))

    def _settle(self, lease: Lease, column: int) -> None:
        """Make the block at `column` the one that is published under its digest."""
        digest, block = lease.digests[column], lease.blocks[column]
        self.pool.publish(block, digest)
        owner = self.pool.lookup(digest)
        assert owner is not None
        if owner != block:
            self.pool.share(owner)
            self.pool.unref(block)
            lease.blocks[column] = owner
            self._table_writes.append((lease.row, column, owner))

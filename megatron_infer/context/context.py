"""Which request holds which row and which blocks. Knows token ids and block ids, never requests or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_infer.context.block_pool import BlockPool
from megatron_infer.context.prefix import DIGEST_SIZE, digest_of, parent_of, preimage_of
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
    """Content digests of the leading blocks that were hit or published: a chain that starts at `root`."""
    root: bytes
    """Names what its blocks are computed with; b"" once it may publish no more (mixed weights, collision, reset)."""


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
    ) -> None:
        assert block_size >= 1 and max_blocks_per_row >= 1, f"block_size {block_size}, per row {max_blocks_per_row}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_rows = num_rows
        self.max_blocks_per_row = max_blocks_per_row
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, keep_cached=prefix_caching and keep_cached)
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
        assert len(root) != DIGEST_SIZE, f"root {root!r} could be taken for a digest"
        row = self._rows.take()
        if row is None:
            return None
        lease = Lease(row=row, blocks=[], capacity=0, cached=0, digests=[], root=root)
        if use_cache:
            blocks = self._find(lease, tokens)
            for block in blocks:
                self.pool.share(block)
            lease.blocks = blocks
            lease.capacity = lease.cached = len(blocks) * self.block_size
        self._leases[row] = lease
        self._journal(lease)
        return lease

    def catch_up(self, lease: Lease, tokens: Sequence[int], planned: int) -> int:
        """Move to published blocks behind those `lease` has published -> how many of `tokens` are now taken care of.

        planned: leading tokens whose computation is planned; the result is that or more, and never all of `tokens`.
        An own block that is planned in part or whole is replaced too: a step in flight still writes and reads the old
        one, and whoever gets that next writes after it.
        """
        first = len(lease.digests)
        found = self._find(lease, tokens)
        for column, block in enumerate(found, start=first):
            self._move(lease, column, block)
        return max(planned, (first + len(found)) * self.block_size)

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
        self._leases[row] = child
        self._journal(child)
        return child, copy

    def announce(self, lease: Lease, tokens: Sequence[int], planned: int) -> None:
        """Publish the full blocks among the first `planned` tokens, which are computed by the step being planned.

        Sound because steps run in the order they were planned, and within one all keys and values are written before
        any row attends: whoever finds such a block reads it in that step or later. Stops at content that another block
        has: the step writes to this lease's own block, so only `commit` can move it.
        """
        pool, size, digests = self.pool, self.block_size, lease.digests
        for column in range(len(digests), planned // size if lease.root and self.prefix_caching else 0):
            prev = digests[-1] if digests else lease.root
            preimage = preimage_of(prev, tokens[column * size : (column + 1) * size])
            digest = digest_of(preimage)
            owner = pool.publish(lease.blocks[column], digest, preimage)
            if owner is None:
                lease.root = b""
            if owner != lease.blocks[column]:
                return
            digests.append(digest)

    def commit(self, lease: Lease, tokens: Sequence[int], computed: int) -> None:
        """Publish the full blocks among the first `computed` tokens, whose keys and values are in the cache by now.

        Does nothing without prefix caching. Where another block already holds the same content, the lease moves to
        that one and gives its own back: a sequence then holds every block its published ones follow. Steps launched
        before still read the old block, and later writes to it come after them.
        """
        assert computed <= len(tokens), f"{computed} tokens computed, {len(tokens)} known"
        digests, root = lease.digests, lease.root
        if not root or not self.prefix_caching:
            return
        size = self.block_size
        for column in range(len(digests), computed // size):
            preimage = preimage_of(digests[-1] if digests else root, tokens[column * size : (column + 1) * size])
            digest = digest_of(preimage)
            owner = self.pool.publish(lease.blocks[column], digest, preimage)
            if owner is None:  # what follows could not be told from what follows that other content
                lease.root = b""
                return
            digests.append(digest)
            if owner != lease.blocks[column]:
                self._move(lease, column, owner)

    def release(self, lease: Lease) -> None:
        """Take back the row and one reference to every block, last block first (see `BlockPool`)."""
        assert self._leases.get(lease.row) is lease, f"release of a lease on row {lease.row} that is not held"
        del self._leases[lease.row]
        unref = self.pool.unref
        for block in reversed(lease.blocks):
            unref(block)
        self._rows.give_back(lease.row)

    def forget_all(self) -> int:
        """Nothing computed or planned so far is ever matched again -> free blocks that were cached.

        Whoever holds a lease goes on and publishes no more: its chain hangs on digests that may get another meaning.
        """
        for lease in self._leases.values():
            lease.root = b""
        return self.pool.forget_all()

    def forget_free(self) -> int:
        """Drop cached content that no lease holds -> blocks dropped; what leases hold can still be hit."""
        return self.pool.forget_free()

    def held_blocks(self) -> list[int]:
        """Every block some lease holds, once, in order."""
        return self.pool.held()

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
        self._check_chains()
        self._rows.check([lease.row for lease in self._leases.values()])

    def _check_chains(self) -> None:
        """Assert that the block before a published one is published, and that leases hold what their digests name."""
        contents = self.pool.contents()
        digests = {digest for digest, _ in contents.values()}
        parents = {block: parent_of(preimage, self.block_size) for block, (_, preimage) in contents.items()}
        orphans = [block for block, parent in parents.items() if parent is not None and parent not in digests]
        assert not orphans, f"blocks {orphans} are published, the blocks they follow are not"
        for row, lease in self._leases.items():
            named = [contents[b][0] if b in contents else b"" for b in lease.blocks[: len(lease.digests)]]
            assert not lease.root or named == lease.digests, f"row {row}: its digests name other blocks than it holds"

    def _find(self, lease: Lease, tokens: Sequence[int]) -> list[int]:
        """Published blocks that go on where the digests of `lease` end, which grow by theirs; never the last token."""
        digests, root, size = lease.digests, lease.root, self.block_size
        blocks: list[int] = []
        if not root or not self.prefix_caching:
            return blocks
        for start in range(len(digests) * size, len(tokens) - size, size):
            preimage = preimage_of(digests[-1] if digests else root, tokens[start : start + size])
            digest = digest_of(preimage)
            block = self.pool.lookup(digest, preimage)
            if block is None:
                break
            blocks.append(block)
            digests.append(digest)
        return blocks

    def _move(self, lease: Lease, column: int, block: int) -> None:
        """Hold `block` at `column` in place of the block there."""
        self.pool.share(block)
        self.pool.unref(lease.blocks[column])
        lease.blocks[column] = block
        self._table_writes.append((lease.row, column, block))

    def _journal(self, lease: Lease) -> None:
        self._table_writes.extend((lease.row, column, block) for column, block in enumerate(lease.blocks))

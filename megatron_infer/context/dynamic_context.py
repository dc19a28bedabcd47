"""Which sequence holds which rows, blocks and host slots, and what they share. Knows ids, never requests or tensors."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_infer.context.leases import Lease
from megatron_infer.context.prefix_hash import DIGEST_SIZE, digest_of, parent_of, preimage_of
from megatron_infer.context.state_cache import StateBook
from megatron_infer.context.state_slots import StateSlots
from megatron_infer.context.swap_slots import SwapSlots

__all__ = ["DynamicInferenceContext", "Lease"]


class DynamicInferenceContext(StateBook):
    """Issues and takes back leases on rows and blocks; every call either succeeds whole or changes nothing.

    A block with several references is full and is never written again. `num_blocks` excludes the dummy block.

    With recurrent state a row is also a state slot: slots 0 .. num_rows - 1 are the rows', num_rows is a dummy for
    padding, then come the snapshots. A prefix is then hit as far as blocks are found and a snapshot lies behind them;
    it is copied to the row's own slot before the step, so that no two sequences ever compute in one slot.
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
        recurrent: bool = False,
        num_snapshots: int = 0,
        num_host_states: int = 0,
    ) -> None:
        self.snapshots = StateSlots(num_rows + 1, num_snapshots) if num_snapshots and prefix_caching else None
        super().__init__(
            num_blocks=num_blocks,
            block_size=block_size,
            num_rows=num_rows,
            max_blocks_per_row=max_blocks_per_row,
            keep_cached=prefix_caching and keep_cached,
            on_forget=None if self.snapshots is None else self.snapshots.forget,
        )
        assert recurrent or not (num_snapshots or num_host_states), "states of a model that keeps none"
        self.prefix_caching = prefix_caching
        self.recurrent = recurrent
        self._moves = []
        if num_host_slots:
            self.host = SwapSlots(num_host_slots, num_states=num_host_states, journal=self._moves.append)

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
        if self.snapshots is not None:
            lease.keep_at.add((len(tokens) - 1) // self.block_size * self.block_size)
        self._issue(lease)
        return lease

    def catch_up(self, lease: Lease, tokens: Sequence[int], planned: int) -> int:
        """Move to published blocks behind those `lease` has published -> how many of `tokens` are now taken care of.

        planned: leading tokens whose computation is planned; the result is that or more, and never all of `tokens`.
        An own block that is planned in part or whole is replaced too: a step in flight still writes and reads the old
        one, and whoever gets that next writes after it.
        """
        first = len(lease.digests)
        found = self._find(lease, tokens, beyond=planned)
        for column, block in enumerate(found, start=first):
            self._move(lease, column, block)
            self._name_state(lease, column)
        return max(planned, (first + len(found)) * self.block_size)

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

    def publish_planned(self, lease: Lease, tokens: Sequence[int], planned: int) -> None:
        """Publish the full blocks among the first `planned` tokens, which are computed by the step being planned.

        Sound because steps run in the order they were planned, and within one all keys and values are written before
        any row attends: whoever finds such a block reads it in that step or later. Stops at content that another block
        has: the step writes to this lease's own block, so only `commit` can move it.
        """
        pool, size, digests = self.pool, self.block_size, lease.digests
        if not self.prefix_caching:
            return
        for column in range(len(digests), planned // size if lease.root else 0):
            prev = digests[-1] if digests else lease.root
            preimage = preimage_of(prev, tokens[column * size : (column + 1) * size])
            digest = digest_of(preimage)
            owner = pool.publish(lease.blocks[column], digest, preimage)
            if owner is None:
                lease.root = b""
            if owner != lease.blocks[column]:
                return
            digests.append(digest)
            self._name_state(lease, column)

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
            self._name_state(lease, column)

    def release(self, lease: Lease) -> None:
        """Take back the row, one reference to every block, and states that no block stands for."""
        self._give_back_unnamed(lease)
        super().release(lease)

    def forget_all(self) -> int:
        """Nothing computed or planned so far is ever matched again -> free blocks that were cached.

        Whoever holds a lease goes on and publishes no more: its chain hangs on digests that may get another meaning.
        """
        for lease in self._leases.values():
            lease.root = b""
            self._give_back_unnamed(lease)
        if self.host is not None:
            self.host.forget_contents()
        self.forget_states()
        return self.pool.forget_all()

    def forget_free(self) -> int:
        """Drop cached content that no lease holds -> blocks dropped; what leases hold can still be hit."""
        return self.pool.forget_free()

    def check(self) -> None:
        """Assert that rows, blocks, digests and host slots agree with the leases issued and with each other."""
        super().check()
        self._check_chains()
        if self.host is not None:
            self.host.check(self.block_size)
        if self.snapshots is not None:
            unnamed = [slot for lease in self._leases.values() for slot in lease.unnamed.values()]
            self.snapshots.check(unnamed, self.pool.contents().keys())

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

    def _find(self, lease: Lease, tokens: Sequence[int], *, beyond: int = 0) -> list[int]:
        """Published blocks that go on where the digests of `lease` end, which grow by theirs; never the last token.

        With recurrent state only as far as a snapshot behind more than `beyond` tokens: nothing without one.
        """
        digests, root, size = lease.digests, lease.root, self.block_size
        if not root or not self.prefix_caching or (self.recurrent and self.snapshots is None):
            return []
        first = len(digests)
        before = lease.hashed[first:]
        blocks = self.pool.run_of(before)
        digests += before[: len(blocks)]
        num_again = len(blocks)
        if num_again == len(before):
            for start in range(len(digests) * size, len(tokens) - size, size):
                preimage = preimage_of(digests[-1] if digests else root, tokens[start : start + size])
                digest = digest_of(preimage)
                block = self.pool.lookup(digest, preimage)
                if block is None:
                    break
                blocks.append(block)
                digests.append(digest)
        if self.snapshots is not None and blocks:
            self._stop_at_snapshot(lease, blocks, self.snapshots, first=first, beyond=beyond)
            if num_again and blocks:
                self._trust(lease, tokens, blocks, first=first)
        return blocks

    def _trust(self, lease: Lease, tokens: Sequence[int], blocks: list[int], *, first: int) -> None:
        """Take blocks found by their digests alone only if all their preimages are equal too."""
        digests, size = lease.digests, self.block_size
        for column in range(first, len(digests)):
            prev = digests[column - 1] if column else lease.root
            preimage = preimage_of(prev, tokens[column * size : (column + 1) * size])
            if self.pool.lookup(digests[column], preimage) is None:
                del blocks[:], digests[first:]
                lease.begins_behind = None
                return

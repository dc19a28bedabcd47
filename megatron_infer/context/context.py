"""Which sequence holds which rows, blocks and host slots, and what they share. Knows ids, never requests or tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_infer.context.host import HostSlots, Move, Swapped
from megatron_infer.context.leases import Lease, LeaseBook
from megatron_infer.context.prefix import DIGEST_SIZE, digest_of, parent_of, preimage_of

__all__ = ["DynamicInferenceContext", "Lease"]


class DynamicInferenceContext(LeaseBook):
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
        super().__init__(
            num_blocks=num_blocks,
            block_size=block_size,
            num_rows=num_rows,
            max_blocks_per_row=max_blocks_per_row,
            keep_cached=prefix_caching and keep_cached,
        )
        self.prefix_caching = prefix_caching
        self.host = HostSlots(num_host_slots) if num_host_slots else None
        """Host memory for blocks of sequences that wait; None: there is none, and nothing is ever swapped."""

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
        self._issue(lease)
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

    def forget_all(self) -> int:
        """Nothing computed or planned so far is ever matched again -> free blocks that were cached.

        Whoever holds a lease goes on and publishes no more: its chain hangs on digests that may get another meaning.
        """
        for lease in self._leases.values():
            lease.root = b""
        if self.host is not None:
            self.host.forget_contents()
        return self.pool.forget_all()

    def forget_free(self) -> int:
        """Drop cached content that no lease holds -> blocks dropped; what leases hold can still be hit."""
        return self.pool.forget_free()

    def swap_out(self, lease: Lease, num_tokens: int) -> Swapped | None:
        """Move the first `num_tokens` tokens of `lease`, all of them computed, to the host and release the lease.

        None, and nothing changes, when the host has no room. Steps of the lease must not be in flight.
        """
        if self.host is None:
            return None
        blocks = lease.blocks[: -(-num_tokens // self.block_size)]
        swapped = self.host.store(blocks, num_tokens=num_tokens, contents=self._contents(lease), root=lease.root)
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
        for digest, preimage in swapped.contents:
            block = self.pool.lookup(digest, preimage)
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
            digests=[digest for digest, _ in swapped.contents[: len(hits)]],
            root=swapped.root,
        )
        self._issue(lease)
        return lease

    def host_has_room(self, lease: Lease, num_tokens: int) -> bool:
        """Whether `swap_out` of so many tokens would find slots now."""
        num_blocks = -(-num_tokens // self.block_size)
        host = self.host
        return host is not None and (num_blocks <= host.num_free or host.has_room(num_blocks, self._contents(lease)))

    def drop_swapped(self, swapped: Swapped) -> None:
        """Give back its host slots: what they hold is lost."""
        assert self.host is not None
        self.host.drop(swapped)

    def take_freed_slots(self) -> Collection[int]:
        """Host slots that came free since the last call (see `HostSlots.take_freed`)."""
        return self.host.take_freed() if self.host is not None else ()

    def take_moves(self) -> list[Move]:
        """Moves since the last call: execute them in order before the next forward (see `HostSlots`)."""
        return self.host.take_moves() if self.host is not None else []

    def check(self) -> None:
        """Assert that rows, blocks, digests and host slots agree with the leases issued and with each other."""
        super().check()
        self._check_chains()
        if self.host is not None:
            self.host.check(self.block_size)

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

    def _contents(self, lease: Lease) -> list[tuple[bytes, bytes]]:
        """(digest, preimage) of its leading published blocks; none once its chain has no meaning any more."""
        return [self.pool.content_of(block) for block in lease.blocks[: len(lease.digests)]] if lease.root else []

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

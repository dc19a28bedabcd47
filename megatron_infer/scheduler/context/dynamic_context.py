"""Which sequence holds which rows and blocks, and which blocks they share. Knows ids, never requests or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_infer.scheduler.context.block_digest import DIGEST_SIZE, digest_of, salted
from megatron_infer.scheduler.context.block_pool import BlockPool
from megatron_infer.scheduler.context.copies import Copy, CopyKind
from megatron_infer.scheduler.context.leases import Lease, check_leases, find_published
from megatron_infer.scheduler.context.row_pool import RowPool

if TYPE_CHECKING:
    from megatron_infer.scheduler.context.adapter_slots import AdapterSlots
    from megatron_infer.scheduler.context.state_cache import StateCache
    from megatron_infer.scheduler.context.swap import Swap, SwappedSequence


class DynamicInferenceContext:
    """Issues and takes back leases on rows and blocks; every call either succeeds whole or changes nothing.

    A block with several references is full and is never written again. `num_blocks` excludes the dummy block.
    `scheduler.context.build_context.build_context` makes one with the parts that a model and its configuration need.
    """

    def __init__(
        self,
        pool: BlockPool,
        rows: RowPool,
        *,
        block_size: int,
        max_blocks_per_row: int,
        prefix_caching: bool,
        states: StateCache | None,
        swap: Swap | None,
        copies: list[Copy],
        adapters: AdapterSlots | None = None,
    ) -> None:
        """states: None for a model without recurrent states. swap: None without host memory for evicted sequences.
        copies: the journal that both write to. adapters: None for an engine without adapters."""
        assert block_size >= 1 and max_blocks_per_row >= 1, f"block_size {block_size}, per row {max_blocks_per_row}"
        self.pool, self._rows, self._copies = pool, rows, copies
        self.num_blocks, self.num_rows = pool.num_blocks, rows.count
        self.block_size, self.max_blocks_per_row, self.prefix_caching = block_size, max_blocks_per_row, prefix_caching
        self.states, self.swap, self.adapters = states, swap, adapters
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
        if self.states is not None:
            self.states.admit(lease, len(tokens))
        if use_cache:
            lease.blocks = blocks = self._find(lease, tokens)
            for block in blocks:
                self.pool.share(block)
            lease.capacity = lease.cached = len(blocks) * self.block_size
        self._issue(lease)
        return lease

    def root_of(self, root: bytes, *, adapter: str | None, salt: str) -> bytes:
        """The first link of the chain of a sequence's blocks; `root` names the weights."""
        if adapter is not None and self.adapters is not None:
            root = self.adapters.root(root, adapter)
        return salted(root, salt)

    def num_published(self, tokens: Sequence[int], *, root: bytes) -> int:
        """How many leading tokens `take_published` would find."""
        if not self.prefix_caching:
            return 0
        found = Lease(row=-1, blocks=[], capacity=0, cached=0, digests=[], root=root)
        return len(find_published(self.pool, found, tokens, self.block_size)) * self.block_size

    def take_published(self, lease: Lease, tokens: Sequence[int]) -> int:
        """Let a fresh `lease` hold the published blocks of `tokens` -> their tokens, never the last one.

        The caller writes the recurrent state, if the model has one.
        """
        assert not lease.blocks, f"the lease on row {lease.row} has blocks"
        if self.prefix_caching:
            lease.blocks = find_published(self.pool, lease, tokens, self.block_size)
            for block in lease.blocks:
                self.pool.share(block)
            lease.capacity = lease.cached = len(lease.blocks) * self.block_size
            self._journal(lease)
        return lease.cached

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

    def shrink(self, lease: Lease, num_tokens: int) -> None:
        """Give back the blocks behind those that hold the first `num_tokens` tokens; none of them is published."""
        while lease.capacity - self.block_size >= num_tokens:
            self.pool.unref(lease.blocks.pop())
            lease.capacity -= self.block_size

    def fork(self, lease: Lease, num_tokens: int) -> tuple[Lease, list[Copy]] | None:
        """A second lease on the first `num_tokens` tokens of `lease`: full blocks are shared, a partial tail is not.

        Returns the new lease and the copies of the tail block, if there is one, and of the row's recurrent state: they
        must happen once the source holds those tokens and before the new lease is used. Returns None and changes
        nothing when a row or the tail's block is lacking.
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
        copies: list[Copy] = []
        if tail:
            blocks += self.pool.alloc(1)
            copies.append(Copy(CopyKind.BLOCK, lease.blocks[num_full], blocks[-1]))
        if self.states is not None:
            copies.append(Copy(CopyKind.STATE, lease.row, row))
        child = Lease(
            row=row,
            blocks=blocks,
            capacity=len(blocks) * self.block_size,
            cached=num_tokens,
            digests=lease.digests[:num_full],
            root=lease.root,
            adapter_slot=lease.adapter_slot,
            publishes=lease.publishes,
        )
        self._issue(child)
        return child, copies

    def release(self, lease: Lease) -> None:
        """Take back the row and one reference to every block, last block first (see `BlockPool`)."""
        assert self._leases.get(lease.row) is lease, f"release of a lease on row {lease.row} that is not held"
        del self._leases[lease.row]
        if self.states is not None:
            self.states.release(lease)
        for block in reversed(lease.blocks):
            self.pool.unref(block)
        self._rows.release(lease.row)

    def swap_out(self, lease: Lease, num_tokens: int) -> SwappedSequence | None:
        """Move the first `num_tokens` tokens of `lease`, all of them computed, to the host and release the lease.

        None, and nothing changes, when the host has no room. No step of the lease may be in flight.
        """
        swapped = None if self.swap is None else self.swap.store(lease, num_tokens)
        if swapped is not None:
            self.release(lease)
        return swapped

    def swap_in(self, swapped: SwappedSequence, *, capacity: int, headroom: int = 0) -> Lease | None:
        """A lease that holds what `swapped` held, with room for `capacity` tokens; its host slots are free again.

        None, and nothing changes, without a free row or when fewer than `headroom` blocks would be left.
        """
        assert self.swap is not None and capacity <= self.max_blocks_per_row * self.block_size, f"{capacity} tokens"
        lease = self.swap.load(swapped, capacity=capacity, headroom=headroom)
        if lease is not None:
            self._issue(lease)
        return lease

    def catch_up(self, lease: Lease, tokens: Sequence[int], planned: int) -> int:
        """Let `lease` take the published blocks that continue its own -> how many of `tokens` are planned or found now.

        planned: leading tokens whose computation is planned; the result is that or more, and never all of `tokens`.
        An own block that is planned in part or whole is replaced too: a step in flight still writes and reads the old
        one, and the lease that gets it next writes to it after that.
        """
        first = len(lease.digests)
        found = self._find(lease, tokens, beyond=planned)
        for column, block in enumerate(found, start=first):
            self._move(lease, column, block)
            if self.states is not None:
                self.states.attach(lease, column)
        return max(planned, (first + len(found)) * self.block_size)

    def publish_planned(self, lease: Lease, tokens: Sequence[int], planned: int) -> None:
        """Publish the full blocks among the first `planned` tokens, which are computed by the step being planned.

        Sound because steps run in the order they were planned, and within one all keys and values are written before
        any row attends: a lease that finds such a block reads it in that step or later. Stops at content that another
        block has: the step writes to this lease's own block, so only `publish_computed` can move it.
        """
        self._publish(lease, tokens, planned, may_move=False)

    def publish_computed(self, lease: Lease, tokens: Sequence[int], computed: int) -> None:
        """Publish the full blocks among the first `computed` tokens, whose keys and values are in the cache by now.

        Does nothing without prefix caching. Where another block already holds the same content, the lease moves to
        that one and gives its own back: a sequence then holds every block its published ones follow. Steps launched
        before still read the old block, and later writes to it come after them.
        """
        assert computed <= len(tokens), f"{computed} tokens computed, {len(tokens)} known"
        self._publish(lease, tokens, computed, may_move=True)

    def stop_publishing(self) -> None:
        """The weights changed: leases and swapped sequences keep what they hold and publish no more."""
        for lease in self._leases.values():
            lease.publishes = False
        if self.states is not None:
            self.states.forget_all()
        if self.swap is not None:
            self.swap.forget_contents()

    def forget_all(self) -> int:
        """Nothing computed or planned so far is ever matched again -> free blocks that were cached.

        Leases keep what they hold and publish no more: their chains hang on digests that may get another meaning.
        """
        if self.states is not None:
            self.states.release_pending()
        self.stop_publishing()
        return self.pool.forget_all()

    def forget_free(self) -> int:
        """Drop cached content that no lease holds -> blocks dropped; what leases hold can still be hit."""
        return self.pool.forget_free()

    def held_blocks(self) -> list[int]:
        """Every block some lease holds, once, in order."""
        return self.pool.held()

    def held_state_slots(self) -> list[int]:
        """Every state slot whose content a sequence may continue from: those of rows, and those behind held blocks."""
        return [] if self.states is None else sorted([*self._leases, *self.states.held_slots()])

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

    def take_copies(self) -> tuple[Copy, ...]:
        """Swaps, and loads and keeps of states, since the last call: run them in order before the next forward."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def check(self) -> None:
        """Assert that references, rows, digests, states and host slots agree with the leases and with each other."""
        check_leases(
            self._leases, self.pool, self._rows, block_size=self.block_size, max_blocks_per_row=self.max_blocks_per_row
        )
        if self.states is not None:
            self.states.check(self._leases)
        for part in (self.swap, self.adapters):
            if part is not None:
                part.check()

    def _find(self, lease: Lease, tokens: Sequence[int], *, beyond: int = 0) -> list[int]:
        """Published blocks that continue the digests of `lease`, which grow by theirs; never the last token.

        With recurrent states only as far as one is kept behind more than `beyond` tokens: none without.
        """
        if not lease.publishes or not self.prefix_caching:
            return []
        if self.states is not None:
            return self.states.find(lease, tokens, beyond=beyond)
        return find_published(self.pool, lease, tokens, self.block_size)

    def _publish(self, lease: Lease, tokens: Sequence[int], num_tokens: int, *, may_move: bool) -> None:
        """may_move: the lease takes the block that has the content already; else publishing stops there."""
        if not lease.publishes or not self.prefix_caching:
            return
        size, digests = self.block_size, lease.digests
        for column in range(len(digests), num_tokens // size):
            preimage = lease.preimage(column, tokens, size)
            digest = digest_of(preimage)
            owner = self.pool.publish(lease.blocks[column], digest, preimage)
            if owner is None:  # the digests of later blocks would be those behind that other content
                lease.publishes = False
                return
            if owner != lease.blocks[column]:
                if not may_move:
                    return
                self._move(lease, column, owner)
            digests.append(digest)
            if self.states is not None:
                self.states.attach(lease, column)

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

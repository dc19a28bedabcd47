"""Sequences whose blocks and recurrent state are swapped out to host memory, and back in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron_infer.scheduler.context.block_pool import BlockPool
from megatron_infer.scheduler.context.copies import Copy, CopyKind
from megatron_infer.scheduler.context.leases import Lease
from megatron_infer.scheduler.context.row_pool import RowPool


@dataclass(slots=True, eq=False, kw_only=True)
class SwappedSequence:
    """What a sequence without a lease holds in host memory: its column c is in slots[c]."""

    slots: list[int]
    num_tokens: int
    """Leading tokens whose keys and values the slots hold; the last slot may be partly filled."""
    contents: list[tuple[bytes, bytes]]
    """(digest, preimage) of the leading full blocks that were published; none once it publishes no more."""
    root: bytes
    publishes: bool
    """These two as in `Lease`."""
    host_state: int | None
    """Where its recurrent state is; None for a model without."""


class Swap:
    """Reference-counted host slots, a full block of known content held once, and host places for recurrent states.

        store: block --copy--> slot (or one more reference to a slot that has this content), held by a SwappedSequence
        load:  slot --copy--> block;     drop: the sequence's references go, a slot without any is free again

    A recurrent state belongs to one sequence: its place is never shared. Copies go to the journal, which is executed in
    order before the forward that follows, so that a slot or block given up by one may be the destination of the next.
    The context issues and releases the leases.
    """

    def __init__(
        self,
        pool: BlockPool,
        rows: RowPool,
        *,
        num_slots: int,
        num_states: int,
        block_size: int,
        recurrent: bool,
        journal: list[Copy],
    ) -> None:
        """recurrent: every row has a recurrent state, which is swapped with the blocks; num_states: places for them."""
        self.num_slots = num_slots
        self.blocks_out = 0
        """Blocks copied to the host since the start, and back."""
        self.blocks_in = 0
        self._pool, self._rows = pool, rows
        self._block_size, self._recurrent, self._journal = block_size, recurrent, journal
        self._slots = BlockPool(num_slots, keep_cached=False)
        self._states = RowPool(num_states) if num_states else None
        self._swapped: set[SwappedSequence] = set()
        self._freed_slots: set[int] = set()
        self._freed_states: set[int] = set()

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    @property
    def num_free_states(self) -> int:
        return self._states.num_free if self._states is not None else 0

    def has_room(self, lease: Lease, num_tokens: int) -> bool:
        """Whether `store` of so many tokens would find slots now."""
        if self._recurrent and not self.num_free_states:
            return False
        missing, free = -(-num_tokens // self._block_size), self._slots.num_free
        if missing > free:  # only then look at what the blocks hold
            missing -= sum(self._slots.lookup(*content) is not None for content in self._contents(lease))
        return missing <= free

    def store(self, lease: Lease, num_tokens: int) -> SwappedSequence | None:
        """Journal the copies of the first `num_tokens` tokens to the host; None (nothing changed) without room."""
        slots, contents = self._slots, self._contents(lease)
        blocks = lease.blocks[: -(-num_tokens // self._block_size)]
        known = [slots.lookup(*content) for content in contents]
        known += [None] * (len(blocks) - len(known))
        if known.count(None) > slots.num_free or (self._recurrent and not self.num_free_states):
            return None
        held: list[int] = []
        for column, (block, slot) in enumerate(zip(blocks, known, strict=True)):
            if slot is None:
                slot = slots.alloc(1)[0]
                self._journal.append(Copy(CopyKind.BLOCK_OUT, block, slot))
                self.blocks_out += 1
                self._freed_slots.discard(slot)
                if column < len(contents):
                    slots.publish(slot, *contents[column])
            else:
                slots.share(slot)
            held.append(slot)
        host_state = None
        if self._recurrent:
            assert self._states is not None
            host_state = self._states.take()
            assert host_state is not None
            self._freed_states.discard(host_state)
            self._journal.append(Copy(CopyKind.STATE_OUT, lease.row, host_state))
        swapped = SwappedSequence(
            slots=held,
            num_tokens=num_tokens,
            contents=contents,
            root=lease.root,
            publishes=lease.publishes,
            host_state=host_state,
        )
        self._swapped.add(swapped)
        return swapped

    def load(self, swapped: SwappedSequence, *, capacity: int, headroom: int) -> Lease | None:
        """A lease that holds what `swapped` held, with room for `capacity` tokens; the host slots are given back.

        None, and nothing changes, without a free row or when fewer than `headroom` blocks would be left. Leading blocks
        whose content is published on the device are shared. The others are published by the next `publish_computed`,
        when their content has certainly arrived.
        """
        assert capacity >= swapped.num_tokens, f"{capacity} for {swapped.num_tokens} tokens"
        pool = self._pool
        hits: list[int] = []
        for content in swapped.contents:
            block = pool.lookup(*content)
            if block is None:
                break
            hits.append(block)
        need = -(-capacity // self._block_size) - len(hits)
        num_cached = sum(not pool.refs(block) for block in hits)
        if need > pool.num_free - num_cached - headroom:
            return None
        row = self._rows.take()
        if row is None:
            return None
        for block in hits:
            pool.share(block)
        blocks = hits + pool.alloc(need)
        for column in range(len(hits), len(swapped.slots)):
            self._journal.append(Copy(CopyKind.BLOCK_IN, swapped.slots[column], blocks[column]))
            self.blocks_in += 1
        if swapped.host_state is not None:
            self._journal.append(Copy(CopyKind.STATE_IN, swapped.host_state, row))
        self.drop(swapped)
        return Lease(
            row=row,
            blocks=blocks,
            capacity=len(blocks) * self._block_size,
            cached=swapped.num_tokens,
            digests=[digest for digest, _ in swapped.contents[: len(hits)]],
            root=swapped.root,
            publishes=swapped.publishes,
        )

    def drop(self, swapped: SwappedSequence) -> None:
        """Give up the slots of `swapped`; copies from them that are journaled still arrive."""
        self._swapped.remove(swapped)
        for slot in reversed(swapped.slots):
            self._slots.unref(slot)
            if not self._slots.refs(slot):
                self._freed_slots.add(slot)
        if swapped.host_state is not None:
            assert self._states is not None
            self._states.release(swapped.host_state)
            self._freed_states.add(swapped.host_state)

    def forget_contents(self) -> None:
        """What is on the host stays usable by its sequences, and is neither matched nor published any more."""
        self._slots.forget_all()
        for swapped in self._swapped:
            swapped.publishes, swapped.contents = False, []

    def take_freed(self) -> tuple[set[int], set[int]]:
        """(slots, places of states) that came free since the last call and are free still: their memory can go once
        the copies journaled so far are done."""
        freed = self._freed_slots, self._freed_states
        self._freed_slots, self._freed_states = set(), set()
        return freed

    def check(self) -> None:
        """Assert that references, slots and token counts agree with what is swapped out."""
        held, size = Counter[int](), self._block_size
        for one in self._swapped:
            assert len(one.slots) == -(-one.num_tokens // size), f"{one.num_tokens} tokens in slots {one.slots}"
            assert len(one.contents) <= one.num_tokens // size, f"{len(one.contents)} contents"
            assert len(set(one.slots)) == len(one.slots), f"a slot is twice in {one.slots}"
            held.update(one.slots)
        self._slots.check(held)
        states = [one.host_state for one in self._swapped if one.host_state is not None]
        assert len(states) == (len(self._swapped) if self._recurrent else 0), f"states {states} of {len(self._swapped)}"
        if self._states is not None:
            self._states.check(states)

    def _contents(self, lease: Lease) -> list[tuple[bytes, bytes]]:
        """(digest, preimage) of its leading published blocks; none once it publishes no more."""
        return [self._pool.content_of(block) for block in lease.blocks[: len(lease.digests)]] if lease.publishes else []

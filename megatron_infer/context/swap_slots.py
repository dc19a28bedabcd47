"""Which host slot holds which block of whom, and the moves between device and host that this asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_infer.context.block_pool import BlockPool
from megatron_infer.context.row_pool import RowPool

Move = tuple[str, int, int]
"""("out", block, host slot): the block's content goes to the slot; ("in", block, host slot): it comes to the block.
The same for recurrent states: ("state out", state slot, host state), ("state in", state slot, host state). And
("state copy", destination, source): one device slot's state to another."""


@dataclass(slots=True, eq=False, kw_only=True)
class SwappedSequence:
    """What a sequence without a lease holds in host memory: its column c is in slots[c]."""

    slots: list[int]
    num_tokens: int
    """Leading tokens whose keys and values the slots hold; the last slot may be partly filled."""
    contents: list[tuple[bytes, bytes]]
    """(digest, preimage) of the leading full blocks that were published; none once that has lost its meaning."""
    root: bytes
    """As `Lease.root`; b"" once the weights have changed since."""
    host_state: int | None
    """Where its recurrent state is; None for a model without."""


class SwapSlots:
    """Reference-counted host slots, a full block of known content held once, and places for recurrent states.

        store: block --out--> slot (or one more reference to a slot that has this content), slot held by a Swapped
        fetch: slot --in--> block;        drop: the Swapped's references go, a slot without any is free again

    A recurrent state belongs to one sequence: its place is never shared. Moves go to the journal, which is executed in
    order before the forward that follows, so that a slot or block given up by one move may be the target of the next.
    """

    def __init__(self, num_slots: int, *, num_states: int, journal: Callable[[Move], None]) -> None:
        self.num_slots = num_slots
        self.blocks_out = 0
        """Blocks copied to the host since the start, and back."""
        self.blocks_in = 0
        self._pool = BlockPool(num_slots, keep_cached=False)
        self._states = RowPool(num_states) if num_states else None
        self._swapped: set[SwappedSequence] = set()
        self._journal = journal
        self._freed: set[int] = set()
        self._freed_states: set[int] = set()

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_free_states(self) -> int:
        return self._states.num_free if self._states is not None else 0

    def has_room(self, num_blocks: int, contents: Sequence[tuple[bytes, bytes]], *, with_state: bool = False) -> bool:
        """Whether `store` would find slots for so many blocks, the leading ones with these contents."""
        if with_state and not self.num_free_states:
            return False
        pool = self._pool
        missing = num_blocks
        if missing > pool.num_free:
            missing -= sum(pool.lookup(*content) is not None for content in contents)
        return missing <= pool.num_free

    def store(
        self,
        blocks: Sequence[int],
        *,
        num_tokens: int,
        contents: list[tuple[bytes, bytes]],
        root: bytes,
        state_slot: int | None,
    ) -> SwappedSequence | None:
        """Keep the content of `blocks`, and of a state slot; None (nothing changed) when the host lacks room."""
        if state_slot is not None and not self.num_free_states:
            return None
        pool = self._pool
        known = [pool.lookup(*content) for content in contents]
        known += [None] * (len(blocks) - len(known))
        if known.count(None) > pool.num_free:
            return None
        slots: list[int] = []
        for column, (block, slot) in enumerate(zip(blocks, known, strict=True)):
            if slot is None:
                slot = pool.alloc(1)[0]
                self._journal(("out", block, slot))
                self.blocks_out += 1
                self._freed.discard(slot)
                if column < len(contents):
                    pool.publish(slot, *contents[column])
            else:
                pool.share(slot)
            slots.append(slot)
        swapped = SwappedSequence(slots=slots, num_tokens=num_tokens, contents=contents, root=root, host_state=None)
        if state_slot is not None:
            assert self._states is not None
            swapped.host_state = place = self._states.take()
            assert place is not None
            self._freed_states.discard(place)
            self._journal(("state out", state_slot, place))
        self._swapped.add(swapped)
        return swapped

    def fetch(self, swapped: SwappedSequence, column: int, block: int) -> None:
        """Journal the way back of one column into `block`."""
        self._journal(("in", block, swapped.slots[column]))
        self.blocks_in += 1

    def fetch_state(self, swapped: SwappedSequence, state_slot: int) -> None:
        """Journal the way back of its recurrent state into `state_slot`."""
        assert swapped.host_state is not None
        self._journal(("state in", state_slot, swapped.host_state))

    def drop(self, swapped: SwappedSequence) -> None:
        """Give up the slots of `swapped`; what was fetched from them still arrives."""
        self._swapped.remove(swapped)
        for slot in reversed(swapped.slots):
            self._pool.unref(slot)
            if not self._pool.refs(slot):
                self._freed.add(slot)
        if swapped.host_state is not None:
            assert self._states is not None
            self._states.give_back(swapped.host_state)
            self._freed_states.add(swapped.host_state)

    def forget_contents(self) -> None:
        """What is on the host stays usable by whoever holds it, and is neither matched nor published any more."""
        self._pool.forget_all()
        for swapped in self._swapped:
            swapped.root, swapped.contents = b"", []

    def take_freed(self) -> set[int]:
        """Slots that came free since the last call and are free still: their memory can go, once the moves are done."""
        freed, self._freed = self._freed, set()
        return freed

    def take_freed_states(self) -> set[int]:
        """The same for places of recurrent states."""
        freed, self._freed_states = self._freed_states, set()
        return freed

    def check(self, block_size: int) -> None:
        """Assert that references, slots and token counts agree with what is swapped out."""
        held = [0] * self.num_slots
        for swapped in self._swapped:
            assert len(swapped.slots) == -(-swapped.num_tokens // block_size), (
                f"{swapped.num_tokens} tokens in slots {swapped.slots}"
            )
            assert len(swapped.contents) <= swapped.num_tokens // block_size, f"{len(swapped.contents)} contents"
            assert len(set(swapped.slots)) == len(swapped.slots), f"a slot stands twice in {swapped.slots}"
            for slot in swapped.slots:
                held[slot] += 1
        self._pool.check(held)
        states = [swapped.host_state for swapped in self._swapped if swapped.host_state is not None]
        assert len(states) in (0, len(self._swapped)), f"{len(states)} of {len(self._swapped)} have their state"
        if self._states is not None:
            self._states.check(states)

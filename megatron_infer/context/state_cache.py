"""Recurrent states of rows and of the prefix cache: when one is kept, found, loaded."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_infer.context.leases import Lease
from megatron_infer.context.prefix_hash import preimage_of
from megatron_infer.context.state_slots import StateSlots
from megatron_infer.context.swap import SwapBook


class StateBook(SwapBook):
    """Leases whose rows have a recurrent state, which snapshots can be made of."""

    snapshots: StateSlots | None = None
    """None: no prefix of a sequence with recurrent state is ever hit."""

    def begin_step(self) -> None:
        """A step is planned from here on; what the one before writes can be read now."""
        if self.snapshots is not None:
            self.snapshots.begin_step()

    def load_state(self, lease: Lease) -> None:
        """Journal the way of the snapshot that `admit` or `catch_up` found into the row's own slot, if they did."""
        if lease.begins_behind is not None:
            assert self.snapshots is not None
            self._moves.append(("state copy", lease.row, self.snapshots.use(lease.begins_behind)))
            lease.begins_behind = None

    def keep_states(self, lease: Lease, tokens: Sequence[int], start: int, end: int) -> list[tuple[int, int]]:
        """(position, slot) of the states to keep while tokens start .. end - 1 are computed; `end` itself may be one.

        They are found by plans of later steps, as soon as their block is published: where another lease has done that,
        who needs it waits for it from now on, and nobody keeps a second one.
        """
        kept: list[tuple[int, int]] = []
        snapshots = self.snapshots
        if snapshots is None or not lease.root:
            return kept
        for position in sorted(lease.keep_at):
            if not start < position <= end:
                continue
            block = self._published(lease, tokens, position)
            if block is not None and snapshots.any_behind((block,)):
                continue
            slot = snapshots.take(reclaim=True)
            if slot is None:
                continue
            kept.append((position, slot))
            if block is None:
                lease.unnamed[position] = slot
            else:
                snapshots.name(slot, block, first_to_go=False)
        return kept

    def keep_drawn_state(self, lease: Lease, position: int) -> None:
        """Keep the state that the row has before the step being planned, if a slot is free: it lies behind `position`.

        One a sequence, so that an answer is found again without pushing prompts out: the one before goes when this
        one's block is published.
        """
        if self.snapshots is None or not lease.root or position in lease.unnamed:
            return
        slot = self.snapshots.take(reclaim=False)
        if slot is not None:
            self._moves.append(("state copy", slot, lease.row))
            lease.unnamed[position] = slot
            lease.drawn.add(position)
            if len(lease.digests) * self.block_size >= position:
                self._name_state(lease, position // self.block_size - 1)

    def forget_states(self) -> None:
        """Give up every state kept behind a block: nobody will look for those blocks again."""
        if self.snapshots is not None:
            self.snapshots.forget_all()

    def held_state_slots(self) -> list[int]:
        """Every state slot with content that somebody may go on from: of rows, and snapshots behind held blocks."""
        if not self.recurrent:
            return []
        snapshots = self.snapshots.slots_of(set(self.pool.held())) if self.snapshots is not None else []
        return sorted([*self._leases, *snapshots])

    def _published(self, lease: Lease, tokens: Sequence[int], position: int) -> int | None:
        """The block of others, found by `lease` before, that ends at `position`."""
        column = position // self.block_size - 1
        if column >= len(lease.hashed):
            return None
        prev = lease.hashed[column - 1] if column else lease.root
        preimage = preimage_of(prev, tokens[column * self.block_size : position])
        return self.pool.lookup(lease.hashed[column], preimage)

    def _give_back_unnamed(self, lease: Lease) -> None:
        """No block will be published for the states that `lease` has kept."""
        for slot in lease.unnamed.values():
            self.snapshots.give_back(slot)  # type: ignore[union-attr]
        lease.unnamed = {}

    def _stop_at_snapshot(
        self, lease: Lease, blocks: list[int], snapshots: StateSlots, *, first: int, beyond: int
    ) -> None:
        """Cut found blocks behind the last one with a state; where they go on, others may: a state is wanted there."""
        size, num_found = self.block_size, len(blocks)
        num_usable, lease.waits = 0, False
        if snapshots.any_behind(blocks):
            num_usable = next((n for n in range(num_found, 0, -1) if snapshots.is_ready(blocks[n - 1])), 0)
            lease.waits = any(map(snapshots.is_coming, blocks[num_usable:]))
        if (first + num_usable) * size <= beyond:
            num_usable = 0
        lease.begins_behind = blocks[num_usable - 1] if num_usable else None
        if num_usable < num_found:
            lease.keep_at.add((first + num_found) * size)
            lease.hashed = list(lease.digests)
        del blocks[num_usable:], lease.digests[first + num_usable :]

    def _name_state(self, lease: Lease, column: int) -> None:
        """The block at `column` is published: a state kept for its end can be found from now on."""
        position, block = (column + 1) * self.block_size, lease.blocks[column]
        slot = lease.unnamed.pop(position, None)
        if slot is None:
            return
        assert self.snapshots is not None
        drawn = position in lease.drawn
        named = self.snapshots.name(slot, block, first_to_go=drawn)
        if drawn and named:
            lease.drawn.discard(position)
            if lease.drawn_block is not None:
                self.snapshots.forget_unused(lease.drawn_block)
            lease.drawn_block = block

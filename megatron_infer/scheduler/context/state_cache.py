"""Recurrent states in the prefix cache: where one is kept, how far a hit may go with it, when it is loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from megatron_infer.scheduler.context.block_digest import preimage_of
from megatron_infer.scheduler.context.block_pool import BlockPool
from megatron_infer.scheduler.context.cached_state_slots import CachedStateSlots
from megatron_infer.scheduler.context.copies import Copy, CopyKind
from megatron_infer.scheduler.context.leases import Lease, find_published


@dataclass(slots=True)
class _LeaseStates:
    """States that one lease loads from the cache and keeps for it."""

    load_from: int | None = None
    """Published block whose state the row continues from, until that is loaded."""
    gains_by_waiting: bool = False
    """The step being planned writes a state that lets it skip more."""
    hashed: list[bytes] = field(default_factory=list)
    """The lease's digests before they were last cut back, so that not every chunk of a prompt hashes it to its end."""
    keep_at: set[int] = field(default_factory=set)
    """Positions, multiples of block_size, behind which a state is to be kept."""
    pending: dict[int, int] = field(default_factory=dict)
    """Position -> slot that holds (or will hold) the state there, while the block before it is not published."""
    decoded: set[int] = field(default_factory=set)
    """Positions of `pending` that were reached by decoding."""
    decoded_block: int | None = None
    """Block behind which the last such state is cached."""


class StateCache:
    """States of a recurrent model that prompts continue from: a hit ends at the last block with a state behind it.

    The state is copied to the row's own slot before the step, so that no two sequences ever compute in one slot.
    Without slots (count 0) no prefix of the model is ever hit.
    """

    def __init__(
        self,
        slots: CachedStateSlots,
        pool: BlockPool,
        *,
        block_size: int,
        journal: list[Copy],
        num_draft_states: int = 0,
    ) -> None:
        """pool: tells `slots` of blocks that lose their content. journal: where copies of states are added.

        num_draft_states: slots of each row for the states behind drafts, which follow those of `slots`.
        """
        self.slots, self.num_draft_states = slots, num_draft_states
        self._pool, self._block_size, self._journal = pool, block_size, journal
        self._by_row: defaultdict[int, _LeaseStates] = defaultdict(_LeaseStates)
        """By row."""

    def admit(self, lease: Lease, num_tokens: int) -> None:
        """Keep the state behind the last full block of a prompt of `num_tokens` that a hit can end at."""
        self._by_row[lease.row].keep_at.add((num_tokens - 1) // self._block_size * self._block_size)

    def release(self, lease: Lease) -> None:
        """The lease ends: give back states whose blocks were not published."""
        self._release_pending(self._by_row.pop(lease.row, None))

    def find(self, lease: Lease, tokens: Sequence[int], *, beyond: int) -> list[int]:
        """Published blocks that continue the digests of `lease` to the last one with a state behind it.

        None where that is not behind more than `beyond` tokens. The digests of `lease` grow by those of the blocks.
        """
        if not self.slots.count:
            return []
        digests, first, size = lease.digests, len(lease.digests), self._block_size
        known = self._by_row[lease.row].hashed[first:]
        blocks = self._pool.run_of(known)
        num_known = len(blocks)
        digests += known[:num_known]
        if num_known == len(known):
            blocks += find_published(self._pool, lease, tokens, size)
        if not blocks:
            return blocks
        self._stop_at_state(lease, blocks, first=first, beyond=beyond)
        if num_known and not self._has_content(lease, tokens, first=first):
            del digests[first:]
            self._by_row[lease.row].load_from = None
            return []
        return blocks

    def gains_by_waiting(self, lease: Lease) -> bool:
        """Whether the step being planned writes a state that lets the prompt of `lease` skip more."""
        return self._by_row[lease.row].gains_by_waiting

    def load(self, lease: Lease) -> bool:
        """Journal the copy of the state that `find` ended at into the row's own slot -> whether there is one."""
        states = self._by_row[lease.row]
        if states.load_from is None:
            return False
        self._journal.append(Copy(CopyKind.STATE, self.slots.load(states.load_from), lease.row))
        states.load_from = None
        return True

    def draft_slots(self, lease: Lease) -> range:
        """The row's slots for the states behind the tokens of a step that verifies drafts."""
        first = self.slots.first_slot + self.slots.count + lease.row * self.num_draft_states
        return range(first, first + self.num_draft_states)

    def keep_draft(self, lease: Lease, place: int) -> None:
        """Journal the copy of draft slot `place` into the row's own slot, which loses what was computed behind."""
        self._journal.append(Copy(CopyKind.STATE, self.draft_slots(lease)[place], lease.row))

    def begin_step(self) -> None:
        """A step is planned from here on; the states that the one before writes can be read now."""
        self.slots.begin_step()

    def keep(self, lease: Lease, tokens: Sequence[int], start: int, end: int) -> list[tuple[int, int]]:
        """(position, slot) of the states to keep while tokens start .. end - 1 are computed; `end` itself may be one.

        Plans of later steps find them as soon as their block is published. Where another lease has published it with a
        state no second one is kept: leases that need it wait for that one.
        """
        kept: list[tuple[int, int]] = []
        if not lease.publishes:
            return kept
        states = self._by_row[lease.row]
        for position in sorted(states.keep_at):
            if not start < position <= end:
                continue
            block = self._published(lease, tokens, position)
            if block is not None and self.slots.any_behind((block,)):
                continue
            slot = self.slots.take(evict=True)
            if slot is None:
                continue
            kept.append((position, slot))
            if block is None:
                states.pending[position] = slot
            else:
                self.slots.attach(slot, block, evict_first=False)
        return kept

    def keep_decoded(self, lease: Lease, position: int) -> None:
        """Keep the state that the row has before the step being planned, if a slot is free: it lies behind `position`.

        One per sequence, so that the next turn finds an answer and no prompt is evicted for it: the one before is
        dropped when this one's block is published.
        """
        states = self._by_row[lease.row]
        if not lease.publishes or position in states.pending:
            return
        slot = self.slots.take(evict=False)
        if slot is not None:
            self._journal.append(Copy(CopyKind.STATE, lease.row, slot))
            states.pending[position] = slot
            states.decoded.add(position)
            if len(lease.digests) * self._block_size >= position:
                self.attach(lease, position // self._block_size - 1)

    def attach(self, lease: Lease, column: int) -> None:
        """The block at `column` is published: a state kept for its end can be found from now on."""
        states, position, block = self._by_row[lease.row], (column + 1) * self._block_size, lease.blocks[column]
        slot = states.pending.pop(position, None)
        if slot is None:
            return
        decoded = position in states.decoded
        if self.slots.attach(slot, block, evict_first=decoded) and decoded:
            states.decoded.discard(position)
            if states.decoded_block is not None:
                self.slots.forget_unused(states.decoded_block)
            states.decoded_block = block

    def forget_all(self) -> None:
        """Drop every state cached behind a block: no request looks for those blocks any more."""
        self.slots.forget_all()

    def release_pending(self) -> None:
        """No block will be published for the states that leases have kept."""
        for states in self._by_row.values():
            self._release_pending(states)

    def held_slots(self) -> list[int]:
        """Slots of states behind blocks that leases hold, and of states whose block is not published yet."""
        return self.slots.slots_of(set(self._pool.held()))

    def check(self, rows: Collection[int]) -> None:
        """Assert that only leases, on these rows, keep states, and that slots agree with them and with the blocks."""
        assert self._by_row.keys() <= set(rows), f"states of rows {sorted(self._by_row)}, leases on {sorted(rows)}"
        pending = [slot for states in self._by_row.values() for slot in states.pending.values()]
        self.slots.check(pending, self._pool.contents().keys())

    def _published(self, lease: Lease, tokens: Sequence[int], position: int) -> int | None:
        """The block of another lease, found by `lease` before, that ends at `position`."""
        hashed, size = self._by_row[lease.row].hashed, self._block_size
        column = position // size - 1
        if column >= len(hashed):
            return None
        prev = hashed[column - 1] if column else lease.root
        return self._pool.lookup(hashed[column], preimage_of(prev, tokens[column * size : position]))

    def _stop_at_state(self, lease: Lease, blocks: list[int], *, first: int, beyond: int) -> None:
        """Cut found blocks behind the last one with a state; keep one where they end, which is where prompts part."""
        states, slots, size, num_found = self._by_row[lease.row], self.slots, self._block_size, len(blocks)
        num_usable, states.gains_by_waiting = 0, False
        if slots.any_behind(blocks):
            num_usable = next((n for n in range(num_found, 0, -1) if slots.is_ready(blocks[n - 1])), 0)
            states.gains_by_waiting = any(map(slots.is_coming, blocks[num_usable:]))
        if (first + num_usable) * size <= beyond:
            num_usable = 0
        states.load_from = blocks[num_usable - 1] if num_usable else None
        if num_usable < num_found:
            states.keep_at.add((first + num_found) * size)
            states.hashed = list(lease.digests)
        del blocks[num_usable:], lease.digests[first + num_usable :]

    def _has_content(self, lease: Lease, tokens: Sequence[int], *, first: int) -> bool:
        """Whether blocks found by their digests alone hold these tokens: all their preimages are equal."""
        return all(
            self._pool.lookup(lease.digests[column], lease.preimage(column, tokens, self._block_size)) is not None
            for column in range(first, len(lease.digests))
        )

    def _release_pending(self, states: _LeaseStates | None) -> None:
        if states is not None:
            for slot in states.pending.values():
                self.slots.release(slot)
            states.pending = {}

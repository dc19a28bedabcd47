"""Sequences whose blocks and state move to host memory and back, and the journal of everything that moves."""

from __future__ import annotations

from collections.abc import Collection

from megatron_infer.context.leases import Lease, LeaseBook
from megatron_infer.context.swap_slots import Move, SwappedSequence, SwapSlots


class SwapBook(LeaseBook):
    """Leases that can give their memory away for a while without losing what is in it."""

    host: SwapSlots | None = None
    """Host memory for blocks and states of sequences that wait; None: there is none, and nothing is ever swapped."""
    recurrent: bool = False
    """Whether a row has a recurrent state."""
    _moves: list[Move]

    def swap_out(self, lease: Lease, num_tokens: int) -> SwappedSequence | None:
        """Move the first `num_tokens` tokens of `lease`, all of them computed, to the host and release the lease.

        None, and nothing changes, when the host has no room. Steps of the lease must not be in flight.
        """
        if self.host is None:
            return None
        blocks = lease.blocks[: -(-num_tokens // self.block_size)]
        swapped = self.host.store(
            blocks,
            num_tokens=num_tokens,
            contents=self._contents(lease),
            root=lease.root,
            state_slot=lease.row if self.recurrent else None,
        )
        if swapped is not None:
            self.release(lease)
        return swapped

    def swap_in(self, swapped: SwappedSequence, *, capacity: int, headroom: int = 0) -> Lease | None:
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
        if self.recurrent:
            self.host.fetch_state(swapped, row)
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
        host, num_blocks = self.host, -(-num_tokens // self.block_size)
        if host is None:
            return False
        if num_blocks <= host.num_free:  # without looking at what the blocks hold
            return not self.recurrent or host.num_free_states > 0
        return host.has_room(num_blocks, self._contents(lease), with_state=self.recurrent)

    def drop_swapped(self, swapped: SwappedSequence) -> None:
        """Give back its host slots: what they hold is lost."""
        assert self.host is not None
        self.host.drop(swapped)

    def take_freed_slots(self) -> Collection[int]:
        """Host slots that came free since the last call (see `SwapSlots.take_freed`)."""
        return self.host.take_freed() if self.host is not None else ()

    def take_freed_states(self) -> Collection[int]:
        """The same for host places of recurrent states."""
        return self.host.take_freed_states() if self.host is not None else ()

    def take_moves(self) -> list[Move]:
        """Moves since the last call: execute them in order before the next forward (see `SwapSlots`)."""
        moves = list(self._moves)
        self._moves.clear()
        return moves

    def _contents(self, lease: Lease) -> list[tuple[bytes, bytes]]:
        """(digest, preimage) of its leading published blocks; none once its chain has no meaning any more."""
        return [self.pool.content_of(block) for block in lease.blocks[: len(lease.digests)]] if lease.root else []

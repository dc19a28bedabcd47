"""Leases: the row and blocks that one sequence holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_infer.scheduler.context.block_digest import digest_of, parent_of, preimage_of
from megatron_infer.scheduler.context.block_pool import BlockPool
from megatron_infer.scheduler.context.row_pool import RowPool


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """What one sequence holds from admission to release: a row that never changes, and its blocks in order."""

    row: int
    """Also the slot of its recurrent state, in models that have one."""
    blocks: list[int]
    capacity: int
    """Tokens that fit: len(blocks) * block_size."""
    cached: int
    """Leading tokens whose keys and values were there at admission (prefix hit, swap-in) or fork."""
    digests: list[bytes]
    """Content digests of the leading blocks that were hit or published: a chain that starts at `root`."""
    root: bytes
    """First link of that chain: names what the blocks are computed with."""
    adapter_slot: int = -1
    """Where the device has the adapter that the sequence computes with; -1: it has none."""
    publishes: bool = True
    """False for good after a change of weights, a digest collision or a reset: it matches and publishes no more."""

    def preimage(self, column: int, tokens: Sequence[int], block_size: int) -> bytes:
        """What the block at `column` depends on; the digests of the blocks before it are known."""
        prev = self.digests[column - 1] if column else self.root
        return preimage_of(prev, tokens[column * block_size : (column + 1) * block_size])


def find_published(pool: BlockPool, lease: Lease, tokens: Sequence[int], block_size: int) -> list[int]:
    """Published blocks that continue the digests of `lease`, which grow by theirs; never the last token."""
    blocks: list[int] = []
    for column in range(len(lease.digests), (len(tokens) - 1) // block_size):
        preimage = lease.preimage(column, tokens, block_size)
        digest = digest_of(preimage)
        block = pool.lookup(digest, preimage)
        if block is None:
            break
        blocks.append(block)
        lease.digests.append(digest)
    return blocks


def check_leases(
    leases: Mapping[int, Lease], pool: BlockPool, rows: RowPool, *, block_size: int, max_blocks_per_row: int
) -> None:
    """Assert that leases, by row, agree with the pools, and published blocks with the digests and with each other."""
    held: Counter[int] = Counter()
    column_of: dict[int, int] = {}
    for row, lease in leases.items():
        assert lease.row == row, f"lease on row {lease.row} is recorded on row {row}"
        assert lease.capacity == len(lease.blocks) * block_size, f"row {row}: capacity {lease.capacity}"
        assert len(lease.blocks) <= max_blocks_per_row, f"row {row} holds {len(lease.blocks)} blocks"
        assert len(lease.digests) <= len(lease.blocks), f"row {row}: {len(lease.digests)} digests"
        held.update(lease.blocks)
        for column, block in enumerate(lease.blocks):
            assert column_of.setdefault(block, column) == column, f"block {block} is held at two positions"
    pool.check(held)
    rows.check(list(leases))
    contents = pool.contents()
    digests = {digest for digest, _ in contents.values()}
    parents = {block: parent_of(preimage, block_size) for block, (_, preimage) in contents.items()}
    orphans = [block for block, parent in parents.items() if parent is not None and parent not in digests]
    assert not orphans, f"blocks {orphans} are published, the blocks they follow are not"
    for row, lease in leases.items():
        named = [contents[b][0] if b in contents else b"" for b in lease.blocks[: len(lease.digests)]]
        agree = not lease.publishes or named == lease.digests
        assert agree, f"row {row}: its digests name other blocks than it holds"

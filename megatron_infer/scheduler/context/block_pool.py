"""Block ids: their references, the content each holds, and which is reused next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_infer.scheduler.context.prefix_events import PrefixEvents


@lru_cache(maxsize=4)
def _all_blocks(count: int) -> frozenset[int]:
    """The ids of a pool, for `check`, which compares with them in every step of a test."""
    return frozenset(range(count))


class BlockPool:
    """Reference-counted block ids with an index from content to block.

        blank --alloc--> held (refs > 0) --last unref--> blank     no digest, or REF_ZERO
                          ^  |                       \\-> cached    has a digest and keep_cached (LRU)
                          |  +-- publish(digest)           |
                          +------------- share ------------+ (a hit);  alloc with no blank left reclaims the oldest

    A digest names one block and a block has at most one digest. The preimage it was made from is kept beside it: a
    block is found by its digest and taken only if the preimages are equal, so that a collision is a miss and no more.
    Callers unref a sequence's blocks last to first, and a lease on a block holds its predecessors too, so a block is
    always forgotten before its predecessor, and a digest in a preimage never changes its meaning (see `block_digest`).
    """

    def __init__(self, num_blocks: int, *, keep_cached: bool, on_forget: Callable[[int], None] | None = None) -> None:
        """on_forget: called with each block that loses its content, except by `forget_all`."""
        assert num_blocks >= 1, f"a pool of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self.keep_cached = keep_cached
        self._on_forget = on_forget
        self.events: PrefixEvents | None = None
        """Called for content that becomes findable and for content that is forgotten; None: not collected."""
        self._refs = [0] * num_blocks
        self._blank = list(range(num_blocks))[::-1]
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._preimage_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `alloc` can give out, cached ones without a reference included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold content a prefix can hit."""
        return len(self._cached)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def num_exclusive(self, blocks: list[int]) -> int:
        """How many of `blocks` have one reference only."""
        return list(map(self._refs.__getitem__, blocks)).count(1)

    def alloc(self, n: int) -> list[int]:
        """`n` blocks with one reference each; blank ones first, then cached ones, oldest first."""
        blocks = self.try_alloc(n)
        assert blocks is not None, f"alloc of {n} blocks, {self.num_free} are free"
        return blocks

    def try_alloc(self, n: int) -> list[int] | None:
        """Like `alloc`; None (nothing changed) when fewer are free."""
        blank, refs = self._blank, self._refs
        if n == 1 and blank:  # a decoding request grows by one block: the path of every step
            block = blank.pop()
            refs[block] = 1
            return [block]
        if n > len(blank) + len(self._cached):
            return None
        blocks = []
        for _ in range(n):
            if blank:
                block = blank.pop()
            else:
                block = self._cached.popitem(last=False)[0]
                self._forget(block)
            refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """One more reference to a held block, or the first one to a cached block (a prefix hit)."""
        if self._refs[block] == 0:
            del self._cached[block]  # KeyError: a blank block has no content to share
        self._refs[block] += 1

    def unref(self, block: int) -> None:
        refs = self._refs[block] - 1
        assert refs >= 0, f"block {block} was unreferenced once too often"
        self._refs[block] = refs
        if refs:
            return
        if block in self._digest_of:
            if self.keep_cached:
                self._cached[block] = None
                return
            self._forget(block)
        self._blank.append(block)

    def publish(self, block: int, digest: bytes, preimage: bytes) -> int | None:
        """Make held, unpublished `block` findable -> the block that has this content from now on.

        That is another one if it was published before. None: the digest names other content, nothing changed.
        """
        assert self._refs[block] > 0, f"publish of free block {block}"
        owner = self._block_of.get(digest)
        if owner is None:
            assert block not in self._digest_of, f"block {block} is published under another digest"
            self._block_of[digest] = block
            self._digest_of[block] = digest
            self._preimage_of[block] = preimage
            if self.events is not None:
                self.events.published(digest)
            return block
        return owner if self._preimage_of[owner] == preimage else None

    def lookup(self, digest: bytes, preimage: bytes) -> int | None:
        """The block with this content, held or cached; the caller must `share` it before anything is allocated."""
        block = self._block_of.get(digest)
        return block if block is not None and self._preimage_of[block] == preimage else None

    def run_of(self, digests: list[bytes]) -> list[int]:
        """The blocks that these digests name, to the first that names none; only `lookup` compares the content.

        Many at once, because every chunk of a long prompt asks again.
        """
        blocks: list[int] = list(map(self._block_of.get, digests))  # type: ignore[arg-type]
        return blocks[: blocks.index(None)] if None in blocks else blocks  # type: ignore[arg-type]

    def content_of(self, block: int) -> tuple[bytes, bytes]:
        """(digest, preimage) of a published block."""
        return self._digest_of[block], self._preimage_of[block]

    def contents(self) -> dict[int, tuple[bytes, bytes]]:
        """(digest, preimage) of every block that can be found."""
        return {block: (digest, self._preimage_of[block]) for digest, block in self._block_of.items()}

    def digests(self) -> list[bytes]:
        """Digests of every block that can be found, in the order they were published."""
        return list(self._block_of)

    def forget_all(self) -> int:
        """Drop all content: cached blocks become blank, held ones are no longer found -> how many were cached."""
        num_cached = len(self._cached)
        self._blank.extend(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._digest_of.clear()
        self._preimage_of.clear()
        if self.events is not None:
            self.events.reset()
        return num_cached

    def forget_free(self) -> int:
        """Drop the content of free blocks: cached ones become blank -> how many there were. Held ones stay findable."""
        count = len(self._cached)
        for block in self._cached:
            self._forget(block)
        self._blank.extend(self._cached)
        self._cached.clear()
        return count

    def held(self) -> list[int]:
        """Blocks with a reference, in order."""
        return [block for block, refs in enumerate(self._refs) if refs]

    def _forget(self, block: int) -> None:
        digest = self._digest_of.pop(block)
        del self._block_of[digest], self._preimage_of[block]
        if self.events is not None:
            self.events.forgotten(digest)
        if self._on_forget is not None:
            self._on_forget(block)

    def check(self, held: Mapping[int, int]) -> None:
        """Assert that block b has held[b] references, those not in `held` none, and every index agrees with that."""
        refs, count = self._refs, self.num_blocks
        agrees = refs.count(0) == count - len(held) and all(refs[block] == n for block, n in held.items())
        assert agrees, f"references held {dict(held)} != counted {refs}"
        # as many names as blocks, and together all of them: each block is in one of the three, once
        agrees = self.num_free + len(held) == count and {*self._blank, *self._cached, *held} == _all_blocks(count)
        assert agrees, f"free list {sorted([*self._blank, *self._cached])} != blocks not in {sorted(held)}"
        assert {b: d for d, b in self._block_of.items()} == self._digest_of, "digest index and its inverse differ"
        assert self._preimage_of.keys() == self._digest_of.keys(), "a digest without its preimage, or the reverse"
        blank = [block for block in self._digest_of if not refs[block] and block not in self._cached]
        assert not blank, f"blank blocks {sorted(blank)} have a digest"
        assert all(block in self._digest_of for block in self._cached), "a cached block has no digest"
        assert self.keep_cached or not self._cached, f"{len(self._cached)} blocks cached under REF_ZERO"

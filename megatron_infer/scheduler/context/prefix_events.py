"""Collects which content of a block pool has become findable, and which no longer is, for a router of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_infer.scheduler.context.block_pool import BlockPool

MAX_CHANGES = 1 << 16
"""Changes kept between two reports; beyond, the next report is the pool's whole content instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReport:
    """Apply in this order: reset, forgotten, published."""

    reset: bool
    """Nothing reported before holds any more."""
    published: Sequence[bytes]
    """Digests, parents before children."""
    forgotten: Sequence[bytes]


class PrefixEvents:
    """Sets itself as `BlockPool.events` and collects what the pool publishes and forgets; keeps the net effect."""

    def __init__(self, pool: BlockPool, *, limit: int = MAX_CHANGES) -> None:
        self._pool, self._limit = pool, limit
        self._findable: dict[bytes, bool] = {}
        self._reset = self._overflowed = False
        pool.events = self

    def published(self, digest: bytes) -> None:
        self._note(digest, True)

    def forgotten(self, digest: bytes) -> None:
        self._note(digest, False)

    def reset(self) -> None:
        self._findable.clear()
        self._reset, self._overflowed = True, False

    def everything(self) -> PrefixReport:
        """The pool's whole content, for a reader that knows nothing yet."""
        self._findable.clear()
        self._reset = self._overflowed = False
        return PrefixReport(reset=True, published=self._pool.digests(), forgotten=())

    def take(self) -> PrefixReport | None:
        """What has changed since the last call; None: nothing."""
        if self._overflowed:
            return self.everything()
        if not self._findable and not self._reset:
            return None
        report = PrefixReport(
            reset=self._reset,
            published=[digest for digest, findable in self._findable.items() if findable],
            forgotten=[digest for digest, findable in self._findable.items() if not findable],
        )
        self._findable.clear()
        self._reset = False
        return report

    def _note(self, digest: bytes, findable: bool) -> None:
        if self._overflowed:
            return
        self._findable.pop(digest, None)  # so that the order is that of the last changes
        self._findable[digest] = findable
        if len(self._findable) > self._limit:
            self._findable.clear()
            self._overflowed = True

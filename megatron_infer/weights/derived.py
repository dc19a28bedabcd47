"""Everything computed from the weights and kept: who rebuilds it after an update, and how staleness shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from megatron_infer.errors import StaleCache


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedCache:
    """One derived copy: packed or quantised weights, rotary tables, a mixer's -exp(A_log)."""

    name: str
    refresh: Callable[[], Mapping[int, int] | None]
    """Compute it again from the weights the model has now -> checksums, by id, of weights read whole for it."""
    differs: Callable[[], str | None]
    """Compare it with what a refresh would give -> what differs first, None when it is up to date. May be slow."""
    release: Callable[[], None] | None = None
    """Give its memory back until the next refresh; None: it is too small to bother."""
    num_bytes: Callable[[], int] = lambda: 0


class DerivedCaches:
    """The registry. Whoever keeps something derived from weights registers it, or it goes stale unseen."""

    def __init__(self) -> None:
        self._caches: dict[str, DerivedCache] = {}
        self.is_released = False
        """Nothing may run before the next `refresh`, whether or not memory was given back."""

    def register(self, cache: DerivedCache) -> None:
        """Refreshed from now on after every update; a second one under the same name is a mistake."""
        if cache.name in self._caches:
            raise ValueError(f"a derived cache named {cache.name!r} is registered already")
        self._caches[cache.name] = cache

    @property
    def names(self) -> list[str]:
        return list(self._caches)

    @property
    def num_bytes(self) -> int:
        """Memory of all that can be released."""
        return sum(cache.num_bytes() for cache in self._caches.values() if cache.release is not None)

    def refresh(self, tick: Callable[[str], None] = lambda what: None) -> dict[int, int]:
        """Rebuild all -> checksums of the weights that were read for it, by id.

        When one fails, those before it are new and those after it are not: call it again.
        """
        sums = self._rebuild(self._caches.values(), tick)
        self.is_released = False
        return sums

    def refresh_held(self, tick: Callable[[str], None] = lambda what: None) -> dict[int, int]:
        """As `refresh`, of all but what waits for that."""
        return self._rebuild((cache for cache in self._caches.values() if self._is_held(cache)), tick)

    def release(self, tick: Callable[[str], None] = lambda what: None, *, keep_memory: bool = False) -> None:
        """Give back what can be given back; nothing may run until `refresh`.

        keep_memory: for that refresh to write over; what the copies hold until then is not looked at.
        """
        for cache in self._caches.values():
            if cache.release is not None:
                self.is_released = True
                if not keep_memory:
                    tick(f"releasing {cache.name}")
                    cache.release()

    def verify(self) -> None:
        """Raise StaleCache naming every derived copy that does not belong to the present weights."""
        stale = [
            f"{cache.name} ({difference})"
            for cache in self._caches.values()
            if self._is_held(cache) and (difference := cache.differs()) is not None
        ]
        if stale:
            raise StaleCache(
                f"derived from other weights than the model has: {', '.join(stale)}; say that weights changed "
                "(set_weight_version or refresh_weights), and register a refresh that rebuilds it"
            )

    def _is_held(self, cache: DerivedCache) -> bool:
        return cache.release is None or not self.is_released

    @staticmethod
    def _rebuild(caches: Iterable[DerivedCache], tick: Callable[[str], None]) -> dict[int, int]:
        sums: dict[int, int] = {}
        for cache in caches:
            tick(f"rebuilding {cache.name}")
            sums |= cache.refresh() or {}
        return sums

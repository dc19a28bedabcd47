"""Which adapters the device has, and in which slots. Knows names, never matrices."""

from __future__ import annotations

from collections.abc import Callable, Collection

from megatron_infer.scheduler.context.block_digest import adapted

MAX_FORGOTTEN = 1024
Used = Callable[[], Collection[str]]
"""-> the adapters that running requests compute with: their slots stay."""


class AdapterSlots:
    """Gives loaded adapters slots on the device; the least recently used adapter that nothing runs with makes room.

    An adapter is written into its slot before the first step that uses it: `take_loads`. Steps launched before that
    may still read what the slot had, as they run before it.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.versions: dict[str, tuple[int, str]] = {}
        """Loaded adapter -> (its version, hash of its content)."""
        self._last_version: dict[str, int] = {}
        """The last version of names that are not loaded, up to MAX_FORGOTTEN of them."""
        self._oldest_version = 0
        """No name that is neither loaded nor in `_last_version` had a higher one."""
        self.num_loads = 0
        """Times that an adapter was written into a slot."""
        self._slot_of: dict[str, int] = {}
        """Least recently used first."""
        self._loads: dict[int, str] = {}

    @property
    def resident(self) -> tuple[str, ...]:
        """The adapters that have a slot."""
        return tuple(self._slot_of)

    def root(self, root: bytes, name: str) -> bytes:
        """The root of the prefix-hash chain of requests that compute with an adapter."""
        return adapted(root, name, self.versions[name][1])

    def put(self, name: str, digest: str) -> None:
        """Give an adapter that was loaded, or whose content was replaced, its next version. Its slot is written again;
        nothing may be in flight. Versions of a name rise, also across an unload."""
        loaded = self.versions.get(name)
        number = self._last_version.pop(name, self._oldest_version) if loaded is None else loaded[0]
        self.versions[name] = number + 1, digest
        if (slot := self._slot_of.get(name)) is not None:
            self._loads[slot] = name

    def raise_version(self, name: str, number: int) -> None:
        """Make `number` the version if it is higher: tokens of loaded requests were drawn with it."""
        if number > self.versions[name][0]:
            self.versions[name] = number, self.versions[name][1]

    def remove(self, name: str) -> int | None:
        """No request computes with the adapter any more -> the slot that is free now, if it had one."""
        self._last_version[name] = self.versions.pop(name)[0]
        if len(self._last_version) > MAX_FORGOTTEN:
            forgotten = self._last_version.pop(next(iter(self._last_version)))
            self._oldest_version = max(self._oldest_version, forgotten)
        slot = self._slot_of.pop(name, None)
        if slot is not None:
            self._loads.pop(slot, None)
        return slot

    def has_room(self, name: str, used: Used) -> bool:
        """Whether `take` would find a slot."""
        return name in self._slot_of or len(self._slot_of) < self.num_slots or not self._slot_of.keys() <= set(used())

    def take(self, name: str, used: Used) -> int:
        """The adapter's slot, for a request that begins to run; it has one, or there is room."""
        slot = self._slot_of.pop(name, None)
        if slot is None:
            slot = self._free_slot(used)
            self._loads[slot] = name
        self._slot_of[name] = slot
        return slot

    def take_loads(self) -> tuple[tuple[int, str], ...]:
        """(slot, adapter) to write before the next forward, since the last call."""
        loads, self._loads = tuple(self._loads.items()), {}
        self.num_loads += len(loads)
        return loads

    def repeat_loads(self) -> None:
        """Write all slots again: the reader may have lost what it took."""
        self._loads = {slot: name for name, slot in self._slot_of.items()}

    def check(self) -> None:
        slots = list(self._slot_of.values())
        assert len(set(slots)) == len(slots) <= self.num_slots, f"slots {self._slot_of}"
        assert self._slot_of.keys() <= self.versions.keys(), f"{self._slot_of} of {list(self.versions)}"

    def _free_slot(self, used: Used) -> int:
        if len(self._slot_of) < self.num_slots:
            return min(set(range(self.num_slots)) - set(self._slot_of.values()))
        running = set(used())
        name = next(name for name in self._slot_of if name not in running)
        return self._slot_of.pop(name)

"""Chooses a replica for each request, by its cached prefixes, its load, or in turn. Pure Python.

A replica's table holds the digests of its cached blocks, with the hash chain of the cache
(`scheduler.context.block_digest`). It follows the replica's reports: published, forgotten, reset, another root (weights
changed). Blocks that a running request will publish count as held until it ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum

from megatron_infer.config.inference import PrefixCachingCoordinatorPolicy as Policy
from megatron_infer.errors import ConfigError, UnknownRequest
from megatron_infer.scheduler.context.block_digest import TOKEN_SIZE, adapted, digest_of, salted

MAX_DIGESTS = 1 << 17
"""Most digests per replica, oldest forgotten first: 2 million tokens in blocks of 16."""


def chain_of(root: bytes, salt: str, tokens: bytes, block_size: int) -> list[bytes]:
    """Digests of a prompt's full blocks that a cache may serve, which excludes the last token's block.

    tokens: int32 in the machine's order, as `array("i").tobytes()` gives them.
    """
    step = TOKEN_SIZE * block_size
    prev, chain = salted(root, salt), []
    for start in range(0, len(tokens) - step, step):
        prev = digest_of(prev + tokens[start : start + step])
        chain.append(prev)
    return chain


class PrefixTable:
    """Digests of one replica's cached blocks; beyond the limit the least recently used are dropped."""

    def __init__(self, limit: int = MAX_DIGESTS) -> None:
        assert limit >= 1, f"a table of {limit} digests"
        self._limit = limit
        self._stamps: OrderedDict[bytes, int] = OrderedDict()
        self._expected: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._stamps)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._stamps or digest in self._expected

    def publish(self, digests: Sequence[bytes], stamp: int) -> None:
        """Add digests, given in the order of their chains; a parent is dropped after its children."""
        for digest in reversed(digests):
            self._stamps[digest] = stamp
            self._stamps.move_to_end(digest)
        while len(self._stamps) > self._limit:
            self._stamps.popitem(last=False)

    def forget(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._stamps.pop(digest, None)

    def clear(self) -> None:
        """The cache was reset, or belongs to other weights."""
        self._stamps.clear()
        self._expected.clear()

    def expect(self, chain: Iterable[bytes]) -> None:
        """A request that will publish `chain` was assigned."""
        for digest in chain:
            self._expected[digest] = self._expected.get(digest, 0) + 1

    def expect_no_more(self, chain: Iterable[bytes]) -> None:
        """That request has ended; the replica has reported what it published."""
        for digest in chain:
            count = self._expected.get(digest, 0) - 1
            if count > 0:
                self._expected[digest] = count
            else:
                self._expected.pop(digest, None)

    def match(self, chain: Sequence[bytes]) -> int:
        """How many leading blocks of `chain` are held or expected."""
        stamps, expected = self._stamps, self._expected
        for count, digest in enumerate(chain):
            if digest not in stamps and digest not in expected:
                return count
        return len(chain)

    def recency(self, digest: bytes) -> int:
        """Stamp of its last use; 0 if it is only expected."""
        return self._stamps.get(digest, 0)

    def touch(self, chain: Sequence[bytes], stamp: int) -> None:
        for digest in reversed(chain):
            if digest in self._stamps:
                self._stamps[digest] = stamp
                self._stamps.move_to_end(digest)


class Availability(Enum):
    """Whether a replica gets requests."""

    OPEN = "open"
    RESERVE = "reserve"
    """Gets requests only while none is open: it is paused or suspended, and requests would wait."""
    CLOSED = "closed"
    """Gets no requests: it is draining, or has old weights."""


@dataclass(slots=True, eq=False, kw_only=True)
class ReplicaView:
    """The router's state of a replica."""

    key: Hashable
    index: int
    """Order of joining."""
    capacity: int
    """Requests it computes at once."""
    block_size: int
    root: bytes
    table: PrefixTable
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Loaded LoRA adapters with the content in force: name -> its hash."""
    outdated: Set[str] = frozenset()
    """Those that are loaded with another content."""
    loading: list[str] = field(default_factory=list)
    """Adapters that the others have and it is about to have."""
    availability: Availability = Availability.OPEN
    takes_prompts: bool = False
    """It is a prefill_only replica that runs and has the weights in force."""
    load: int = 0
    """Requests assigned to it and not ended."""
    foreign: int = 0
    """Requests that it got from elsewhere."""
    last_assigned: int = 0

    @property
    def free_share(self) -> float:
        """1 when idle, 0 when every row is in use, less when requests wait there."""
        return 1.0 - (self.load + self.foreign) / self.capacity

    def root_of(self, adapter: str | None) -> bytes:
        """The root of requests of an adapter (None: without one); of one it has not loaded some root without blocks."""
        return self.root if adapter is None else adapted(self.root, adapter, self.adapters.get(adapter, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The replica chosen for a request, and the blocks it will publish there."""

    key: Hashable
    chain: Sequence[bytes] = ()
    root: bytes = b""
    matched: int = 0


@dataclass(slots=True)
class Router:
    """Chooses replicas by one policy; the caller reports each choice with `assign`, and its end with `release`."""

    policy: Policy = Policy.FIRST_PREFIX_BLOCK
    alpha: float = 1.0
    max_digests: int = MAX_DIGESTS
    replicas: dict[Hashable, ReplicaView] = field(default_factory=dict)
    _num_joined: int = 0
    _clock: int = 0
    _last_index: int = -1

    def __post_init__(self) -> None:
        self.policy = Policy(self.policy)
        if not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"alpha is {self.alpha}, it must be between 0 and 1")

    def join(self, key: Hashable, *, capacity: int, block_size: int, root: bytes) -> ReplicaView:
        """Add a replica; its table is empty until it reports."""
        if key in self.replicas:
            raise ConfigError(f"replica {key!r} is there already")
        if capacity < 1 or block_size < 1:
            raise ConfigError(f"replica {key!r}: capacity {capacity}, block size {block_size}; both are at least 1")
        table = PrefixTable(self.max_digests)
        view = ReplicaView(
            key=key, index=self._num_joined, capacity=capacity, block_size=block_size, root=root, table=table
        )
        self._num_joined += 1
        self.replicas[key] = view
        return view

    def leave(self, key: Hashable) -> None:
        """Remove a replica and its table; routes to it need no release."""
        self.replicas.pop(key, None)

    def report(
        self,
        key: Hashable,
        *,
        reset: bool = False,
        published: Sequence[bytes] = (),
        forgotten: Iterable[bytes] = (),
    ) -> None:
        """Changes of a replica's cache since its last report."""
        table = self._view(key).table
        if reset:
            table.clear()
        table.forget(forgotten)
        table.publish(published, self._tick())

    def set_root(self, key: Hashable, root: bytes) -> None:
        """Another root means other weights: new requests cannot match blocks published before."""
        view = self._view(key)
        if view.root != root:
            view.root = root
            view.table.clear()

    def choose(self, tokens: bytes, *, salt: str = "", adapter: str | None = None) -> Route | None:
        """A replica for a prompt (int32 token ids; b"" if unknown); None: no replica takes requests.

        adapter: one that the replica should have loaded; None where one is about to have it, else any replica without
        an older content where none has.
        """
        candidates = self._candidates()
        if adapter is not None:
            having = [view for view in candidates if adapter in view.adapters]
            if not having and any(adapter in view.loading for view in candidates):
                return None
            candidates = having or [view for view in candidates if adapter not in view.outdated]
        if not candidates:
            return None
        if self.policy is Policy.ROUND_ROBIN:
            following = [view for view in candidates if view.index > self._last_index]
            return Route(key=(following or candidates)[0].key)
        if self.policy is Policy.LOAD_BALANCED or not tokens:
            return Route(key=_least_loaded(candidates).key)
        return self._by_prefix(candidates, tokens, salt, adapter)

    def assign(self, route: Route) -> None:
        """The request is assigned to `route`."""
        view, stamp = self._view(route.key), self._tick()
        view.load += 1
        view.last_assigned, self._last_index = stamp, view.index
        if route.root == view.root:
            view.table.touch(route.chain, stamp)
            view.table.expect(route.chain)

    def release(self, route: Route) -> None:
        """The request has ended there, or goes elsewhere."""
        view = self.replicas.get(route.key)
        if view is None:
            return
        view.load -= 1
        assert view.load >= 0, f"replica {route.key!r} was released once too often"
        if route.root == view.root:
            view.table.expect_no_more(route.chain)

    def _by_prefix(self, candidates: list[ReplicaView], tokens: bytes, salt: str, adapter: str | None) -> Route:
        chains: dict[tuple[bytes, int], list[bytes]] = {}
        if self.policy is Policy.FIRST_PREFIX_BLOCK:  # only the first block is hashed, once per kind of replica
            tokens = tokens[: TOKEN_SIZE * (max(view.block_size for view in candidates) + 1)]
        best: tuple[float, float, int, int] | None = None
        chosen, route_matched = candidates[0], 0
        for view in candidates:
            kind = (view.root_of(adapter), view.block_size)
            chain = chains.get(kind)
            if chain is None:
                chain = chain_of(kind[0], salt, tokens, view.block_size)
                if self.policy is Policy.FIRST_PREFIX_BLOCK:
                    del chain[1:]
                chains[kind] = chain
            matched = view.table.match(chain)
            if not matched:
                continue
            score = self.alpha * matched / len(chain) + (1.0 - self.alpha) * view.free_share
            order = (score, view.free_share, view.table.recency(chain[matched - 1]), -view.index)
            if best is None or order > best:
                best, chosen, route_matched = order, view, matched
        fallback = _least_loaded(candidates)
        if best is None or best[0] < (1.0 - self.alpha) * fallback.free_share:
            chosen, route_matched = fallback, 0
        kind = (chosen.root_of(adapter), chosen.block_size)
        return Route(key=chosen.key, chain=chains[kind], root=chosen.root, matched=route_matched)

    def _candidates(self) -> list[ReplicaView]:
        views = list(self.replicas.values())  # in the order of joining
        chosen = [view for view in views if view.availability is Availability.OPEN]
        return chosen or [view for view in views if view.availability is Availability.RESERVE]

    def _view(self, key: Hashable) -> ReplicaView:
        try:
            return self.replicas[key]
        except KeyError:
            raise UnknownRequest(f"no replica {key!r}") from None

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _least_loaded(candidates: list[ReplicaView]) -> ReplicaView:
    """The largest free share; among equals the one assigned to longest ago, then the first that joined."""
    return max(candidates, key=lambda view: (view.free_share, -view.last_assigned, -view.index))

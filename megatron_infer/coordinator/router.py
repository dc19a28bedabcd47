"""Chooses a replica for each request, by its cached prefixes, its load, or in turn. Pure Python.

A replica's table holds the digests of its cached blocks, with the hash chain of the cache
(`scheduler.context.block_digest`). It follows the replica's reports: published, forgotten, reset, another root (weights
changed). Blocks that a running request will publish count as held until it ends.

What a choice costs does not grow with the replicas: `PrefixIndex` has the holders of a block, `Ranking` the replica
with the most room. Only requests of an adapter look at every replica.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice, takewhile
from typing import NamedTuple

from megatron_infer.config.inference import PrefixCachingCoordinatorPolicy as Policy
from megatron_infer.errors import ConfigError, UnknownRequest
from megatron_infer.scheduler.context.block_digest import TOKEN_SIZE, adapted, digest_of, salted

MAX_DIGESTS = 1 << 17
"""Most digests of a replica that does not say how many blocks it has, the oldest forgotten first."""
MAX_BLOCKS = 1 << 22
"""Most digests of one that does: 64 million tokens in blocks of 16."""
MAX_LOOKED_AT = 32
"""Replicas that a choice looks at, of those that hold equally much of a prompt: they take turns to be looked at."""


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


class PrefixIndex:
    """Which tables hold each digest, by the numbers of their owners."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int | dict[int, None]] = {}
        """A number while there is one holder, which is the rule: a dict takes four times the memory of all else."""

    def add(self, digest: bytes, owner: int) -> None:
        held = self._holders.setdefault(digest, owner)
        if isinstance(held, dict):
            held[owner] = None
        elif held != owner:
            self._holders[digest] = {held: None, owner: None}

    def discard(self, digest: bytes, owner: int) -> None:
        held = self._holders.get(digest)
        if held == owner:
            del self._holders[digest]
        elif isinstance(held, dict):
            held.pop(owner, None)
            if len(held) == 1:
                self._holders[digest] = next(iter(held))

    def holders(self, digest: bytes) -> Collection[int]:
        held = self._holders.get(digest)
        if held is None:
            return ()
        return held if isinstance(held, dict) else (held,)

    def some_holders(self, digest: bytes) -> list[int]:
        """The next MAX_LOOKED_AT of its holders; a further call has others."""
        held = self._holders[digest]
        assert isinstance(held, dict), "a single holder"
        chosen = list(islice(held, MAX_LOOKED_AT))
        for owner in chosen:
            del held[owner]
            held[owner] = None
        return chosen


class PrefixTable:
    """Digests of one replica's cached blocks; beyond the limit the least recently used are dropped."""

    def __init__(self, limit: int = MAX_DIGESTS, index: PrefixIndex | None = None, owner: int = 0) -> None:
        """index, owner: where it is to be found, and by which number."""
        assert limit >= 1, f"a table of {limit} digests"
        self._limit = limit
        self._owner = owner
        self._index = PrefixIndex() if index is None else index
        self._stamps: dict[bytes, int] = {}
        """The least recently used first."""
        self._expected: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._stamps)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._stamps or digest in self._expected

    def publish(self, digests: Sequence[bytes], stamp: int) -> None:
        """Add digests, given in the order of their chains. Of one call a parent is dropped after its children."""
        for digest in reversed(digests):
            if self._stamps.pop(digest, None) is None:
                self._index.add(digest, self._owner)
            self._stamps[digest] = stamp
        if len(self._stamps) > self._limit:  # a few more at once: the first item of a dict is slow to find
            self.forget(list(islice(self._stamps, len(self._stamps) - self._limit + self._limit // 16)))

    def forget(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            if self._stamps.pop(digest, None) is not None and digest not in self._expected:
                self._index.discard(digest, self._owner)

    def clear(self) -> None:
        """The cache was reset, or belongs to other weights."""
        for digest in (*self._stamps, *self._expected):
            self._index.discard(digest, self._owner)
        self._stamps.clear()
        self._expected.clear()

    def expect(self, chain: Iterable[bytes]) -> None:
        """A request that will publish `chain` was assigned."""
        for digest in chain:
            count = self._expected.get(digest, 0)
            if not count:
                self._index.add(digest, self._owner)
            self._expected[digest] = count + 1

    def expect_no_more(self, chain: Iterable[bytes]) -> None:
        """That request has ended; the replica has reported what it published."""
        for digest in chain:
            count = self._expected.get(digest, 0) - 1
            if count > 0:
                self._expected[digest] = count
            elif self._expected.pop(digest, None) is not None and digest not in self._stamps:
                self._index.discard(digest, self._owner)

    def match(self, chain: Sequence[bytes]) -> int:
        """How many leading blocks of `chain` the replica has or will have; fewer where this table has dropped some,
        which it does only of a cache with more blocks than its limit.

        The last one of them is in the table, and the replica's cache drops a parent after its children.
        """
        return bisect_left(chain, True, key=lambda digest: digest not in self)

    def recency(self, digest: bytes) -> int:
        """Stamp of its last use; 0 if it is only expected."""
        return self._stamps.get(digest, 0)

    def touch(self, chain: Sequence[bytes], stamp: int) -> None:
        for digest in reversed(chain):
            if self._stamps.pop(digest, None) is not None:
                self._stamps[digest] = stamp


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


Rank = tuple[float, int, int]
"""The smallest is the first; its last item is the view's index."""


class Ranking:
    """Replicas in the order in which requests go to them."""

    def __init__(self, rank: Callable[[ReplicaView], Rank]) -> None:
        self._rank = rank
        self._order: list[Rank] = []
        self._members: dict[int, tuple[Rank, ReplicaView]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[ReplicaView]:
        return (self._members[rank[2]][1] for rank in self._order)

    def __contains__(self, view: ReplicaView) -> bool:
        return view.index in self._members

    def put(self, view: ReplicaView) -> None:
        """Add a replica, or put it where it belongs now."""
        rank, known = self._rank(view), self._members.get(view.index)
        if known is not None and known[0] == rank:
            return
        self.discard(view)
        insort(self._order, rank)
        self._members[view.index] = rank, view

    def discard(self, view: ReplicaView) -> None:
        known = self._members.pop(view.index, None)
        if known is not None:
            del self._order[bisect_left(self._order, known[0])]

    @property
    def first(self) -> ReplicaView:
        return self._members[self._order[0][2]][1]

    def first_after(self, rank: Rank) -> ReplicaView:
        """The first one with a larger rank, else the very first."""
        position = bisect_right(self._order, rank)
        return self._members[self._order[position % len(self._order)][2]][1]

    def those(self, chosen: Callable[[ReplicaView], bool]) -> Ranking:
        found = Ranking(self._rank)
        for view in self:
            if chosen(view):
                found.put(view)
        return found


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
    _index: PrefixIndex = field(default_factory=PrefixIndex)
    _kinds: Counter[tuple[bytes, int]] = field(default_factory=Counter)
    """Roots and block sizes of the replicas."""
    _rankings: dict[Availability, Ranking] = field(init=False)
    _views: dict[int, ReplicaView] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.policy = Policy(self.policy)
        if not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"alpha is {self.alpha}, it must be between 0 and 1")
        rank = _rank_in_turn if self.policy is Policy.ROUND_ROBIN else _rank_by_room
        self._rankings = {one: Ranking(rank) for one in (Availability.OPEN, Availability.RESERVE)}

    def join(
        self, key: Hashable, *, capacity: int, block_size: int, root: bytes, num_blocks: int | None = None
    ) -> ReplicaView:
        """Add a replica; its table is empty until it reports. num_blocks: of its cache, None: not known."""
        if key in self.replicas:
            raise ConfigError(f"replica {key!r} is there already")
        if capacity < 1 or block_size < 1:
            raise ConfigError(f"replica {key!r}: capacity {capacity}, block size {block_size}; both are at least 1")
        index = self._num_joined
        limit = self.max_digests if num_blocks is None else min(num_blocks, MAX_BLOCKS)
        table = PrefixTable(limit, self._index, index)
        view = ReplicaView(key=key, index=index, capacity=capacity, block_size=block_size, root=root, table=table)
        self._num_joined += 1
        self._kinds[root, block_size] += 1
        self.replicas[key] = self._views[index] = view
        self._rankings[view.availability].put(view)
        return view

    def leave(self, key: Hashable) -> None:
        """Remove a replica and its table; routes to it need no release."""
        view = self.replicas.pop(key, None)
        if view is None:
            return
        del self._views[view.index]
        self._count_kind(view, -1)
        view.table.clear()
        for ranking in self._rankings.values():
            ranking.discard(view)

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
            self._count_kind(view, -1)
            view.root = root
            self._count_kind(view, +1)
            view.table.clear()

    def set_foreign(self, key: Hashable, count: int) -> None:
        """Requests that a replica has from elsewhere."""
        view = self._view(key)
        if view.foreign != count:
            view.foreign = count
            self._rank_again(view)

    def set_availability(self, key: Hashable, availability: Availability) -> None:
        view = self._view(key)
        view.availability = availability
        for one, ranking in self._rankings.items():
            if one is availability:
                ranking.put(view)
            else:
                ranking.discard(view)

    @property
    def takes_requests(self) -> bool:
        return bool(self._candidates())

    def with_room(self, share: float = 0.0) -> Iterator[ReplicaView]:
        """Replicas that are open and have a free row, and at least this share of their rows free."""
        select = filter if self.policy is Policy.ROUND_ROBIN else takewhile
        return select(lambda view: view.free_share > 0 and view.free_share >= share, self._rankings[Availability.OPEN])

    def choose(self, tokens: bytes, *, salt: str = "", adapter: str | None = None) -> Route | None:
        """A replica for a prompt (int32 token ids; b"" if unknown); None: no replica takes requests.

        adapter: one that the replica should have loaded; None where one is about to have it, else any replica without
        an older content where none has.
        """
        candidates = self._candidates()
        if adapter is not None:
            having = candidates.those(lambda view: adapter in view.adapters)
            if not having and any(adapter in view.loading for view in candidates):
                return None
            candidates = having or candidates.those(lambda view: adapter not in view.outdated)
        if not candidates:
            return None
        if self.policy is Policy.ROUND_ROBIN:
            return Route(key=candidates.first_after((0.0, 0, self._last_index)).key)
        if self.policy is Policy.LOAD_BALANCED or not tokens:
            return Route(key=candidates.first.key)
        return self._by_prefix(candidates, tokens, salt, adapter)

    def assign(self, route: Route) -> None:
        """The request is assigned to `route`."""
        view, stamp = self._view(route.key), self._tick()
        view.load += 1
        view.last_assigned, self._last_index = stamp, view.index
        self._rank_again(view)
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
        self._rank_again(view)
        if route.root == view.root:
            view.table.expect_no_more(route.chain)
            view.table.touch(route.chain, self._tick())  # dropped after what the request generated, as in the cache

    def _by_prefix(self, candidates: Ranking, tokens: bytes, salt: str, adapter: str | None) -> Route:
        kinds: Iterable[tuple[bytes, int]] = tuple(self._kinds)
        if adapter is not None:
            kinds = {(view.root_of(adapter), view.block_size) for view in candidates}
        roomiest, chains = candidates.first, {}
        best = _Choice((1.0 - self.alpha) * roomiest.free_share, -math.inf, 0, -roomiest.index, 0)
        for root, block_size in kinds:
            part = tokens
            if self.policy is Policy.FIRST_PREFIX_BLOCK:  # only the first block is hashed
                part = tokens[: TOKEN_SIZE * (block_size + 1)]
            chain = chains[root, block_size] = chain_of(root, salt, part, block_size)
            best = self._best_holder(candidates, chain, best)  # a digest has its root in it
        chosen = self._views[-best.negative_index]
        kind = (chosen.root_of(adapter), chosen.block_size)
        return Route(key=chosen.key, chain=chains[kind], root=chosen.root, matched=best.num_matched)

    def _best_holder(self, candidates: Ranking, chain: Sequence[bytes], best: _Choice) -> _Choice:
        """The better one of `best` and the best replica that has the first block of `chain`.

        It is found from the last block to the first, as fewer replicas have the later ones. Of more than MAX_LOOKED_AT
        that have a block those with the most room are looked at, and some of the others in turn.
        """
        seen: set[int] = set()
        for count in range(len(chain), 0, -1):
            held = self._index.holders(chain[count - 1])
            if not held:
                continue
            if not candidates or self._score(count, chain, candidates.first) < best.score:
                return best
            if len(held) > MAX_LOOKED_AT:
                return self._best_of_many(candidates, chain, count, best)
            for index in held:
                if index not in seen:
                    best = self._better(best, candidates, chain, self._views[index], count)
            seen.update(held)
        return best

    def _best_of_many(self, candidates: Ranking, chain: Sequence[bytes], count: int, best: _Choice) -> _Choice:
        """The same, where many have `count` blocks, and those that have more have been looked at."""
        for view in islice(candidates, MAX_LOOKED_AT):
            if self._score(count, chain, view) <= best.score:
                return best
            best = self._better(best, candidates, chain, view, view.table.match(chain))
        for index in self._index.some_holders(chain[count - 1]):
            best = self._better(best, candidates, chain, self._views[index], count)
        return best

    def _better(
        self, best: _Choice, candidates: Ranking, chain: Sequence[bytes], view: ReplicaView, count: int
    ) -> _Choice:
        """The better one of `best` and a replica that has `count` blocks."""
        if not count or view not in candidates:
            return best
        recency = view.table.recency(chain[count - 1])
        return max(best, _Choice(self._score(count, chain, view), view.free_share, recency, -view.index, count))

    def _score(self, num_matched: int, chain: Sequence[bytes], view: ReplicaView) -> float:
        return self.alpha * num_matched / len(chain) + (1.0 - self.alpha) * view.free_share

    def _candidates(self) -> Ranking:
        return self._rankings[Availability.OPEN] or self._rankings[Availability.RESERVE]

    def _rank_again(self, view: ReplicaView) -> None:
        for ranking in self._rankings.values():
            if view in ranking:
                ranking.put(view)

    def _count_kind(self, view: ReplicaView, change: int) -> None:
        kind = (view.root, view.block_size)
        self._kinds[kind] += change
        if not self._kinds[kind]:
            del self._kinds[kind]

    def _view(self, key: Hashable) -> ReplicaView:
        try:
            return self.replicas[key]
        except KeyError:
            raise UnknownRequest(f"no replica {key!r}") from None

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


class _Choice(NamedTuple):
    """A replica and why it is chosen: the largest is the best."""

    score: float
    free_share: float
    recency: int
    negative_index: int
    num_matched: int


def _rank_by_room(view: ReplicaView) -> Rank:
    """The largest free share first; among equals the one assigned to longest ago, then the first that joined."""
    return -view.free_share, view.last_assigned, view.index


def _rank_in_turn(view: ReplicaView) -> Rank:
    return 0.0, 0, view.index

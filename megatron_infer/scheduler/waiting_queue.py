"""Requests that hold no memory: the queue before admission, and siblings that wait for their leader's prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from megatron_infer.scheduler import policy
from megatron_infer.scheduler.request import Request, sort_key_of


class WaitingQueue:
    """By priority; within one the evicted requests by arrival, then the others by arrival.

    A group (n > 1) is queued as its leader, and its siblings wait behind that. When the leader ends, or has no room
    for all its siblings, the first of those left leads the others: their prompt is still computed once.
    """

    def __init__(self) -> None:
        self.requests: deque[Request] = deque()
        self.overtaken: dict[Request, int] = {}
        """Admissions of others past a request since it was queued; bounded by `policy.MAX_OVERTAKEN`."""
        self._siblings: dict[Request, list[Request]] = {}
        """By leader, which may be queued or running."""
        self.num_arrivals = 0
        self.released: int | None = None
        """See `release`; None: all may be admitted."""
        self.in_turn: Callable[[Iterable[Request]], Iterable[Request]] | None = None
        """The order of requests of several callers; None: that of the queue."""

    def __len__(self) -> int:
        return len(self.requests) + sum(map(len, self._siblings.values()))

    def assign_arrivals(self, leader: Request) -> None:
        """Give a new request and its siblings the next arrivals."""
        for request in (leader, *leader.siblings):
            assert request.arrival < 0, f"request {request.id!r} was added before"
            request.arrival, self.num_arrivals = self.num_arrivals, self.num_arrivals + 1

    def release(self, arrival: int) -> None:
        """Requests before `arrival` may be admitted; the others wait for the next release."""
        self.released = arrival

    def append(self, leader: Request) -> None:
        requests, priority = self.requests, leader.params.priority
        index = len(requests)
        while index and requests[index - 1].params.priority > priority:
            index -= 1
        requests.insert(index, leader)
        self.hold_siblings(leader)

    def hold_siblings(self, leader: Request) -> None:
        """Let a leader's siblings wait for its prefill, wherever the leader itself is."""
        if leader.siblings:
            self._siblings[leader] = list(leader.siblings)

    def insert_evicted(self, request: Request) -> None:
        """Insert before all of its priority that were never evicted, among the evicted by arrival."""
        requests, priority = self.requests, request.params.priority
        index = 0
        while index < len(requests) and (
            requests[index].params.priority < priority
            or (requests[index].history.num_evictions and requests[index].sort_key < request.sort_key)
        ):
            index += 1
        requests.insert(index, request)

    def insert_sorted(self, requests: Sequence[Request]) -> None:
        """Insert `requests` and sort all by priority and arrival."""
        self.requests = deque(sorted([*self.requests, *requests], key=sort_key_of))

    def insert_group(self, siblings: Sequence[Request]) -> None:
        """Insert the first of `siblings` by arrival among those never evicted; it leads the others."""
        if not siblings:
            return
        first, *others = siblings
        requests = self.requests
        index = len(requests)
        while index and (
            requests[index - 1].params.priority > first.params.priority
            or (not requests[index - 1].history.num_evictions and requests[index - 1].sort_key > first.sort_key)
        ):
            index -= 1
        requests.insert(index, first)
        if others:
            self._siblings[first] = others

    def is_leader(self, request: Request) -> bool:
        """Whether siblings wait for this request's prefill."""
        return request in self._siblings

    def pop_siblings(self, leader: Request) -> list[Request]:
        """The siblings that waited behind `leader`; the caller queues or forks them."""
        return self._siblings.pop(leader, [])

    def remove(self, request: Request) -> None:
        """Remove a waiting request, queued or behind its leader; its own siblings take its place."""
        for siblings in self._siblings.values():
            if request in siblings:
                siblings.remove(request)
                break
        else:
            self.requests.remove(request)
            self.overtaken.pop(request, None)
        self._siblings = {leader: siblings for leader, siblings in self._siblings.items() if siblings}
        self.insert_group(self.pop_siblings(request))

    def candidates(self, num_rows: int, among: Collection[Request] | None = None) -> list[Request]:
        """The requests that may be tried for `num_rows` free rows in this step, in order; of those in `among`."""
        released, requests = self.released, iter(self.requests)
        if released is not None:
            requests = (request for request in requests if request.arrival < released)
        if among is not None:
            requests = (request for request in requests if request in among)
        if self.in_turn is not None:
            requests = iter(self.in_turn(requests))
        return list(islice(requests, num_rows + policy.LOOKAHEAD))

    def remove_admitted(self, admitted: Collection[Request]) -> None:
        requests, kept = self.requests, []
        num_left = len(admitted)
        while num_left:
            request = requests.popleft()
            if request in admitted:
                num_left -= 1
                self.overtaken.pop(request, None)
            else:
                kept.append(request)
        requests.extendleft(reversed(kept))

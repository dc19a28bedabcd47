"""Requests that hold no memory: the line before admission, and siblings that wait for their leader's prefill."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from megatron_infer.scheduler import policy

if TYPE_CHECKING:
    from megatron_infer.scheduler.request import Request


def sort_key_of(request: Request) -> tuple[int, int]:
    return request.rank


def remove_by_rank(requests: list[Request], request: Request) -> bool:
    """Take `request` out of a list kept by rank; False when it is not in it."""
    index = bisect_left(requests, request.rank, key=sort_key_of)
    if index == len(requests) or requests[index] is not request:
        return False
    del requests[index]
    return True


def number(leader: Request, first: int) -> int:
    """Give a newcomer and its siblings the arrivals from `first` on -> the next one."""
    for arrival, member in enumerate((leader, *leader.siblings), start=first):
        assert member.arrival < 0, f"request {member.id!r} was added before"
        member.arrival = arrival
    return first + 1 + len(leader.siblings)


class WaitingQueue:
    """By priority; of each the evicted requests by arrival, then the others by arrival. Behind each leader stand the
    siblings it will fork.

    A group (n > 1) stands in line with its leader. When the leader dies, or has no room for all its siblings, the
    first of those left leads the others: their prompt is still computed once.
    """

    def __init__(self) -> None:
        self.line: deque[Request] = deque()
        self.overtaken: dict[Request, int] = {}
        """Admissions of others past a request in line since it stands there; bounded by `policy.MAX_OVERTAKEN`."""
        self._siblings: dict[Request, list[Request]] = {}

    def __len__(self) -> int:
        return len(self.line) + sum(map(len, self._siblings.values()))

    def append(self, leader: Request) -> None:
        line, priority = self.line, leader.params.priority
        index = len(line)
        while index and line[index - 1].params.priority > priority:
            index -= 1
        line.insert(index, leader)
        self.wait_behind(leader)

    def wait_behind(self, leader: Request) -> None:
        """Let a leader's siblings wait for its prefill, wherever the leader itself is."""
        if leader.siblings:
            self._siblings[leader] = list(leader.siblings)

    def put_back(self, request: Request) -> None:
        """Insert an evicted request before all of its priority that were never evicted, among the evicted by rank."""
        line, priority = self.line, request.params.priority
        index = 0
        while index < len(line) and (
            line[index].params.priority < priority
            or (line[index].history.num_evictions and line[index].rank < request.rank)
        ):
            index += 1
        line.insert(index, request)

    def restart(self, requests: Sequence[Request]) -> None:
        """Take `requests` in again and sort everyone by rank."""
        self.line = deque(sorted([*self.line, *requests], key=sort_key_of))

    def leads(self, request: Request) -> bool:
        """Whether siblings wait for this request's prefill."""
        return request in self._siblings

    def take_siblings(self, leader: Request) -> list[Request]:
        """The siblings waiting behind `leader`, who are the caller's from now on."""
        return self._siblings.pop(leader, [])

    def stand_in_line(self, siblings: Sequence[Request]) -> None:
        """Let the first of `siblings` wait by itself, by rank among those never evicted, and lead the others."""
        if not siblings:
            return
        first, *others = siblings
        line = self.line
        index = len(line)
        while index and (
            line[index - 1].params.priority > first.params.priority
            or (not line[index - 1].history.num_evictions and line[index - 1].rank > first.rank)
        ):
            index -= 1
        line.insert(index, first)
        if others:
            self._siblings[first] = others

    def remove(self, request: Request) -> None:
        """Take out a waiting request, in line or behind its leader; its own siblings take its place."""
        for siblings in self._siblings.values():
            if request in siblings:
                siblings.remove(request)
                break
        else:
            self.line.remove(request)
            self.overtaken.pop(request, None)
        self._siblings = {leader: siblings for leader, siblings in self._siblings.items() if siblings}
        self.stand_in_line(self.take_siblings(request))

    def candidates(self, num_rows: int) -> Iterator[Request]:
        """Those who may be tried for `num_rows` free rows in this step, in order."""
        yield from list(islice(self.line, num_rows + policy.LOOKAHEAD))

    def take_out(self, admitted: Collection[Request]) -> None:
        """Remove requests that were admitted."""
        line, kept = self.line, []
        num_left = len(admitted)
        while num_left:
            request = line.popleft()
            if request in admitted:
                num_left -= 1
                self.overtaken.pop(request, None)
            else:
                kept.append(request)
        line.extendleft(reversed(kept))

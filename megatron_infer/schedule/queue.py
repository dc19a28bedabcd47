"""Requests that hold no memory: the line before admission, and siblings that wait for their leader's prefill."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from megatron_infer.schedule import policy

if TYPE_CHECKING:
    from megatron_infer.schedule.request import Request


def arrival_of(request: Request) -> int:
    return request.arrival


def remove_by_arrival(requests: list[Request], request: Request) -> bool:
    """Take `request` out of a list kept oldest first; False when it is not in it."""
    index = bisect_left(requests, request.arrival, key=arrival_of)
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
    """Evicted requests by arrival, then the others by arrival; behind each leader the siblings it will fork.

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
        self.line.append(leader)
        self.wait_behind(leader)

    def wait_behind(self, leader: Request) -> None:
        """Let a leader's siblings wait for its prefill, wherever the leader itself is."""
        if leader.siblings:
            self._siblings[leader] = list(leader.siblings)

    def put_back(self, request: Request) -> None:
        """Insert an evicted request before all that were never evicted, among the evicted by arrival."""
        line = self.line
        index = 0
        while index < len(line) and line[index].history.num_evictions and line[index].arrival < request.arrival:
            index += 1
        line.insert(index, request)

    def restart(self, requests: Sequence[Request]) -> None:
        """Take `requests` in again and sort everyone by arrival."""
        self.line = deque(sorted([*self.line, *requests], key=arrival_of))

    def leads(self, request: Request) -> bool:
        """Whether siblings wait for this request's prefill."""
        return request in self._siblings

    def take_siblings(self, leader: Request) -> list[Request]:
        """The siblings waiting behind `leader`, who are the caller's from now on."""
        return self._siblings.pop(leader, [])

    def stand_in_line(self, siblings: Sequence[Request]) -> None:
        """Let the first of `siblings` wait by itself, by arrival among those never evicted, and lead the others."""
        if not siblings:
            return
        first, *others = siblings
        line = self.line
        index = len(line)
        while index and not line[index - 1].history.num_evictions and line[index - 1].arrival > first.arrival:
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

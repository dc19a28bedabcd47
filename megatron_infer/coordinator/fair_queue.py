"""The order of waiting requests: priority, then callers in turn, then a caller's calls in turn, then arrival."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_infer.coordinator.peers import PendingRequest

Caller = tuple[bytes | str, str]
_Calls = OrderedDict[str, "deque[PendingRequest]"]
_Callers = OrderedDict[Caller, _Calls]


class FairQueue:
    """Waiting requests, those that have ended included until they are taken.

    Within a priority each caller gets one request served in turn, so that a call of a thousand prompts delays the
    request of another caller by one request. The first request of a caller waits for one request of each other caller.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Callers] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[PendingRequest]:
        """In no order that matters."""
        for callers in self._levels.values():
            for calls in callers.values():
                for requests in calls.values():
                    yield from requests

    def push(self, request: PendingRequest) -> None:
        callers = self._levels.setdefault(request.priority, OrderedDict())
        calls = callers.setdefault(request.caller, OrderedDict())
        calls.setdefault(request.submit.call, deque()).append(request)
        self._count += 1

    def pop(self, may: Callable[[Caller], bool] | None = None) -> PendingRequest | None:
        """The next one, of the first caller in turn that `may` allows (None: of all); None: there is none."""
        level = min(self._levels, default=0)
        for caller, calls in self._levels.get(level, {}).items():
            if may is None or may(caller):
                return self._take(level, caller, next(iter(calls)), first=True)
        return None

    def pop_last(self) -> PendingRequest:
        """The one that would be served last, or nearly; the queue must not be empty."""
        level = max(self._levels)
        caller = next(reversed(self._levels[level]))
        return self._take(level, caller, next(reversed(self._levels[level][caller])), first=False)

    def _take(self, level: int, caller: Caller, call: str, *, first: bool) -> PendingRequest:
        callers = self._levels[level]
        calls = callers[caller]
        requests = calls[call]
        request = requests.popleft() if first else requests.pop()
        self._count -= 1
        if not requests:
            del calls[call]
        elif first:
            calls.move_to_end(call)
        if not calls:
            del callers[caller]
        elif first:
            callers.move_to_end(caller)
        if not callers:
            del self._levels[level]
        return request

"""How many tokens are worth drafting for each request: by what steps cost and by how many of its drafts were kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_infer.scheduler.request import Request

FORGETTING = 0.95
"""Weight of a request's earlier verifications at each step: after 14 steps half is forgotten."""
HOPE = 0.8
"""Share of kept drafts that is assumed, with the weight of one draft: each request is tried, and again in time."""
NUM_FORGOTTEN = 64
"""Requests recorded beyond those that run before the ended ones are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of a step: a part that every step takes, and one for each of its tokens."""

    step_s: float = 8.0
    """The default's ratio stands until steps are measured: a step costs as much as eight of its tokens."""
    token_s: float = 1.0

    def value_of(self, num_tokens: float, num_drawn: float) -> float:
        """What a drawn token costs more than a drafted one, as a ratio, in a step of `num_tokens` that draws
        `num_drawn`. Example: a step of 8 s and 1 s a token, one row: 9 s for a token, 1 s for a draft -> 9."""
        return (self.step_s + self.token_s * num_tokens) / num_drawn / max(self.token_s, 1e-12)


@dataclass(slots=True)
class _Record:
    """Drafts of a request that were tried (up to the first one that was wrong) and kept; the old ones count less."""

    tried: float = 0.0
    kept: float = 0.0

    @property
    def share(self) -> float:
        return (self.kept + HOPE) / (self.tried + 1.0)


class DraftDepth:
    """Drafts a token where the chance that it is kept pays for computing it.

    A draft at place i is kept if all before it were: with probability share ** i. It costs a token of a step and saves,
    if it is kept, its part of another step. Deterministic in its calls, as the scheduler is.
    """

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._records: dict[Request, _Record] = {}

    def of(self, requests: Sequence[Request], most: int) -> list[int]:
        """Tokens to draft, 0 to `most`, for each of the requests that decode in a step; called once for each step."""
        depths = self.expected(requests, most)
        for request, depth in zip(requests, depths, strict=True):
            if not depth:  # nothing is learned of it: hope comes back
                self._forget(self._records[request])
        return depths

    def expected(self, requests: Sequence[Request], most: int) -> list[int]:
        """What `of` would return, without counting a step."""
        count = len(requests)
        if not count:
            return []
        shares = [self._record(request).share for request in requests]
        value = self.costs.value_of(count, count)
        for _ in range(2):  # drafts make a token cheaper, and then fewer of them pay
            depths = [_depth(share, value, most) for share in shares]
            drawn = count + sum(_kept(share, depth) for share, depth in zip(shares, depths, strict=True))
            value = self.costs.value_of(count + sum(depths), drawn)
        return depths

    def verified(self, request: Request, num_drafts: int, num_kept: int) -> None:
        """A step has verified drafts of a request and kept the first `num_kept`."""
        record = self._record(request)
        self._forget(record)
        record.kept += num_kept
        record.tried += min(num_drafts, num_kept + 1)

    def _record(self, request: Request) -> _Record:
        record = self._records.get(request)
        if record is None:
            if len(self._records) > NUM_FORGOTTEN:
                self._records = {one: known for one, known in self._records.items() if one.finish_reason is None}
            record = self._records[request] = _Record()
        return record

    @staticmethod
    def _forget(record: _Record) -> None:
        record.tried *= FORGETTING
        record.kept *= FORGETTING


def _depth(share: float, value: float, most: int) -> int:
    """The last place whose draft is kept often enough."""
    depth, chance = 0, share
    while depth < most and chance * value >= 1.0:
        depth += 1
        chance *= share
    return depth


def _kept(share: float, depth: int) -> float:
    """Drafts of `depth` that are kept on average."""
    return sum(share**place for place in range(1, depth + 1))

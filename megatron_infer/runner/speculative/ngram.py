"""Proposals from the request's own tokens: what followed the last few where they stood before."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_infer.scheduler.draft_depth import LONGEST_RUN, NO_PROPOSAL, Proposal
from megatron_infer.scheduler.request import Request

SOURCE = "ngram"

KEYS = (4, 1)
"""Lengths of the runs that are indexed, the longest first. (8, 4, 2, 1) finds no more of the two sets of
tools/bench/speculative.py, and takes twice the time."""
LONGEST = 16
"""The longest run of last tokens that is looked up: a longer run is kept more often, and found less often."""
NUM_CANDIDATES = 8
"""Latest places of the longest indexed run, those that are compared for the longest run of all."""
FEW = 16
"""Fewer new tokens than this are indexed one by one: it is faster so."""
NUM_FORGOTTEN = 64
"""Requests indexed beyond those that run before the ended ones are dropped."""


@dataclass(slots=True)
class _Index:
    """Where runs of tokens end, in one request."""

    num_seen: int = 0
    """Leading tokens that are indexed."""
    ends: dict[int, list[int]] = field(default_factory=dict)
    """By the hash of a run; runs of one hash are told apart where they are compared."""


class NgramProposer:
    """Looks up the last 16 to 1 tokens; the same tokens give the same proposal on every rank."""

    def __init__(self) -> None:
        self._indices: dict[Request, _Index] = {}

    def propose(self, request: Request, most: int) -> Proposal:
        """At most `most` tokens that may follow those of `request`; none where its last tokens are new.

        Of the latest places of an indexed run, the one with the longest run of all counts, and of these the latest. A
        run that reaches its own repetition goes on with it: after 7 8 7 8 come 7 8 7 8.
        """
        tokens, index = request.tokens, self._index_of(request)
        length = len(tokens)
        best, best_run = 0, 0
        for run in KEYS:
            for end in reversed(index.ends.get(hash(tuple(tokens[-run:])), ())[-NUM_CANDIDATES:]):
                same = 0
                while same < LONGEST and same < end and tokens[end - 1 - same] == tokens[length - 1 - same]:
                    same += 1
                if same > best_run and same >= run:
                    best, best_run = end, same
                if same == LONGEST:
                    break
            if best:
                break
        if not best:
            return NO_PROPOSAL
        while (
            best_run < LONGEST_RUN and best_run < best and tokens[best - 1 - best_run] == tokens[length - 1 - best_run]
        ):
            best_run += 1
        period = length - best
        return Proposal([tokens[best + i % period] for i in range(most)], SOURCE, best_run)

    def _index_of(self, request: Request) -> _Index:
        """The request's index, up to the run before its last token."""
        index = self._indices.get(request)
        if index is None:
            if len(self._indices) > NUM_FORGOTTEN:
                self._indices = {one: known for one, known in self._indices.items() if one.finish_reason is None}
            index = self._indices[request] = _Index()
        tokens, ends, num_seen = request.tokens, index.ends, index.num_seen
        for run in KEYS:
            if len(tokens) - num_seen < FEW:
                for end in range(max(num_seen, run), len(tokens)):
                    ends.setdefault(hash(tuple(tokens[end - run : end])), []).append(end)
                continue
            first, behind = max(num_seen - run, 0), len(tokens) - run
            runs = zip(*(tokens[first + place : behind + place] for place in range(run)), strict=False)
            for end, key in enumerate(map(hash, runs), first + run):
                ends.setdefault(key, []).append(end)
        index.num_seen = len(tokens)
        return index

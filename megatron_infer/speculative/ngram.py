"""Proposals from the request's own tokens: what followed the last few where they stood before."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_infer.scheduler.draft_depth import LONGEST_RUN, NO_PROPOSAL, Proposal
from megatron_infer.scheduler.request import Request

SOURCE = "ngram"

NUM_CANDIDATES = 8
"""Latest places of the shortest run that are compared for the longest."""
NUM_FORGOTTEN = 64
"""Requests indexed beyond those that run before the ended ones are dropped."""


@dataclass(slots=True)
class _Index:
    """Where each run of `ngram_min` tokens ends, in one request."""

    num_seen: int = 0
    """Leading tokens that are indexed."""
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class NgramProposer:
    """Looks up the last `ngram_max` to `ngram_min` tokens; the same tokens give the same proposal on every rank."""

    def __init__(self, *, ngram_min: int, ngram_max: int) -> None:
        assert 1 <= ngram_min <= ngram_max, f"runs of {ngram_min} to {ngram_max} tokens"
        self._shortest, self._longest = ngram_min, ngram_max
        self._indices: dict[Request, _Index] = {}

    def propose(self, request: Request, most: int) -> Proposal:
        """At most `most` tokens that may follow those of `request`; none where its last tokens are new.

        Of the places where the longest run stood before, the latest counts. A run that reaches its own repetition goes
        on with it: after 7 8 7 8 come 7 8 7 8.
        """
        tokens, index = request.tokens, self._index_of(request)
        length = len(tokens)
        if length <= self._shortest:
            return NO_PROPOSAL
        best, best_run = 0, 0
        for end in reversed(index.ends.get(tuple(tokens[-self._shortest :]), ())[-NUM_CANDIDATES:]):
            run = self._shortest
            while run < self._longest and run < end and tokens[end - 1 - run] == tokens[length - 1 - run]:
                run += 1
            if run > best_run:
                best, best_run = end, run
                if run == self._longest:
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
        tokens, run, ends = request.tokens, self._shortest, index.ends
        for end in range(max(index.num_seen, run), len(tokens)):
            ends.setdefault(tuple(tokens[end - run : end]), []).append(end)
        index.num_seen = len(tokens)
        return index

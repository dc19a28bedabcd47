"""How many tokens are worth drafting for each request: by what steps cost and by how often such drafts were kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_costs import StepCosts, size_class
from megatron_infer.scheduler.step_plan import ON_DEVICE

LONGEST_RUN = 16
"""Longer runs count as this long."""
TABLE_PRIOR, TABLE_FORGETTING = 8.0, 0.995
"""The assumed share of kept drafts weighs as much as this many drafts; each new draft scales earlier ones by this."""
REQUEST_PRIOR, REQUEST_FORGETTING = 2.0, 0.97
"""The same two figures for how one request differs from the others."""
LEAST_CHANCE = 0.05
"""A draft with a smaller chance to be kept is not considered, except the first of a proposal: the weights of a draft
model may have changed, which only a verified draft shows."""
MARK_UP = 1.1
"""The time that drafts add to a step is multiplied by this: it is an estimate, and an estimate that is too low is
chosen most often."""
PROBE_SHARE = 0.01
"""Share of the time that goes to drafts that are not expected to pay, so that the measured costs stay current."""
PLAIN_EVERY = 50
"""After this many steps with drafts, one step of as many rows runs without drafts and is measured."""
SHORT_TURN_S = 1e-3
"""Where a step takes less than this for each of its rows, the time of finding a proposal (about a hundredth) counts."""
IDLE_STEPS, LEAST_REST, MOST_REST = 8, 4, 9
"""There a request that drafted nothing in so many steps rests for so few to so many between two proposals, until it
drafts again. How many changes, so that no text that repeats itself is looked at in the same place only."""
NUM_FORGOTTEN = 64
"""With more records than this, those of ended requests are dropped."""


class Proposal(NamedTuple):
    """Tokens that may follow those of a request."""

    tokens: Sequence[int] = ()
    source: str = ""
    """What proposed them; how often drafts are kept is learned for each source."""
    run: int = 0
    """How many of the last tokens also stood at the earlier place that these were copied from; 0: not copied."""


NO_PROPOSAL = Proposal()


@dataclass(slots=True)
class _Share:
    """Drafts of one kind that were compared with the token drawn at their place; the old ones count less."""

    assumed: float
    """Share of them that is kept, before any was compared."""
    share: float
    """What is expected now; within 0 and 1, not at them."""
    tried: float = 0.0
    kept: float = 0.0

    def learn(self, kept: bool) -> None:
        self.tried, self.kept = TABLE_FORGETTING * self.tried + 1, TABLE_FORGETTING * self.kept + kept
        self.share = (self.kept + TABLE_PRIOR * self.assumed) / (self.tried + TABLE_PRIOR)


@dataclass(slots=True)
class _Record:
    """How a request's drafts did, what was expected of them, and its latest proposal."""

    tried: float = 0.0
    kept: float = 0.0
    expected: float = 0.0
    proposal: Proposal = NO_PROPOSAL
    length: int = 0
    """Tokens that the request had at its latest proposal."""
    compared: bool = True
    """Whether the latest proposal has been compared with what was drawn."""
    idle: int = 0
    """Short steps in a row in which nothing was drafted for it."""
    rests: int = 0
    """Steps that it is to go without a proposal yet."""

    @property
    def odds(self) -> float:
        """Ratio of the odds that a draft of this request is kept to those of a draft of any request."""
        failed, expected_failed = self.tried - self.kept, self.tried - self.expected
        prior = REQUEST_PRIOR
        return (self.kept + prior) / (self.expected + prior) * (expected_failed + prior) / (failed + prior)


@dataclass(slots=True)
class _Probes:
    seconds: float = 0.0
    """Time that may be spent on drafts that are not expected to pay."""
    since_plain: dict[int, int] = field(default_factory=dict)
    """Steps with drafts since the latest one without, by the size class of their rows."""


class DraftDepth:
    """Chooses how many tokens to draft: as many as give the most tokens per second.

    A draft that extends a run of r tokens is expected to be kept as often as others that extended a run of r; the draft
    behind it extends a run of r + 1. A proposal that is not verified is compared with the token that is drawn, so that
    the share of kept drafts is learned without trials. Deterministic in its calls and in `costs`, as the scheduler is.
    """

    def __init__(self, *, learns_unverified: bool = True) -> None:
        """learns_unverified: False where drafts are not kept for being equal to what is drawn."""
        self.costs = StepCosts()
        self._learns_unverified = learns_unverified
        self._shares: dict[str, list[_Share]] = {}
        """By source; in a list by the run that a draft extends."""
        self._records: dict[Request, _Record] = {}
        self._probes = _Probes()
        self._priced = self.costs
        """What `_added_s` follows from: seconds that 1, 2, ... drafts add to a step, by its rows."""
        self._added_s: dict[int, list[float]] = {}
        self._num_steps = 0

    def looking(self, requests: Sequence[Request]) -> list[int]:
        """Places of those that may propose in a step of all requests that decode; the others rest. Called once for each
        step."""
        self._num_steps += 1
        records, found = self._records, []
        for place, request in enumerate(requests):
            record = records.get(request)
            if record is None or not record.rests:
                found.append(place)
            else:
                record.rests -= 1
        return found

    def rests(self, request: Request) -> bool:
        """Whether the request goes without a proposal in the next step that it is planned in."""
        record = self._records.get(request)
        return record is not None and record.rests > 0

    def of(
        self, requests: Sequence[Request], proposals: Sequence[Proposal], looking: Sequence[int] | None = None
    ) -> list[int]:
        """Tokens of each proposal to verify in a step of all requests that decode; called once for each step in which
        some are `looking`; None: all are."""
        depths = self._counted(requests, proposals)
        is_short = self.costs.seconds(max(1, len(requests)), verifying=False) < SHORT_TURN_S * len(requests)
        # The same for all that look in one step, so that they do together from then on.
        rests = LEAST_REST + (self._num_steps * 2654435761 >> 13) % (MOST_REST - LEAST_REST + 1)
        for place in range(len(requests)) if looking is None else looking:
            request = requests[place]
            record = self._record(request)
            idles = (
                is_short and not depths[place] and request.params.structured is None
            )  # a grammar may force any token
            record.idle = record.idle + 1 if idles else 0
            record.rests = rests if record.idle >= IDLE_STEPS else 0
        return depths

    def _counted(self, requests: Sequence[Request], proposals: Sequence[Proposal]) -> list[int]:
        rows, probes = len(requests), self._probes
        if not any(proposal.tokens for proposal in proposals):
            return [0] * rows
        chances, depths = self._expected(requests, proposals)
        rows_class = size_class(rows)
        if sum(depths):
            if (since := probes.since_plain.get(rows_class, PLAIN_EVERY)) >= PLAIN_EVERY:
                depths = [0] * rows
                since = -1
            probes.since_plain[rows_class] = since + 1
            return depths
        probes.since_plain[rows_class] = 0
        plain_s = self.costs.seconds(rows, verifying=False)
        best = max(range(rows), key=lambda row: sum(chances[row]))
        price_s = max(0.0, self.costs.seconds(rows + len(chances[best]), verifying=True) - plain_s)
        probes.seconds = min(probes.seconds + PROBE_SHARE * plain_s, price_s)
        if chances[best] and probes.seconds >= price_s:
            probes.seconds = 0.0
            depths[best] = len(chances[best])
        return depths

    def expected(self, requests: Sequence[Request], proposals: Sequence[Proposal]) -> list[int]:
        """What `of` would return if it did not also measure; no step is counted."""
        return self._expected(requests, proposals)[1]

    def proposed(self, request: Request, proposal: Proposal) -> None:
        """Note what may follow the request's tokens; what was noted last is compared with what followed."""
        record, length = self._record(request), len(request.tokens)
        if not record.compared and length > record.length:
            self._learn(record, 0, request.tokens[record.length] == record.proposal.tokens[0])
        cannot_compare = not self._learns_unverified or not proposal.tokens or ON_DEVICE in proposal.tokens
        record.proposal, record.length, record.compared = proposal, length, cannot_compare

    def verified(self, request: Request, num_drafts: int, num_kept: int) -> None:
        """A step has verified drafts of the latest proposal and kept the first `num_kept`."""
        record = self._record(request)
        for place in range(min(num_drafts, num_kept + 1)):
            self._learn(record, place, place < num_kept)
        record.compared = True

    def _expected(
        self, requests: Sequence[Request], proposals: Sequence[Proposal]
    ) -> tuple[list[list[float]], list[int]]:
        """(the chance that each draft is kept, drafts to verify) of each request."""
        chances = [
            self._chances(request, proposal) if proposal.tokens else []
            for request, proposal in zip(requests, proposals, strict=True)
        ]
        rows = len(requests)
        depths = [0] * rows
        plain_s = self.costs.seconds(rows, verifying=False)
        best_rate = rows / plain_s
        if not any(chances):
            return chances, depths
        ranked = sorted(((chance, row) for row, own in enumerate(chances) for chance in own), reverse=True)
        added_s, drawn, num_best = self._added(rows, plain_s, len(ranked)), float(rows), 0
        for place, (chance, _) in enumerate(ranked):
            drawn += chance
            rate = drawn / (plain_s + added_s[place])
            if rate > best_rate:
                best_rate, num_best = rate, place + 1
        for _, row in ranked[:num_best]:
            depths[row] += 1
        return chances, depths

    def _chances(self, request: Request, proposal: Proposal) -> list[float]:
        """The chance that each draft is kept, which it is if all before it are."""
        found: list[float] = []
        chance, odds, shares = 1.0, self._record(request).odds, self._shares_of(proposal)
        for place in range(len(proposal.tokens)):
            share = shares[min(proposal.run + place, LONGEST_RUN)].share
            chance *= odds * share / (1.0 - share + odds * share)
            if place and chance < LEAST_CHANCE:
                break
            found.append(chance)
        return found

    def _shares_of(self, proposal: Proposal) -> list[_Share]:
        found = self._shares.get(proposal.source)
        if found is None:
            assumed = [1.0 - 0.9 / max(1.3, run) if proposal.run else 0.8 for run in range(LONGEST_RUN + 1)]
            found = self._shares[proposal.source] = [_Share(one, one) for one in assumed]
        return found

    def _added(self, rows: int, plain_s: float, count: int) -> list[float]:
        """The first entries, at least `count`, of what drafts add to a step of `rows` rows, marked up."""
        if self._priced is not self.costs:
            self._priced, self._added_s = self.costs, {}
        found = self._added_s.setdefault(rows, [])
        for tokens in range(rows + len(found) + 1, rows + count + 1):
            found.append(MARK_UP * max(0.0, self.costs.seconds(tokens, verifying=True) - plain_s))
        return found

    def _learn(self, record: _Record, place: int, kept: bool) -> None:
        proposal = record.proposal
        share = self._shares_of(proposal)[min(proposal.run + place, LONGEST_RUN)]
        record.tried = REQUEST_FORGETTING * record.tried + 1
        record.kept = REQUEST_FORGETTING * record.kept + kept
        record.expected = REQUEST_FORGETTING * record.expected + share.share
        share.learn(kept)

    def _record(self, request: Request) -> _Record:
        record = self._records.get(request)
        if record is None:
            if len(self._records) > NUM_FORGOTTEN:
                self._records = {one: known for one, known in self._records.items() if one.finish_reason is None}
            record = self._records[request] = _Record()
        return record

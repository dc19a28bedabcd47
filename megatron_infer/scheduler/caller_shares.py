"""Shares of the callers of one engine: of its rows, and of the time of its steps. With one caller nothing changes.

Callers are numbers, and what is decided follows from commands, results and `costs` alone: every rank decides alike. A
share says when a request is computed, never what it draws.

Rows. Where a caller waits for a row and another has two rows more, the youngest request of the caller with most rows is
evicted, one in a step. Each eviction evens the rows out, so evictions end. A caller without requests keeps a free row
for PRESENT_STEPS steps, so that one who comes and goes evicts nothing; at most an eighth of the rows, or one, is kept.

Time. A step with tokens of several callers takes at most PAIR times as long as one token, or STRETCH times as long as
the tokens of the smallest of them alone, or as one token of each. Half of its tokens go to prompts of callers that
decode nothing, who wait for a first token, the others to those that decode, each half evenly (max-min). The first
prompt of each such caller lengthens a step to FIRST times one token; the caller's other prompts come after it. Where
the first prompts end with the step, those that decode have one token each, in every second step at most. A caller
without requests counts for as many steps as it had some. Until PRESENT_STEPS steps after its last request, a step that
decodes takes at most AWAY times as long as one token: a caller that comes back waits for a short step. A caller's rows
decode in turn, and each caller has one token at least: every row goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from megatron_infer.scheduler import policy
from megatron_infer.scheduler.admitted_requests import AdmittedRequests
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.preemption import PreemptionPolicy
from megatron_infer.scheduler.request import Request, Status, sort_key_of
from megatron_infer.scheduler.step_costs import StepCosts
from megatron_infer.scheduler.waiting_queue import WaitingQueue

PRESENT_STEPS = 256
"""Steps for which a caller counts after its last request."""
PAIR, STRETCH, FIRST, AWAY = 1.5, 1.1, 3.0, 2.5


@dataclass(slots=True)
class StepShare:
    """What a step may take."""

    num_tokens: int
    decode: Collection[Request]
    """Requests that may decode."""
    prompt_tokens: dict[int, int]
    """By caller."""


class CallerShares:
    """Decides once per step, before anything else is planned."""

    def __init__(
        self,
        context: DynamicInferenceContext,
        queue: WaitingQueue,
        admitted_requests: AdmittedRequests,
        preemption: PreemptionPolicy,
    ) -> None:
        self.costs = StepCosts()
        self.num_reserved = 0
        """Free rows that are kept for callers without a request."""
        self._context = context
        self._queue = queue
        self._admitted_requests = admitted_requests
        self._preemption = preemption
        self._seen: dict[int, int] = {}
        """Caller -> the latest step at which it had a request."""
        self._came: dict[int, int] = {}
        """Caller -> the step at which the first of its latest requests in a row came."""
        self._turns: dict[int, tuple[int, int]] = {}
        """Caller -> sort key of the request that decoded last in its turn."""
        self._hurried = -2
        """The latest step in which those that decode had a token each, so that first prompts were computed whole."""
        self._leaving: Request | None = None
        """Is evicted when nothing of it is in flight; does not decode until then."""

    def see(self, caller: int) -> None:
        """A request of `caller` comes."""
        now = self._admitted_requests.stats.steps
        if caller not in self._seen or self._seen[caller] < now - 1:
            self._came[caller] = now
        self._seen[caller] = now

    def begin_step(self, among: Collection[Request] | None) -> None:
        """Make way for a waiting caller below its share of rows. among: the requests that may take part; None: all."""
        self.num_reserved, self._queue.in_turn = 0, None
        if len(self._seen) < 2:
            return
        rows = self._present()
        if len(self._seen) > 1:
            self._queue.in_turn = self._in_turn
            self._make_way(rows, among)

    def _present(self) -> Counter[int]:
        """Rows by caller; forgets callers that have not been seen for long."""
        now = self._admitted_requests.stats.steps
        rows = Counter([request.caller for request in self._admitted_requests.live()])
        here = {*rows, *(request.caller for request in self._queue.requests)}
        self._seen.update(dict.fromkeys(here, now))
        self._seen = {caller: step for caller, step in self._seen.items() if now - step <= PRESENT_STEPS}
        self._turns = {caller: turn for caller, turn in self._turns.items() if caller in self._seen}
        self._came = {caller: step for caller, step in self._came.items() if caller in self._seen}
        num_rows = self._context.num_rows
        most = max(0, min(num_rows - len(here), max(1, num_rows // 8)))
        self.num_reserved = min(len(self._seen) - len(here), most)
        return rows

    # ------------------------------------------------------------------ rows

    def _in_turn(self, requests: Iterable[Request]) -> list[Request]:
        """Waiting requests by priority, then those whose callers have the fewest rows, then in their order."""
        rows = Counter([request.caller for request in self._admitted_requests.live()])
        keyed = []
        for index, request in enumerate(requests):
            keyed.append((request.params.priority, rows[request.caller], index, request))
            rows[request.caller] += 1
        return [request for *_, request in sorted(keyed)]

    def _make_way(self, rows: Counter[int], among: Collection[Request] | None) -> None:
        """Evict a request for the first that waits, if its caller has two rows fewer than another."""
        leaving, self._leaving = self._leaving, None
        waiting = self._queue.candidates(1, among)
        if not waiting or not rows:
            return
        first = waiting[0]
        if self._has_room(first) or not self._admitted_requests.has_adapter_slot(first):
            return
        caller, most = min(rows.items(), key=lambda item: (-item[1], item[0]))
        if rows[first.caller] + 2 > most:
            return
        live = self._admitted_requests.live()
        of_caller = [one for one in live if one.caller == caller]
        victim, oldest = max(of_caller, key=sort_key_of), min(live, key=sort_key_of)
        if leaving in of_caller and leaving is not oldest:  # which it may have become, as others ended
            victim = leaving
        if victim.params.priority < first.params.priority or len(of_caller) < 2:
            return
        if victim.in_flight:
            self._leaving = victim
        else:
            self._preemption.evict(victim)
            self._queue.overtaken[first] = policy.MAX_OVERTAKEN  # else the victim takes its room again

    def _has_room(self, request: Request) -> bool:
        """Whether a row and blocks are free for it, as far as is known without its prefix."""
        need = policy.blocks_needed(len(request.tokens), self._context.block_size)
        headroom = policy.admission_headroom(self._admitted_requests.num_running, self._context.num_blocks)
        free_rows = self._context.num_free_rows - self.num_reserved
        return free_rows > 0 and self._context.num_free_blocks - headroom >= need

    # ------------------------------------------------------------------ a step's time

    def share(self, budget: int, among: Collection[Request] | None) -> StepShare | None:
        """What the step may take of `budget` tokens, once memory is there; None: all of it."""
        if len(self._seen) < 2:
            return None
        decoding: dict[int, list[Request]] = {}
        for request in self._admitted_requests.decoding:
            if request is not self._leaving and (among is None or request in among):
                decoding.setdefault(request.caller, []).append(request)
        prompts: Counter[int] = Counter()
        first_prompt: dict[int, int] = {}
        num_free = max(0, self._context.num_free_rows - self.num_reserved)
        for request in [*self._admitted_requests.prefilling, *self._queue.candidates(0, among)[:num_free]]:
            if request.status is Status.WAITING or among is None or request in among:
                prompts[request.caller] += len(request.tokens) - request.scheduled
                first_prompt.setdefault(request.caller, prompts[request.caller])
        now = self._admitted_requests.stats.steps
        # Who is away may be back in this step, for as long as it was here.
        wanted = {caller: 1 for caller, seen in self._seen.items() if now - seen <= seen - self._came[caller]}
        for caller in sorted({*decoding, *prompts}):
            wanted[caller] = max(1, min(budget, len(decoding.get(caller, ())) + prompts[caller]))
        is_away = len(wanted) < len(self._seen)
        if len(wanted) < 2 and self._leaving is None and not (is_away and decoding):
            return None
        seconds = self.costs.seconds
        one, least = seconds(1, verifying=False), max(len(wanted), min(wanted.values(), default=1))
        limit = max(PAIR * one, STRETCH * seconds(least, verifying=False)) if len(wanted) > 1 else inf
        most = self._tokens_within(min(limit, AWAY * one) if is_away else limit, len(wanted), budget)
        if sum(wanted.values()) <= most and self._leaving is None:
            return None
        new = {caller: wanted[caller] for caller in prompts if caller not in decoding}
        if decoding:
            new = {caller: min(count, first_prompt[caller]) for caller, count in new.items()}
        others = {caller: count for caller, count in wanted.items() if caller not in new}
        longest = max(most, self._tokens_within(FIRST * one, len(wanted), budget))
        kept = max(len(others), min(most - most // 2, sum(others.values())))
        if new and sum(new.values()) <= longest - len(others) and now > self._hurried + 1:
            kept, self._hurried = len(others), now
        first = _shared(new, longest - kept)
        tokens = first | _shared(others, max(kept, most - sum(first.values())))
        chosen: set[Request] = set()
        prompt_tokens: dict[int, int] = {}
        for caller, share in tokens.items():
            of_caller = decoding.get(caller, [])
            for_prompts = min(prompts[caller], share // 2)
            num_rows = min(len(of_caller), max(1, share - for_prompts))
            chosen.update(self._next_rows(caller, of_caller, num_rows))
            prompt_tokens[caller] = share - num_rows
        return StepShare(min(budget, max(most, sum(tokens.values()))), chosen, prompt_tokens)

    def _tokens_within(self, limit: float, fewest: int, budget: int) -> int:
        """Tokens of a step that takes at most `limit` seconds; `fewest` in any case."""
        low, high = fewest, max(fewest, budget)
        while low < high:
            middle = (low + high + 1) // 2
            if self.costs.seconds(middle, verifying=False) <= limit:
                low = middle
            else:
                high = middle - 1
        return low

    def _next_rows(self, caller: int, decoding: list[Request], count: int) -> list[Request]:
        """`count` of a caller's decoding requests, those after its last turn first."""
        if not 0 < count < len(decoding):
            return decoding[:count]
        start = 0
        if caller in self._turns:
            start = bisect_right(decoding, self._turns[caller], key=sort_key_of)
        taken = [*decoding[start:], *decoding[:start]][:count]
        self._turns[caller] = taken[-1].sort_key
        return taken


def _shared(wanted: Mapping[int, int], total: int) -> dict[int, int]:
    """Tokens by caller, as evenly as what each wants allows. Example: {1: 2, 2: 50, 3: 60} of 30 -> 2, 14, 14."""
    shares, left = {}, total
    for place, caller in enumerate(sorted(wanted, key=lambda caller: (wanted[caller], caller))):
        shares[caller] = max(1, min(wanted[caller], left // (len(wanted) - place)))
        left -= shares[caller]
    return shares

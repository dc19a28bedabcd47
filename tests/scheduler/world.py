"""Scheduler, context and fake device under one step loop that checks all of them after every step."""

from __future__ import annotations

import types
from collections import Counter
from dataclasses import dataclass, field

from fake_device import VOCAB, FakeDevice, draw, prefix_digests

from megatron_infer.config.inference import PreemptionMode
from megatron_infer.runner.in_flight import RunnerOutput
from megatron_infer.runner.speculative.verify import Verifier
from megatron_infer.scheduler import policy
from megatron_infer.scheduler.context.block_digest import root_of
from megatron_infer.scheduler.context.build_context import build_context
from megatron_infer.scheduler.context.copies import CopyKind
from megatron_infer.scheduler.drafts import DraftPlanner
from megatron_infer.scheduler.preemption import is_ending
from megatron_infer.scheduler.request import FinishReason, Status, sort_key_of
from megatron_infer.scheduler.scheduler import Scheduler
from megatron_infer.scheduler.step_plan import StepPlan, StepResult


@dataclass(frozen=True)
class Swap:
    """What an evicted request may do instead of being recomputed."""

    slots: int = 0
    mode: PreemptionMode = PreemptionMode.AUTO
    costs: policy.CostModel = field(default_factory=policy.CostModel)

    def states(self, num_rows):
        """Places for recurrent states: fewer than may be needed."""
        return min(num_rows, max(1, self.slots // 3)) if self.slots else 0


@dataclass
class PrefillAccount:
    """Prompt tokens that the device must have computed, counted apart from the scheduler's own counters."""

    admitted: dict = field(default_factory=dict)
    """Request whose prompt is not planned to its end -> (known tokens, cached tokens)."""
    returned: set = field(default_factory=set)
    """Those of them that were readmitted with keys and values instead of being admitted."""
    counts: Counter = field(default_factory=Counter)
    """known: tokens at admissions without forks; asked: those of admissions that may hit; never computed: those of
    requests that ended or started over before."""

    def admit(self, request, *, asks, cached_tokens, forked, swapped_tokens=None):
        known = len(request.tokens)
        self.returned.discard(request)
        if swapped_tokens is not None:  # back from the host: it does not ask the prefix cache
            self.admitted[request] = (known, swapped_tokens)
            self.counts["known"] += known - swapped_tokens
            return
        self.admitted[request] = (known, cached_tokens)
        if not forked:
            self.counts["known"] += known
            self.counts.update(asked=known * asks, queries=asks)

    def readmit(self, request, computed):
        """It comes with keys and values: no admission, and its tokens go to the device by themselves."""
        self.admitted[request] = (len(request.tokens), computed)
        self.returned.add(request)
        self.counts["known"] += len(request.tokens) - computed
        self.counts["readmitted"] += 1

    def end(self, request, scheduled):
        """Its lease ends, or nothing more is planned for it: known tokens that were not planned never will be."""
        known, _ = self.admitted.pop(request, (0, 0))
        self.counts["never computed"] += max(0, known - scheduled)

    def restart(self, before):
        """before: request -> `scheduled`, of the live requests before they were sent back to the queue."""
        for request, scheduled in before.items():
            if request.status is Status.WAITING:
                self.end(request, scheduled)

    def check(self, stats, device):
        """At the end: what the scheduler says about the prefix cache is what the device had to compute."""
        counts = self.counts
        assert device.num_prefilled == counts["known"] - stats.prefix_hit_tokens - counts["never computed"], (
            stats,
            counts,
        )
        assert stats.prefix_queries == counts["queries"] >= stats.prefix_hits
        assert stats.prefix_hit_tokens + stats.prefix_miss_tokens == counts["asked"]


@dataclass
class World:
    """Scheduler, context and device under one step loop, with `check` after every step."""

    num_blocks: int = 32
    block_size: int = 4
    num_rows: int = 8
    max_tokens: int = 64
    chunked: bool = False
    paused_limit: int = 8
    caching: bool = False
    keep_cached: bool = False
    overlap: bool = False
    swap: Swap = field(default_factory=Swap)
    num_cached_states: int | None = None
    """State slots of the prefix cache, of a model with recurrent states; None: a model without."""
    version: int = 0
    in_flight_steps: list = field(default_factory=list)
    """(plan, tokens drawn, their origins), oldest first."""
    break_next: bool = False
    """The first request that draws in the next step to be committed ends with an error."""
    events: list = field(default_factory=list)
    origins: dict = field(default_factory=dict)
    """Request -> (weights that drew it, oldest and newest weights of its KV) of each output token."""
    account: PrefillAccount = field(default_factory=PrefillAccount)

    def __post_init__(self):
        self.build()

    def build(self):
        """Make scheduler, context and device, without requests."""
        self.context = build_context(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_rows=self.num_rows,
            max_blocks_per_row=self.num_blocks,
            prefix_caching=self.caching,
            keep_cached=self.keep_cached,
            num_host_slots=self.swap.slots,
            recurrent=self.recurrent,
            num_cached_states=self.num_cached_states or 0,
            num_host_states=self.swap.states(self.num_rows) if self.recurrent else 0,
            num_draft_states=self.max_drafts if self.recurrent and self.proposer is not None else 0,
        )
        self.device = FakeDevice(self.context, self.num_blocks * self.block_size + 2, self.swap.slots)
        drafts = None
        if self.proposer is not None and self.block_size > 1:
            most = min(self.max_drafts, self.block_size - 1)
            drafts = DraftPlanner(
                self.context, self.proposer, max_drafts=most, vocab_size=VOCAB, depth=self.depth and self.depth()
            )
        self.scheduler = Scheduler(
            self.context,
            max_tokens=self.max_tokens,
            chunked_prefill=self.chunked,
            paused_block_limit=self.paused_limit,
            root=self.root(),
            version=self.version,
            preemption=self.swap.mode,
            costs=self.swap.costs,
            on_event=self._on_event,
            drafts=drafts,
            **self.scheduling,
        )

    scheduling = types.MappingProxyType({})
    """Further arguments of the scheduler."""
    proposer, max_drafts = None, 6
    """Drafts tokens; None, or blocks of one token: nothing is drafted."""
    depth = None
    """Makes what decides how many drafts pay; None: all of them are verified."""

    @property
    def drafts(self):
        return self.scheduler._drafts

    @property
    def ahead(self):
        """Steps in flight between two calls of `step`."""
        return int(self.overlap)

    @property
    def steps(self):
        return self.account.counts["steps"]

    @property
    def recurrent(self):
        return self.num_cached_states is not None

    @property
    def requests(self):
        return list(self.origins)

    def root(self):
        return root_of(model="fake", weight_version=self.version)

    def _on_event(self, request, kind, payload):
        self.events.append((request.id, kind, payload))
        if kind == "admit":
            self.account.admit(request, asks=self.caching and request.may_hit, **payload)
        if kind == "finish":
            self.account.end(request, request.scheduled)
        if kind == "pause":
            assert not is_ending(request), "paused although its last token is in flight"
        if kind == "evict":
            self.account.end(request, payload["num_tokens"])
            assert request.in_flight == 0 and request.lease is None
            others = [*self.scheduler.running, *self.scheduler.paused]
            assert not others or min(map(sort_key_of, others)) < request.sort_key, "evicted the oldest of several"
            assert (payload["how"] == "swap") == (request in self.scheduler.preemption.swapped)

    def _scheduled(self):
        return {request: request.scheduled for request in self.scheduler.admitted_requests.live()}

    def kinds(self, name=None):
        return [kind for request, kind, _ in self.events if name in (None, request)]

    def add(self, request):
        self.scheduler.add(request)
        for member in (request, *request.siblings):
            self.origins[member] = []
        return request

    # ------------------------------------------------------------------ the loop

    def step(self) -> StepPlan:
        plan = self._schedule()
        if plan.num_tokens:
            self.launch(plan)
        else:
            assert self.in_flight_steps or not self.scheduler.has_unfinished, "nothing runs and nothing is in flight"
        self.commit_previous(leave=self.ahead if plan.num_tokens else max(0, len(self.in_flight_steps) - 1))
        self.account.counts["steps"] += 1
        assert self.steps < 5000, "this never ends"
        self.check()
        return plan

    def _schedule(self) -> StepPlan:
        cached = {request: request.history.cached_tokens for request in self.scheduler.admitted_requests.prefilling}
        plan = self.scheduler.schedule()
        self.account.counts["late hits"] += sum(
            request.history.cached_tokens > had for request, had in cached.items() if request.lease is not None
        )
        rows = [*zip(plan.decode, plan.decode_starts, strict=True)]
        for request, start in [*rows, *((chunk.request, chunk.start) for chunk in plan.prefill if chunk.drafts)]:
            # A prompt that paused before its last token continues as a decode row.
            self.account.counts["never computed"] += start < self.account.admitted[request][0]
        check_plan(self, plan)
        return plan

    def launch(self, plan):
        self.in_flight_steps.append((plan, self.device.run(plan, self.version), self.device.origins))

    def commit_previous(self, *, leave=0):
        while len(self.in_flight_steps) > leave:
            self.commit_oldest()

    def commit_oldest(self):
        plan, tokens, origins = self.in_flight_steps.pop(0)
        if self.break_next and plan.sampled:  # it ends although later steps may count on its token
            self.break_next = False
            self.scheduler.finish(plan.sampled[0], FinishReason.ERROR)
        origin_of = dict(zip(plan.sampled, origins, strict=True))  # one for all draws of a request in a step
        parts = [(plan, RunnerOutput(StepResult(tokens), None, [], []), True)]
        for part, output, is_last in parts if self.drafts is None else Verifier(self.drafts).parts(*parts[0][:2]):
            unfinished = [index for index, request in enumerate(part.sampled) if request.status is not Status.FINISHED]
            for index in unfinished:
                self.origins[part.sampled[index]].append(origin_of[part.sampled[index]])
            committed = self.scheduler.commit(part, output.result, is_last=is_last)
            assert list(committed.taken) == unfinished
            ended = [part.sampled[index] for index in unfinished if part.sampled[index].status is Status.FINISHED]
            assert committed.ended == ended

    def fail_step(self, moment) -> StepPlan:
        """A step whose forward raises "before" it is launched, "early" (table writes are lost) or "late" (it ran)."""
        plan = self._schedule()
        if plan.num_tokens and moment == "early":
            self.context.take_table_writes()
        elif plan.num_tokens and moment == "late":
            self.launch(plan)
            self.in_flight_steps.pop()
        if moment != "late":
            self.account.counts["never computed"] += plan.num_prompt_tokens
        self.commit_previous()
        before = self._scheduled()
        self.scheduler.cancel(plan)
        self.account.restart(before)
        members = {*plan.sampled, *(chunk.request for chunk in plan.prefill)}
        self.account.counts["restarts beside the plan"] += sum(
            request.status is Status.WAITING for request in before if request not in members
        )
        self.check()
        return plan

    def drain(self, limit=2000):
        for _ in range(limit):
            if not self.scheduler.has_unfinished and not self.in_flight_steps:
                break
            self.step()
        assert not self.scheduler.has_unfinished, f"unfinished after {limit} steps"
        self.check()
        assert self.context.num_free_rows == self.num_rows
        assert self.context.num_free_blocks == self.num_blocks
        assert not self.scheduler.preemption.swapped
        assert self.context.swap is None or self.context.swap.num_free == self.swap.slots
        assert self.context.states is None or not self.context.states.slots.slots_of(())
        for request in self.requests:
            self.check_tokens(request)
        self.account.check(self.scheduler.stats, self.device)

    def new_weights(self, *, keep, version=None):
        """Weights change between steps, perhaps back to former ones; running requests keep their KV or start over."""
        self.commit_previous()
        self.version = self.version + 1 if version is None else version
        self.scheduler.set_root(self.root(), version=self.version)
        if not keep:
            self._requeue_all()
            assert self.context.num_free_rows == self.num_rows

    def recompute(self):
        """The cache is lost: all requests start over. As in a suspend, copies that wait are run before."""
        self.commit_previous()
        for copy in self.context.take_copies():
            self.device.copy(*copy)
        self._requeue_all()
        self.context.forget_all()
        self.device.kv = [None] * len(self.device.kv)
        self.device.states = [None] * len(self.device.states)
        assert self.context.pool.num_cached == 0

    def _requeue_all(self):
        before = self._scheduled()
        self.scheduler.requeue_all()
        self.account.restart(before)

    # ------------------------------------------------------------------ checks

    def check_tokens(self, request):
        """Its tokens are those the oracle draws without any cache, up to where it was ended."""
        expected = request.tokens[: request.prompt_len]
        for version, _, _ in self.origins[request]:
            expected.append(draw(prefix_digests(expected)[-1], version))
        assert request.tokens == expected, f"{request.id}: {request.tokens} != {expected}"
        spans = request.history.spans
        for index, origin in enumerate(self.origins[request]):
            claimed = [span[1:4] for span in spans if span.first_token <= index][-1]
            assert claimed == origin, f"{request.id}: {spans}, but output token {index} comes from {origin}"
        assert [span.first_token for span in spans] == sorted({span.first_token for span in spans}), spans
        assert request.finish_reason is not None and request.lease is None and request.in_flight == 0
        output = request.tokens[request.prompt_len :]
        stops = [i for i, token in enumerate(output) if token in request.stop_ids]
        assert not stops or stops[0] == len(output) - 1, f"{request.id} continued past a stop id"
        if request.finish_reason is FinishReason.LENGTH:
            assert len(request.tokens) == request.max_total and not stops
        if request.finish_reason is FinishReason.STOP and request.stop_reason is None:
            assert stops

    def check(self):
        self.context.check()
        scheduler = self.scheduler
        admitted_requests = scheduler.admitted_requests
        for requests, status in (
            (admitted_requests.decoding, Status.RUNNING),
            (admitted_requests.prefilling, Status.RUNNING),
            (scheduler.paused, Status.PAUSED),
            (scheduler.queue.requests, Status.WAITING),
        ):
            assert all(request.status is status for request in requests)
        for requests in (admitted_requests.decoding, admitted_requests.prefilling, admitted_requests.paused):
            assert [r.sort_key for r in requests] == sorted(r.sort_key for r in requests)
        live = admitted_requests.live()
        assert len(set(live)) == len(live)
        assert all(request.lease is not None for request in live)
        assert all(request.lease is None and not request.scheduled for request in scheduler.waiting)
        assert set(scheduler.preemption.swapped) <= set(scheduler.waiting)
        _check_queue(scheduler.queue)
        unfinished = [request for request in self.requests if request.finish_reason is None]
        assert len(unfinished) == scheduler.num_waiting + scheduler.num_running + scheduler.num_paused
        leases = {request.lease.row for request in self.requests if request.lease is not None}
        assert len(leases) == self.num_rows - self.context.num_free_rows
        members = Counter()
        for plan, *_ in self.in_flight_steps:
            members.update([*plan.sampled, *(chunk.request for chunk in plan.prefill if not chunk.samples)])
        assert all(request.in_flight == members[request] for request in self.requests)


def _check_queue(queue):
    priorities = [request.params.priority for request in queue.requests]
    assert priorities == sorted(priorities), priorities
    assert all(count <= policy.MAX_OVERTAKEN for count in queue.overtaken.values())
    assert set(queue.overtaken) <= set(queue.requests)


def check_plan(world, plan):
    chunks = plan.prefill
    if world.scheduler.paused:
        assert not any(chunk.first for chunk in chunks), "an admission took a block that a paused request waits for"
        moved = world.caching and chunks  # a prompt that moves to published blocks gives its own back
        assert moved or not world.context.num_free_blocks, "a request is paused beside a free block"
    assert plan.num_tokens == len(plan.decode) + sum(chunk.n for chunk in chunks) <= world.max_tokens
    planned = [*plan.decode, *(chunk.request for chunk in chunks), *(f for chunk in chunks for f in chunk.forks)]
    assert len(set(planned)) == len(planned)
    assert all(request.status is Status.RUNNING for request in planned)
    expected = list(plan.decode)
    for request, start in zip(plan.decode, plan.decode_starts, strict=True):
        assert start == request.scheduled - 1 < request.max_total - 1, f"{request.id}: step past its last token"
    for chunk in chunks:
        expected += (chunk.request,) * len(chunk.drafts)
        expected += (chunk.request, *chunk.forks) if chunk.samples else ()
        if chunk.drafts:
            assert chunk.start == len(chunk.request.tokens) - 1 == chunk.request.scheduled - 1
            assert chunk.n == 1 + len(chunk.drafts) <= chunk.request.max_total - 1 - chunk.start
            continue
        known, cached = world.account.admitted[chunk.request]
        assert known == len(chunk.request.tokens)
        assert chunk.n > 0 and chunk.samples == (chunk.start + chunk.n == known)
        back = chunk.request in world.account.returned
        assert chunk.first == (chunk.start == cached and not back), "its tokens go to the device once"
        whole = known - cached
        assert world.chunked or chunk.n == whole or whole > world.max_tokens or back, "a chunk although it is off"
    assert list(plan.sampled) == expected
    blocks = [copy for copy in plan.copies_after if copy.kind is CopyKind.BLOCK]
    states = [copy for copy in plan.copies_after if copy.kind is CopyKind.STATE]
    assert list(plan.copies_after) == blocks + states, "equal kinds are executed in one call"
    assert len({copy.destination for copy in blocks}) == len(blocks)
    assert all(world.context.pool.refs(copy.destination) == 1 for copy in blocks)
    sources, targets = {copy.source for copy in states}, [copy.destination for copy in states]
    for chunk in chunks:
        assert all(chunk.start < position < chunk.start + chunk.n for position, _ in chunk.captures), chunk
        targets += [slot for _, slot in chunk.captures]
    assert len(set(targets)) == len(targets) and sources.isdisjoint(targets), plan.copies_after

"""A device of plain lists that runs plans and notices every wrong byte, and a world that drives scheduler and device.

A cache entry is (position, digest of all tokens up to it, weight version): it is right only if the whole sequence
before it was. A recurrent state is (tokens taken in, digest of them, oldest and newest weights). The token drawn after
a sequence is a function of that digest and of the weight version: `draw` is the oracle.
"""

from __future__ import annotations

import types
from collections import Counter
from dataclasses import dataclass, field

from megatron_infer.config.inference import PreemptionMode
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.context.dynamic_context import DynamicInferenceContext
from megatron_infer.context.prefix_hash import root_of
from megatron_infer.scheduler import policy
from megatron_infer.scheduler.preemption import is_ending
from megatron_infer.scheduler.request import FinishReason, Request, Status
from megatron_infer.scheduler.scheduler import Scheduler
from megatron_infer.scheduler.step_plan import StepPlan, StepResult
from megatron_infer.scheduler.waiting_queue import sort_key_of

VOCAB = 97
EOS = 3


def prefix_digests(tokens):
    """digest[p] of tokens[0..p]."""
    digests, digest = [], 0
    for token in tokens:
        digest = hash((digest, token))
        digests.append(digest)
    return digests


def draw(digest, version):
    return hash((digest, version, 1)) % VOCAB


def continued(tokens, n, version):
    """`tokens` and the next `n` that the oracle draws."""
    tokens = list(tokens)
    for _ in range(n):
        tokens.append(draw(prefix_digests(tokens)[-1], version))
    return tokens


def make_request(name, tokens, max_new, **kwargs):
    fields = {"params": SamplingParams(), "seed": 0, "stop_ids": frozenset({EOS})}
    return Request(
        id=name, tokens=list(tokens), prompt_len=len(tokens), max_total=len(tokens) + max_new, **(fields | kwargs)
    )


def make_group(name, tokens, max_new, n, **kwargs):
    leader, *siblings = (make_request(f"{name}#{i}", tokens, max_new, **kwargs) for i in range(n))
    leader.siblings = tuple(siblings)
    return leader


class FakeDevice:
    """Token rows, block table, flat cache, host slots; knows table and moves from the context's journals only."""

    def __init__(self, context, num_positions, num_host_slots):
        self.context = context
        self.size = context.block_size
        self.kv = [None] * (context.num_blocks * self.size)
        self.table = [[None] * context.max_blocks_per_row for _ in range(context.num_rows)]
        self.rows = [[None] * num_positions for _ in range(context.num_rows)]
        self.host = [None] * num_host_slots
        num_snapshots = context.snapshots.count if context.snapshots else 0
        self.states = [None] * (context.num_rows + 1 + num_snapshots)
        self.host_states = [None] * context.num_rows
        self.num_copies = self.num_state_copies = self.num_captures = 0
        self.num_computed = self.num_prefilled = 0
        self.num_moves = 0
        self.origins = []
        """Of the tokens drawn last: weights that drew them, oldest and newest weights of the KV attended to."""

    def run(self, plan: StepPlan, version: int) -> list[int]:
        """Computes a step -> the tokens of plan.sampled."""
        for row, column, block in self.context.take_table_writes():
            self.table[row][column] = block
        for move in self.context.take_moves():
            self.move(*move)
        for request in plan.returned:
            self._upload(request)
        pieces = [(request, start, 1) for request, start in zip(plan.decode, plan.decode_starts, strict=True)]
        for piece in plan.prefill:
            row = piece.request.lease.row
            if piece.first:
                self._upload(piece.request)
            for fork in piece.forks:
                self.rows[fork.lease.row] = list(self.rows[row])
            pieces.append((piece.request, piece.start, piece.n))
        self._write(pieces, version)
        if self.context.recurrent:
            self._advance(pieces, {piece.request: piece.captures for piece in plan.prefill}, version)
        self.num_prefilled += sum(piece.n for piece in plan.prefill)
        reads = [self._read(request, start + n, version) for request, start, n in pieces]
        for piece, read in zip(plan.prefill, reads[len(plan.decode) :], strict=True):
            reads += [read] * (piece.samples * (1 + len(piece.forks)))
        reads = reads[: len(plan.decode)] + reads[len(pieces) :]
        drawn = [draw(digest, version) for digest, _ in reads]
        self.origins = [origin for _, origin in reads]
        ends = [start + 1 for start in plan.decode_starts]
        for piece in plan.prefill:
            ends += [piece.start + piece.n] * (piece.samples * (1 + len(piece.forks)))
        for request, end, token in zip(plan.sampled, ends, drawn, strict=True):
            self.rows[request.lease.row][end] = token
        for source, target in plan.copies:
            self.kv[target * self.size : (target + 1) * self.size] = self.kv[
                source * self.size : (source + 1) * self.size
            ]
            self.num_copies += 1
        for source, target in plan.state_copies:
            self.states[target] = self.states[source]
            self.num_state_copies += 1
        return drawn

    def _upload(self, request):
        row = request.lease.row
        self.rows[row] = request.tokens + [None] * (len(self.rows[row]) - len(request.tokens))

    def content(self, lease, num_tokens):
        """The cache entries of a lease's first tokens."""
        size = self.size
        return [self.kv[lease.blocks[p // size] * size + p % size] for p in range(num_tokens)]

    def put(self, lease, entries, *, start):
        """Write entries from position `start` on, as a load does: between steps."""
        size = self.size
        for position in range(start, len(entries)):
            self.kv[lease.blocks[position // size] * size + position % size] = entries[position]

    def move(self, direction, block, slot):
        self.num_moves += 1
        if direction == "state copy":
            assert self.states[slot] is not None, f"slot {slot} holds no state to copy"
            self.states[block] = self.states[slot]
            return
        if direction == "state out":
            self.host_states[slot] = self.states[block]
            return
        if direction == "state in":
            assert self.host_states[slot] is not None, f"no state in host place {slot}"
            self.states[block] = self.host_states[slot]
            return
        place = slice(block * self.size, (block + 1) * self.size)
        if direction == "out":
            self.host[slot] = self.kv[place]
        else:
            assert direction == "in" and self.host[slot] is not None, f"{direction} from slot {slot}: {self.host}"
            self.kv[place] = self.host[slot]

    def _advance(self, pieces, captures, version):
        """Every row's state takes in its tokens, all rows at once: what one keeps, no other reads in this step."""
        slots = [request.lease.row for request, _, _ in pieces]
        kept = [slot for request, _, _ in pieces for _, slot in captures.get(request, ())]
        assert len({*slots, *kept}) == len(slots) + len(kept), f"rows {slots} and states kept {kept} share a slot"
        for request, start, n in pieces:
            row, tokens = request.lease.row, self.rows[request.lease.row][: start + n]
            digests = prefix_digests(tokens)
            state = self.states[row] if start else (0, None, version, version)
            expected = (start, digests[start - 1] if start else None)
            assert state is not None and state[:2] == expected, f"{request.id}: goes on at {start} from state {state}"
            oldest, newest = state[2:]
            assert not request.lease.root or oldest == newest == version, f"{request.id}: stale state {state}"
            for position, slot in (*captures.get(request, ()), (start + n, row)):
                assert start < position <= start + n, f"{request.id}: keeps {position} of {start} .. {start + n}"
                self.states[slot] = (position, digests[position - 1], min(oldest, version), max(newest, version))
            self.num_captures += len(captures.get(request, ()))

    def _write(self, pieces, version):
        written = set()
        for request, start, n in pieces:
            row, end = request.lease.row, start + n
            tokens = self.rows[row][:end]
            assert None not in tokens, f"{request.id}: the device does not know tokens up to {end}: {tokens}"
            for column in range(-(-end // self.size)):
                booked = request.lease.blocks[column]
                assert self.table[row][column] == booked, f"{request.id}: column {column} is {self.table[row][column]}"
            digests = prefix_digests(tokens)
            for position in range(start, end):
                flat = self._flat(row, position)
                assert flat not in written, f"two writes to {flat}"
                written.add(flat)
                self.kv[flat] = (position, digests[position], version)
            self.num_computed += n

    def _read(self, request, end, version):
        row = request.lease.row
        entries = [self.kv[self._flat(row, position)] for position in range(end)]
        expected = list(enumerate(prefix_digests(self.rows[row][:end])))
        assert [entry and entry[:2] for entry in entries] == expected, f"{request.id}: wrong cache content"
        if request.lease.root:
            assert all(entry[2] == version for entry in entries), f"{request.id}: stale weights in {entries}"
        kv_versions = [entry[2] for entry in entries]
        origin = (version, min(kv_versions), max(kv_versions))
        assert request.history.spans[-1][1:] == origin, (
            f"{request.id}: {request.history.spans} claims other weights than {kv_versions} under {version}"
        )
        return expected[-1][1], origin

    def _flat(self, row, position):
        return self.table[row][position // self.size] * self.size + position % self.size


@dataclass(frozen=True)
class Swap:
    """What an evicted request may do instead of being computed anew."""

    slots: int = 0
    mode: PreemptionMode = PreemptionMode.AUTO
    costs: policy.CostModel = field(default_factory=policy.CostModel)

    def states(self, num_rows):
        """Places for recurrent states: fewer than may be asked for."""
        return min(num_rows, max(1, self.slots // 3)) if self.slots else 0


@dataclass
class Books:
    """What prompts the device must have computed, kept apart from the scheduler's own counters."""

    admitted: dict = field(default_factory=dict)
    """Known tokens and cached ones of those whose admission is not over."""
    returned: set = field(default_factory=set)
    """Those of them who came back with keys and values instead of being admitted."""
    counts: Counter = field(default_factory=Counter)
    """known: tokens at admissions, forks left out; asked: those of admissions that may hit; waived: never computed."""

    def admit(self, request, *, asks, cached_tokens, forked, swapped_tokens=None):
        known = len(request.tokens)
        self.returned.discard(request)
        if swapped_tokens is not None:  # back from the host: no admission that asks the prefix cache
            self.admitted[request] = (known, swapped_tokens)
            self.counts["known"] += known - swapped_tokens
            return
        self.admitted[request] = (known, cached_tokens)
        if not forked:
            self.counts["known"] += known
            self.counts.update(asked=known * asks, queries=asks)

    def readmit(self, request, computed):
        """It came back with keys and values: no admission, and its tokens go to the device by themselves."""
        self.admitted[request] = (len(request.tokens), computed)
        self.returned.add(request)
        self.counts["known"] += len(request.tokens) - computed
        self.counts["taken back"] += 1

    def end(self, request, scheduled):
        """Its lease goes, or nothing more is planned under it: known tokens that were not planned never will be."""
        known, _ = self.admitted.pop(request, (0, 0))
        self.counts["waived"] += max(0, known - scheduled)

    def restart(self, before):
        """before: `scheduled` of everyone who was live."""
        for request, scheduled in before.items():
            if request.status is Status.WAITING:
                self.end(request, scheduled)

    def check(self, stats, device):
        """At the end: what the scheduler says about the prefix cache is what the device had to compute."""
        counts = self.counts
        assert device.num_prefilled == counts["known"] - stats.prefix_hit_tokens - counts["waived"], (stats, counts)
        assert stats.prefix_queries == counts["queries"] >= stats.prefix_hits
        assert stats.prefix_hit_tokens + stats.prefix_miss_tokens == counts["asked"]


@dataclass
class World:
    """Scheduler, context and device under one step loop, checking all books after every step."""

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
    num_snapshots: int | None = None
    """Of a model with recurrent state; None: it has none."""
    version: int = 0
    flights: list = field(default_factory=list)
    break_next: bool = False
    events: list = field(default_factory=list)
    origins: dict = field(default_factory=dict)
    books: Books = field(default_factory=Books)

    def __post_init__(self):
        self.build()

    def build(self):
        """Scheduler, context and device without any requests."""
        self.context = DynamicInferenceContext(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_rows=self.num_rows,
            max_blocks_per_row=self.num_blocks,
            prefix_caching=self.caching,
            keep_cached=self.keep_cached,
            num_host_slots=self.swap.slots,
            recurrent=self.recurrent,
            num_snapshots=self.num_snapshots or 0,
            num_host_states=self.swap.states(self.num_rows) if self.recurrent else 0,
        )
        self.device = FakeDevice(self.context, self.num_blocks * self.block_size + 2, self.swap.slots)
        self.scheduler = Scheduler(
            self.context,
            max_tokens=self.max_tokens,
            chunked_prefill=self.chunked,
            paused_block_limit=self.paused_limit,
            root=self.root(),
            version=self.version,
            preemption=self.swap.mode,
            on_event=self._on_event,
            **self.scheduling,
        )
        self.scheduler.preemption.costs = self.swap.costs

    scheduling = types.MappingProxyType({})
    """Further arguments of the scheduler."""

    @property
    def previous(self):
        """Whether anything is in flight."""
        return bool(self.flights)

    @property
    def ahead(self):
        """Steps in flight between two calls of `step`."""
        return int(self.overlap)

    @property
    def steps(self):
        return self.books.counts["steps"]

    @property
    def recurrent(self):
        return self.num_snapshots is not None

    @property
    def requests(self):
        return list(self.origins)

    def root(self):
        return root_of(model="fake", weight_version=self.version)

    def _on_event(self, request, kind, payload):
        self.events.append((request.id, kind, payload))
        if kind == "admit":
            self.books.admit(request, asks=self.caching and request.may_hit, **payload)
        if kind == "finish":
            self.books.end(request, request.scheduled)
        if kind == "pause":
            assert not is_ending(request), "paused although its last token is in flight"
        if kind == "evict":
            self.books.end(request, payload["num_tokens"])
            assert request.in_flight == 0 and request.lease is None
            others = [*self.scheduler.running, *self.scheduler.paused]
            assert not others or min(map(sort_key_of, others)) < request.rank, "evicted the oldest of several"
            assert (payload["how"] == "swap") == (request in self.scheduler.preemption.swapped)

    def _scheduled(self):
        return {request: request.scheduled for request in self.scheduler.running_set.live()}

    def kinds(self, name=None):
        return [kind for request, kind, _ in self.events if name in (None, request)]

    def begun(self, request):
        """Tokens it had when it was admitted last: cached ones or those that came back from the host."""
        admitted = next(p for name, kind, p in reversed(self.events) if kind == "admit" and name == request.id)
        return admitted["cached_tokens"] + admitted.get("swapped_tokens", 0)

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
            assert self.previous or not self.scheduler.has_unfinished, "nothing runs and nothing is in flight"
        self.commit_previous(leave=self.ahead if plan.num_tokens else max(0, len(self.flights) - 1))
        self.books.counts["steps"] += 1
        assert self.steps < 5000, "this never ends"
        self.check()
        return plan

    def _schedule(self) -> StepPlan:
        cached = {request: request.history.cached_tokens for request in self.scheduler.running_set.prefilling}
        plan = self.scheduler.schedule()
        self.books.counts["late hits"] += sum(
            request.history.cached_tokens > had for request, had in cached.items() if request.lease is not None
        )
        for request, start in zip(plan.decode, plan.decode_starts, strict=True):
            # A prompt that paused before its last token goes on as a decode row.
            self.books.counts["waived"] += start < self.books.admitted[request][0]
        self._check_plan(plan)
        return plan

    def launch(self, plan):
        self.flights.append((plan, self.device.run(plan, self.version), self.device.origins))

    def commit_previous(self, *, leave=0):
        while len(self.flights) > leave:
            self.commit_oldest()

    def commit_oldest(self):
        plan, tokens, origins = self.flights.pop(0)
        if self.break_next and plan.sampled:  # its logits are bad: it ends although later steps may count on its token
            self.break_next = False
            self.scheduler.finish(plan.sampled[0], FinishReason.ERROR)
        for request, origin in zip(plan.sampled, origins, strict=True):
            if request.status is not Status.FINISHED:
                self.origins[request].append(origin)
        alive = [index for index, request in enumerate(plan.sampled) if request.status is not Status.FINISHED]
        committed = self.scheduler.commit(plan, StepResult(tokens))
        assert list(committed.taken) == alive
        assert all(request.status is Status.FINISHED for request in committed.ended)

    def fail_step(self, moment) -> StepPlan:
        """A step whose forward raises "before" it touched the device, "early" (table writes are lost) or "late"."""
        plan = self._schedule()
        if plan.num_tokens and moment == "early":
            self.context.take_table_writes()  # lost
            self.context.take_moves()
        elif plan.num_tokens and moment == "late":
            self.launch(plan)
            self.flights.pop()
        if moment != "late":
            self.books.counts["waived"] += sum(piece.n for piece in plan.prefill)
        self.commit_previous()
        before = self._scheduled()
        self.scheduler.cancel(plan)
        self.books.restart(before)
        members = {*plan.sampled, *(piece.request for piece in plan.prefill)}
        self.books.counts["restarts beside the plan"] += sum(
            request.status is Status.WAITING for request in before if request not in members
        )
        self.check()
        return plan

    def drain(self, limit=2000):
        for _ in range(limit):
            if not self.scheduler.has_unfinished and not self.previous:
                break
            self.step()
        assert not self.scheduler.has_unfinished, f"unfinished after {limit} steps"
        self.check()
        assert self.context.num_free_rows == self.num_rows
        assert self.context.num_free_blocks == self.num_blocks
        assert not self.scheduler.preemption.swapped
        assert self.context.host is None or self.context.host.num_free == self.swap.slots
        assert self.context.snapshots is None or not self.context.snapshots.slots_of(())
        for request in self.requests:
            self.check_tokens(request)
        self.books.check(self.scheduler.stats, self.device)

    def new_weights(self, *, keep, version=None):
        """Weights change between steps (perhaps back to former ones); the running keep their cache or start over."""
        self.commit_previous()
        self.version = self.version + 1 if version is None else version
        self.scheduler.set_root(self.root(), version=self.version)
        if not keep:
            self._requeue_all()
            assert self.context.num_free_rows == self.num_rows

    def recompute(self):
        """The cache is lost: everyone starts over."""
        self.commit_previous()
        self._requeue_all()
        self.context.forget_all()
        self.device.kv = [None] * len(self.device.kv)
        self.device.states = [None] * len(self.device.states)
        assert self.context.pool.num_cached == 0

    def _requeue_all(self):
        before = self._scheduled()
        self.scheduler.requeue_all()
        self.books.restart(before)

    # ------------------------------------------------------------------ checks

    def check_tokens(self, request):
        """Its tokens are those the oracle draws without any cache, up to where it was ended."""
        expected = request.tokens[: request.prompt_len]
        for version, _, _ in self.origins[request]:
            expected.append(draw(prefix_digests(expected)[-1], version))
        assert request.tokens == expected, f"{request.id}: {request.tokens} != {expected}"
        spans = request.history.spans
        for index, origin in enumerate(self.origins[request]):
            told = [span[1:] for span in spans if span.first_token <= index][-1]
            assert told == origin, f"{request.id}: {spans}, but output token {index} comes from {origin}"
        assert [span.first_token for span in spans] == sorted({span.first_token for span in spans}), spans
        assert request.finish_reason is not None and request.lease is None and request.in_flight == 0
        output = request.tokens[request.prompt_len :]
        stops = [i for i, token in enumerate(output) if token in request.stop_ids]
        assert not stops or stops[0] == len(output) - 1, f"{request.id} went on past a stop id"
        if request.finish_reason is FinishReason.LENGTH:
            assert len(request.tokens) == request.max_total and not stops
        if request.finish_reason is FinishReason.STOP and request.stop_reason is None:
            assert stops

    def check(self):
        self.context.check()
        scheduler = self.scheduler
        running_set = scheduler.running_set
        for requests, status in (
            (running_set.decoding, Status.RUNNING),
            (running_set.prefilling, Status.RUNNING),
            (scheduler.paused, Status.PAUSED),
            (scheduler.queue.line, Status.WAITING),
        ):
            assert all(request.status is status for request in requests)
        for requests in (running_set.decoding, running_set.prefilling, running_set.paused):
            assert [r.rank for r in requests] == sorted(r.rank for r in requests)
        live = running_set.live()
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
        for plan, *_ in self.flights:
            members.update({*plan.sampled, *(piece.request for piece in plan.prefill)})
        assert all(request.in_flight == members[request] for request in self.requests)

    def _check_plan(self, plan):
        pieces = plan.prefill
        if self.scheduler.paused:
            assert not any(piece.first for piece in pieces), "an admission took a block that a paused request waits for"
            moved = self.caching and pieces  # a prompt that moves to published blocks gives its own back
            assert moved or not self.context.num_free_blocks, "someone is paused beside a free block"
        assert plan.num_tokens == len(plan.decode) + sum(piece.n for piece in pieces) <= self.max_tokens
        everyone = [*plan.decode, *(piece.request for piece in pieces), *(f for piece in pieces for f in piece.forks)]
        assert len(set(everyone)) == len(everyone)
        assert all(request.status is Status.RUNNING for request in everyone)
        expected = list(plan.decode)
        for request, start in zip(plan.decode, plan.decode_starts, strict=True):
            assert start == request.scheduled - 1 < request.max_total - 1, f"{request.id}: step past its last token"
        for piece in pieces:
            expected += (piece.request, *piece.forks) if piece.samples else ()
            known, cached = self.books.admitted[piece.request]
            assert known == len(piece.request.tokens)
            assert piece.n > 0 and piece.samples == (piece.start + piece.n == known)
            back = piece.request in self.books.returned
            assert piece.first == (piece.start == cached and not back), "its tokens go to the device once"
            whole = known - cached
            assert self.chunked or piece.n == whole or whole > self.max_tokens or back, "a chunk although it is off"
        assert list(plan.sampled) == expected
        assert len({target for _, target in plan.copies}) == len(plan.copies)
        assert all(self.context.pool.refs(target) == 1 for _, target in plan.copies)
        sources, targets = {a for a, _ in plan.state_copies}, [b for _, b in plan.state_copies]
        for piece in pieces:
            assert all(piece.start < position < piece.start + piece.n for position, _ in piece.captures), piece
            targets += [slot for _, slot in piece.captures]
        assert len(set(targets)) == len(targets) and sources.isdisjoint(targets), plan.state_copies


def _check_queue(queue):
    priorities = [request.params.priority for request in queue.line]
    assert priorities == sorted(priorities), priorities
    assert all(count <= policy.MAX_OVERTAKEN for count in queue.overtaken.values())
    assert set(queue.overtaken) <= set(queue.line)

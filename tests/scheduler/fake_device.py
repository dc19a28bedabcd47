"""A device of plain lists that runs plans and notices every wrong byte.

A cache entry is (position, digest of all tokens up to it, weight version): it is right only if the whole sequence
before it was. A recurrent state is (tokens taken in, digest of them, oldest and newest weights). The token drawn after
a sequence is a function of that digest and of the weight version: `draw` is the oracle.
"""

from __future__ import annotations

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.scheduler.context import dynamic_context, leases
from megatron_infer.scheduler.context.copies import CopyKind
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_plan import StepPlan

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


def replace_digests(monkeypatch, digest):
    """Blocks are found by `digest(preimage)` in place of the real hash."""
    for module in (dynamic_context, leases):
        monkeypatch.setattr(module, "digest_of", digest)


def make_request(name, tokens, max_new, **kwargs):
    fields = {"params": SamplingParams(), "seed": 0, "stop_ids": frozenset({EOS})}
    return Request(
        id=name, tokens=list(tokens), prompt_len=len(tokens), max_total=len(tokens) + max_new, **(fields | kwargs)
    )


def make_group(name, tokens, max_new, n, **kwargs):
    leader, *siblings = (make_request(f"{name}#{i}", tokens, max_new, **kwargs) for i in range(n))
    leader.siblings = tuple(siblings)
    return leader


def sampled_ends(plan: StepPlan):
    """Tokens of its sequence behind which each of plan.sampled draws."""
    ends = [start + 1 for start in plan.decode_starts]
    for chunk in plan.prefill:
        ends += range(chunk.start + 1, chunk.start + chunk.n) if chunk.drafts else ()
        ends += [chunk.start + chunk.n] * (chunk.samples * (1 + len(chunk.forks)))
    return ends


class FakeDevice:
    """Token rows, block table, flat cache, host slots; it knows tables and copies from journals and plans only."""

    def __init__(self, context, num_positions, num_host_slots):
        self.context = context
        self.size = context.block_size
        self.kv = [None] * (context.num_blocks * self.size)
        self.table = [[None] * context.max_blocks_per_row for _ in range(context.num_rows)]
        self.rows = [[None] * num_positions for _ in range(context.num_rows)]
        self.host = [None] * num_host_slots
        num_cached = context.states.slots.count if context.states else 0
        num_draft = context.states.num_draft_states if context.states else 0
        self.states = [None] * (context.num_rows * (1 + num_draft) + 1 + num_cached)
        self.host_states = [None] * context.num_rows
        self.num_copies = self.num_state_copies = self.num_captures = 0
        self.num_computed = self.num_prefilled = 0
        self.num_swaps_and_loads = 0
        self.origins = []
        """For each token drawn last: weights that drew it, oldest and newest weights of the KV it attended to."""

    def run(self, plan: StepPlan, version: int) -> list[int]:
        """Compute a step -> the tokens of plan.sampled."""
        for row, column, block in self.context.take_table_writes():
            self.table[row][column] = block
        for copy in plan.copies_before:
            self.copy(*copy)
        self.num_swaps_and_loads += len(plan.copies_before)
        for request in plan.readmitted:
            self._upload(request)
        runs = [(request, start, 1) for request, start in zip(plan.decode, plan.decode_starts, strict=True)]
        for chunk in plan.prefill:
            row = chunk.request.lease.row
            if chunk.first:
                self._upload(chunk.request)
            for fork in chunk.forks:
                self.rows[fork.lease.row] = list(self.rows[row])
            self.rows[row][chunk.start + 1 : chunk.start + 1 + len(chunk.drafts)] = chunk.drafts
            runs.append((chunk.request, chunk.start, chunk.n))
        self._write(runs, version)
        if self.context.states is not None:
            self._advance(runs, {chunk.request: chunk.captures for chunk in plan.prefill}, version)
        self.num_prefilled += sum(chunk.n for chunk in plan.prefill if not chunk.drafts)
        rows = zip(plan.decode, plan.decode_starts, strict=True)
        reads = [self._read(request, start + 1, version) for request, start in rows]
        for chunk in plan.prefill:
            ends = range(chunk.start + 1 if chunk.drafts else chunk.start + chunk.n, chunk.start + chunk.n + 1)
            read = [self._read(chunk.request, end, version) for end in ends]
            reads += [*read, *read[-1:] * len(chunk.forks)] if chunk.samples else ()
        drawn = [draw(digest, version) for digest, _ in reads]
        self.origins = [origin for _, origin in reads]
        for request, end, token in zip(plan.sampled, sampled_ends(plan), drawn, strict=True):
            self.rows[request.lease.row][end] = token
        for copy in plan.copies_after:
            self.copy(*copy)
            self.num_copies += copy.kind is CopyKind.BLOCK
            self.num_state_copies += copy.kind is CopyKind.STATE
        return drawn

    def _upload(self, request):
        row = request.lease.row
        self.rows[row] = request.tokens + [None] * (len(self.rows[row]) - len(request.tokens))

    def content(self, lease, num_tokens):
        """The cache entries of a lease's first tokens."""
        size = self.size
        return [self.kv[lease.blocks[p // size] * size + p % size] for p in range(num_tokens)]

    def put(self, lease, entries, *, start):
        """Write entries from position `start` on, between steps, as a load does."""
        size = self.size
        for position in range(start, len(entries)):
            self.kv[lease.blocks[position // size] * size + position % size] = entries[position]

    def copy(self, kind, source, destination):
        sources, destinations = {
            CopyKind.BLOCK: (self.kv, self.kv),
            CopyKind.BLOCK_OUT: (self.kv, self.host),
            CopyKind.BLOCK_IN: (self.host, self.kv),
            CopyKind.STATE: (self.states, self.states),
            CopyKind.STATE_OUT: (self.states, self.host_states),
            CopyKind.STATE_IN: (self.host_states, self.states),
        }[kind]
        content = sources[self._place(sources, source)]
        known = content is not None or kind is CopyKind.STATE_OUT
        assert known, f"{kind}: place {source} was never written"
        destinations[self._place(destinations, destination)] = content

    def _place(self, memory, place):
        """An index into `memory`: a block of the cache is a slice of its entries."""
        return slice(place * self.size, (place + 1) * self.size) if memory is self.kv else place

    def _advance(self, runs, captures, version):
        """Every row's state takes in its tokens, all rows at once: what one keeps, no other reads in this step."""
        slots = [request.lease.row for request, _, _ in runs]
        kept = [slot for request, _, _ in runs for _, slot in captures.get(request, ())]
        assert len({*slots, *kept}) == len(slots) + len(kept), f"rows {slots} and states kept {kept} share a slot"
        for request, start, n in runs:
            row, tokens = request.lease.row, self.rows[request.lease.row][: start + n]
            digests = prefix_digests(tokens)
            state = self.states[row] if start else (0, None, version, version)
            expected = (start, digests[start - 1] if start else None)
            assert state is not None and state[:2] == expected, f"{request.id}: continues at {start} from state {state}"
            oldest, newest = state[2:]
            assert not request.lease.publishes or oldest == newest == version, f"{request.id}: stale state {state}"
            for position, slot in (*captures.get(request, ()), (start + n, row)):
                assert start < position <= start + n, f"{request.id}: keeps {position} of {start} .. {start + n}"
                self.states[slot] = (position, digests[position - 1], min(oldest, version), max(newest, version))
            self.num_captures += len(captures.get(request, ()))

    def _write(self, runs, version):
        written = set()
        for request, start, n in runs:
            row, end = request.lease.row, start + n
            tokens = self.rows[row][:end]
            assert None not in tokens, f"{request.id}: the device does not know tokens up to {end}: {tokens}"
            for column in range(-(-end // self.size)):
                held = request.lease.blocks[column]
                assert self.table[row][column] == held, f"{request.id}: column {column} is {self.table[row][column]}"
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
        if request.lease.publishes:
            assert all(entry[2] == version for entry in entries), f"{request.id}: stale weights in {entries}"
        kv_versions = [entry[2] for entry in entries]
        origin = (version, min(kv_versions), max(kv_versions))
        assert request.history.spans[-1][1:4] == origin, (
            f"{request.id}: {request.history.spans} claims other weights than {kv_versions} under {version}"
        )
        return expected[-1][1], origin

    def _flat(self, row, position):
        return self.table[row][position // self.size] * self.size + position % self.size

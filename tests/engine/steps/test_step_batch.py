"""Batches of steps: what reaches the device is what the plan says, whole or advanced, exact or padded."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_device import VOCAB
from random_world import random_leader, random_world
from test_fuzz import disturb
from world import World

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.kernels.base import RotaryTable, StepMetadata
from megatron_infer.kernels.step_gather import torch_gather
from megatron_infer.memory.device import Device
from megatron_infer.runner.batch import Batch, BatchBuilder
from megatron_infer.scheduler.step_plan import StepPlan

HEAD_DIM = 4
SHAPES = [GraphShape(tokens + decode, prefill, decode) for decode in (1, 4, 8) for prefill, tokens in ((0, 0), (8, 32))]


class Planner:
    """Stands in for attention: only `plan` is called."""

    name = "planner"
    graph_safe = True

    def __init__(self) -> None:
        self.step: StepMetadata | None = None

    def plan(self, step: StepMetadata) -> None:
        self.step = step


def make_builder(
    *, num_rows: int, num_blocks: int, block_size: int, max_tokens: int, num_positions: int, shapes=()
) -> BatchBuilder:
    angles = torch.arange(num_positions * HEAD_DIM, dtype=torch.float32).view(num_positions, HEAD_DIM)
    sizes = SimpleNamespace(
        max_requests=num_rows,
        max_tokens=max_tokens,
        max_blocks_per_row=num_blocks,
        max_sequence_length=num_positions,
        block_size=block_size,
        graph_shapes=shapes,
    )
    layout = SimpleNamespace(dummy_block=num_blocks)
    store = SimpleNamespace(layout=layout, kv_cache=torch.zeros(1), states=None, pending_restore=lambda: None)
    kernels = SimpleNamespace(
        ops=None, attention=Planner(), scan=None, layers=None, lora=None, expanded=None, gather=torch_gather
    )
    rotary = RotaryTable(cos_PR=angles, sin_PR=-angles)
    return BatchBuilder(Device("cpu"), sizes, store, kernels, rotary=rotary, dtype=torch.float32)


class BatchWorld(World):
    """A world whose every step is built three times: advanced where it can be, always uploaded, and padded."""

    def build(self):
        super().build()
        context = self.context
        sizes = {
            "num_rows": self.num_rows,
            "num_blocks": context.num_blocks,
            "block_size": self.block_size,
            "max_tokens": self.max_tokens,
            "num_positions": context.num_blocks * self.block_size + 2,
        }
        self.advancing, self.uploading = make_builder(**sizes), make_builder(**sizes)
        self.padding = make_builder(**sizes, shapes=SHAPES)
        self.counts = getattr(self, "counts", Counter())
        count_advances(self.advancing, self.counts, "advanced")
        count_advances(self.padding, self.counts, "advanced when padded")
        take = context.take_table_writes

        def taken():
            self.writes = take()
            return self.writes

        context.take_table_writes = taken

    def launch(self, plan: StepPlan):
        super().launch(plan)
        tokens = torch.tensor(self.in_flight_steps[-1][1], dtype=torch.int64)
        self.uploading.writer.forget()
        batches = [builder.build(plan, self.writes) for builder in (self.advancing, self.uploading)]
        shape = smallest(plan)
        self.counts["padded" if shape else "exact"] += 1
        batches.append(self.padding.build(plan, self.writes, shape=shape))
        if shape is not None:
            self.padding.derive(batches[2])
        same_mirrors(*batches[:2])
        for batch in batches:
            self.check_batch(plan, batch)
        if shape is not None:
            check_padding(batches[2], plan, shape, self.padding)
        for builder, batch in zip((self.advancing, self.uploading), batches[:2], strict=True):
            builder.store_sampled(batch, tokens)
        padded = torch.full((len(batches[2].sample_row_S),), 1, dtype=torch.int64)
        padded[: len(tokens)] = tokens
        self.padding.store_sampled(batches[2], padded)

    def check_batch(self, plan: StepPlan, batch: Batch):
        device, size, meta = self.device, self.block_size, batch.meta
        spans = [(request, start, 1) for request, start in zip(plan.decode, plan.decode_starts, strict=True)]
        places = list(range(len(spans)))
        spans += [(chunk.request, chunk.start, chunk.n) for chunk in plan.prefill]
        offset = batch.meta.num_decode
        for chunk in plan.prefill:
            places.append(offset)
            offset += chunk.n
        for (request, start, n), first in zip(spans, places, strict=True):
            row, span = request.lease.row, slice(first, first + n)
            ids = [device.rows[row][position] for position in range(start, start + n)]
            assert batch.token_ids_T[span].tolist() == ids
            assert meta.positions_T[span].tolist() == list(range(start, start + n))
            flat = [device.table[row][p // size] * size + p % size for p in range(start, start + n)]
            assert meta.kv_pos_T[span].tolist() == flat
            assert torch.equal(meta.cos_TR[span, 0], HEAD_DIM * meta.positions_T[span].float())
        rows = [*range(len(plan.decode)), *range(meta.num_decode, meta.num_decode + len(plan.prefill))]
        for r, (request, start, n) in zip(rows, spans, strict=True):
            on_device = (meta.q_len_R[r], meta.kv_len_R[r], meta.table_row_R[r], meta.cu_q_R1[r + 1] - meta.cu_q_R1[r])
            assert tuple(map(int, on_device)) == (n, start + n, request.lease.row, n)
            assert meta.q_len[r] == n and meta.kv_len[r] == start + n and meta.table_row[r] == request.lease.row
        assert batch.num_sampled == len(plan.sampled)
        assert batch.sample_rows.tolist() == [request.lease.row for request in plan.sampled]
        assert batch.sample_row_S[: batch.num_sampled].tolist() == batch.sample_rows.tolist()
        assert batch.sample_position_S[: batch.num_sampled].tolist() == batch.sample_positions.tolist()
        at = batch.sample_token_S[: batch.num_sampled]
        assert torch.equal(meta.positions_T[at] + 1, torch.from_numpy(batch.sample_positions))


def count_advances(builder: BatchBuilder, counts: Counter, name: str) -> None:
    advance = builder._buffer.advance_mirror

    def counted(num_decode):
        counts[name] += 1
        advance(num_decode)

    builder._buffer.advance_mirror = counted


def smallest(plan: StepPlan) -> GraphShape | None:
    """A shape that the step fits in, its forks included."""
    decode, prefill = len(plan.decode), len(plan.prefill)
    fitting = [
        shape
        for shape in SHAPES
        if decode <= shape.num_decode
        and prefill <= shape.num_prefill
        and plan.num_tokens - decode <= shape.num_tokens - shape.num_decode
        and len(plan.sampled) <= shape.num_rows
    ]
    return min(fitting, default=None)


def same_mirrors(one: Batch, other: Batch) -> None:
    assert one.views.size == other.views.size
    for name, mirror in one.views.mirror.items():
        assert torch.equal(mirror, other.views.mirror[name]), name
    for name, host in one.views.host.items():
        assert np.array_equal(host, other.views.host[name]), name
        if name in one.views.mirror:
            assert host.tolist() == one.views.mirror[name].tolist(), f"{name}: the device holds something else"


def check_padding(batch: Batch, plan: StepPlan, shape: GraphShape, builder: BatchBuilder) -> None:
    meta, dummy = batch.meta, builder.rows.dummy_row
    decode, prefill = len(plan.decode), len(plan.prefill)
    end = shape.num_decode + plan.num_tokens - decode
    assert (meta.num_tokens, meta.num_rows, meta.num_decode) == (shape.num_tokens, shape.num_rows, shape.num_decode)
    assert meta.max_kv_len >= int(meta.kv_len_R.max()) and meta.max_q_len >= int(meta.q_len_R.max())
    first_of_dummy_block = int(builder.rows.block_table[dummy, 0]) * builder._block_size
    for tokens in (slice(decode, shape.num_decode), slice(end, shape.num_tokens)):
        assert not meta.positions_T[tokens].any()
        assert (meta.kv_pos_T[tokens] == first_of_dummy_block).all()
    dummies, empty = slice(decode, shape.num_decode), slice(shape.num_decode + prefill, shape.num_rows)
    assert (meta.q_len_R[dummies] == 1).all() and (meta.kv_len_R[dummies] == 1).all()
    assert not meta.q_len_R[empty].any() and not meta.kv_len_R[empty].any()
    assert (meta.table_row_R[dummies] == dummy).all() and (meta.table_row_R[empty] == dummy).all()
    assert (meta.cu_q_R1[shape.num_decode + prefill :] == end).all()
    drawn = batch.num_sampled
    assert len(batch.sample_row_S) == shape.num_rows
    assert (batch.sample_row_S[drawn:] == dummy).all()
    assert not batch.sample_position_S[drawn:].any() and not batch.sample_token_S[drawn:].any()
    view = builder.static_view(shape)
    builder.derive(view)
    for name in ("positions_T", "kv_pos_T", "cos_TR", "sin_TR"):
        assert torch.equal(getattr(view.meta, name), getattr(meta, name)), name
    assert torch.equal(view.token_ids_T, batch.token_ids_T)
    for name in ("q_len_R", "kv_len_R", "table_row_R", "cu_q_R1"):
        assert getattr(view.meta, name).data_ptr() == getattr(meta, name).data_ptr(), f"{name} has moved"
    for name in ("sample_token_S", "sample_row_S", "sample_position_S"):
        assert getattr(view, name).data_ptr() == getattr(batch, name).data_ptr(), f"{name} has moved"


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 25), marks=pytest.mark.long)], ids=["", "more"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_is_the_plan_in_random_schedules(overlap, seeds):
    totals, counts = Counter(), Counter()
    for seed in seeds:
        rng = random.Random(1000 + seed)
        drawn = random_world(rng, overlap=overlap, num_rows=rng.randint(2, 8))
        fields = [field.name for field in dataclasses.fields(World) if field.init and field.name[0] != "_"]
        keep = {"flights", "events", "origins", "books"}
        world = BatchWorld(**{name: getattr(drawn, name) for name in fields if name not in keep})
        run(world, rng, totals)
        counts += world.counts
    assert counts["advanced"] > 30 and counts["advanced when padded"] > 30 and counts["padded"] > 300, counts
    for what in ("paused", "evicted", "forked", "readmitted"):
        assert totals[what] > 0, (what, totals)


def run(world: BatchWorld, rng: random.Random, totals: Counter) -> None:
    stem = [rng.randrange(4, VOCAB) for _ in range(24)]
    prompts: list[list[int]] = []
    leaders = [random_leader(world, rng, stem, f"r{i}", prompts) for i in range(rng.randint(3, 12))]
    pending = [leader for leader in leaders if leader is not None]
    while pending or world.scheduler.has_unfinished or world.in_flight_steps:
        while pending and rng.random() < 0.3:
            world.add(pending.pop())
        if rng.random() < 0.2:
            disturb(world, rng, totals, pending)
        world.step()
    totals.update(world.scheduler.stats.as_dict())
    totals.update(world.account.counts)


# ---------------------------------------------------------------------- steps made by hand


def request_in(row: int, name: str = "r") -> SimpleNamespace:
    return SimpleNamespace(id=name, lease=SimpleNamespace(row=row, adapter_slot=-1), tokens=[5] * 9)


def decode_plan(requests, starts, **fields) -> StepPlan:
    return StepPlan(
        step=0, decode=requests, decode_starts=starts, num_tokens=len(requests), sampled=list(requests), **fields
    )


@pytest.fixture
def builder() -> BatchBuilder:
    builder = make_builder(num_rows=4, num_blocks=8, block_size=4, max_tokens=16, num_positions=32, shapes=SHAPES)
    builder.uploads, builder.counts = [], Counter()
    upload = builder._buffer._device.upload
    builder._buffer._device.upload = lambda host, target: (builder.uploads.append(host.nbytes), upload(host, target))
    count_advances(builder, builder.counts, "advances")
    return builder


@pytest.mark.parametrize("shape", [None, GraphShape(4, 0, 4)])
def test_decode_rows_that_go_on_upload_nothing(builder, shape):
    requests = [request_in(2), request_in(0)]
    for step in range(3):
        batch = builder.build(decode_plan(requests, [4 + step, 7 + step]), (), shape=shape)
        builder.derive(batch)
        assert batch.meta.positions_T[:2].tolist() == [4 + step, 7 + step]
        assert batch.sample_position_S[:2].tolist() == batch.sample_positions.tolist() == [5 + step, 8 + step]
    assert len(builder.uploads) == 1 and builder.counts["advances"] == 2


def test_another_request_at_the_next_position_is_no_advance(builder):
    builder.build(decode_plan([request_in(1)], [4]), ())
    batch = builder.build(decode_plan([request_in(3)], [5]), ())
    assert batch.meta.table_row_R.tolist() == [3] and len(builder.uploads) == 2


def test_a_request_that_came_back_in_another_row_is_written_again(builder):
    request = request_in(1)
    builder.build(decode_plan([request], [4]), ())
    request.lease = SimpleNamespace(row=2, adapter_slot=-1)
    batch = builder.build(decode_plan([request], [5], readmitted=(request,)), ())
    assert batch.meta.table_row_R.tolist() == [2] and batch.sample_rows.tolist() == [2]


def test_a_shape_that_changes_is_uploaded(builder):
    request = request_in(1)
    for step, shape in enumerate((None, GraphShape(4, 0, 4), GraphShape(1, 0, 1), GraphShape(4, 0, 4))):
        batch = builder.build(decode_plan([request], [4 + step]), (), shape=shape)
        builder.derive(batch)
        assert batch.meta.positions_T.tolist() == [4 + step] + [0] * (batch.num_tokens - 1)
    assert len(builder.uploads) == 4


def test_after_a_build_that_failed_the_next_is_uploaded(builder, monkeypatch):
    request = request_in(1)
    builder.build(decode_plan([request], [4]), ())
    monkeypatch.setattr(builder._buffer, "advance_mirror", lambda num_decode: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        builder.build(decode_plan([request], [5]), ())
    batch = builder.build(decode_plan([request], [6]), ())
    assert batch.meta.positions_T.tolist() == [6] and batch.meta.kv_len_R.tolist() == [7]


def test_more_table_writes_than_a_step_has_room_for_all_arrive(builder):
    room = len(builder._buffer.host["write_at"])
    builder.rows.block_table.zero_()
    writes = [(row, column, 1 + (row + column) % 7) for row in range(4) for column in range(8)]
    doubled = [(row, column, 0) for row, column, _ in writes] + writes  # the last of several counts
    builder._buffer.host["write_at"], builder._buffer.host["write_block"] = (
        builder._buffer.host[name][:10] for name in ("write_at", "write_block")
    )
    assert room > 10
    builder.build(decode_plan([request_in(1)], [4]), doubled)
    expected = [[1 + (row + column) % 7 for column in range(8)] for row in range(4)]
    assert builder.rows.block_table[:4].tolist() == expected


def test_a_step_that_no_shape_holds_is_refused(builder):
    requests = [request_in(row) for row in range(3)]
    with pytest.raises(AssertionError, match="3 decode rows"):
        builder.build(decode_plan(requests, [4, 4, 4]), (), shape=GraphShape(1, 0, 1))


def test_tokens_received_later_go_to_the_rows_of_their_step(builder):
    batch = builder.build(decode_plan([request_in(1), request_in(2)], [4, 6]), ())
    builder.build(decode_plan([request_in(3)], [9]), ())
    builder.store_received(batch, np.array([11, 12]))
    assert builder.token_pool[1, 5] == 11 and builder.token_pool[2, 7] == 12 and builder.token_pool.count_nonzero() == 2


def test_new_angles_take_the_place_of_the_old_ones(builder):
    def angles() -> torch.Tensor:
        batch = builder.build(decode_plan([request_in(1)], [4]), ())
        return batch.meta.cos_TR

    before = angles()
    place = builder.rotations.cos_PR.data_ptr()
    table = torch.full((32, HEAD_DIM), 7.0)
    assert builder.rotations.differs(RotaryTable(cos_PR=table, sin_PR=table)) == "cos"
    builder.rotations.set(RotaryTable(cos_PR=table, sin_PR=table))
    assert builder.rotations.cos_PR.data_ptr() == place, "a captured graph reads the old place"
    assert (angles() == 7.0).all() and not (before == 7.0).any()

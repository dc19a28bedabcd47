"""Copies in two streams arrive as if there were one, in whatever order a device would run them.

The stand-in of a device keeps what is enqueued on each stream and carries it out as late as it may, in a random order
that the marks allow.
"""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from suspend_case import MODES, make_engine, workload

from megatron_infer.context import copies, memory
from megatron_infer.context import store as store_module
from megatron_infer.context.copies import CopyPipeline, words
from megatron_infer.context.memory import HostArena
from megatron_infer.context.regions.pinned import MIN_BYTES, PinnedPool
from megatron_infer.context.store import StateStore
from megatron_infer.testing.tiny import tiny_gpt

CPU = torch.device("cpu")


class Streams:
    """Two queues. A mark is (which, how many entries were before it); an entry that holds is a mark."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.queues, self.done, self.num_holds = {False: [], True: []}, {False: 0, True: 0}, 0

    def upload(self, numbers):
        assert len(numbers) <= copies.MAX_INDEX
        return torch.tensor(numbers, dtype=torch.int64)

    def buffer(self, num_bytes):
        return torch.full((num_bytes,), 0x5A, dtype=torch.uint8)

    def run(self, work, *, side):
        self.queues[side].append(work)

    def mark(self, *, side):
        return side, len(self.queues[side])

    def hold(self, mark, *, side):
        self.num_holds += 1
        self.queues[side].append(mark)

    def seconds(self, first, last):
        self.wait()
        return 0.5

    def wait(self):
        """Carry everything out."""
        while True:
            able = [side for side in (False, True) if self._is_able(side)]
            if not able:
                break
            side = self.rng.choice(able)
            entry = self.queues[side][self.done[side]]
            self.done[side] += 1
            if callable(entry):
                entry()
        assert all(self.done[side] == len(queue) for side, queue in self.queues.items()), (
            "the streams wait for each other"
        )

    def _is_able(self, side):
        if self.done[side] == len(self.queues[side]):
            return False
        entry = self.queues[side][self.done[side]]
        return callable(entry) or self.done[entry[0]] >= entry[1]


class Pins:
    """Pinned memory that is plain, and counted."""

    def __init__(self):
        self.num_pinned, self.num_unpins, self.forbidden = 0, 0, False

    def pin(self, num_bytes):
        assert not self.forbidden, "pinned in the middle of a step"
        self.num_pinned += num_bytes
        return torch.full((num_bytes,), 0x77, dtype=torch.uint8)

    def unpin(self):
        self.num_unpins += 1


@pytest.fixture
def device(monkeypatch):
    """Stores take the pipeline; whoever waits for the device waits for the streams."""
    lanes, pins = [], Pins()

    def make(where):
        lanes.append(Streams(len(lanes)))
        return CopyPipeline(lanes[-1], PinnedPool(1 << 20, pin=pins.pin, unpin=pins.unpin))

    def wait(where):
        for lane in lanes:
            lane.wait()

    monkeypatch.setattr(store_module, "make_pipeline", make)
    monkeypatch.setattr(store_module, "wait", wait)
    return lanes, pins, wait


@pytest.fixture
def small_pieces(monkeypatch):
    """Three of `make_store`'s blocks to a piece and a chunk."""
    monkeypatch.setattr(memory, "PIECE_BYTES", 3 * 3 * 2 * 4 * 2 * 8 * 4)
    monkeypatch.setattr(memory, "MAX_CHUNK_BYTES", 0)


def make_store(num_blocks=24, slots=0):
    return StateStore(
        num_layers=3,
        num_blocks=num_blocks,
        block_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=CPU,
        static_pointers=True,
        unified_memory=False,
        num_host_slots=slots,
    )


def quiet(what):
    pass


@pytest.mark.parametrize("seed", range(10))
def test_offloaded_blocks_come_back_through_two_streams(seed, device, small_pieces):
    (lanes, _, _), store = device, make_store()
    lanes[0].rng.seed(seed)
    store.kv_cache.normal_()
    blocks = random.Random(seed).sample(range(23), 17)
    before = store.kv_cache.clone()
    away = store.offload(blocks, quiet)
    assert lanes[0].num_holds > 2 * 5, "six pieces, each waits for its gather and for its staging buffer"
    back = store.restore(set(blocks), quiet)
    assert torch.equal(store.kv_cache[:, :, blocks], before[:, :, blocks])
    assert away.copy_s == back.copy_s == 0.5, "by the device's clock"
    assert store.host_bytes() == 0


@pytest.mark.parametrize("seed", range(20))
def test_swaps_between_steps_do_what_one_after_the_other_would(seed, device, small_pieces):
    (_, pins, wait), rng, store = device, random.Random(seed), make_store(9, slots=10)
    store.kv_cache.normal_()
    before = store.kv_cache.clone()
    pool, host = {block: block for block in range(8)}, {}
    pins.forbidden = True  # all host slots are pinned before the first step
    for _ in range(12):
        moves = []
        for _ in range(rng.randint(0, 20)):
            if host and rng.random() < 0.5:
                block, slot = rng.randrange(8), rng.choice(list(host))
                moves.append(("in", block, slot))
                pool[block] = host[slot]
            else:
                block, slot = rng.randrange(8), rng.randrange(10)
                moves.append(("out", block, slot))
                host[slot] = pool[block]
        store.run_moves(moves)
        if rng.random() < 0.3:
            wait(CPU)
        freed = [slot for slot in range(10) if rng.random() < 0.2]
        store.free_host_slots(freed)
        for slot in freed:
            host.pop(slot, None)
    wait(CPU)
    for block, content in pool.items():
        assert torch.equal(store.kv_cache[:, :, block], before[:, :, content])


def test_pinned_memory_is_kept_for_the_next_suspend_and_trimmed_when_asked(device, small_pieces):
    (_, pins, _), store = device, make_store()
    store.kv_cache.normal_()
    for _ in range(3):
        store.offload(range(12), quiet)
        first = store.host_bytes()
        assert store.idle_host_bytes() == 0
        store.restore(set(range(12)), quiet)
        assert store.host_bytes() == 0 and store.idle_host_bytes() == first
    assert pins.num_pinned == first == 4 * MIN_BYTES
    assert store.trim_host() == 0, "within what may be kept"
    assert store.trim_host(2 * MIN_BYTES) == 2 * MIN_BYTES and store.idle_host_bytes() == 2 * MIN_BYTES
    assert store.trim_host(0) == 2 * MIN_BYTES and pins.num_unpins == 2


def test_pool_keeps_no_more_than_its_share_and_shares_sizes():
    pins = Pins()
    pool = PinnedPool(3 * MIN_BYTES, pin=pins.pin, unpin=pins.unpin)
    chunks = [pool.take((size,), torch.uint8) for size in (MIN_BYTES, MIN_BYTES - 5, 4 * MIN_BYTES, 3 * MIN_BYTES)]
    assert [chunk.resident_bytes() // MIN_BYTES for chunk in chunks] == [1, 1, 4, 4]
    for chunk in chunks:
        chunk.release()
    assert pool.take((MIN_BYTES // 4,), torch.float32).tensor.shape == (MIN_BYTES // 4,)
    assert pins.num_pinned == 10 * MIN_BYTES, "taken from what was idle"
    assert pool.idle_bytes() == 9 * MIN_BYTES
    assert pool.trim() == 8 * MIN_BYTES, "the largest first"
    assert pool.idle_bytes() == MIN_BYTES and pins.num_unpins == 1


def test_no_memory_to_pin_leaves_the_pool_as_it_was(device, small_pieces):
    (_, pins, _), store = device, make_store()
    store.kv_cache.normal_()
    before, pin, calls = store.kv_cache.clone(), pins.pin, []

    def second_fails(num_bytes):
        calls.append(num_bytes)
        if len(calls) == 2:
            raise MemoryError("no more")
        return pin(num_bytes)

    store._pipeline.host._pin = second_fails
    with pytest.raises(MemoryError):
        store.offload(range(12), quiet)
    assert torch.equal(store.kv_cache, before) and store.host_bytes() == 0
    store.offload(range(12), quiet)
    store.restore(set(range(12)), quiet)
    assert torch.equal(store.kv_cache[:, :, :12], before[:, :, :12])


def test_pieces_hold_no_more_numbers_than_are_uploaded_at_once(monkeypatch):
    monkeypatch.setattr(memory, "MAX_INDEX", 5)
    lane, pins = Streams(0), Pins()
    arena = HostArena((2,), torch.int64, pipeline=CopyPipeline(lane, PinnedPool(0, pin=pins.pin)), max_slots=40)
    pool = torch.arange(80).view(40, 2)
    arena.save(range(23), pool, range(23))
    back = torch.zeros_like(pool)
    arena.load(range(23), back, range(23))
    lane.wait()
    assert torch.equal(back[:23], pool[:23])
    assert max(len(queue) for queue in lane.queues.values()) > 5 * 2


@pytest.mark.parametrize(
    "shape, dtype, expected",
    [((5, 4), torch.bfloat16, (5, 1)), ((5, 3), torch.bfloat16, None), ((5, 3), torch.float64, (5, 3))],
)
def test_elements_are_copied_as_words_where_they_divide(shape, dtype, expected):
    tensor = torch.arange(shape[0] * shape[1]).view(shape).to(dtype)
    seen = words(tensor)
    assert (seen.shape, seen.dtype) == ((expected, torch.int64) if expected else (shape, dtype))
    assert seen.data_ptr() == tensor.data_ptr()


def test_places_that_are_strided_are_copied_as_words():
    cache = torch.randn(3, 2, 7, 4, 2, 8, dtype=torch.float32).to(torch.bfloat16)
    seen = words(cache.permute(2, 0, 1, 3, 4, 5))
    assert seen.dtype == torch.int64 and seen.shape == (7, 3, 2, 4, 2, 2)


@pytest.mark.parametrize("mode", MODES)
def test_engine_draws_the_same_tokens_with_copies_in_two_streams(mode, device, monkeypatch):
    monkeypatch.setattr(memory, "PIECE_BYTES", 40_000)
    monkeypatch.setattr(memory, "MAX_CHUNK_BYTES", 0)
    torch.manual_seed(0)
    model = tiny_gpt(vocab_size=128, max_sequence_length=256, init_method_std=0.2)
    work = workload("greedy")[:4]
    engine = make_engine(model, buffer_size_gb=0.004, max_requests=4)
    expected = [out.outputs[0].token_ids for out in engine.generate([p for p, _ in work], [how for _, how in work])]
    for prompt, how in work:
        engine.add_request(prompt, how)
    done, steps = {}, 0
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = output.outputs[0].token_ids
        steps += 1
        if steps in (2, 5, 9):
            report = engine.suspend(mode).tags["kv_cache"]
            assert (report.gb_per_s is not None) is (mode == "offload")
            if mode == "offload":
                assert report.gb_per_s == report.bytes_copied / 0.5 / 1e9
            engine.resume()
    assert [done[key] for key in sorted(done)] == expected


def test_dropped_staging_waits_for_its_copies_and_a_stopwatch_for_both_streams(device):
    (lanes, _, _), store = device, make_store()
    store.kv_cache.normal_()
    lane, pipeline = lanes[0], store._pipeline
    store._blocks.copy_out([1, 2], quiet)
    last_copy = lane.mark(side=True)
    pipeline.drop_staging()
    assert last_copy in lane.queues[False], "its memory is the main stream's again"
    watch = copies.Stopwatch(pipeline)
    store._blocks.copy_back({1, 2}, quiet)
    last_scatter = lane.mark(side=False)
    watch.stop()
    assert last_scatter in lane.queues[True]


class Event:
    def __init__(self, log, enable_timing):
        assert enable_timing
        self.log, self.at = log, 0.0

    def record(self, stream):
        self.log.append(("record", stream))
        self.at = float(len(self.log))

    def synchronize(self):
        self.log.append(("synchronize",))

    def elapsed_time(self, other):
        return other.at - self.at


class Stream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_event(self, event):
        self.log.append(("wait", self.name))


def test_lane_of_cuda_puts_work_where_it_says(monkeypatch):
    log: list[tuple] = []
    main, empty = Stream(log, "main"), torch.empty
    now = [main]

    @contextlib.contextmanager
    def enter(stream):
        now.append(stream)
        yield
        now.pop()

    stubs = {
        "Stream": lambda device: Stream(log, "side"),
        "Event": lambda enable_timing: Event(log, enable_timing),
        "current_stream": lambda device: now[-1],
        "stream": enter,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **how: empty(*size, **how))
    lane, pins = copies.CudaLane(CPU), Pins()
    pipeline = CopyPipeline(lane, PinnedPool(0, pin=pins.pin))
    pool, host, back = torch.arange(60.0).view(30, 2), torch.zeros(4, 2), torch.zeros(30, 2)
    watch = copies.Stopwatch(pipeline)
    pipeline.save(pool, [3, 7, 8, 29], host)
    assert torch.equal(host, pool[[3, 7, 8, 29]])
    pipeline.load(host, back, [1, 2, 3, 4])
    assert torch.equal(back[1:5], host) and not back[5:].any()
    assert watch.stop() > 0
    ran = []
    lane.run(lambda: ran.append(now[-1].name), side=False)
    lane.run(lambda: ran.append(now[-1].name), side=True)
    assert ran == ["main", "side"] and now == [main]
    del log[:]
    lane.hold(lane.mark(side=True), side=False)
    assert [(what, getattr(where, "name", where)) for what, where in log] == [("record", "side"), ("wait", "main")]
    del log[:]
    for i in range(copies.NUM_UPLOADS):
        assert lane.upload([i, 5]).tolist() == [i, 5]
    assert log.count(("synchronize",)) == 2, "only numbers that an earlier copy may still be reading are waited for"

"""Copies in three streams arrive as if there were one, in whatever order a device would run them.

The stand-in of a device keeps what is enqueued on each stream and carries it out as late as it may, in a random order
that the events allow.
"""

from __future__ import annotations

import contextlib
import random
from functools import partial

import pytest
import torch
from engines import make_engine, run, tokens_of
from store_case import RandomCopies, block_in, block_out, build_store, copy_block, cut_pieces, quiet
from suspend_case import MODES, workload

from megatron_infer.memory import copy_pipeline
from megatron_infer.memory import store as store_module
from megatron_infer.memory.copy_pipeline import CopyPipeline, Stream, words
from megatron_infer.memory.device import Device
from megatron_infer.memory.regions.pinned import SMALLEST_BYTES, PinnedPool, PinnedRegion, machine_share
from megatron_infer.memory.store_layout import StoreLayout
from megatron_infer.scheduler.context.copies import CopyKind

CPU = torch.device("cpu")


class Streams:
    """Three queues. An event is (stream, number of entries before it); an entry that is an event waits for it."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.queues, self.done = {on: [] for on in Stream}, dict.fromkeys(Stream, 0)
        self.steps_are_now = False
        """Work that torch does directly counts as the steps' stream: the queue of that stream is never behind it."""

    def upload(self, numbers):
        return torch.tensor(numbers, dtype=torch.int64)

    def buffer(self, num_bytes):
        return torch.full((num_bytes,), 0x5A, dtype=torch.uint8)

    def run(self, work, on):
        self.queues[on].append(work)
        self._keep_up()

    def record_event(self, on):
        return on, len(self.queues[on])

    def wait_event(self, event, on):
        self.queues[on].append(event)
        self._keep_up()

    def is_done(self, event):
        return self.done[event[0]] >= event[1]

    def seconds(self, first, last):
        self.wait()
        return 0.5

    def wait(self):
        """Run everything."""
        self.go_on(lambda: False)
        assert all(self.done[on] == len(queue) for on, queue in self.queues.items()), "the streams wait for each other"

    def go_on(self, is_enough):
        """Run queued work until `is_enough()`, in any order that the events allow."""
        while not is_enough():
            able = [on for on in Stream if self._is_able(on)]
            if not able:
                break
            on = self.rng.choice(able)
            entry = self.queues[on][self.done[on]]
            self.done[on] += 1
            if callable(entry):
                entry()

    def _keep_up(self):
        if self.steps_are_now:
            self.go_on(lambda: self.done[Stream.STEPS] == len(self.queues[Stream.STEPS]))

    def _is_able(self, on):
        if self.done[on] == len(self.queues[on]):
            return False
        entry = self.queues[on][self.done[on]]
        return callable(entry) or self.done[entry[0]] >= entry[1]


class Passed:
    """An event of copies that are done at once."""

    def record(self):
        pass

    def is_done(self):
        return True

    def wait(self):
        pass


class Pins:
    """Pinned memory that is plain, and counted."""

    def pool(self, keep_bytes):
        return PinnedPool(Passed, keep_bytes=keep_bytes, pin=self.pin, unpin=self.unpin)

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
    """Stores use the pipeline; a wait for the device waits for the streams."""
    made, pins = [], Pins()

    def make(where):
        made.append(Streams(len(made)))
        return CopyPipeline(made[-1], pins.pool(1 << 20))

    def wait(where):
        for streams in made:
            streams.wait()

    monkeypatch.setattr(store_module, "make_pipeline", make)
    monkeypatch.setattr(store_module, "wait", wait)
    return made, pins, wait


@pytest.fixture
def small_pieces(monkeypatch):
    """Three of `make_store`'s blocks to a piece and a chunk."""
    cut_pieces(monkeypatch, 3 * 3 * 2 * 4 * 2 * 8 * 4)


def make_store(num_blocks=24, slots=0):
    layout = StoreLayout(kv_shape=(3, 2, num_blocks, 4, 2, 8), dtype=torch.float32)
    return build_store(layout, static=True, host_slots=(slots, 0))


BLOCKS = random.Random(1).sample(range(23), 17)


def test_offloaded_blocks_come_back_while_steps_wait_for_one_layer_after_the_other(device, small_pieces):
    made, _, wait = device
    early = []
    for seed in range(20):
        store = make_store()
        streams = made[-1]
        streams.rng.seed(seed)
        store.kv_cache.normal_()
        before = store.kv_cache.clone()
        away = store.offload(BLOCKS, quiet)
        assert away.copy_s == 0.5 and away.bytes_under_way == 0, "by the device's clock"
        back = store.restore(set(BLOCKS), quiet)
        assert back.bytes_copied == back.bytes_under_way == away.bytes_copied and back.copy_s == 0.0
        restore, seen = store.pending_restore(), []
        for layer in range(3):
            restore.wait_for_layer(("blocks", layer))
            content = restore.kv_cache[layer]
            streams.run(partial(lambda to, layer: to.append(layer[:, BLOCKS].clone()), seen, content), Stream.STEPS)
        assert restore.needs_no_wait and store.pending_restore() is None, "a step that comes next need not wait"
        streams.go_on(lambda seen=seen: seen)
        early.append(not restore.is_done())
        assert (store.host_bytes() and store.restore_copy_s is None) or not early[-1]
        wait(CPU)
        assert store.pending_restore() is None and store.restore_copy_s == 0.5 and store.host_bytes() == 0
        assert torch.equal(torch.stack(seen), before[:, :, BLOCKS])
    assert any(early), "the first layer is used while others are still on their way"


USES = {
    "read": lambda store: store.read_blocks(BLOCKS)["blocks"].permute(1, 2, 0, 3, 4, 5),
    "swap": lambda store: store.run_copies([block_out(BLOCKS[0], 0), block_in(0, 23)]),
    "copy": lambda store: store.run_copies([copy_block(BLOCKS[0], 23)]),
    "suspend": lambda store: store.restore(set(BLOCKS), quiet) if store.offload(BLOCKS, quiet) else None,
    "tensor": lambda store: store.kv_cache,
}


@pytest.mark.parametrize("use", USES)
def test_every_other_use_of_the_cache_finds_all_of_it(use, device, small_pieces):
    made, _, wait = device
    for seed in range(5):
        store = make_store(25, slots=1)
        made[-1].rng.seed(seed)
        store.kv_cache.normal_()
        before = store.kv_cache.clone()
        store.offload(BLOCKS, quiet)
        store.restore(set(BLOCKS), quiet)
        made[-1].steps_are_now = True
        USES[use](store)
        wait(CPU)
        assert torch.equal(store.kv_cache[:, :, BLOCKS], before[:, :, BLOCKS])
        if use in ("swap", "copy"):
            assert torch.equal(store.kv_cache[:, :, 23], before[:, :, BLOCKS[0]])


SWAPS = (CopyKind.BLOCK_OUT, CopyKind.BLOCK_IN)


@pytest.mark.parametrize("seed", range(20))
def test_swaps_between_steps_do_what_one_after_the_other_would(seed, device, small_pieces):
    (_, pins, wait), rng, store = device, random.Random(seed), make_store(9, slots=10)
    store.kv_cache.normal_()
    before, copies = store.kv_cache.clone(), RandomCopies(rng, num_slots=10, kinds=SWAPS, block=range(8))
    pins.forbidden = True  # all host slots are pinned before the first step
    for _ in range(12):
        store.run_copies(copies.draw(20))
        if rng.random() < 0.3:
            wait(CPU)
        store.free_host_slots(copies.free("block"))
    wait(CPU)
    for block in range(8):
        assert torch.equal(store.kv_cache[:, :, block], before[:, :, copies.held["block", block]])


def test_a_store_that_is_dropped_waits_for_its_copies(device, small_pieces):
    (made, _, _), store = device, make_store()
    store.offload(BLOCKS, quiet)
    store.restore(set(BLOCKS), quiet)
    streams, last = made[0], made[0].record_event(Stream.SCATTER)
    assert not streams.is_done(last)
    del store
    assert streams.is_done(last)


def test_pinned_memory_is_kept_for_the_next_suspend_and_trimmed_when_asked(device, small_pieces):
    (_, pins, wait), store = device, make_store()
    store.kv_cache.normal_()
    for _ in range(3):
        store.offload(range(12), quiet)
        first = store.host_bytes()
        assert store.idle_host_bytes() == 0
        store.restore(set(range(12)), quiet)
        assert store.host_bytes() == first and store.idle_host_bytes() == 0, "it is still read from"
        wait(CPU)
        assert store.pending_restore() is None
        assert store.host_bytes() == 0 and store.idle_host_bytes() == first
    assert pins.num_pinned == first == 4 * 8192
    assert store.trim_host() == 0, "within what may be kept"
    assert store.trim_host(16384) == 16384 == store.idle_host_bytes()
    assert store.trim_host(0) == 16384 and pins.num_unpins == 2


def test_an_interrupt_while_a_host_copy_is_dropped_hands_out_no_memory_twice(device, small_pieces, monkeypatch):
    """A step drops it, and may be interrupted anywhere."""
    (_, pins, wait), store = device, make_store()
    store.offload(range(12), quiet)
    pinned = store.host_bytes()
    store.restore(set(range(12)), quiet)
    wait(CPU)
    give_back, calls = PinnedPool.give_back, []

    def stopped(self, buffer):
        give_back(self, buffer)
        calls.append(buffer)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(PinnedPool, "give_back", stopped)
    with pytest.raises(KeyboardInterrupt):
        store.pending_restore()
    assert store.pending_restore() is None and store.host_bytes() == 0
    assert store.idle_host_bytes() == pinned == pins.num_pinned and len(calls) == 4


def test_staging_is_given_back_behind_a_copy_that_was_interrupted_before_its_event(device, monkeypatch):
    (made, _, _), store = device, make_store(25, slots=1)
    streams, pipeline = made[0], store._pipeline
    store.run_copies([block_out(3, 0)])
    wait_event = streams.wait_event

    def stopped(event, on):
        if on is Stream.STEPS and event[0] is Stream.COPY:
            raise KeyboardInterrupt
        wait_event(event, on)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(streams, "wait_event", stopped)
        store.run_copies([block_in(0, 4)])
    last_copy = streams.record_event(Stream.COPY)
    pipeline.drop_staging()
    assert last_copy in streams.queues[Stream.STEPS]


def test_pool_keeps_no_more_than_its_share_and_shares_sizes():
    pins = Pins()
    pool = pins.pool(3 * SMALLEST_BYTES)
    sizes = (SMALLEST_BYTES, SMALLEST_BYTES - 5, 4 * SMALLEST_BYTES, 3 * SMALLEST_BYTES)
    regions = [PinnedRegion(pool, size) for size in sizes]
    assert [region.resident_bytes() // SMALLEST_BYTES for region in regions] == [1, 1, 4, 4]
    for region in regions:
        region.release()
    assert PinnedRegion(pool, SMALLEST_BYTES).tensor.shape == (SMALLEST_BYTES,)
    assert pins.num_pinned == 10 * SMALLEST_BYTES, "taken from what was idle"
    assert pool.idle_bytes() == 9 * SMALLEST_BYTES
    assert pool.trim() == 8 * SMALLEST_BYTES, "the largest first"
    assert pool.idle_bytes() == SMALLEST_BYTES and pins.num_unpins == 1


def test_processes_that_see_one_device_each_share_what_the_machine_may_keep_pinned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = machine_share()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert machine_share() == alone // 8 > 0


def test_no_memory_to_pin_leaves_the_pool_as_it_was(device, small_pieces):
    (_, pins, wait), store = device, make_store()
    store.kv_cache.normal_()
    before, pin, calls = store.kv_cache.clone(), pins.pin, []

    def second_fails(num_bytes):
        calls.append(num_bytes)
        if len(calls) == 2:
            raise MemoryError("no more")
        return pin(num_bytes)

    store._pipeline.pinned._pin = second_fails
    with pytest.raises(MemoryError):
        store.offload(range(12), quiet)
    assert torch.equal(store.kv_cache, before) and store.host_bytes() == 0
    store.offload(range(12), quiet)
    store.restore(set(range(12)), quiet)
    wait(CPU)
    assert torch.equal(store.kv_cache[:, :, :12], before[:, :, :12])


@pytest.mark.parametrize(
    "size, element, expected",
    [((5, 4), torch.bfloat16, (5, 1)), ((5, 3), torch.bfloat16, None), ((5, 3), torch.float64, (5, 3))],
)
def test_elements_are_copied_as_words_where_they_divide(size, element, expected):
    tensor = torch.arange(size[0] * size[1]).view(size).to(element)
    seen = words(tensor)
    assert (seen.shape, seen.dtype) == ((expected, torch.int64) if expected else (size, element))
    assert seen.data_ptr() == tensor.data_ptr()


def test_places_that_are_strided_are_copied_as_words():
    cache = torch.randn(3, 2, 7, 4, 2, 8, dtype=torch.float32).to(torch.bfloat16)
    seen = words(cache.permute(2, 0, 1, 3, 4, 5))
    assert seen.dtype == torch.int64 and seen.shape == (7, 3, 2, 4, 2, 2)


@pytest.mark.parametrize("mode", MODES)
def test_engine_draws_the_same_tokens_with_copies_in_three_streams(model, mode, device, monkeypatch):
    cut_pieces(monkeypatch, 40_000)
    work = workload("greedy")[:4]
    engine = make_engine(model, buffer_size_gb=0.004, max_requests=4)
    device[0][0].steps_are_now = True
    expected, first = tokens_of(run(engine, work)), engine.num_steps

    def suspend(engine):
        if engine.num_steps - first in (2, 5, 9):
            report = engine.suspend(mode).tags["kv_cache"]
            assert (report.gb_per_s is not None) is (mode == "offload")
            if mode == "offload":
                assert report.gb_per_s == report.bytes_copied / 0.5 / 1e9
            back = engine.resume().tags["kv_cache"]
            assert (back.bytes_under_way == back.bytes_copied > 0) is (mode == "offload") and back.gb_per_s is None

    assert tokens_of(run(engine, work, suspend)) == expected


def test_dropped_staging_waits_for_its_copies_and_a_stopwatch_for_both_streams(device):
    (made, _, _), store = device, make_store()
    store.kv_cache.normal_()
    streams, pipeline = made[0], store._pipeline
    watch = copy_pipeline.Stopwatch(pipeline)
    index, host = streams.upload([1, 2]), torch.zeros(2, 2, 4, 2, 8)
    pipeline.offload(store.kv_cache[0].transpose(0, 1), index, host)
    last_copy = streams.record_event(Stream.COPY)
    pipeline.drop_staging()
    assert last_copy in streams.queues[Stream.STEPS], "its memory is the steps' again"
    dropped = streams.record_event(Stream.STEPS)
    watch.stop()
    assert dropped in streams.queues[Stream.COPY]


class Event:
    def __init__(self, log, enable_timing):
        assert enable_timing
        self.log, self.at = log, 0.0

    def record(self, stream):
        self.log.append(("record", stream))
        self.at = float(len(self.log))

    def synchronize(self):
        self.log.append(("synchronize",))

    def query(self):
        return ("synchronize",) in self.log

    def elapsed_time(self, other):
        return other.at - self.at


class OneStream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_event(self, event):
        self.log.append(("wait", self.name))


def test_streams_of_cuda_run_work_where_they_are_asked_to(monkeypatch):
    log: list[tuple] = []
    main, empty = OneStream(log, "main"), torch.empty
    now, names = [main], iter(("copy", "scatter"))

    @contextlib.contextmanager
    def enter(stream):
        now.append(stream)
        yield
        now.pop()

    stubs = {
        "Stream": lambda device: OneStream(log, next(names)),
        "Event": lambda enable_timing: Event(log, enable_timing),
        "current_stream": lambda device: now[-1],
        "stream": enter,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **how: empty(*size, **how))
    streams, index = copy_pipeline.CudaStreams(Device("cpu")), torch.tensor
    pipeline = CopyPipeline(streams, Pins().pool(0))
    pool, host, back = torch.arange(60.0).view(30, 2), torch.zeros(4, 2), torch.zeros(30, 2)
    watch = copy_pipeline.Stopwatch(pipeline)
    pipeline.offload(pool, streams.upload([3, 7, 8, 29]), host)
    assert torch.equal(host, pool[[3, 7, 8, 29]])
    pipeline.reload(host, back, index([1, 2, 3, 4]), on=Stream.SCATTER)
    assert torch.equal(back[1:5], host) and not back[5:].any()
    assert watch.stop() > 0
    ran = []
    for on in Stream:
        streams.run(lambda: ran.append(now[-1].name), on)
    assert ran == ["main", "copy", "scatter"] and now == [main]
    del log[:]
    assert not streams.is_done(streams.record_event(Stream.COPY))
    assert log == [("record", streams._own[Stream.COPY])], "it does not wait"
    del log[:]
    streams.wait_event(streams.record_event(Stream.SCATTER), Stream.STEPS)
    assert [(what, getattr(where, "name", where)) for what, where in log] == [("record", "scatter"), ("wait", "main")]

"""The store gives its memory back and restores its blocks; what holds for states as well is in test_state_slots.py."""

from __future__ import annotations

import gc
import itertools
import mmap
import sys
from pathlib import Path

import pytest
import torch
from store_case import Recorder, block_in, block_out, build_store, cut_pieces, quiet

from megatron_infer.errors import ConfigError
from megatron_infer.memory.host_arena import HostArena, slots_per_chunk
from megatron_infer.memory.regions import choose
from megatron_infer.memory.store_layout import StoreLayout

MIB = 1 << 20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="RSS is read from /proc")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]


def make_store(num_blocks=12, *, dtype=torch.float32, device="cpu", static=False, unified=False, slots=0, head_dim=8):
    layout = StoreLayout(kv_shape=(3, 2, num_blocks, 4, 2, head_dim), dtype=dtype)
    return build_store(layout, device=device, static=static, unified=unified, host_slots=(slots, 0))


def fill(store, seed=0):
    """Random content in every block but the dummy -> a copy of it all."""
    generator = torch.Generator().manual_seed(seed)
    cache = store.kv_cache
    cache.copy_(torch.randn(cache.shape, generator=generator).to(cache.dtype))
    cache[:, :, store.layout.dummy_block] = 0
    return cache.clone()


def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture
def small_pieces(monkeypatch):
    """Chunks and pieces of three of `make_store`'s fp32 blocks, so that small tests cross their borders."""
    cut_pieces(monkeypatch, 3 * 3 * 2 * 4 * 2 * 8 * 4)


@LINUX
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("held", [False, True], ids=["", "held"])
def test_memory_is_back_before_release_returns(static, held):
    store = make_store(256, static=static, head_dim=2048 * 4)  # 1.5 MiB a block
    size = store.layout.num_bytes
    assert size == 384 * MIB and store.resident_bytes() < 2 * store.layout.block_bytes  # untouched pages cost nothing
    store.kv_cache[:, :, :170].fill_(1.0)
    touched = 170 * store.layout.block_bytes
    assert store.resident_bytes() == pytest.approx(touched, rel=0.02)
    holder = store.kv_cache if held else None  # a step's batch may still look at it

    full = rss()
    report = store.release(quiet)
    assert full - rss() > 0.95 * touched
    assert report.bytes_freed == pytest.approx(touched, rel=0.02)
    assert store.resident_bytes() == 0
    assert holder is None or not holder[0, 0, 5].any()

    store.restore(set(), quiet)
    store.kv_cache[:, :, :170].fill_(2.0)
    assert rss() > full - 0.05 * touched

    away = store.offload(list(range(20)), quiet)  # the host copy is in the same memory and is counted
    copied = 20 * store.layout.block_bytes
    assert full - rss() > 0.95 * (touched - copied) - 4 * MIB
    assert store.host_bytes() == pytest.approx(copied, rel=0.05)
    assert away.bytes_freed == pytest.approx(touched - copied, rel=0.02)
    back = store.restore(set(range(20)), quiet)
    assert store.host_bytes() == 0
    assert back.bytes_freed == pytest.approx(0, abs=0.1 * copied)  # the host copy became the pool again
    assert (store.kv_cache[:, :, :20] == 2.0).all()


@pytest.mark.long
@LINUX
@pytest.mark.parametrize("static", [False, True])
def test_cycles_do_not_grow_memory(static):
    store = make_store(256, static=static, head_dim=128, slots=64)  # 24 KiB a block

    def cycle(i):
        store.kv_cache.fill_(i)
        store.run_copies([block_out(block, block) for block in range(64)])
        store.offload(list(range(128)), quiet) if i % 2 else store.release(quiet)
        store.restore(set(range(0, 128, 2)) if i % 2 else set(), quiet)
        store.free_host_slots(range(64))

    for i in range(20):
        cycle(i)
    gc.collect()
    mappings, taken = num_mappings(), [rss()]
    for i in range(210):
        cycle(i)
        if i % 70 == 69:
            gc.collect()
            taken.append(rss())
    # what else this process holds may grow once; a cycle that keeps a block keeps 1.6 MiB in each of the three
    assert min(after - before for before, after in itertools.pairwise(taken)) < MIB, taken
    assert num_mappings() - mappings < 20


def num_mappings():
    return len(Path("/proc/self/maps").read_text().splitlines())


BLOCKS = [8, 1, 5, 6, 0, 3, 10, 2]  # five pieces: nine rows of a layer to a chunk


@pytest.mark.parametrize("static", [False, True])
def test_release_that_fails_changes_nothing(static):
    store = make_store(static=static)
    before = fill(store)
    with pytest.raises(TimeoutError):
        store.release(Recorder(0))
    assert not store.is_released and torch.equal(store.kv_cache, before)


def test_no_memory_at_restore_leaves_it_released(monkeypatch):
    store = make_store()
    before = fill(store)
    store.offload([1, 2], quiet)
    with monkeypatch.context() as patch:
        patch.setattr(choose.mmap, "mmap", _no_memory)
        with pytest.raises(MemoryError, match="the system gives no"):
            store.restore({1, 2}, quiet)
        assert store.is_released
    store.restore({1, 2}, quiet)
    assert torch.equal(store.kv_cache[:, :, [1, 2]], before[:, :, [1, 2]])


def test_no_host_memory_at_offload_leaves_the_pool(monkeypatch, small_pieces):
    store = make_store()
    before, calls = fill(store), []

    def second_fails(*args, **kwargs):
        calls.append(args)
        return _no_memory() if len(calls) == 2 else mapping(*args, **kwargs)

    mapping = mmap.mmap
    with monkeypatch.context() as patch:
        patch.setattr(choose.mmap, "mmap", second_fails)
        with pytest.raises(MemoryError):
            store.offload(BLOCKS, quiet)
    assert not store.is_released and torch.equal(store.kv_cache, before) and store.host_bytes() == 0


def _no_memory(*args, **kwargs):
    raise OSError(12, "Cannot allocate memory")


@LINUX
def test_chunks_go_back_when_their_last_slot_is_freed():
    store = make_store(100, slots=96, head_dim=2048 * 4)  # 1.5 MiB a block, 42 slots a chunk
    store.kv_cache[:, :, :96].fill_(3.0)
    start = rss()
    store.run_copies([block_out(block, block) for block in range(96)])
    assert store.host_bytes() == pytest.approx(96 * store.layout.block_bytes, rel=0.01)
    assert rss() - start > 0.95 * store.host_bytes()
    store.free_host_slots(range(1, 84))
    assert store.host_bytes() == pytest.approx((42 + 12) * store.layout.block_bytes, rel=0.01)  # slot 0 holds its chunk
    store.kv_cache[:, :, 50].zero_()
    store.run_copies([block_in(0, 50), block_in(95, 51)])
    assert (store.kv_cache[:, :, 50:52] == 3.0).all()
    store.free_host_slots(range(96))
    assert store.host_bytes() == 0
    assert rss() - start < 4 * MIB


@pytest.mark.parametrize(
    "slot_bytes, expected", [(MIB, 64), (40 * MIB, 3), (83 * MIB, 3), (3000 * MIB, 1), (7, 9586980)]
)
def test_chunks_waste_little_of_a_power_of_two(slot_bytes, expected):
    assert slots_per_chunk(slot_bytes) == expected


def test_last_chunk_is_no_larger_than_its_slots():
    arena = HostArena((1024,), torch.float32, max_slots=3)
    pool = torch.arange(4 * 1024.0).view(4, 1024)
    arena.offload([0, 1, 2], pool, [3, 2, 1])
    assert arena.resident_bytes() == 3 * 4096
    back = torch.zeros_like(pool)
    arena.reload([2, 0], back, [0, 1])
    assert torch.equal(back[:2], pool[[1, 3]])


def test_static_pointers_are_refused_where_pages_cannot_be_discarded(monkeypatch):
    monkeypatch.setattr(choose, "DISCARDS_PAGES", False)
    with pytest.raises(ConfigError, match="set static_kv_memory_pointers=False"):
        make_store(static=True)
    store = make_store(slots=2)  # unmapping does it there
    before = fill(store)
    store.run_copies([block_out(0, 0)])
    store.offload([1, 2], quiet)
    assert store.resident_bytes() == 0
    store.restore({1, 2}, quiet)
    assert torch.equal(store.kv_cache[:, :, [1, 2]], before[:, :, [1, 2]])
    assert not store.kv_cache[:, :, 0].any()

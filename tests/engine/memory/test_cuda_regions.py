"""Each kind of device memory, as the driver counts it: released memory is free before the call returns."""

from __future__ import annotations

import pytest
import torch
from store_case import block_in, block_out, copy_block

from megatron_infer.memory.copy_pipeline import Stream, make_pipeline
from megatron_infer.memory.regions import managed
from megatron_infer.memory.regions.choose import make_region, table
from megatron_infer.memory.store import CacheStore
from megatron_infer.memory.store_layout import StoreLayout

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MIB = 1 << 20
SIZE = 600 * MIB
SLACK = 32 * MIB
"""Bytes of other uses: kernels that are loaded at their first use, and pages of several sizes."""
PLAIN, UNIFIED = (False, False), (False, True)
STATIC = (True, False)
"""Skipped where torch_memory_saver is not installed."""


def region_of(kind, num_bytes=SIZE):
    if kind is STATIC:
        pytest.importorskip("torch_memory_saver")
    return make_region((num_bytes,), torch.uint8, CUDA, static_pointers=kind[0], unified_memory=kind[1])


def free():
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def make_store(kind, num_blocks=256, slots=0):
    layout = StoreLayout(kv_shape=(3, 2, num_blocks, 16, 8, 1024), dtype=torch.bfloat16)
    return CacheStore(layout, region_of(kind, layout.num_bytes), (slots, 0))


def quiet(what):
    pass


@pytest.mark.parametrize("kind", [PLAIN, STATIC])
def test_released_memory_is_free_for_others_and_comes_back(kind):
    before = free()
    region = region_of(kind)
    region.tensor.fill_(7)
    full = free()
    assert before - full == pytest.approx(SIZE, abs=SLACK)
    for _ in range(3):
        region.release()
        assert free() - full == pytest.approx(SIZE, abs=SLACK)
        assert region.resident_bytes() == 0
        other = torch.empty(SIZE - SLACK, dtype=torch.uint8, device=CUDA)
        del other
        region.restore()
        region.tensor.fill_(8)
        assert int(region.tensor[SIZE // 2]) == 8
        assert abs(free() - full) <= SLACK
    del region
    assert abs(free() - before) <= SLACK


def test_static_memory_keeps_its_addresses():
    region = region_of(STATIC)
    assert type(region).__name__ == dict(row[:2] for row in table(CUDA))["static pointers"] == "SaverRegion"
    tensor, address = region.tensor, region.tensor.data_ptr()
    region.release()
    blocker = torch.empty(SIZE, dtype=torch.uint8, device=CUDA)  # gets none of the reserved addresses
    assert not address <= blocker.data_ptr() < address + SIZE
    region.restore()
    assert region.tensor is tensor and tensor.data_ptr() == address
    host = torch.arange(SIZE, dtype=torch.uint8).pin_memory()
    tensor.copy_(host, non_blocking=True)
    assert torch.equal(tensor.cpu(), host), "host copies work on such memory"


def test_graph_captured_before_a_release_writes_to_the_memory_after_it():
    region = region_of(STATIC, 64 * MIB)
    cell, value = region.tensor[:1024].view(torch.float32), torch.zeros(256, device=CUDA)
    cell.copy_(value)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cell.add_(value)
        cell.mul_(2)
    for _ in range(3):
        region.release()
        region.restore()
        cell.fill_(1)
        value.fill_(4)
        graph.replay()
        torch.cuda.synchronize()
        assert (cell == 10).all()


def test_more_than_there_is_leaves_nothing_behind():
    before = free()
    with pytest.raises(torch.OutOfMemoryError):
        region_of(STATIC, before + 1024 * MIB)
    assert abs(free() - before) <= SLACK
    region = region_of(STATIC)
    region.release()
    blocker = torch.empty(free() - SIZE // 2, dtype=torch.uint8, device=CUDA)
    with pytest.raises(torch.OutOfMemoryError, match="try again"):
        region.restore()
    assert region.resident_bytes() == 0
    del blocker
    region.restore()


def test_unified_memory_keeps_content_while_its_pages_may_migrate():
    if (reason := managed.unavailable(CUDA)) is not None:
        pytest.skip(reason)
    if free() < 4 * SIZE:  # more than is free makes pages move without end, which can hang a device
        pytest.skip(f"fewer than {4 * SIZE:,} bytes of the device are free")
    region = region_of(UNIFIED)
    address = region.tensor.data_ptr()
    region.tensor.fill_(3)
    region.allow_migration()
    assert region.prefetch([(0, SIZE)]) == SIZE
    assert int(region.tensor.sum(dtype=torch.int64)) == 3 * SIZE and region.tensor.data_ptr() == address
    region.release()
    region.restore()
    region.tensor.fill_(4)
    assert int(region.tensor[-1]) == 4 and region.tensor.data_ptr() == address


@pytest.mark.parametrize("kind", [PLAIN, STATIC])
def test_offload_frees_the_pool_and_brings_back_what_was_kept(kind):
    store = make_store(kind)
    store.kv_cache.normal_()
    kept = [*range(0, 200, 3), 201, 202]
    content, address = store.kv_cache[:, :, kept].clone(), store.kv_cache.data_ptr()
    full = free()
    away = store.offload(kept, quiet)
    assert free() - full >= store.layout.num_bytes - SLACK and away.bytes_freed == store.layout.num_bytes
    back = store.restore(set(kept), quiet)
    assert torch.equal(store.kv_cache[:, :, kept], content)
    assert not store.kv_cache[:, :, store.layout.dummy_block].any()
    assert 0 < away.copy_s <= away.seconds and copy_seconds(store) > 0 and back.bytes_copied == away.bytes_copied
    assert not store.addresses_stable or store.kv_cache.data_ptr() == address


def copy_seconds(store):
    """Seconds that the copies of a restore took, after waiting for them."""
    torch.cuda.synchronize()
    assert store.pending_restore() is None
    return store.restore_copy_s


def test_second_offload_pins_nothing():
    store = make_store(PLAIN)
    for _ in range(2):
        store.offload(range(100), quiet)
        pinned = store.host_bytes()
        store.restore(set(range(100)), quiet)
        copy_seconds(store)
    assert store.idle_host_bytes() == pinned
    store._pipeline.pinned._pin = None  # type: ignore[assignment]
    store.offload(range(100), quiet)
    store.restore(set(range(100)), quiet)


def test_swaps_in_a_step_wait_for_nothing():
    store = make_store(PLAIN, slots=64)
    store.kv_cache.normal_()
    before = store.kv_cache.clone()
    store.run_copies([block_out(block, block) for block in range(64)])
    torch.cuda.synchronize()
    store._pipeline.pinned._pin = None  # type: ignore[assignment]
    torch.cuda.set_sync_debug_mode("error")
    try:
        store.run_copies([block_out(block, block) for block in range(64)] + [block_in(i, 100 + i) for i in range(64)])
        store.run_copies([copy_block(1, 200), copy_block(2, 201)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(store.kv_cache[:, :, 100:164], before[:, :, :64])
    assert torch.equal(store.kv_cache[:, :, 200:202], before[:, :, 1:3])


def test_two_static_caches_are_released_one_by_one():
    first, second = make_store(STATIC), make_store(STATIC)
    second.kv_cache.normal_()
    before = second.kv_cache.clone()
    first.release(quiet)
    assert torch.equal(second.kv_cache, before)
    second.release(quiet)
    first.restore(set(), quiet)
    second.restore(set(), quiet)


def test_pipelined_copies_come_near_a_plain_pinned_copy():
    """80 % of what one cudaMemcpyAsync of the same size does, out and in; blocks are scattered."""
    size = 2048 * MIB
    store = make_store(PLAIN, num_blocks=size // (3 * 2 * 16 * 8 * 1024 * 2) + 1)
    blocks = list(range(store.layout.num_blocks - 1))[::2] + list(range(1, store.layout.num_blocks - 1))[::2]
    store.offload(blocks, quiet)  # pins
    store.restore(set(blocks), quiet)
    away, back = store.offload(blocks, quiet), store.restore(set(blocks), quiet)
    back_s = copy_seconds(store)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device=CUDA)
    peaks = []
    for target, source in ((host, device), (device, host)):
        target.copy_(source, non_blocking=True)
        streams = make_pipeline(CUDA).streams
        first = streams.record_event(Stream.STEPS)
        target.copy_(source, non_blocking=True)
        peaks.append(size / streams.seconds(first, streams.record_event(Stream.STEPS)))
    assert away.bytes_copied / away.copy_s > 0.8 * peaks[0]
    assert back.bytes_copied / back_s > 0.8 * peaks[1]

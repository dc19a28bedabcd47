"""Memory is given back and taken again at the same addresses, whole or not at all, whichever driver call fails.

Runs on a stand-in of the driver that counts every allocation and whose device memory is host memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal

import fake_cuda
import pytest
import torch
from suspend_case import MODES, make_engine, workload

from megatron_infer.engine import build
from megatron_infer.errors import ConfigError, TransitionFailed
from megatron_infer.memory.regions import choose, vmm
from megatron_infer.memory.store import CacheStore
from megatron_infer.memory.store_layout import StoreLayout
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

pytestmark = pytest.mark.skipif(fake_cuda.COMPILER is None, reason="needs a C compiler")
CPU = torch.device("cpu")
GRAIN = fake_cuda.GRAIN
FAILED = (torch.OutOfMemoryError, RuntimeError, ConfigError)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return fake_cuda.build(tmp_path_factory.mktemp("fake"), 13000)


@pytest.fixture
def fake(library, tmp_path, monkeypatch):
    monkeypatch.setattr(vmm, "CHUNK_BYTES", 2 * GRAIN)
    lib = fake_cuda.load(library, tmp_path)
    yield lib
    lib.fake_fail_at(-1)
    if lib.fake_reserved_bytes():  # a cycle of objects still holds a region
        gc.collect()
    assert (lib.fake_taken_bytes(), lib.fake_reserved_bytes(), lib.fake_num_held_handles()) == (0, 0, 0), "leaked"
    assert lib.fake_last_refusal() == b"", "the driver was asked for something it refuses"


def make_driver(fake):
    driver = vmm.Driver(fake)
    driver.call("cuInit", 0)
    return driver


def make_region(fake, num_bytes=5 * GRAIN - 100):
    return vmm.VmmRegion((num_bytes,), torch.uint8, CPU, driver=make_driver(fake))


def test_address_stays_while_memory_is_gone(fake):
    region = make_region(fake)
    tensor, address = region.tensor, region.tensor.data_ptr()
    assert fake.fake_num_held_handles() == 0, "the mapping alone holds the memory"
    for content in (3, 4):
        tensor.fill_(content)
        assert tensor.sum() == content * tensor.numel()
        assert (region.resident_bytes(), fake.fake_taken_bytes()) == (5 * GRAIN - 100, 5 * GRAIN)
        region.release()
        assert (region.resident_bytes(), fake.fake_taken_bytes()) == (0, 0)
        assert fake.fake_reserved_bytes() == 5 * GRAIN
        region.restore()
        assert region.tensor is tensor and tensor.data_ptr() == address
        assert tensor[7] == 0xA5, "fresh memory"


def test_touching_released_memory_ends_the_process(fake):
    region = make_region(fake)
    region.release()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.memset(region.tensor.data_ptr(), 0, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_memory_outlives_the_region_as_long_as_a_tensor_views_it(fake):
    region = make_region(fake)
    view = region.tensor[100:200]
    del region
    view.fill_(9)
    assert view.sum() == 900 and fake.fake_taken_bytes() == 5 * GRAIN
    del view
    assert fake.fake_reserved_bytes() == 0


def test_construction_that_fails_at_any_call_leaves_nothing(fake):
    driver = make_driver(fake)
    before = fake.fake_num_calls()
    region = vmm.VmmRegion((5 * GRAIN,), torch.uint8, CPU, driver=driver)
    calls = fake.fake_num_calls() - before
    assert calls == 2 + 3 * 3 + 1
    del region
    for k in range(1, calls + 1):
        fake.fake_fail_at(k)
        with pytest.raises(FAILED, match="injected"):
            vmm.VmmRegion((5 * GRAIN,), torch.uint8, CPU, driver=driver)
        assert (fake.fake_taken_bytes(), fake.fake_reserved_bytes(), fake.fake_num_held_handles()) == (0, 0, 0), k


def test_restore_that_fails_at_any_call_leaves_it_released_and_works_when_tried_again(fake):
    region = make_region(fake)
    address = region.tensor.data_ptr()
    for k in range(1, 3 * 3 + 2):
        region.release()
        fake.fake_fail_at(k)
        with pytest.raises(FAILED, match="injected"):
            region.restore()
        assert (region.resident_bytes(), fake.fake_taken_bytes(), fake.fake_num_held_handles()) == (0, 0, 0), k
        region.restore()
        region.tensor.fill_(1)
        assert region.tensor.data_ptr() == address


def test_release_that_fails_keeps_memory_and_content(fake):
    region = make_region(fake)
    region.tensor.fill_(5)
    fake.fake_fail_at(1)
    with pytest.raises(RuntimeError, match="stay where they are"):
        region.release()
    assert region.resident_bytes() == region.tensor.nbytes and (region.tensor == 5).all()
    region.release()


def test_undoing_that_fails_too_is_caught_up_by_the_next_restore(fake, monkeypatch):
    region, driver = make_region(fake), make_driver(fake)
    region.release()
    unmap = driver._calls["cuMemUnmap"]
    monkeypatch.setattr(region._range, "_driver", driver)
    monkeypatch.setitem(driver._calls, "cuMemUnmap", lambda *arguments: 999)
    fake.fake_fail_at(4)  # the second chunk
    with pytest.raises(RuntimeError):
        region.restore()
    assert region.resident_bytes() == fake.fake_taken_bytes() == 2 * GRAIN
    driver._calls["cuMemUnmap"] = unmap
    region.restore()
    region.tensor.fill_(1)
    assert fake.fake_taken_bytes() == 5 * GRAIN


def test_memory_taken_by_another_process_is_an_out_of_memory_error(fake):
    region = make_region(fake)
    region.release()
    fake.fake_set_limit(3 * GRAIN)
    with pytest.raises(torch.OutOfMemoryError, match=r"needs 327,680 bytes of cpu.*out of memory.*try again"):
        region.restore()
    assert fake.fake_taken_bytes() == 0
    fake.fake_set_limit(5 * GRAIN)
    region.restore()
    assert fake.fake_taken_bytes() == 5 * GRAIN


def test_driver_without_virtual_memory_says_so(fake):
    fake.fake_set_supported(0)
    assert "attribute 102" in vmm.unavailable(CPU, make_driver(fake))
    fake.fake_set_supported(1)
    assert vmm.unavailable(CPU, make_driver(fake)) is None
    assert "no CUDA driver" in vmm.unavailable(CPU) or torch.cuda.is_available()


def test_saver_is_used_where_the_driver_lacks_virtual_memory(monkeypatch):
    cuda, made = torch.device("cuda"), []
    monkeypatch.setattr(choose.vmm, "unavailable", lambda device: "old driver")
    monkeypatch.setattr(choose.managed, "unavailable", lambda device: "no pages move")
    monkeypatch.setattr(choose.saver, "unavailable", lambda: None)
    monkeypatch.setattr(choose.saver, "SaverRegion", lambda *arguments: made.append(arguments) or "saver")
    assert choose.make_region((4,), torch.uint8, cuda, static_pointers=True, unified_memory=False) == "saver"
    assert choose.table(cuda) == [
        ("plain", "CudaRegion", ""),
        ("static pointers", "SaverRegion", "old driver"),
        ("unified memory", "CudaRegion", "no pages move"),
    ]
    monkeypatch.setattr(choose.vmm, "unavailable", lambda device: None)
    monkeypatch.setattr(choose.vmm, "VmmRegion", lambda *arguments: "vmm")
    assert choose.make_region((4,), torch.uint8, cuda, static_pointers=True, unified_memory=False) == "vmm"
    assert choose.table(cuda)[1] == ("static pointers", "VmmRegion", "")


# ------------------------------------------------------------------ the store and the engine on it


@pytest.fixture
def on_fake(fake, monkeypatch):
    """Engines keep their caches in the stand-in's memory."""

    def make(shape, dtype, device, **asked):
        return vmm.VmmRegion(shape, dtype, device, driver=make_driver(fake))

    monkeypatch.setattr(build, "make_region", make)
    return fake


def make_store(fake):
    layout = StoreLayout(kv_shape=(3, 2, 60, 16, 2, 32), dtype=torch.float32)
    return CacheStore(layout, vmm.VmmRegion((layout.num_bytes,), torch.uint8, CPU, driver=make_driver(fake)))


def quiet(what):
    pass


def test_every_failing_call_of_a_cycle_is_undone_whole(fake):
    store = make_store(fake)
    store.kv_cache.normal_()
    store.kv_cache[:, :, store.layout.dummy_block] = 0
    before, address, kept = store.kv_cache.clone(), store.kv_cache.data_ptr(), [3, 9, 10, 58]
    num_failed = 0
    for k in range(1, 60):
        fake.fake_fail_at(k)
        try:
            store.offload(kept, quiet)
        except RuntimeError:
            num_failed += 1
            assert not store.is_released and torch.equal(store.kv_cache, before) and store.host_bytes() == 0
            store.offload(kept, quiet)
        assert fake.fake_taken_bytes() == store.resident_bytes() == 0
        try:
            store.restore(set(kept), quiet)
        except FAILED:
            num_failed += 1
            assert store.is_released and fake.fake_taken_bytes() == 0
            store.restore(set(kept), quiet)
        fake.fake_fail_at(-1)
        assert store.kv_cache.data_ptr() == address and store.addresses_stable
        assert torch.equal(store.kv_cache[:, :, kept], before[:, :, kept])
        assert not store.kv_cache[:, :, store.layout.dummy_block].any()
        store.kv_cache.copy_(before)
    assert num_failed > 20


@pytest.mark.parametrize("mode", MODES)
def test_engine_draws_the_same_tokens_over_suspends_with_static_memory(mode, on_fake):
    torch.manual_seed(0)
    model = tiny_gpt(vocab_size=128, max_sequence_length=256, init_method_std=0.2)
    work = workload("greedy")[:4]
    prompts, params = [prompt for prompt, _ in work], [how for _, how in work]
    settings = {"buffer_size_gb": 0.004, "max_requests": 4, "static_kv_memory_pointers": True}
    engine = make_engine(model, **settings)
    expected = [out.outputs[0].token_ids for out in engine.generate(prompts, params)]
    for prompt, how in work:
        engine.add_request(prompt, how)
    store, done, steps = inspect(engine).store, {}, 0
    address = store.kv_cache.data_ptr()
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = output.outputs[0].token_ids
        steps += 1
        if steps in (2, 5, 9):
            report = engine.suspend(mode)
            held = inspect(engine).store.layout.num_bytes if mode == "persist" else 0
            assert (on_fake.fake_taken_bytes() >= held) if held else (on_fake.fake_taken_bytes() == 0)
            assert report.tags["kv_cache"].bytes_copied > 0 if mode == "offload" else True
            engine.resume()
            assert store.kv_cache.data_ptr() == address
    assert [done[key] for key in sorted(done)] == expected and steps > 9


def test_suspend_and_resume_that_the_driver_fails_can_be_called_again(on_fake):
    torch.manual_seed(0)
    model = tiny_gpt(vocab_size=128, max_sequence_length=256, init_method_std=0.2)
    prompt, how = workload("greedy")[0]
    engine = make_engine(model, buffer_size_gb=0.004, max_requests=4, static_kv_memory_pointers=True)
    expected = engine.generate([prompt], how)[0].outputs[0].token_ids
    engine.add_request(prompt, how)
    for _ in range(3):
        engine.step()
    on_fake.fake_fail_at(1)
    with pytest.raises(TransitionFailed, match=r"the engine is RUNNING again.*stay where they are"):
        engine.suspend("offload")
    engine.step()
    engine.suspend("offload")
    on_fake.fake_set_limit(2 * GRAIN)  # the trainer still has the rest
    with pytest.raises(TransitionFailed, match=r"the engine is SUSPENDED again.*out of memory"):
        engine.resume()
    assert on_fake.fake_taken_bytes() == 0
    on_fake.fake_set_limit(1 << 40)
    engine.resume()
    done = []
    while engine.has_unfinished():
        done += [output for output in engine.step() if output.finished]
    assert done[0].outputs[0].token_ids == expected

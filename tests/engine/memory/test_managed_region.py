"""Unified memory is advised and bounded as documented, with either runtime's calls, on a stand-in."""

from __future__ import annotations

import logging

import fake_cuda
import pytest
import torch
from engines import make_engine

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.memory import build_store
from megatron_infer.memory.regions import choose, managed
from megatron_infer.testing.inspect import inspect

pytestmark = pytest.mark.skipif(fake_cuda.COMPILER is None, reason="needs a C compiler")
CPU = torch.device("cpu")
MIB = 1 << 20
PREFER, MAY_MIGRATE, ACCESSED = "advise 3", "advise 4", "advise 5"


@pytest.fixture(scope="module", params=fake_cuda.VERSIONS)
def library(request, tmp_path_factory):
    return request.param, fake_cuda.build(tmp_path_factory.mktemp("fake"), request.param)


@pytest.fixture
def fake(library, tmp_path):
    lib = fake_cuda.load(library[1], tmp_path)
    yield lib
    assert lib.fake_last_refusal() == b"" and lib.fake_pending_error() == 0


def journal(fake):
    said = fake.fake_journal().decode().splitlines()
    fake.fake_clear_journal()
    return said


def test_pages_are_preferred_and_allowed_to_migrate(fake, library):
    runtime = managed.Runtime(fake)
    assert runtime.version == library[0]
    region = managed.ManagedRegion((16 * MIB,), torch.uint8, CPU, runtime=runtime)
    address = region.tensor.data_ptr()
    assert journal(fake) == [PREFER, ACCESSED]
    region.tensor[5 * MIB] = 7
    region.allow_migration()
    assert journal(fake) == [MAY_MIGRATE]
    region.end_migration()
    assert journal(fake) == [PREFER]
    assert region.tensor[5 * MIB] == 7 and region.tensor.data_ptr() == address
    region.release()
    assert journal(fake) == [MAY_MIGRATE]
    region.restore()
    assert journal(fake) == [PREFER]
    assert region.tensor.data_ptr() == address and region.addresses_stable
    del region
    assert fake.fake_managed_bytes() == 0


def test_refused_hints_are_logged_and_nothing_fails(fake, caplog):
    region = managed.ManagedRegion((MIB,), torch.uint8, CPU, runtime=managed.Runtime(fake))
    fake.fake_fail_at(1)
    with caplog.at_level(logging.WARNING, "megatron_infer"):
        region.end_migration()
    assert "cudaMemAdvise(3) gave CUDA error 999" in caplog.text
    assert fake.fake_pending_error() == 0, "torch's next call would report it"


def test_no_memory_is_an_out_of_memory_error(fake):
    fake.fake_set_limit(MIB)
    with pytest.raises(torch.OutOfMemoryError, match="no 2,097,152 bytes of unified memory"):
        managed.ManagedRegion((2 * MIB,), torch.uint8, CPU, runtime=managed.Runtime(fake))


@pytest.mark.parametrize(
    "has, why", [((0, 0), "ManagedMemory is 0"), ((1, 0), "ConcurrentManagedAccess is 0"), ((1, 1), None)]
)
def test_device_that_cannot_move_pages_says_so(has, why, fake):
    fake.fake_set_managed(*has)
    reason = managed.unavailable(CPU, managed.Runtime(fake))
    assert reason is None if why is None else why in reason


def test_plain_memory_with_a_warning_where_there_is_no_unified_memory(monkeypatch, caplog):
    monkeypatch.setattr(choose.managed, "unavailable", lambda device: "cuda has none")
    monkeypatch.setattr(choose, "CudaRegion", lambda *arguments: "plain")
    with caplog.at_level(logging.WARNING, "megatron_infer"):
        made = choose.make_region((4,), torch.uint8, torch.device("cuda"), static_pointers=False, unified_memory=True)
    assert made == "plain"
    assert "unified_memory_level=1: cuda has none; the cache takes plain device memory" in caplog.text


def test_no_more_than_the_paused_buffer_lies_beyond_the_device():
    managed.check_room(100, free=100, spill_bytes=0, host_free=0)
    managed.check_room(150, free=100, spill_bytes=50, host_free=50)
    with pytest.raises(torch.OutOfMemoryError, match=r"100 of the device are free and only 49 \(paused_buffer"):
        managed.check_room(150, free=100, spill_bytes=49, host_free=500)
    with pytest.raises(torch.OutOfMemoryError, match="the host has 40 to spare"):
        managed.check_room(150, free=100, spill_bytes=50, host_free=40)


def test_persist_lets_pages_migrate_and_resume_ends_that(model, fake, monkeypatch):
    runtime = managed.Runtime(fake)
    monkeypatch.setattr(
        build_store,
        "make_region",
        lambda shape, dtype, device, **asked: managed.ManagedRegion(shape, dtype, device, runtime=runtime),
    )
    engine = make_engine(model, max_requests=4)
    engine.add_request(list(range(5, 50)), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    for _ in range(4):
        engine.step()
    journal(fake)
    engine.suspend("persist")
    assert journal(fake) == [MAY_MIGRATE]
    engine.resume()
    assert journal(fake) == [PREFER]

    def refuse(what):
        raise TimeoutError(what)

    engine.lifecycle.observers.append(refuse)
    with pytest.raises(Exception, match="suspend"):
        engine.suspend("persist")
    engine.lifecycle.observers.remove(refuse)
    assert journal(fake) == [], "what fails before pages may migrate changes no advice"
    engine.suspend("recompute")
    assert MAY_MIGRATE in journal(fake)
    engine.resume()
    assert len(inspect(engine).scheduler.waiting) + inspect(engine).scheduler.num_running == 1

"""Memory is given back and taken again at the same addresses, by a stand-in of torch_memory_saver."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import fake_saver
import pytest
import torch
from engines import finish, make_engine, run, submit, tokens_of
from suspend_case import MODES, workload

from megatron_infer.errors import ConfigError, TransitionFailed
from megatron_infer.kernels import optional_packages
from megatron_infer.memory import build_store
from megatron_infer.memory.regions import choose, saver
from megatron_infer.testing.inspect import inspect

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MIB = 1 << 20
SIZE = 3 * MIB - 100


@pytest.fixture
def fake(monkeypatch):
    found, module = fake_saver.Saver(limit=64 * MIB), ModuleType("torch_memory_saver")
    module.torch_memory_saver, module.__version__ = found, "0.0.10"
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    monkeypatch.setattr(saver, "missing", optional_packages.missing.__wrapped__)  # without its cache
    monkeypatch.setattr(saver, "MARGIN_BYTES", MIB)
    monkeypatch.setattr(saver, "free_bytes", lambda device: found.free_bytes)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return found


def make_region(num_bytes=SIZE):
    return saver.SaverRegion((num_bytes,), torch.uint8, CPU)


def test_address_stays_while_memory_is_gone(fake):
    region = make_region()
    tensor, address, before = region.tensor, region.tensor.data_ptr(), fake.free_bytes
    for content in (3, 4):
        tensor.fill_(content)
        assert region.resident_bytes() == SIZE
        region.release()
        assert (region.resident_bytes(), fake.free_bytes) == (0, before + SIZE)
        region.restore()
        assert region.tensor is tensor and tensor.data_ptr() == address and tensor[7] == 0xA5, "fresh memory"


def test_touching_released_memory_ends_the_process(fake):
    region = make_region()
    region.release()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.memset(region.tensor.data_ptr(), 0, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_memory_that_is_not_there_is_an_error_and_never_asked_for(fake):
    """The package would end the process, also where the region is made."""
    with pytest.raises(torch.OutOfMemoryError, match=r"needs 67,108,864 bytes of cpu .*lower buffer_size_gb"):
        make_region(64 * MIB)
    region = make_region()
    region.release()
    fake.limit = 2 * MIB
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="free memory there and try again"):
            region.restore()
        assert region.resident_bytes() == 0
    fake.limit = 64 * MIB
    region.restore()
    region.tensor.fill_(1)


def test_regions_are_released_one_by_one_and_a_dropped_one_gives_its_memory_back(fake):
    first, second = make_region(), make_region()
    second.tensor.fill_(5)
    first.release()
    assert (second.tensor == 5).all()
    second.release()
    first.restore()
    second.restore()
    before = fake.free_bytes
    del first
    assert fake.free_bytes == before + SIZE
    second.release()
    del second  # released already: pausing it again would end the process
    assert fake.free_bytes == 64 * MIB


def test_a_saver_that_was_set_up_before_keeps_its_mode_and_one_that_does_not_work_is_refused(fake, monkeypatch):
    fake.hook_mode = "torch"
    fake._ensure_initialized()
    make_region()
    broken = fake_saver.Saver(limit=64 * MIB)
    monkeypatch.setattr(sys.modules["torch_memory_saver"], "torch_memory_saver", broken)
    monkeypatch.setattr(saver, "free_bytes", lambda device: 64 * MIB)
    monkeypatch.setenv("LD_PRELOAD", "/lib/torch_memory_saver_hook_mode_preload.so")
    with pytest.raises(ConfigError, match=r"does not work here .*invalid LD_PRELOAD.*unified_memory_level=1"):
        make_region()


def test_what_lacks_is_named_with_its_remedy(fake, monkeypatch):
    monkeypatch.setattr(choose.managed, "unavailable", lambda device: "no pages move")
    assert choose.table(CUDA) == [
        ("plain", "CudaRegion", ""),
        ("static pointers", "SaverRegion", ""),
        ("unified memory", "CudaRegion", "no pages move"),
    ]
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    reason = "torch-memory-saver is not installed; pip install torch-memory-saver"
    assert choose.table(CUDA)[1] == ("static pointers", "not available", reason)
    with pytest.raises(ConfigError, match=f"{reason}, or set static_kv_memory_pointers=False"):
        choose.make_region((2, 2), torch.float32, CUDA, static_pointers=True, unified_memory=False)


ENDS = """
import os, sys, types, torch
sys.path.insert(0, {folder!r})
import fake_saver
from megatron_infer.memory.regions import saver

class Saver(fake_saver.Saver):
    def __del__(self):
        os._exit(3)

module = sys.modules["torch_memory_saver"] = types.ModuleType("torch_memory_saver")
module.torch_memory_saver, module.__version__ = Saver(limit=1 << 28), "0.0.10"
saver.free_bytes = lambda device: 1 << 28
region = saver.SaverRegion((100,), torch.uint8, torch.device("cpu"))
region.release()
del region, module, sys.modules["torch_memory_saver"]
"""


@pytest.mark.long
def test_the_saver_outlives_the_interpreter():
    """Where it is collected the package ends the process with an error."""
    command = [sys.executable, "-c", ENDS.format(folder=str(Path(__file__).parent))]
    assert subprocess.run(command, check=False).returncode == 0


# ------------------------------------------------------------------ the engine on it


@pytest.fixture
def engine(model, fake, monkeypatch):
    """An engine whose cache is in the stand-in's memory, and the answers to its work."""
    monkeypatch.setattr(
        build_store, "make_region", lambda shape, dtype, device, **asked: make_saver_region(shape, dtype)
    )
    return make_engine(model, buffer_size_gb=0.004, max_requests=4, static_kv_memory_pointers=True)


def make_saver_region(shape, dtype):
    return saver.SaverRegion(shape, dtype, CPU)


def test_tokens_are_the_same_over_suspends_in_every_mode(engine, fake):
    work = workload("greedy")[:4]
    expected = tokens_of(run(engine, work))
    store = inspect(engine).store
    address, held = store.kv_cache.data_ptr(), fake.limit - fake.free_bytes
    for mode in MODES:
        first = engine.num_steps

        def suspend(engine, mode=mode, first=first):
            if engine.num_steps - first in (2, 5, 9):
                report = engine.suspend(mode)
                assert fake.limit - fake.free_bytes == (held if mode == "persist" else 0)
                assert report.tags["kv_cache"].bytes_copied > 0 if mode == "offload" else True
                engine.resume()
                assert store.kv_cache.data_ptr() == address

        assert tokens_of(run(engine, work, suspend)) == expected and engine.num_steps - first > 9


def test_a_resume_without_memory_can_be_called_again(engine, fake):
    prompt, how = workload("greedy")[0]
    expected = engine.generate([prompt], how)[0].outputs[0].token_ids
    submit(engine, [(prompt, how)])
    for _ in range(3):
        engine.step()
    engine.suspend("offload")
    fake.limit = MIB  # the trainer still has the rest
    with pytest.raises(TransitionFailed, match=r"the engine is SUSPENDED again.*free memory there and try again"):
        engine.resume()
    fake.limit = 64 * MIB
    engine.resume()
    assert tokens_of(finish(engine).values()) == [expected]

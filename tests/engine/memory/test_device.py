"""Copies between host and device transfer the content of the time of the call, however late the device runs them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from late_device import MAIN, LateDevice, LateGpu

from megatron_infer.errors import ConfigError
from megatron_infer.memory.device import Device
from megatron_infer.memory.regions import pinned


@pytest.fixture
def gpu(monkeypatch) -> LateGpu:
    return LateGpu(monkeypatch)


@pytest.fixture
def device(gpu) -> LateDevice:
    """Takes the path of a GPU; copies run in order, when the test lets them."""
    return LateDevice(gpu)


def test_copies_transfer_the_content_of_the_time_of_the_call(gpu, device):
    rng = random.Random(0)
    mirror, host = torch.zeros(1000, dtype=torch.uint8), np.zeros(1000, dtype=np.uint8)
    uploaded, reads = [], []
    for turn in range(600):
        count = rng.randint(1, 1000)
        if rng.random() < 0.4:
            host[:count] = turn % 251
            device.upload(host[:count], mirror[:count])
            expected = host[:count].copy()
            reads.append((device.begin_read(mirror[:count]), [expected]))
            host[:] = 255
        elif rng.random() < 0.5:
            array = np.arange(turn, turn + count, dtype=np.int64)
            tensor = device.to_device(array)
            uploaded.append((tensor, array.copy()))
            array[:] = -1
        elif reads and rng.random() < 0.5:
            read, expected = reads.pop(rng.randrange(len(reads)))
            assert all(np.array_equal(got.numpy(), want) for got, want in zip(read.wait(), expected, strict=True))
        else:
            gpu.reach(MAIN, min(gpu.done[MAIN] + rng.randint(0, 6), gpu.enqueued[MAIN]))
    gpu.flush()
    assert all(np.array_equal(tensor.numpy(), array) for tensor, array in uploaded)
    for read, expected in reads:
        assert all(np.array_equal(got.numpy(), want) for got, want in zip(read.wait(), expected, strict=True))
    assert not device.syncs["upload"]


def test_a_device_that_keeps_up_needs_two_buffers_only(gpu, device):
    target, made, pin = torch.zeros(100, dtype=torch.uint8), [], device.pinned._pin
    device.pinned._pin = lambda num_bytes: made.append(num_bytes) or pin(num_bytes)
    for turn in range(50):
        device.upload(np.full(100, turn, dtype=np.uint8), target)
        read = device.begin_read(target, target[:3])
        gpu.flush()
        assert read.wait()[1].tolist() == [turn] * 3
    assert len(made) == 2


def test_a_read_tensor_is_not_overwritten_by_later_reads(device):
    source = torch.arange(8)
    first = device.begin_read(source).wait()[0]
    assert device.begin_read(source + 1).wait()[0].tolist() == list(range(1, 9))
    assert first.tolist() == list(range(8))


def test_a_host_far_ahead_waits_for_the_oldest_upload(gpu, device, monkeypatch):
    monkeypatch.setattr(pinned, "MAX_RETIRED_BYTES", 4 * pinned.SMALLEST_BYTES)
    target = torch.zeros(100, dtype=torch.uint8)
    for _ in range(10):
        device.upload(np.zeros(100, dtype=np.uint8), target)
    assert device.syncs["upload"] == gpu.done[MAIN] == 6


@pytest.mark.parametrize("is_late", [False, True], ids=["cpu", "late"])
def test_a_wait_is_counted_once_and_reading_nothing_is_none(gpu, is_late):
    device = LateDevice(gpu) if is_late else Device("cpu")
    read = device.begin_read(torch.ones(2), torch.zeros(0), torch.tensor(7))
    assert [part.tolist() for part in read.wait()] == [[1.0, 1.0], [], 7]
    assert read.wait() and read.is_done() and device.syncs == {"read": 1}
    nothing = device.begin_read()
    assert nothing.is_done() and nothing.wait() == () and device.syncs == {"read": 1}


@pytest.fixture
def second_of_two_gpus(monkeypatch):
    """torch as it is in a thread whose device is cuda:1 -> streams that events were recorded on."""
    recorded = []

    class Stamp:
        def record(self, stream=None) -> None:
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "Event", Stamp)
    return recorded


def test_a_missing_device_is_refused_and_the_devices_there_are_named(second_of_two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for ask in (Device("cuda:2").available_bytes, Device("cuda:2").make_current):
        with pytest.raises(ConfigError, match="cuda:2: there are 2 GPUs here, cuda:0 to cuda:1"):
            ask()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="finds no GPU here"):
        Device("cuda").available_bytes()
    with pytest.raises(ConfigError, match="device 'tpu' is not one: auto, cpu, cuda or cuda:N"):
        Device("tpu")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_without_a_number_is_that_of_the_calling_thread(second_of_two_gpus, name):
    assert Device(name).torch == torch.device("cuda", 1)
    assert Device("cuda:3").torch == torch.device("cuda", 3)


def test_events_are_recorded_on_a_stream_of_their_own_device(second_of_two_gpus):
    Device("cuda:3").event("read").record()
    assert second_of_two_gpus == ["stream of cuda:3"]


@pytest.mark.gpu
def test_copies_on_a_gpu_transfer_the_content_of_the_call_and_do_not_wait():
    device = Device("cuda")
    mirror = device.device_buffer(1 << 20)
    host = np.zeros(1 << 20, dtype=np.uint8)
    torch.cuda.set_sync_debug_mode("error")
    try:
        reads = []
        for turn in range(40):
            torch.cuda._sleep(2_000_000)  # the device is behind
            host[:] = turn
            device.upload(host, mirror)
            host[:] = 255
            reads.append((turn, device.begin_read(mirror[::4096], device.to_device(np.full(5, turn)))))
        assert not reads[-1][1].is_done() and not device.syncs["upload"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for turn, read in reads:
        sample, uploaded = read.wait()
        assert (sample == turn).all() and uploaded.tolist() == [turn] * 5


@pytest.mark.parametrize("has_bf16", [False, True])
def test_the_dtype_is_bfloat16_where_what_multiplies_is_fast_in_it(has_bf16, monkeypatch):
    from megatron_infer.kernels.native import native_build
    from megatron_infer.memory import device
    from megatron_infer.pipelines.machine import Machine

    cpu, half = Device("cpu"), torch.bfloat16
    machine = Machine(device="cpu", is_cuda=False, free_bytes=1)
    for place in ("megatron_infer.memory.device", "megatron_infer.pipelines.machine"):
        monkeypatch.setattr(f"{place}.cpu_has_bf16", lambda: has_bf16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16, raising=False)
    plain = half if has_bf16 else torch.float32
    monkeypatch.delenv(native_build.BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(native_build, "find_compiler", lambda: "/usr/bin/c++")
    for backend, wanted in (("auto", half), ("native", half), ("vendor", plain)):
        assert device.choose_dtype("auto", cpu, linear_backend=backend) is wanted
        assert machine.dtype("auto", linear_backend=backend) == str(wanted).removeprefix("torch.")
    assert device.choose_dtype("auto", cpu, trains=True) is plain
    for forced, wanted in (("torch", plain), ("native", half)):
        monkeypatch.setenv(native_build.BACKEND_VARIABLE, forced)
        assert device.choose_dtype("auto", cpu) is wanted

    def none() -> str:
        raise native_build.NativeUnavailable("no C++ compiler")

    monkeypatch.setattr(native_build, "find_compiler", none)
    assert device.choose_dtype("auto", cpu) is plain
    assert machine.dtype("auto", linear_backend="auto") == str(plain).removeprefix("torch.")
    assert device.choose_dtype("float32", cpu) is torch.float32

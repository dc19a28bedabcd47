"""What a device can do at most, measured in the run that is held against it, and how time is taken on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Of one device, in one run."""

    copy_gb_s: float
    """Bytes read and written per second by a copy of a large tensor."""
    matmul_tflop_s: float
    to_host_gb_s: float
    """Device to pinned host memory; on a CPU a copy."""
    from_host_gb_s: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"copy {self.copy_gb_s:,.0f} GB/s, bf16 matmul {self.matmul_tflop_s:,.1f} TFLOP/s, "
            f"to host {self.to_host_gb_s:.1f} GB/s, from host {self.from_host_gb_s:.1f} GB/s"
        )


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(function: Callable[[], Any], device: torch.device, *, rounds: int, warm: int = 2) -> float:
    """Median time of one call, the device's own where it has a clock."""
    for _ in range(warm):
        function()
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        else:
            begun = time.perf_counter()
            function()
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def measure(device: torch.device) -> Ceilings:
    """Copy 2 GiB (a CPU: 16 MiB), multiply 8192^3 in bf16 (a CPU: 256^3)."""
    is_cuda = device.type == "cuda"
    num_bytes, width = (2**31, 8192) if is_cuda else (2**24, 256)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source), device, rounds=20 if is_cuda else 3)
    small = source[: num_bytes // 4]
    host = torch.empty(len(small), dtype=torch.uint8, pin_memory=is_cuda)
    out_s = seconds(lambda: host.copy_(small, non_blocking=True), device, rounds=5)
    in_s = seconds(lambda: small.copy_(host, non_blocking=True), device, rounds=5)
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    matmul_s = seconds(lambda: a @ b, device, rounds=20 if is_cuda else 3)
    return Ceilings(
        copy_gb_s=2 * num_bytes / copy_s / 1e9,
        matmul_tflop_s=2 * width**3 / matmul_s / 1e12,
        to_host_gb_s=num_bytes / 4 / out_s / 1e9,
        from_host_gb_s=num_bytes / 4 / in_s / 1e9,
    )


LAUNCH_GAP_US = 5.0
"""Kernels that follow each other at once, in a graph too, are about a microsecond apart: the device drains and fills. A
gap up to this long is the price of a launch and no wait for the host."""


def waiting(intervals: Iterable[tuple[float, float]], *, least: float) -> tuple[float, float]:
    """(length of the gaps between intervals, which may overlap, that are longer than `least`, of all gaps)."""
    found, of_all = 0.0, 0.0
    end: float | None = None
    for begin, stop in sorted(intervals):
        gap = 0.0 if end is None else max(0.0, begin - end)
        found, of_all = found + (gap if gap > least else 0.0), of_all + gap
        end = stop if end is None else max(end, stop)
    return found, of_all


def idle_share(run: Callable[[], Any], device: torch.device) -> tuple[float, float, int]:
    """While `run` runs, of the time between the first and the last kernel on `device`: (the share in which it waited
    for the host, the share in which no kernel ran, number of kernels).

    It waits for the host in gaps over LAUNCH_GAP_US. A CPU's operators stand in for kernels there.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as trace:
        run()
        wait(device)
    wanted = DeviceType.CUDA if is_cuda else DeviceType.CPU
    spans = [(e.time_range.start, e.time_range.end) for e in trace.events() if e.device_type == wanted]
    if not spans:
        raise RuntimeError("the profiler saw no kernel; is another profiler attached, or CUPTI missing?")
    whole = max(stop for _, stop in spans) - min(begin for begin, _ in spans)
    waited, of_all = waiting(spans, least=LAUNCH_GAP_US)
    return waited / whole, of_all / whole, len(spans)

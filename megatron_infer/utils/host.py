"""The host's memory, CPU and processes, without torch."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LEAST_WATCHED_S = 0.25
"""Shortest span of a `CpuClock` that tells of other processes (seconds)."""


def memory_info() -> dict[str, int]:
    """Bytes by name as /proc/meminfo has them; {} where there is no such file."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}


def free_host_bytes() -> int:
    """Free memory of the host, as the system reports it."""
    free = memory_info().get("MemAvailable")
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) if free is None else free


def cpu_info() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; {} where there is no such file."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def cpu_flags() -> set[str]:
    """Names of the processor's features, as x86 or Arm names them."""
    info = cpu_info()
    return set((info.get("flags") or info.get("Features") or "").split())


def cpu_has_bf16() -> bool:
    """True where the CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX).

    Elsewhere the native kernels are faster in it than in float32, and torch is much slower.
    """
    return not cpu_flags().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def cpu_name() -> str:
    """The processor's model name, or the machine's type where the system has no name."""
    return cpu_info().get("model name") or platform.processor() or platform.machine()


def resident_mib(pid: int) -> float:
    """Resident memory of a process; 0 where the system does not report it."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as numbers:
            return int(numbers.readline().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, ValueError, IndexError):
        return 0.0


def processes_below(pid: int) -> list[int]:
    """A process and all its descendants that still run."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{one}/task").glob("*/children"):
                found += map(int, path.read_text().split())
    return found


@dataclass(frozen=True, slots=True)
class CpuClock:
    """CPU seconds of some processes, and of the cores that this process may use, at a moment."""

    wall: float
    own: float
    cores: float | None

    @classmethod
    def now(cls, pids: Sequence[int] = ()) -> CpuClock:
        """`own` counts this process, and the processes `pids` with their descendants."""
        descendants = sum(_cpu_s(child) for pid in pids for child in processes_below(pid))
        return cls(time.perf_counter(), time.process_time() + descendants, _cores_busy_s())

    def other_load(self, since: CpuClock) -> float | None:
        """Cores that other processes used since then; None where the system does not report it.

        None also for a span shorter than `LEAST_WATCHED_S`: the system counts ticks of 10 ms, and one tick would be a
        load.
        """
        seconds = self.wall - since.wall
        if self.cores is None or since.cores is None or seconds < LEAST_WATCHED_S:
            return None
        return max(0.0, ((self.cores - since.cores) - (self.own - since.own)) / seconds)


def _cores_busy_s() -> float | None:
    try:
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        with open("/proc/stat", encoding="ascii") as lines:
            rows = [line.split() for line in lines if line.partition(" ")[0] in names]
    except (OSError, AttributeError):  # not a Linux
        return None
    # user, nice, system, (idle, iowait,) irq, softirq, steal
    return sum(int(row[column]) for row in rows for column in (1, 2, 3, 6, 7, 8)) / os.sysconf("SC_CLK_TCK")


def _cpu_s(pid: int) -> float:
    """User and system seconds of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

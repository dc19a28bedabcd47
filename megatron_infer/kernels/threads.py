"""The number of CPU threads: the default, and setting it."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def _physical_cores(cpus: set[int], topology: Path) -> int:
    """Distinct cores behind `cpus`; hyperthreads of one core share its vector units and count once."""
    cores = set()
    for cpu in cpus:
        try:
            siblings = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return len(cores)


def _cgroup_cpus(cpu_max: Path) -> int | None:
    """Whole CPUs the container may use, from cgroup v2's quota; None when unlimited or unknown."""
    try:
        quota, period = cpu_max.read_text().split()[:2]
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))


def default_threads(
    *, topology: Path = Path("/sys/devices/system/cpu"), cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")
) -> int:
    """One thread for each physical core that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    if hasattr(os, "sched_getaffinity"):
        cpus = os.sched_getaffinity(0)
    else:
        cpus = set(range(os.cpu_count() or 1))
    cores = _physical_cores(cpus, topology)
    quota = _cgroup_cpus(cpu_max)
    return cores if quota is None else min(cores, quota)


def apply_cpu_settings(num_threads: int | None = None) -> None:
    """Set torch's thread count (None: `default_threads`)."""
    count = default_threads() if num_threads is None else num_threads
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)

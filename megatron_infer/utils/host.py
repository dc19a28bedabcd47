"""The host's memory and CPU, without torch."""

from __future__ import annotations

import os


def free_host_bytes() -> int:
    """Free memory of the host, as the system reports it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the portable figure below
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def cpu_has_bf16() -> bool:
    """True where the CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX).

    Elsewhere the native kernels are faster in it than in float32, and torch is much slower.
    """
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return False
    return any(flag in flags.split() for flag in ("avx512_bf16", "amx_bf16", "bf16"))

"""How idle OpenMP threads wait. `limit_spinning` must run before torch loads: this module imports nothing heavy."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import Any

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPIN_COUNT = 1000
"""Turns that a thread spins between two parallel regions before it sleeps: about 20 us, as between two kernels of a
step.

Decode step of a 135M model on two cores, in ms, idle / with one core busy: 300,000 iterations (libgomp's default)
12 / 885, 1,000 iterations 12 / 25, none 17 / 17.
"""
MOST_FREE = 4
"""With more cores than this for each of torch's threads, spinning threads are left alone: most cores are idle."""
_crowd: threading.Thread | None = None


def limit_spinning() -> bool:
    """Let idle OpenMP threads spin briefly, then sleep, unless the user set a variable -> True where it takes effect.

    A thread that spins on a core which another program needs uses up its time slice, and every parallel region then
    waits for that core. Does nothing once torch is loaded.
    """
    if "torch" in sys.modules or any(name in os.environ for name in VARIABLES):
        return False
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    return True


def crowd_cores() -> bool:
    """The like once torch is loaded, for the rest of the process: idle threads spin 100 turns -> whether they do now.

    While libgomp has more threads than the process has cores, they spin no longer than that (its documentation of
    GOMP_SPINCOUNT). So one thread has a team of its own, as large as that takes, which sleeps for ever. Left alone: a
    torch of one thread, one that leaves most cores free, and other OpenMP runtimes. Without effect: in a process that
    was bound to fewer cores after torch was imported.
    """
    global _crowd
    torch: Any = sys.modules.get("torch")
    path = getattr(getattr(torch, "_C", None), "__file__", None)
    if path is None or _crowd is not None or any(name in os.environ for name in VARIABLES):
        return False
    library, threads = ctypes.CDLL(path), torch.get_num_threads()
    if hasattr(library, "kmp_set_blocktime") or not hasattr(library, "GOMP_parallel"):
        return False
    cores, nothing, done = library.omp_get_num_procs(), library.omp_get_level, threading.Event()
    if threads < 2 or cores > MOST_FREE * threads:
        return False

    def park() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            library.GOMP_parallel(nothing, None, ctypes.c_uint(cores + 1), ctypes.c_uint(0))
        finally:
            done.set()
        threading.Event().wait()

    _crowd = threading.Thread(target=park, name="openmp-crowd", daemon=True)
    _crowd.start()
    done.wait()
    return True

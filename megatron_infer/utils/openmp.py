"""How idle OpenMP threads wait. `limit_spinning` must run before torch loads: this module imports nothing heavy."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPIN_COUNT = 1000
"""Turns that a thread spins between two parallel regions before it sleeps: about 20 us, as between two kernels of a
step.

Decode step of a 135M model on two cores, in ms, idle / with one core busy: 300,000 iterations (libgomp's default)
12 / 885, 1,000 iterations 12 / 25, none 17 / 17.
"""
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
    """The same once torch is loaded, for the rest of the process -> whether this call changed it.

    While libgomp has more threads than the process has cores, idle ones spin 100 turns only (its documentation of
    GOMP_SPINCOUNT). So one thread has a team of its own, with a thread for each core, which sleeps for ever.
    """
    global _crowd
    torch = sys.modules.get("torch")
    if torch is None or _crowd is not None or any(name in os.environ for name in VARIABLES):
        return False
    library = ctypes.CDLL(torch._C.__file__)
    try:
        parallel, cores, nothing = library.GOMP_parallel, library.omp_get_num_procs(), library.omp_get_level
    except AttributeError:  # another runtime
        return False
    if cores < 2:
        return False
    done = threading.Event()

    def park() -> None:
        parallel(nothing, None, ctypes.c_uint(cores), ctypes.c_uint(0))
        done.set()
        threading.Event().wait()

    _crowd = threading.Thread(target=park, name="openmp-crowd", daemon=True)
    _crowd.start()
    done.wait()
    return True

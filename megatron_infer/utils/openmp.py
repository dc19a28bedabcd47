"""How idle OpenMP threads wait. Must be set before torch loads its runtime, so this module imports nothing heavy."""

from __future__ import annotations

import os
import sys

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPIN_COUNT = 1000
"""Turns that a thread spins between two parallel regions before it sleeps: about 20 us, as between two kernels of a
step.

Decode step of a 135M model on two cores, in ms, idle / with one core busy: 300,000 iterations (libgomp's default)
12 / 885, 1,000 iterations 12 / 25, none 17 / 17.
"""


def limit_spinning() -> bool:
    """Let idle OpenMP threads spin briefly, then sleep, unless the user set a variable -> True where it takes effect.

    A thread that spins on a core which another program needs uses up its time slice, and every parallel region then
    waits for that core. Does nothing once torch is loaded.
    """
    if "torch" in sys.modules or any(name in os.environ for name in VARIABLES):
        return False
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    return True

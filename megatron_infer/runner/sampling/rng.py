"""Randomness without state: a draw is a function of (seed, position).

Here it is computed on the host; captured draws and Triton kernels compute the same bits on the device.

Chunking, batching, eviction and overlap change when a token is drawn, never its (seed, position): so they cannot
change the token.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
GAMMA, MIX_FIRST, MIX_SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's; also for draws on a device."""
_CHILD = 0xD1B54A32D192ED03
"""An odd constant unlike GAMMA, so that children's seeds lie on no request's own sequence."""


def mix(x: np.ndarray) -> np.ndarray:
    """Bijective scramble of uint64. Source: SplitMix64's finaliser (Steele, Lea, Flood 2014; Vigna's constants)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_SECOND)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) with 53 random bits for each (uint64 seed, position >= 0).

    Element i of the SplitMix64 sequence that starts at mix(seed): neighbouring seeds start at unrelated states.
    """
    counter = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA)
    drawn: np.ndarray = (mix(mix(seeds) + counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn


def derive_seed(seed: int, child: int) -> int:
    """Seed (0 to 2**64-1) of child `child` of a group; child 0 keeps the group's, so n=4 begins with what n=1 gives."""
    seed &= _MASK
    if child == 0:
        return seed
    state = np.array([seed ^ _CHILD, child], dtype=np.uint64)
    scrambled = mix(state)
    return int(mix(scrambled[:1] + scrambled[1:] * np.uint64(_CHILD))[0])

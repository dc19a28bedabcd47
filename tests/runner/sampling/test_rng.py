"""Draws are a pure, well scrambled function of (seed, position)."""

from __future__ import annotations

import numpy as np

from megatron_infer.runner.sampling.rng import derive_seed, mix, uniform

GAMMA, CHILD = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def chi_square(values: np.ndarray, bins: int) -> float:
    counts = np.bincount((values * bins).astype(int), minlength=bins)
    expected = len(values) / bins
    return float(((counts - expected) ** 2 / expected).sum())


def within(statistic: float, freedom: int) -> bool:
    return abs(statistic - freedom) < 4.5 * (2 * freedom) ** 0.5


def test_mix_gives_the_published_splitmix64_sequence():
    state = np.array([(1234567 + GAMMA * i) % 2**64 for i in range(1, 6)], dtype=np.uint64)
    assert mix(state).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def slow_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_uniform_is_what_python_integers_give():
    for seed in (0, 1, 2**63, 2**64 - 1):
        for position in (0, 1, 77, 2**31 - 1):
            wanted = (slow_mix((slow_mix(seed) + GAMMA * (position + 1)) % 2**64) >> 11) / 2**53
            assert uniform(np.array([seed], dtype=np.uint64), np.array([position], dtype=np.int32))[0] == wanted


def test_uniform_fills_the_unit_interval_along_positions_and_along_seeds():
    along_positions = uniform(np.full(200_000, 5, dtype=np.uint64), np.arange(200_000))
    along_seeds = uniform(np.arange(200_000, dtype=np.uint64), np.full(200_000, 17))
    for values in (along_positions, along_seeds):
        assert values.min() >= 0.0 and values.max() < 1.0
        assert within(chi_square(values, 256), 255)
        pairs = np.floor(values[::2] * 16) * 16 + np.floor(values[1::2] * 16)
        assert within(chi_square(pairs / 256, 256), 255), "neighbours are not independent"
        bits = (values * 2**53).astype(np.uint64)
        for bit in range(53):
            share = float(((bits >> np.uint64(bit)) & np.uint64(1)).mean())
            assert abs(share - 0.5) < 0.006, f"bit {bit} is set in {share:.3f} of the draws"


def test_seeds_that_differ_in_one_bit_give_unrelated_sequences():
    positions = np.arange(20_000)
    base = uniform(np.full(20_000, 42, dtype=np.uint64), positions)
    for bit in range(64):
        other = uniform(np.full(20_000, 42 ^ (1 << bit), dtype=np.uint64), positions)
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.035, f"bit {bit}"


def test_seeds_of_children_are_what_python_integers_give():
    """A change of them would change every seeded sample of a group but the first."""
    for seed in (0, 9, 2**64 - 1):
        for child in (1, 2, 1000):
            wanted = slow_mix((slow_mix(seed ^ CHILD) + slow_mix(child) * CHILD) % 2**64)
            assert derive_seed(seed, child) == wanted


def test_children_have_their_own_seeds_and_the_first_keeps_the_groups():
    assert derive_seed(9, 0) == 9
    assert derive_seed(-1, 0) == 2**64 - 1
    seeds = {derive_seed(seed, child) for seed in range(16) for child in range(512)}
    assert len(seeds) == 16 * 512
    assert all(0 <= seed < 2**64 for seed in seeds)
    draws = uniform(np.array([derive_seed(3, child) for child in range(20_000)], dtype=np.uint64), np.zeros(20_000))
    assert within(chi_square(draws, 64), 63)

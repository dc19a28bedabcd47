"""Typed metrics count right, and refuse what would make them wrong."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_infer.engine.metrics.registry import Histogram, Registry


def test_counter_refuses_to_shrink():
    counter = Registry().counter("tokens", "tokens drawn")
    counter.inc(3)
    for amount in (-1, math.nan):
        with pytest.raises(ValueError, match="only grows"):
            counter.inc(amount)
    assert counter.value == 3


def test_registry_returns_one_series_per_name_and_labels():
    registry = Registry()
    registry.counter("finished", "requests", reason="stop").inc()
    registry.counter("finished", "requests", reason="stop").inc()
    registry.counter("finished", "requests", reason="length").inc()
    (family,) = registry.collect()
    assert {labels: series.value for labels, series in family.series.items()} == {
        (("reason", "stop"),): 2,
        (("reason", "length"),): 1,
    }


def test_registry_refuses_a_name_with_two_kinds_or_two_bucket_sets():
    registry = Registry()
    registry.gauge("x", "")
    with pytest.raises(ValueError, match="x is a gauge, asked for as a counter"):
        registry.counter("x", "")
    registry.histogram("h", "", (1, 2))
    with pytest.raises(ValueError, match="exists with bounds"):
        registry.histogram("h", "", (1, 3))


def test_histogram_bounds_are_inclusive_above():
    histogram = Histogram("h", (1, 2))
    for value in (0.5, 1, 1.5, 2, 99):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == pytest.approx(104)
    with pytest.raises(ValueError, match="NaN"):
        histogram.observe(math.nan)


@pytest.mark.parametrize("bounds", [(), (2, 1), (1, 1), (1, math.inf), (math.nan,)])
def test_histogram_refuses_bounds_that_are_not_increasing_and_finite(bounds):
    with pytest.raises(ValueError, match="bounds"):
        Histogram("h", bounds)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(0, 100))
def test_histogram_quantile_is_within_one_bucket_of_the_true_one(hundredths, percent):
    values, q = [n / 100 for n in hundredths], percent / 100
    bounds = (1, 2, 4, 8, 16)
    histogram = Histogram("h", bounds)
    for value in values:
        histogram.observe(value)
    true = sorted(values)[max(math.ceil(q * len(values)) - 1, 0)]
    upper = next(b for b in bounds if true <= b)
    lower = max([0, *(b for b in bounds if b < upper)])
    assert lower - 1e-9 <= histogram.quantile(q) <= upper + 1e-9

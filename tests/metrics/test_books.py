"""Counts over several lives of who counts: they add up, never go back, and do not grow without bound."""

from __future__ import annotations

from megatron_infer.metrics import monotonic
from megatron_infer.metrics.core import Registry
from megatron_infer.metrics.monotonic import MonotonicCounts
from megatron_infer.metrics.server_meter import ServerMeter

BOUNDS = (1.0, 2.0)


def life(name, count, observed=(), level=0.0):
    registry = Registry()
    registry.counter("c_total", "counts", replica=name).inc(count)
    histogram = registry.histogram("h", "times", BOUNDS, replica=name)
    for value in observed:
        histogram.observe(value)
    registry.gauge("g", "level", replica=name).set(level)
    return list(registry.collect())


def shown(one):
    return {family.name: family.series for family in one.families()}


def test_counts_of_several_lives_add_up():
    one, key = MonotonicCounts(), (("replica", "a"),)
    for born, count, observed in ((1.0, 5, [0.5]), (1.0, 7, [0.5, 3.0]), (2.0, 0, []), (2.0, 4, [1.5]), (3.0, 1, [])):
        one.take("a", born, life("a", count, observed))
        one.set_present(["a"])
    series = shown(one)
    assert series["c_total"][key].value == 7 + 4 + 1
    assert (series["h"][key].counts, series["h"][key].total) == ([1, 1, 1], 5.0)


def test_who_is_gone_keeps_counts_and_loses_gauges():
    one = MonotonicCounts()
    for name in "ab":
        one.take(name, 1.0, life(name, 3, level=2.0))
    one.set_present(["b"])
    series = shown(one)
    assert [dict(key)["replica"] for key in series["c_total"]] == ["a", "b"]
    assert [dict(key)["replica"] for key in series["g"]] == ["b"]
    assert one.sources == {"a": False, "b": True}


def test_a_series_that_a_later_life_has_not_yet_is_not_lost():
    one = MonotonicCounts()
    registry = Registry()
    registry.counter("rare_total", "rare").inc(3)
    one.take("a", 1.0, list(registry.collect()))
    one.take("a", 2.0, life("a", 1))
    one.take("a", 3.0, life("a", 1))
    assert shown(one)["rare_total"][()].value == 3


def test_those_who_are_gone_are_forgotten_beyond_a_limit(monkeypatch):
    monkeypatch.setattr(monotonic, "MAX_GONE", 3)
    one = MonotonicCounts()
    for i in range(10):
        one.take(f"r{i}", 1.0, life(f"r{i}", 1))
    one.set_present(["r0"])
    assert list(one.sources) == ["r0", "r7", "r8", "r9"]


def test_a_coordinator_that_starts_anew_or_is_silent_takes_no_count_back():
    meter = ServerMeter()
    names = ("submitted", "finished", "refused", "resent", "replicas_lost", "fenced", "waiting", "clients")
    seen = []
    for started, submitted in ((1.0, 4), (None, 0), (2.0, 1), (2.0, 3)):
        stats = {**dict.fromkeys(names, 0), "submitted": submitted, "replicas": [], "started": started}
        meter.saw(None if started is None else stats)
        families = {family.name: family.series for family in meter.families()}
        assert families["megatron_infer_coordinator_up"][()].value == (started is not None)
        assert ("megatron_infer_coordinator_waiting" in families) == (started is not None)
        seen.append(families["megatron_infer_coordinator_submitted_total"][()].value)
    assert seen == [4, 4, 5, 7]

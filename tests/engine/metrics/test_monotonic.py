"""Counts over several runs of a source: they add up, never decrease, and the number of sources is bounded."""

from __future__ import annotations

import json

from megatron_infer.engine.metrics import monotonic
from megatron_infer.engine.metrics.monotonic import MonotonicCounts, summed
from megatron_infer.engine.metrics.registry import Registry, families_of, plain_of
from megatron_infer.engine.metrics.server_meter import ServerMeter

BOUNDS = (1.0, 2.0)


def report(name, count, observed=(), level=0.0):
    registry = Registry()
    registry.counter("c_total", "counts", replica=name).inc(count)
    histogram = registry.histogram("h", "times", BOUNDS, replica=name)
    for value in observed:
        histogram.observe(value)
    registry.gauge("g", "level", replica=name).set(level)
    return list(registry.collect())


def shown(one):
    return {family.name: family.series for family in one.families()}


def test_counts_of_several_runs_of_a_source_add_up():
    one, key = MonotonicCounts(), (("replica", "a"),)
    for born, count, observed in ((1.0, 5, [0.5]), (1.0, 7, [0.5, 3.0]), (2.0, 0, []), (2.0, 4, [1.5]), (3.0, 1, [])):
        one.update("a", born, report("a", count, observed))
        one.set_present(["a"])
    series = shown(one)
    assert series["c_total"][key].value == 7 + 4 + 1
    assert (series["h"][key].counts, series["h"][key].total) == ([1, 1, 1], 5.0)


def test_an_absent_source_keeps_counts_and_loses_gauges():
    one = MonotonicCounts()
    for name in "ab":
        one.update(name, 1.0, report(name, 3, level=2.0))
    one.set_present(["b"])
    series = shown(one)
    assert [dict(key)["replica"] for key in series["c_total"]] == ["a", "b"]
    assert [dict(key)["replica"] for key in series["g"]] == ["b"]
    assert one.sources == {"a": False, "b": True}


def test_a_series_absent_from_a_later_run_is_kept():
    one = MonotonicCounts()
    registry = Registry()
    registry.counter("rare_total", "rare").inc(3)
    one.update("a", 1.0, list(registry.collect()))
    one.update("a", 2.0, report("a", 1))
    one.update("a", 3.0, report("a", 1))
    assert shown(one)["rare_total"][()].value == 3


def test_absent_sources_are_forgotten_beyond_a_limit(monkeypatch):
    monkeypatch.setattr(monotonic, "MAX_ABSENT", 3)
    one = MonotonicCounts()
    for i in range(10):
        one.update(f"r{i}", 1.0, report(f"r{i}", 1))
    one.set_present(["r0"])
    assert list(one.sources) == ["r0", "r7", "r8", "r9"]


def test_counts_do_not_decrease_when_a_coordinator_restarts_or_is_silent():
    meter = ServerMeter()
    names = "submitted finished refused moved relieved resent replicas_lost fenced waiting clients".split()
    seen = []
    for started, submitted in ((1.0, 4), (None, 0), (2.0, 1), (2.0, 3)):
        stats = {**dict.fromkeys(names, 0), "submitted": submitted, "replicas": [], "started": started}
        meter.update(None if started is None else stats)
        families = {family.name: family.series for family in meter.families()}
        assert families["megatron_infer_coordinator_up"][()].value == (started is not None)
        assert ("megatron_infer_coordinator_waiting" in families) == (started is not None)
        seen.append(families["megatron_infer_coordinator_submitted_total"][()].value)
    assert seen == [4, 4, 5, 7]


def test_a_replica_whose_figures_cannot_be_read_is_named_once_each_time_it_comes(caplog):
    meter = ServerMeter()
    names = "submitted finished refused moved relieved resent replicas_lost fenced waiting clients".split()
    replica = {"name": "a", "incarnation": 1, "running": 0, "waiting": 0, "free_rows": 1}
    for is_present in (True, True, False, True):
        replicas = [replica | {"stats": {"figures": {"born": "?"}}}] if is_present else []
        meter.update({**dict.fromkeys(names, 0), "replicas": replicas, "started": 1.0})
    assert caplog.text.count("the figures of replica 'a' cannot be read") == 2


def test_series_of_equal_labels_are_added_up_over_sources_and_pass_between_processes():
    one, key = MonotonicCounts(), (("replica", "all"),)
    for name, born, count, observed in (("http0", 1.0, 5, [0.5]), ("http1", 1.0, 2, [3.0]), ("http0", 2.0, 1, [1.5])):
        families = json.loads(json.dumps(plain_of(report("all", count, observed, level=1.0))))
        one.update(name, born, families_of(families))
    one.set_present(["http0", "http1"])
    series = {family.name: family.series for family in summed(one.totals())}
    assert series["c_total"][key].value == 5 + 2 + 1 and series["g"][key].value == 2.0
    assert (series["h"][key].counts, series["h"][key].total) == ([1, 1, 1], 5.0)
    one.set_present(["http1"])
    series = {family.name: family.series for family in one.totals()}
    assert series["c_total"][key].value == 8 and series["g"][key].value == 1.0

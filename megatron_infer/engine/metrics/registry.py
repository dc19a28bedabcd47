"""Metrics by name and labels: counters, gauges, histograms. Pure Python without I/O; Prometheus and wandb read them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Labels = tuple[tuple[str, str], ...]


class Counter:
    """A sum that only grows."""

    __slots__ = ("labels", "name", "value")
    kind = "counter"

    def __init__(self, name: str, labels: Labels = ()) -> None:
        self.name = name
        self.labels = labels
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        if not amount >= 0:
            raise ValueError(f"counter {self.name}: cannot add {amount}, a counter only grows; use a gauge")
        self.value += amount


class Gauge:
    """The latest value of something."""

    __slots__ = ("labels", "name", "value")
    kind = "gauge"

    def __init__(self, name: str, labels: Labels = ()) -> None:
        self.name = name
        self.labels = labels
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Histogram:
    """Observations counted in fixed buckets: bucket i holds bounds[i-1] < x <= bounds[i], the last one the rest."""

    __slots__ = ("bounds", "counts", "labels", "name", "total")
    kind = "histogram"

    def __init__(self, name: str, bounds: Sequence[float], labels: Labels = ()) -> None:
        if not bounds or any(not a < b for a, b in pairwise(bounds)):
            raise ValueError(f"histogram {name}: bounds must be non-empty and increasing, got {list(bounds)}")
        if not all(map(math.isfinite, bounds)):
            raise ValueError(f"histogram {name}: bounds must be finite, got {list(bounds)}; the last bucket is added")
        self.name = name
        self.labels = labels
        self.bounds = tuple(float(b) for b in bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        if math.isnan(value):
            raise ValueError(f"histogram {self.name}: cannot observe NaN")
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """Estimate of the q-quantile, linear within its bucket; NaN when empty.

        Observations beyond the last bound count as the last bound.
        Example: bounds 1, 2; observations 0.5, 1.5, 1.5, 1.5 -> quantile(0.5) lies 1/3 into the bucket 1..2: 1.333.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"histogram {self.name}: quantile must be within 0..1, got {q}")
        rank, below = q * self.count, 0
        if not self.count:
            return math.nan
        lower = min(0.0, self.bounds[0])
        for upper, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return lower + (upper - lower) * max(rank - below, 0.0) / count
            below += count
            lower = upper
        return self.bounds[-1]


Metric = Counter | Gauge | Histogram


@dataclass(slots=True, eq=False)
class Family:
    """All series of one name, which a text exposition groups under one help line."""

    name: str
    kind: str
    help: str
    series: dict[Labels, Metric]


def plain_of(families: Iterable[Family]) -> list[Any]:
    """Families as lists, texts and numbers, for another process (`families_of`)."""
    return [
        [one.name, one.kind, one.help, [[labels, _plain_value(metric)] for labels, metric in one.series.items()]]
        for one in families
    ]


def families_of(plain: Iterable[Any]) -> list[Family]:
    """What `plain_of` made."""
    found = []
    for name, kind, help, series in plain:
        family = Family(name, kind, help, {})
        for given, value in series:
            labels: Labels = tuple((label, text) for label, text in given)
            family.series[labels] = _metric_of(name, kind, labels, value)
        found.append(family)
    return found


def _plain_value(metric: Metric) -> Any:
    return [metric.bounds, metric.counts, metric.total] if isinstance(metric, Histogram) else metric.value


def _metric_of(name: str, kind: str, labels: Labels, value: Any) -> Metric:
    if kind == "histogram":
        histogram = Histogram(name, value[0], labels)
        histogram.counts, histogram.total = list(value[1]), value[2]
        return histogram
    metric = Counter(name, labels) if kind == "counter" else Gauge(name, labels)
    metric.value = value
    return metric


class Registry:
    """Metrics by name and labels; the same name and labels give the same object."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def counter(self, name: str, help: str, **labels: str) -> Counter:
        key = _labels(labels)
        series = self._family(name, "counter", help).series
        metric = series.setdefault(key, Counter(name, key))
        assert isinstance(metric, Counter)
        return metric

    def gauge(self, name: str, help: str, **labels: str) -> Gauge:
        key = _labels(labels)
        series = self._family(name, "gauge", help).series
        metric = series.setdefault(key, Gauge(name, key))
        assert isinstance(metric, Gauge)
        return metric

    def histogram(self, name: str, help: str, bounds: Sequence[float], **labels: str) -> Histogram:
        key = _labels(labels)
        series = self._family(name, "histogram", help).series
        metric = series.setdefault(key, Histogram(name, bounds, key))
        assert isinstance(metric, Histogram)
        if metric.bounds != tuple(bounds):
            raise ValueError(f"histogram {name} exists with bounds {metric.bounds}, asked again with {tuple(bounds)}")
        return metric

    def collect(self) -> Iterator[Family]:
        """Families in the order they were declared."""
        yield from self._families.values()

    def _family(self, name: str, kind: str, help: str) -> Family:
        family = self._families.setdefault(name, Family(name, kind, help, {}))
        if family.kind != kind:
            raise ValueError(f"metric {name} is a {family.kind}, asked for as a {kind}; give it another name")
        return family


def _labels(labels: dict[str, str]) -> Labels:
    return tuple(sorted(labels.items()))

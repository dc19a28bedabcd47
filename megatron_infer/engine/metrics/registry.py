"""Metrics by name and labels: counters, gauges, histograms. Pure Python without I/O; Prometheus and wandb read them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Counter:
    """A sum that only grows."""

    name: str
    value: float = 0.0
    kind: ClassVar[str] = "counter"

    def inc(self, amount: float = 1.0) -> None:
        if not amount >= 0:
            raise ValueError(f"counter {self.name}: cannot add {amount}, a counter only grows; use a gauge")
        self.value += amount


@dataclass(slots=True)
class Gauge:
    """The latest value of something."""

    name: str
    value: float = 0.0
    kind: ClassVar[str] = "gauge"

    def set(self, value: float) -> None:
        self.value = value

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


@dataclass(slots=True)
class Histogram:
    """Observations counted in fixed buckets: bucket i holds bounds[i-1] < x <= bounds[i], the last one the rest."""

    name: str
    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    """Counts, one for each bucket."""
    total: float = 0.0
    """Sum of the observations."""
    kind: ClassVar[str] = "histogram"

    def __post_init__(self) -> None:
        if not self.bounds or any(not a < b for a, b in pairwise(self.bounds)):
            raise ValueError(f"histogram {self.name}: bounds must be non-empty and increasing, got {list(self.bounds)}")
        if not all(map(math.isfinite, self.bounds)):
            raise ValueError(
                f"histogram {self.name}: bounds must be finite, got {list(self.bounds)}; the last bucket is added"
            )
        self.bounds = tuple(map(float, self.bounds))
        self.counts = list(self.counts) or [0] * (len(self.bounds) + 1)

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
M = TypeVar("M", Counter, Gauge, Histogram)
_CLASSES: dict[str, Any] = {one.kind: one for one in (Counter, Gauge, Histogram)}


@dataclass(slots=True)
class Family:
    """All series of one name, which a text exposition groups under one help line."""

    name: str
    kind: str
    help: str
    series: dict[Labels, Metric]


def copied(families: Iterable[Family]) -> list[Family]:
    """Copies that later changes do not reach."""
    return [
        replace(family, series={labels: replace(metric) for labels, metric in list(family.series.items())})
        for family in list(families)
    ]


def plain_of(families: Iterable[Family]) -> list[Any]:
    """Families as lists, texts and numbers, for another process (`families_of`)."""
    return [
        [one.name, one.kind, one.help, [[labels, asdict(metric)] for labels, metric in one.series.items()]]
        for one in families
    ]


def families_of(plain: Iterable[Any]) -> list[Family]:
    """What `plain_of` made."""
    found = []
    for name, kind, help, series in plain:
        shown = {tuple((label, text) for label, text in labels): _CLASSES[kind](**value) for labels, value in series}
        found.append(Family(name, kind, help, shown))
    return found


class Registry:
    """Metrics by name and labels; the same name and labels give the same object."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def counter(self, name: str, help: str, **labels: str) -> Counter:
        return self._metric(Counter(name), help, labels)

    def gauge(self, name: str, help: str, **labels: str) -> Gauge:
        return self._metric(Gauge(name), help, labels)

    def histogram(self, name: str, help: str, bounds: Sequence[float], **labels: str) -> Histogram:
        metric = self._metric(Histogram(name, bounds), help, labels)
        if metric.bounds != tuple(bounds):
            raise ValueError(f"histogram {name} exists with bounds {metric.bounds}, asked again with {tuple(bounds)}")
        return metric

    def collect(self) -> Iterator[Family]:
        """Families in the order they were declared."""
        yield from self._families.values()

    def _metric(self, new: M, help: str, labels: dict[str, str]) -> M:
        family = self._families.setdefault(new.name, Family(new.name, new.kind, help, {}))
        if family.kind != new.kind:
            raise ValueError(f"metric {new.name} is a {family.kind}, asked for as a {new.kind}; give it another name")
        metric = family.series.setdefault(labels_of(labels), new)
        assert isinstance(metric, type(new))
        return metric


def labels_of(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items()))

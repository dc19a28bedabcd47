"""Counts that go on when who counts is replaced: a process that starts again begins at zero, its series must not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from megatron_infer.metrics.core import Counter, Family, Gauge, Histogram, Labels, Metric

MAX_GONE = 256
"""Those who are gone and whose counts are kept, at most."""


class _Book:
    """One source's counts: what its earlier lives came to, and the present one's last report."""

    def __init__(self) -> None:
        self.born: float | None = None
        self.before: dict[tuple[str, Labels], Metric] = {}
        self.last: list[Family] = []

    def take(self, born: float, families: list[Family]) -> None:
        if self.born is not None and born != self.born:
            self.before = {(f.name, key): one for f in self.counts() for key, one in f.series.items()}
        self.born, self.last = born, families

    def counts(self) -> list[Family]:
        """Counters and histograms, all lives together."""
        made: dict[str, Family] = {}
        for family in self.last:
            if family.kind != "gauge":
                made[family.name] = Family(family.name, family.kind, family.help, dict(family.series))
        for (name, key), base in self.before.items():
            family = made.setdefault(name, Family(name, base.kind, "", {}))
            now = family.series.get(key)
            family.series[key] = base if now is None else _sum(base, now)
        return list(made.values())

    def gauges(self) -> list[Family]:
        return [family for family in self.last if family.kind == "gauge"]


class MonotonicCounts:
    """Series of several sources by name; their counts never go back while this object lives."""

    def __init__(self) -> None:
        self._books: OrderedDict[str, _Book] = OrderedDict()
        self._present: set[str] = set()

    def take(self, source: str, born: float, families: list[Family]) -> None:
        """A source's report. Another `born` than before: it counts from zero again."""
        self._books.setdefault(source, _Book()).take(born, families)
        self._books.move_to_end(source)

    def know(self, source: str) -> None:
        """It is there, be it without a report yet."""
        self._books.setdefault(source, _Book())

    def set_present(self, sources: Iterable[str]) -> None:
        """Who is there; of the others counts are kept and gauges are not shown."""
        self._present = set(sources)
        gone = [name for name in self._books if name not in self._present]
        for name in gone[: max(0, len(gone) - MAX_GONE)]:
            del self._books[name]

    @property
    def sources(self) -> dict[str, bool]:
        """Everyone heard of -> whether it is there."""
        return {name: name in self._present for name in self._books}

    def families(self) -> list[Family]:
        return merged(
            family
            for name, book in self._books.items()
            for family in (*book.counts(), *(book.gauges() if name in self._present else ()))
        )


def merged(families: Iterable[Family]) -> list[Family]:
    """One family a name, with everybody's series; the first one's help."""
    made: dict[str, Family] = {}
    for family in families:
        one = made.setdefault(family.name, Family(family.name, family.kind, family.help, {}))
        one.help = one.help or family.help
        one.series.update(family.series)
    return list(made.values())


def copied(family: Family) -> Family:
    """A snapshot that does not change any more."""
    return Family(family.name, family.kind, family.help, {key: _copy(one) for key, one in family.series.items()})


def _copy(metric: Metric) -> Metric:
    made: Metric
    if isinstance(metric, Histogram):
        made = Histogram(metric.name, metric.bounds, metric.labels)
        made.counts, made.total = list(metric.counts), metric.total
        return made
    made = Counter(metric.name, metric.labels) if isinstance(metric, Counter) else Gauge(metric.name, metric.labels)
    made.value = metric.value
    return made


def _sum(base: Metric, now: Metric) -> Metric:
    made = _copy(now)
    if isinstance(made, Histogram):
        assert isinstance(base, Histogram)
        if base.bounds != made.bounds:  # another release's buckets: only the sums can go on
            return made
        made.counts = [a + b for a, b in zip(base.counts, made.counts, strict=True)]
        made.total += base.total
    else:
        assert not isinstance(base, Histogram)
        made.value += base.value
    return made

"""Counts that never go back: the totals of a process that restarts go on behind those of its earlier runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron_infer.engine.metrics.registry import Family, Histogram, Labels, Metric

MAX_ABSENT = 256
"""Most absent sources whose counts are kept."""


class _Source:
    """The counts of one source: the totals of its earlier runs, and the last report of the present one."""

    def __init__(self) -> None:
        self.born: float | None = None
        self.before: dict[tuple[str, Labels], Metric] = {}
        self.last: list[Family] = []

    def update(self, born: float, families: list[Family]) -> None:
        if self.born is not None and born != self.born:
            self.before = {(f.name, key): one for f in self.counts() for key, one in f.series.items()}
        self.born, self.last = born, families

    def counts(self) -> list[Family]:
        """Counters and histograms, summed over all runs."""
        totals: dict[str, Family] = {}
        for family in self.last:
            if family.kind != "gauge":
                totals[family.name] = Family(family.name, family.kind, family.help, dict(family.series))
        for (name, key), base in self.before.items():
            family = totals.setdefault(name, Family(name, base.kind, "", {}))
            now = family.series.get(key)
            family.series[key] = base if now is None else _sum(base, now)
        return list(totals.values())

    def gauges(self) -> list[Family]:
        return [family for family in self.last if family.kind == "gauge"]


class MonotonicCounts:
    """The series of several sources by name; counts never go back while this object lives."""

    def __init__(self) -> None:
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._present: set[str] = set()

    def update(self, source: str, born: float, families: list[Family]) -> None:
        """A source's report. Another `born` than before: it has restarted and counts from zero."""
        self._sources.setdefault(source, _Source()).update(born, families)
        self._sources.move_to_end(source)

    def add(self, source: str) -> None:
        """Add a source that may have no report yet."""
        self._sources.setdefault(source, _Source())

    def set_present(self, sources: Iterable[str]) -> None:
        """Which sources are present; of the others, counts are kept and gauges are not shown."""
        self._present = set(sources)
        absent = [name for name in self._sources if name not in self._present]
        for name in absent[: max(0, len(absent) - MAX_ABSENT)]:
            del self._sources[name]

    @property
    def sources(self) -> dict[str, bool]:
        """Every source -> whether it is present."""
        return {name: name in self._present for name in self._sources}

    def families(self) -> list[Family]:
        """The series of all sources, which have labels of their own."""
        return merged(self._all())

    def totals(self) -> list[Family]:
        """The series of all sources, added up where their labels are equal."""
        return summed(self._all())

    def _all(self) -> Iterator[Family]:
        for name, source in self._sources.items():
            yield from source.counts()
            yield from source.gauges() if name in self._present else ()


def merged(families: Iterable[Family]) -> list[Family]:
    """One family per name, with the series of all of that name and the first one's help."""
    by_name: dict[str, Family] = {}
    for family in families:
        one = by_name.setdefault(family.name, Family(family.name, family.kind, family.help, {}))
        one.help = one.help or family.help
        one.series.update(family.series)
    return list(by_name.values())


def summed(families: Iterable[Family]) -> list[Family]:
    """One family per name; the series of equal labels are added up, gauges as well."""
    by_name: dict[str, Family] = {}
    for family in families:
        one = by_name.setdefault(family.name, Family(family.name, family.kind, family.help, {}))
        one.help = one.help or family.help
        for key, metric in family.series.items():
            one.series[key] = _sum(one.series[key], metric) if key in one.series else metric
    return list(by_name.values())


def _sum(base: Metric, now: Metric) -> Metric:
    if not isinstance(now, Histogram):
        assert not isinstance(base, Histogram)
        return replace(now, value=base.value + now.value)
    assert isinstance(base, Histogram)
    if base.bounds != now.bounds:  # another release's buckets cannot be added
        return now
    counts = [a + b for a, b in zip(base.counts, now.counts, strict=True)]
    return replace(now, counts=counts, total=base.total + now.total)

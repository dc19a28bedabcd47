"""What a server of the Tinker API counts of each training client, for /metrics and /v1/status."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_infer.engine.metrics.definitions import TINKER, MetricSet
from megatron_infer.engine.metrics.registry import Family

METRICS = {name.removeprefix("tinker_client_").removesuffix("_total"): name for name in TINKER}
"""Metric by the name of its figure."""
Row = Mapping[str, float | None]


@dataclass(slots=True)
class ClientFigures:
    """The figures of one training client in this process; see METRICS."""

    steps: int = 0
    trained_tokens: int = 0
    sampled_tokens: int = 0
    training_seconds: float = 0.0
    sampling_seconds: float = 0.0
    loss: float | None = None
    queue: int = 0
    made: float = field(default_factory=time.monotonic)

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.made

    def row(self) -> Row:
        """Each figure by its name; None: there is none yet."""
        return {name: getattr(self, name) for name in METRICS}


def families_of(rows: Mapping[str, Row]) -> list[Family]:
    """The series of TINKER. rows: by the label of the client."""
    metrics = MetricSet()
    for client, row in rows.items():
        for figure, name in METRICS.items():
            value = row[figure]
            if value is None:
                continue
            if TINKER[name].kind == "counter":
                metrics.counter(name, client=client).inc(value)
            else:
                metrics.gauge(name, client=client).set(value)
    return metrics.families()

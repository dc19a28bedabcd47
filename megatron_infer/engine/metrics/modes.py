"""Who serves the metrics of an engine; it needs no client library."""

from __future__ import annotations

from enum import Enum


class PrometheusMetricsMode(str, Enum):
    """See `engine.metrics.prometheus`."""

    INSTRUMENT_ONLY = "instrument_only"
    """The application serves the metrics."""
    LAUNCH_SERVER = "launch_server"
    """A separate server answers GET /metrics."""
    LAUNCH_MULTIPROC_SERVER = "launch_multiproc_server"
    """One of several processes serves the metrics of all."""

"""Metrics for Prometheus, through its client library, in three modes:

instrument_only          metrics are in the library's registry; the application serves them
launch_server            a separate server answers GET /metrics
launch_multiproc_server  several processes (ranks, replicas of a host) write into the folder PROMETHEUS_MULTIPROC_DIR;
                         one of them serves the metrics of all, and another takes over when it ends

    with PrometheusExporter.of_engine(llm.engine, mode="launch_server", port=9400) as exporter:
        ...                                                    # curl http://127.0.0.1:9400/metrics
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_infer.engine.metrics.definitions import engine_families
from megatron_infer.engine.metrics.engine_snapshot import EngineSnapshot
from megatron_infer.engine.metrics.modes import PrometheusMetricsMode
from megatron_infer.engine.metrics.registry import Family, Histogram, Labels
from megatron_infer.errors import ConfigError, unknown_name

try:
    import prometheus_client
    from prometheus_client import core as prometheus
    from prometheus_client import multiprocess, values
    from prometheus_client.utils import floatToGoString
except ImportError:  # pragma: no cover
    raise ConfigError("Prometheus metrics need prometheus-client: pip install 'megatron-infer[server]'") from None

log = logging.getLogger("megatron_infer")

MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"
WRITE_S = 1.0
"""Seconds between two writes of a process in launch_multiproc_server."""
Read = Callable[[], Iterable[Family]]


def mode_of(mode: str | PrometheusMetricsMode) -> PrometheusMetricsMode:
    """Raises ConfigError naming the nearest one."""
    try:
        return PrometheusMetricsMode(mode)
    except ValueError:
        known = [member.value for member in PrometheusMetricsMode]
        message = unknown_name("prometheus_metrics_mode", str(mode), known)
        raise ConfigError(f"{message}; one of {', '.join(known)}") from None


class FamilyCollector:
    """The collector that the library calls at each scrape."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def describe(self) -> list[Any]:
        return []  # without it the library would read all metrics to learn their names

    def collect(self) -> Iterator[Any]:
        for family in self._read():
            yield _translated(family)


def _translated(family: Family) -> Any:
    names = sorted({name for labels in family.series for name, _ in labels})
    made: Any
    if family.kind == "histogram":
        made = prometheus.HistogramMetricFamily(family.name, family.help, labels=names)
    elif family.kind == "counter":
        made = prometheus.CounterMetricFamily(family.name, family.help, labels=names)
    else:
        made = prometheus.GaugeMetricFamily(family.name, family.help, labels=names)
    for labels, metric in family.series.items():
        shown = dict(labels)
        given = [shown.get(name, "") for name in names]
        if isinstance(metric, Histogram):
            made.add_metric(given, _cumulative(metric), metric.total)
        else:
            made.add_metric(given, metric.value)
    return made


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        buckets.append((_text(bound), float(total)))
    return buckets


def _text(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


def exposition(read: Read, accept: str = "") -> tuple[bytes, str]:
    """The text of one scrape and its Content-Type, in the format that the header `accept` asks for."""
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(FamilyCollector(read))
    try:
        encode, content_type = prometheus_client.exposition.choose_encoder(accept)
    except (TypeError, ValueError):  # it names a version that is no number
        encode, content_type = prometheus_client.exposition.choose_encoder("")
    return encode(registry), content_type


class PrometheusExporter:
    """Exports what `read` returns at every scrape, until `close`."""

    def __init__(
        self,
        read: Read,
        *,
        mode: str | PrometheusMetricsMode = PrometheusMetricsMode.INSTRUMENT_ONLY,
        port: int = 0,
        host: str = "127.0.0.1",
        registry: Any = None,
    ) -> None:
        """port: of the separate server; 0: a free one, see `url`. registry: None is the library's own.

        Raises ConfigError for an unknown mode, a taken port, or launch_multiproc_server without its folder.
        """
        self.mode = mode_of(mode)
        self.url: str | None = None
        """URL of the separate server; None where the application or another process serves the metrics."""
        self._registry = prometheus_client.REGISTRY if registry is None else registry
        self._collector: FamilyCollector | None = None
        self._server: tuple[Any, threading.Thread] | None = None
        self._shared: _SharedFolder | None = None
        self._host, self._port = host, port
        if self.mode is PrometheusMetricsMode.LAUNCH_MULTIPROC_SERVER:
            self._shared = _SharedFolder(read, self._serve)
            self._shared.start()
            return
        self._collector = FamilyCollector(read)
        self._registry.register(self._collector)
        if self.mode is PrometheusMetricsMode.LAUNCH_SERVER:
            try:
                self._serve(self._registry)
            except ConfigError:
                self.close()
                raise

    @classmethod
    def of_engine(cls, engine: Any, *, replica: str | None = None, **options: Any) -> PrometheusExporter:
        """Metrics of a DynamicInferenceEngine. replica: a label to distinguish several engines."""
        labels = {} if replica is None else {"replica": replica}

        def read() -> list[Family]:
            snapshot: EngineSnapshot = engine.figures()
            return engine_families(snapshot, **labels)

        return cls(read, **options)

    def close(self) -> None:
        """Stop exporting; with launch_multiproc_server the counts stay in the sums of the other processes."""
        if self._shared is not None:
            self._shared.close()
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = self.url = None
        if self._collector is not None:
            self._registry.unregister(self._collector)
            self._collector = None

    def __enter__(self) -> PrometheusExporter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _serve(self, registry: Any) -> None:
        try:
            self._server = prometheus_client.start_http_server(self._port, self._host, registry)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"cannot serve metrics at {self._host} port {self._port}: {reason}") from None
        if _is_loopback(self._host):
            self._server[0].set_app(_asked_by_address(prometheus_client.make_wsgi_app(registry)))
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{self._server[0].server_port}/metrics"


def _asked_by_address(app: Any) -> Any:
    """Refuses a Host that is a name: a page of another site may have led it here (DNS rebinding)."""

    def checked(environ: dict[str, Any], start_response: Any) -> Any:
        with contextlib.suppress(ValueError):
            if _is_loopback(urlsplit(f"//{environ.get('HTTP_HOST', 'localhost')}").hostname or ""):
                return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"ask by 127.0.0.1 or localhost\n"]

    return checked


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class _SharedFolder:
    """One process's files in the folder, written every WRITE_S; the process with the lock serves all files."""

    def __init__(self, read: Read, serve: Callable[[Any], None]) -> None:
        folder = os.environ.get(MULTIPROC_DIR)
        if not folder or not os.path.isdir(folder):
            shown = "is not set" if not folder else f"is {folder!r}, which is no folder"
            raise ConfigError(
                f"launch_multiproc_server: {MULTIPROC_DIR} {shown}; name an empty folder for all processes"
            )
        self._folder, self._read, self._serve = Path(folder), read, serve
        self._value_class = values.MultiProcessValue()  # type: ignore[no-untyped-call]
        self._values: dict[tuple[str, Labels, str], Any] = {}
        self._lock = (self._folder / "megatron_infer.lock").open("w")
        self._is_serving = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megatron-infer-metrics", daemon=True)

    def start(self) -> None:
        self.write()
        self._try_serving()
        self._thread.start()

    def close(self) -> None:
        """Write once more, then remove gauges and keep counts."""
        self._stop.set()
        self._thread.join()
        self.write()
        multiprocess.mark_process_dead(os.getpid(), str(self._folder))  # type: ignore[no-untyped-call]
        self._lock.close()

    def _run(self) -> None:
        while not self._stop.wait(WRITE_S):
            self.write()
            try:
                self._try_serving()
            except ConfigError as error:  # the port may still be taken; the next write tries again
                log.warning("%s", error)

    def _try_serving(self) -> None:
        """Serve, unless another process does."""
        import fcntl

        if self._is_serving:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        registry = prometheus_client.CollectorRegistry()
        registry.register(_LiveCollector(self.write, self._folder))
        try:
            self._serve(registry)
        except ConfigError:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            raise
        self._is_serving = True

    def write(self) -> None:
        """Write the values that `read` returns now."""
        now = time.time()
        for family in self._read():
            for labels, metric in family.series.items():
                if isinstance(metric, Histogram):
                    for bound, count in zip((*metric.bounds, float("inf")), metric.counts, strict=True):
                        self._value(family, labels, "_bucket", _text(bound)).set(count)
                    self._value(family, labels, "_sum").set(metric.total)
                else:
                    self._value(family, labels).set(metric.value, timestamp=now)

    def _value(self, family: Family, labels: Labels, suffix: str = "", le: str | None = None) -> Any:
        key = (family.name + suffix, labels, le or "")
        value = self._values.get(key)
        if value is None:
            shown = (*labels, *((("le", le),) if le is not None else ()))
            names, given = [name for name, _ in shown], [text for _, text in shown]
            base = family.name.removesuffix("_total")
            value = self._values[key] = self._value_class(
                family.kind, base, family.name + suffix, names, given, family.help, multiprocess_mode="livemostrecent"
            )
        return value


class _LiveCollector:
    """Collects the files of all processes, without the gauges of processes that have ended."""

    def __init__(self, write: Callable[[], None], folder: Path) -> None:
        self._write, self._folder = write, folder

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Any:
        self._write()
        for path in self._folder.glob("gauge_live*_*.db"):
            pid = path.stem.rpartition("_")[2]
            if pid.isdigit() and not _is_alive(int(pid)):
                multiprocess.mark_process_dead(int(pid), str(self._folder))  # type: ignore[no-untyped-call]
        return multiprocess.MultiProcessCollector(None, str(self._folder)).collect()  # type: ignore[no-untyped-call]


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True

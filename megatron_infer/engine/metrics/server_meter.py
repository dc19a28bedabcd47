"""Metrics of the HTTP server: calls by route and status, tokens, latencies; and those that replicas report."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_infer.engine.metrics.definitions import (
    MetricSet,
    coordinator_families,
    engine_families,
    parcel_families,
)
from megatron_infer.engine.metrics.engine_meter import E2E_BOUNDS, ITL_BOUNDS, TTFT_BOUNDS, outcome_of
from megatron_infer.engine.metrics.engine_snapshot import EngineSnapshot
from megatron_infer.engine.metrics.monotonic import MonotonicCounts, merged
from megatron_infer.engine.metrics.registry import Family, Registry, copied

log = logging.getLogger("megatron_infer.server")

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
OTHER = "other"
CLIENT_LEFT = 499
"""nginx's status for a client that disconnects before the reply."""


class ServerMeter:
    """The metrics of one HTTP process; usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own = MetricSet()
        self._ttft = self._own.histogram("ttft_seconds", TTFT_BOUNDS)
        self._itl = self._own.histogram("itl_seconds", ITL_BOUNDS)
        self._e2e = self._own.histogram("e2e_seconds", E2E_BOUNDS)
        self._prompt = self._own.counter("prompt_tokens_total")
        self._cached = self._own.counter("cached_prompt_tokens_total")
        self._output = self._own.counter("output_tokens_total")
        self._calls = self._own.gauge("http_calls")
        self._in_flight = self._own.gauge("requests_in_flight")
        for outcome in ("stop", "length", "abort", "error", "refused"):
            self._own.counter("requests_total", outcome=outcome)
        self._engines = MonotonicCounts()
        self._coordinator = MonotonicCounts()
        self._replicas: list[Family] = coordinator_families(None)
        self._workers: list[Family] = []
        self.sources: list[Callable[[], list[Family]]] = []
        """Give the series of further modules that come and go; called from any thread."""
        self._unread: set[str] = set()
        """Replicas whose figures could not be read, for one line in the log each."""

    @property
    def registry(self) -> Registry:
        """For metrics of further modules; they are used on the event loop only."""
        return self._own.registry

    # ------------------------------------------------------------------ calls

    def call_began(self) -> None:
        with self._lock:
            self._calls.inc()

    def call_ended(self, method: str, route: str | None, status: int, seconds: float) -> None:
        """route: as registered, None for an unknown path, which must not become a label."""
        shown, path = method if method in METHODS else OTHER, route or OTHER
        with self._lock:
            self._calls.inc(-1)
            self._own.counter("http_requests_total", method=shown, route=path, code=str(status)).inc()
            self._own.histogram("http_request_seconds", E2E_BOUNDS, route=path).observe(seconds)

    # ------------------------------------------------------------------ requests

    def request(self, *, stream: bool) -> RequestMeter:
        """A request is submitted to the engines."""
        with self._lock:
            self._in_flight.inc()
        return RequestMeter(self, stream)

    def first_tokens(self, seconds: float | None, *, prompt: int, cached: int) -> None:
        with self._lock:
            self._prompt.inc(prompt)
            self._cached.inc(cached)
            if seconds is not None:
                self._ttft.observe(seconds)

    def tokens(self, count: int, *, gap_s: float | None) -> None:
        """gap_s: seconds since the tokens before, for streams."""
        with self._lock:
            self._output.inc(count)
            if gap_s is not None and count:
                self._itl.observe(gap_s / count, count)

    def request_ended(self, outcome: str, seconds: float) -> None:
        with self._lock:
            self._in_flight.inc(-1)
            self._own.counter("requests_total", outcome=outcome).inc()
            if outcome in ("stop", "length"):
                self._e2e.observe(seconds)

    # ------------------------------------------------------------------ engines

    def update(self, stats: Mapping[str, Any] | None, workers: Iterable[Mapping[str, Any]] = ()) -> None:
        """stats: the coordinator's report, None if it does not answer; figures in it that cannot be read are removed.

        workers: status of the engines' processes.
        """
        with self._lock:
            self._workers = _worker_families(workers)
            if stats is None:
                self._replicas = coordinator_families(None)
                self._coordinator.set_present(())
                self._engines.set_present(())
                return
            names = _names(stats["replicas"])
            self._unread &= names.keys()
            for name, replica in names.items():
                self._engines.add(name)
                if replica["stats"].get("figures"):
                    self._update_engine(name, replica["stats"])
            self._engines.set_present(names)
            metrics = MetricSet()
            for name, is_present in self._engines.sources.items():
                metrics.gauge("replica_up", replica=name).set(float(is_present))
            for name, replica in names.items():
                for status in ("running", "waiting"):
                    metrics.gauge("replica_requests", replica=name, status=status).set(replica[status])
                metrics.gauge("replica_free_rows", replica=name).set(replica["free_rows"])
            self._coordinator.update("", stats["started"], coordinator_families(stats))
            self._coordinator.set_present([""])
            self._replicas = metrics.families()

    def own_families(self) -> list[Family]:
        """What this process counts of its calls and requests."""
        with self._lock:
            return copied(self._own.families())

    def _update_engine(self, name: str, stats: dict[str, Any]) -> None:
        try:
            snapshot = EngineSnapshot.from_dict(stats["figures"])
            parcels = parcel_families(stats.get("parcels", {}), replica=name)
            self._engines.update(name, snapshot.born, engine_families(snapshot, replica=name) + parcels)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:  # of another release
            del stats["figures"]
            if name not in self._unread:
                self._unread.add(name)
                log.warning("the figures of replica %r cannot be read, metrics go without them: %r", name, error)

    def families(self) -> list[Family]:
        """All metrics, with their values now."""
        own = [*self.own_families(), *(family for read in self.sources for family in read())]
        with self._lock:
            engines, coordinator = self._engines.families(), self._coordinator.families()
            return merged([*own, *engines, *coordinator, *self._replicas, *self._workers])


class RequestMeter:
    """Measures one request. Outputs come on one thread; the first of several ends counts."""

    def __init__(self, meter: ServerMeter, stream: bool) -> None:
        self._meter, self._stream = meter, stream
        self._began = self._last = time.monotonic()
        self._num_tokens = 0
        self._has_tokens = self._ended = False
        self._lock = threading.Lock()

    def output(self, output: Any) -> None:
        """A cumulative `RequestOutput`."""
        with self._lock:
            if self._ended:
                return
            now, count = time.monotonic(), output.metrics.num_output_tokens
            new, first = count - self._num_tokens, not self._has_tokens and count > 0
            if first:
                seconds = now - self._began if self._stream else None
                prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
                self._meter.first_tokens(seconds, prompt=prompt, cached=cached)
                self._has_tokens = True
            if new:
                gap = None if first or not self._stream else now - self._last
                self._meter.tokens(new, gap_s=gap)
                self._num_tokens, self._last = count, now
            if output.finished:
                outcome = "error" if output.error is not None else outcome_of(o.finish_reason for o in output.outputs)
                self._end(outcome)

    def failed(self, outcome: str) -> None:
        """outcome: "refused" or "error"."""
        with self._lock:
            self._end(outcome)

    def abandoned(self) -> None:
        """Its output is not read any more; does nothing if it has ended."""
        with self._lock:
            self._end("abort")

    def _end(self, outcome: str) -> None:
        if not self._ended:
            self._ended = True
            self._meter.request_ended(outcome, time.monotonic() - self._began)


def _names(replicas: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Replicas by name; further ones of the same name by name and incarnation."""
    by_name: dict[str, dict[str, Any]] = {}
    for replica in replicas:
        name = replica["name"] or "replica"
        by_name[name if name not in by_name else f"{name}#{replica['incarnation']}"] = replica
    return by_name


def _worker_families(workers: Iterable[Mapping[str, Any]]) -> list[Family]:
    metrics = MetricSet()
    for worker in workers:
        metrics.gauge("worker_up", worker=worker["name"]).set(float(worker["state"] == "running"))
        metrics.counter("worker_restarts_total", worker=worker["name"]).inc(worker["restarts"])
    return metrics.families()

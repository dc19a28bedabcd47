"""What a server's clients see: calls by route and status, tokens, latencies; beside what replicas report."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_infer.metrics.core import Family
from megatron_infer.metrics.definitions import Sheet, coordinator_families, engine_families
from megatron_infer.metrics.engine_meter import E2E_BOUNDS, ITL_BOUNDS, TTFT_BOUNDS, outcome_of
from megatron_infer.metrics.engine_snapshot import EngineSnapshot
from megatron_infer.metrics.monotonic import MonotonicCounts, copied, merged

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
OTHER = "other"
CLIENT_LEFT = 499


class ServerMeter:
    """Counts of one HTTP process; told from any thread, read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sheet = Sheet()
        self._ttft = self._sheet.histogram("ttft_seconds", TTFT_BOUNDS)
        self._itl = self._sheet.histogram("itl_seconds", ITL_BOUNDS)
        self._e2e = self._sheet.histogram("e2e_seconds", E2E_BOUNDS)
        self._prompt = self._sheet.counter("prompt_tokens_total")
        self._cached = self._sheet.counter("cached_prompt_tokens_total")
        self._output = self._sheet.counter("output_tokens_total")
        self._calls = self._sheet.gauge("http_calls")
        self._in_flight = self._sheet.gauge("requests_in_flight")
        for outcome in ("stop", "length", "abort", "error", "refused"):
            self._sheet.counter("requests_total", outcome=outcome)
        self._books = MonotonicCounts()
        self._coordinator = MonotonicCounts()
        self._beside: list[Family] = coordinator_families(None)
        self._workers: list[Family] = []

    # ------------------------------------------------------------------ calls

    def call_began(self) -> None:
        with self._lock:
            self._calls.inc()

    def call_ended(self, method: str, route: str | None, status: int, seconds: float) -> None:
        """route: as registered, None where there is none; what clients make up is no label."""
        shown, path = method if method in METHODS else OTHER, route or OTHER
        with self._lock:
            self._calls.inc(-1)
            self._sheet.counter("http_requests_total", method=shown, route=path, code=str(status)).inc()
            self._sheet.histogram("http_request_seconds", E2E_BOUNDS, route=path).observe(seconds)

    # ------------------------------------------------------------------ requests

    def request(self, *, stream: bool) -> RequestWatch:
        """A request to the engines begins."""
        with self._lock:
            self._in_flight.inc()
        return RequestWatch(self, stream)

    def first_news(self, seconds: float | None, *, prompt: int, cached: int) -> None:
        with self._lock:
            self._prompt.inc(prompt)
            self._cached.inc(cached)
            if seconds is not None:
                self._ttft.observe(seconds)

    def tokens(self, count: int, *, gap_s: float | None) -> None:
        """gap_s: seconds since the last tokens of a stream."""
        with self._lock:
            self._output.inc(count)
            if gap_s is not None and count:
                self._itl.observe(gap_s / count, count)

    def request_ended(self, outcome: str, seconds: float) -> None:
        with self._lock:
            self._in_flight.inc(-1)
            self._sheet.counter("requests_total", outcome=outcome).inc()
            if outcome in ("stop", "length"):
                self._e2e.observe(seconds)

    # ------------------------------------------------------------------ engines

    def saw(self, stats: Mapping[str, Any] | None, workers: Iterable[Mapping[str, Any]] = ()) -> None:
        """The coordinator's report, None if it does not answer; processes of engines that are kept alive here."""
        with self._lock:
            self._workers = _worker_families(workers)
            if stats is None:
                self._beside = coordinator_families(None)
                self._coordinator.set_present(())
                self._books.set_present(())
                return
            names = _names(stats["replicas"])
            for name, replica in names.items():
                self._books.know(name)
                figures = replica["stats"].get("figures")
                if figures:
                    known = EngineSnapshot.from_dict(figures)
                    self._books.take(name, known.born, engine_families(known, replica=name))
            self._books.set_present(names)
            sheet = Sheet()
            for name, is_there in self._books.sources.items():
                sheet.gauge("replica_up", replica=name).set(float(is_there))
            for name, replica in names.items():
                for status in ("running", "waiting"):
                    sheet.gauge("replica_requests", replica=name, status=status).set(replica[status])
                sheet.gauge("replica_free_rows", replica=name).set(replica["free_rows"])
            self._coordinator.take("", stats["started"], coordinator_families(stats))
            self._coordinator.set_present([""])
            self._beside = sheet.families()

    def families(self) -> list[Family]:
        """Everything, as it stands now."""
        with self._lock:
            own = [copied(family) for family in self._sheet.families()]
            return merged([*own, *self._books.families(), *self._coordinator.families(), *self._beside, *self._workers])


class RequestWatch:
    """One request's way: told of its news by one thread, and of its end by whoever ends it first."""

    def __init__(self, meter: ServerMeter, stream: bool) -> None:
        self._meter, self._stream = meter, stream
        self._began = self._last = time.monotonic()
        self._num_tokens = 0
        self._seen = self._ended = False
        self._lock = threading.Lock()

    def news(self, output: Any) -> None:
        """A `RequestOutput` with all so far."""
        with self._lock:
            if self._ended:
                return
            now, count = time.monotonic(), output.metrics.num_output_tokens
            new, first = count - self._num_tokens, not self._seen and count > 0
            if first:
                seconds = now - self._began if self._stream else None
                prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
                self._meter.first_news(seconds, prompt=prompt, cached=cached)
                self._seen = True
            if new:
                gap = None if first or not self._stream else now - self._last
                self._meter.tokens(new, gap_s=gap)
                self._num_tokens, self._last = count, now
            if output.finished:
                outcome = "error" if output.error is not None else outcome_of(o.finish_reason for o in output.outputs)
                self._end(outcome)

    def failed(self, outcome: str) -> None:
        """It was "refused", or came to an "error"."""
        with self._lock:
            self._end(outcome)

    def left(self) -> None:
        """Nobody waits for it any more; of one that has ended: nothing."""
        with self._lock:
            self._end("abort")

    def _end(self, outcome: str) -> None:
        if not self._ended:
            self._ended = True
            self._meter.request_ended(outcome, time.monotonic() - self._began)


def _names(replicas: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Replicas by name; one whose name another bears, too, by name and incarnation."""
    made: dict[str, dict[str, Any]] = {}
    for replica in replicas:
        name = replica["name"] or "replica"
        made[name if name not in made else f"{name}#{replica['incarnation']}"] = replica
    return made


def _worker_families(workers: Iterable[Mapping[str, Any]]) -> list[Family]:
    sheet = Sheet()
    for worker in workers:
        sheet.gauge("worker_up", worker=worker["name"]).set(float(worker["state"] == "running"))
        sheet.counter("worker_restarts_total", worker=worker["name"]).inc(worker["restarts"])
    return sheet.families()

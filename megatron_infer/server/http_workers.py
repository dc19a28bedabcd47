"""Several HTTP processes at one socket (`http_workers`); their parent watches them and adds up their figures.

HttpFrontend (parent)        asks every worker for its figures, each second and for every scrape
    |  FrontendLink          what a worker asks its parent: the state of all processes, the sum of the figures
HttpServer (worker)          serves HTTP; a client of the coordinator

All workers accept from one listening socket, which the parent holds open: a worker that dies loses the connections that
it has accepted, and no other one is refused. Parent and workers ask each other over sockets in the server's folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from megatron_infer.coordinator.client import AsyncInferenceClient
from megatron_infer.distributed.wire import LinkClosed, answer, ask
from megatron_infer.engine.metrics.monotonic import MonotonicCounts, summed
from megatron_infer.engine.metrics.prometheus import exposition
from megatron_infer.engine.metrics.registry import Family, families_of, plain_of
from megatron_infer.server.engine_client import POLL_S, EngineClient
from megatron_infer.server.http_errors import unavailable
from megatron_infer.server.http_server import CLOSE_TIMEOUT_S, EnginesFailed, HttpProcess, metrics_exporter, url_of
from megatron_infer.server.process_options import HttpOptions
from megatron_infer.server.supervisor import ProcessSpec, Supervisor

log = logging.getLogger("megatron_infer.server")

GATHER_S = 1.0
"""Seconds between two times that the parent asks for figures, and most seconds that one worker's are waited for."""
MAX_QUESTION = 1 << 20
"""Most bytes of a question between the processes: the headers of a caller's request fit in."""


class HttpFrontend(HttpProcess):
    """The parent of `http_workers` HTTP processes."""

    def __init__(self, options: HttpOptions, *, supervisor: Supervisor | None = None) -> None:
        """supervisor: of the engines' processes, if they are started here."""
        super().__init__()
        self._options = options
        self._settings = options.settings
        self._folder = options.folder
        self._engines = supervisor
        self._http = Supervisor(())
        self._figures = MonotonicCounts()
        self._figures_lock = threading.Lock()
        """A metrics server of its own reads them from its thread."""
        self._calls: dict[str, int] = {}
        self._client: EngineClient | None = None
        self._ends_at: float | None = None
        """When workers that still drain are killed, on time.monotonic's clock; None before SIGTERM."""

    def run(self, listening: socket.socket, *, on_ready: Callable[[str], None]) -> None:
        """See `HttpProcess`: it is ready once all workers are, and every worker that was given up ends it too."""
        asyncio.run(self.serve(listening, on_ready=on_ready))

    async def serve(self, listening: socket.socket, *, on_ready: Callable[[str], None]) -> None:
        """See `run`."""
        self._http = Supervisor(self._workers(listening.fileno()))
        coordinator = AsyncInferenceClient(self._options.coordinator, key=self._options.key, name="http-frontend")
        async with (
            coordinator,
            EngineClient(coordinator, None, self._settings, model=self._options.model, processes=self) as self._client,
        ):
            with self._handling_signals(), metrics_exporter(self._families, self._settings):
                answering = await answer_json(frontend_path(self._folder), self._reply)
                try:
                    self._http.start()
                    await self._watch(lambda: on_ready(url_of(listening)))
                finally:
                    answering.close()
                    await asyncio.to_thread(self._http.stop, number=signal.SIGKILL, timeout_s=CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------------ processes

    def failure(self) -> str | None:
        """Why no call will be served again; None while one is or may be."""
        return (None if self._engines is None else self._engines.failure()) or self._http.failure()

    def status(self) -> list[dict[str, Any]]:
        return [*(() if self._engines is None else self._engines.status()), *self._http.status()]

    def _workers(self, listening: int) -> list[ProcessSpec]:
        settings = dataclasses.replace(self._settings, prometheus_metrics_mode="instrument_only", http_workers=1)
        options, started = dataclasses.replace(self._options, settings=settings), time.time()
        count = self._settings.http_workers
        return [options.worker(index, listening=listening, started=started) for index in range(count)]

    async def _watch(self, on_ready: Callable[[], None]) -> None:
        """Until all workers have ended after a signal, or a failure, of which they know: they fail their calls."""
        assert self._client is not None
        is_announced = False
        gathered = 0.0
        failure = None
        while self._ends_at is None or any(process.is_running for process in self._http.processes):
            now = self._last_pass = time.monotonic()
            if self._ends_at is not None and now > self._ends_at:
                break
            if self._ends_at is None:
                if (failure := self.failure()) is not None:
                    self._http.terminate_workers()
                    self._ends_at = now + CLOSE_TIMEOUT_S
                    continue
                is_ready = all(process.ready or process.is_given_up for process in self._http.processes)
                if is_ready and not is_announced and self._client.state == "ok":
                    is_announced = True
                    on_ready()
            if now - gathered > GATHER_S:
                await self._gather()
                gathered = time.monotonic()
            await asyncio.sleep(0.05 if self._ends_at is None else 0.01)
        if failure is not None:
            raise EnginesFailed(failure)

    def _shut_down(self) -> None:
        assert self._client is not None
        if self._ends_at is not None:
            self.was_forced, self._ends_at = True, 0.0
            return
        log.info("shutting down: %d calls are running", sum(self._calls.values()))
        self._client.begin_drain()
        self._ends_at = time.monotonic() + self._settings.drain_timeout_s + 2 * CLOSE_TIMEOUT_S
        self._http.terminate_workers()

    # ------------------------------------------------------------------ figures

    async def _gather(self) -> None:
        """Ask every worker for its figures. One that does not answer keeps its last ones, without gauges."""
        names = [process.spec.name for process in self._http.processes]
        found = await asyncio.gather(*(ask_json(worker_path(self._folder, name), {}, GATHER_S) for name in names))
        present = {name: one for name, one in zip(names, found, strict=True) if one is not None}
        with self._figures_lock:
            for name, one in present.items():
                self._figures.update(name, one["born"], families_of(one["families"]))
            self._figures.set_present(present)
        self._calls = {name: one["calls"] for name, one in present.items()}

    def _families(self) -> list[Family]:
        """All metrics, those of the workers as of the last `_gather`."""
        assert self._client is not None
        with self._figures_lock:
            workers = self._figures.totals()
        return summed([*self._client.meter.families(), *workers])

    async def _reply(self, question: dict[str, Any]) -> dict[str, Any]:
        """To a worker's FrontendLink."""
        accept = question.get("metrics")
        if accept is None:
            return {"failure": self.failure(), "processes": self.status(), "calls": sum(self._calls.values())}
        assert self._client is not None
        await asyncio.gather(self._client.refresh(), self._gather())
        text, content_type = exposition(self._families, accept)
        return {"text": text.decode(), "content_type": content_type}


class FrontendLink:
    """A worker's link to its parent: the state of all processes, GATHER_S old at most, and the sum of all metrics."""

    def __init__(self, folder: str, *, name: str) -> None:
        self._folder, self._name = folder, name
        self._born = time.time()
        self._state: dict[str, Any] = {"failure": None, "processes": [], "calls": 0}

    def failure(self) -> str | None:
        failure: str | None = self._state["failure"]
        return failure

    def status(self) -> list[dict[str, Any]]:
        processes: list[dict[str, Any]] = self._state["processes"]
        return processes

    @property
    def num_calls(self) -> int:
        """Calls that run in all HTTP processes."""
        number: int = self._state["calls"]
        return number

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """The text of a scrape, of all processes, and its Content-Type. Raises ApiError 503."""
        reply = await ask_json(frontend_path(self._folder), {"metrics": accept}, 4 * GATHER_S)
        if reply is None:
            raise unavailable("the process that adds up the metrics does not answer", "no_metrics")
        return reply["text"].encode(), reply["content_type"]

    @contextlib.asynccontextmanager
    async def joined(self, client: EngineClient) -> AsyncIterator[None]:
        """Answer the parent with this process's figures, and keep its state up to date."""

        async def figures(question: dict[str, Any]) -> dict[str, Any]:
            plain = plain_of(client.meter.own_families())
            return {"born": self._born, "calls": client.num_calls, "families": plain}

        answering = await answer_json(worker_path(self._folder, self._name), figures)
        await self._refresh()
        polling = asyncio.create_task(self._poll())
        try:
            yield
        finally:
            polling.cancel()
            answering.close()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._refresh()

    async def _refresh(self) -> None:
        self._state = await ask_json(frontend_path(self._folder), {}, GATHER_S) or self._state


# ---------------------------------------------------------------------- questions between processes


def frontend_path(folder: str) -> str:
    return os.path.join(folder, "frontend")


def worker_path(folder: str, name: str) -> str:
    return os.path.join(folder, name)


async def answer_json(path: str, reply: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> asyncio.Server:
    """`answer` with JSON."""

    async def encoded(question: bytes) -> bytes:
        return msgspec.json.encode(await reply(msgspec.json.decode(question)))

    return await answer(path, encoded, max_bytes=MAX_QUESTION)


async def ask_json(path: str, question: dict[str, Any], timeout_s: float) -> Any:
    """The answer; None if none comes in time."""
    with contextlib.suppress(OSError, LinkClosed, msgspec.MsgspecError):
        async with asyncio.timeout(timeout_s):
            return msgspec.json.decode(await ask(path, msgspec.json.encode(question)))
    return None

"""The HTTP server of a process: a socket, the application under uvicorn, and its shutdown.

SIGTERM or Ctrl-C: new calls are answered 503, running calls go on for drain_timeout_s. A second signal ends all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

for _needed in ("starlette", "uvicorn", "httptools", "msgspec", "zmq", "prometheus_client"):
    if find_spec(_needed) is None:
        raise ModuleNotFoundError(f"the server needs {_needed}: pip install 'megatron-infer[server]'", name=_needed)

# ruff: noqa: E402
import prometheus_client
import uvicorn

from megatron_infer.coordinator.client import AsyncInferenceClient
from megatron_infer.engine.metrics.registry import Family
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.server.app import Module, create_app
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import unavailable
from megatron_infer.server.http_protocol import IDLE_TIMEOUT_S, Connections, protocol_of, raise_descriptor_limit
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.supervisor import Supervisor
from megatron_infer.server.tracing import tracing_to
from megatron_infer.text.tokenizer import Tokenizer
from megatron_infer.utils.process_memory import full_collections_by_hand
from megatron_infer.utils.short_turns import short_turns

if TYPE_CHECKING:
    from megatron_infer.server.http_workers import FrontendLink

log = logging.getLogger("megatron_infer.server")

TICK_S = 0.5
CLOSE_TIMEOUT_S = 5.0
"""Most seconds to send replies that are complete, after the drain."""


class EnginesFailed(InferenceError, RuntimeError):
    """No engine has come up, or a process without which none serves was given up."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address is taken or not this machine's."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        one = socket.socket(family, kind, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only if the protocol is TCP
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
        one.listen(2048)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot listen at {host} port {port}: {reason}; choose others (--host, --port)") from None
    one.set_inheritable(False)
    return one


def url_of(one: socket.socket) -> str:
    host, port = one.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed; None: asyncio's own."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _UvicornServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # HttpServer handles signals: it drains first


class HttpProcess(ABC):
    """What serves HTTP in a process: the server itself, or the parent of several (`http_workers`)."""

    def __init__(self) -> None:
        self.was_forced = False
        """Whether a second signal ended it without waiting for running calls."""
        self._last_pass = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pass_s(self) -> float:
        """Seconds that the event loop has stood still, give or take TICK_S. From any thread."""
        return time.monotonic() - self._last_pass

    def shut_down(self) -> None:
        """Do what SIGTERM does; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._shut_down)

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C call `_shut_down`, if this is the main thread."""
        self._loop = loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
        for number in numbers:
            loop.add_signal_handler(number, self._shut_down)
        try:
            yield
        finally:
            for number in numbers:  # uvloop leaves its own, which does nothing then
                loop.remove_signal_handler(number)

    @abstractmethod
    def run(self, listening: socket.socket, *, on_ready: Callable[[str], None]) -> None:
        """Serve on an event loop of its own until `shut_down`, SIGTERM or Ctrl-C.

        on_ready: called with the URL once an engine serves. Raises EnginesFailed once no engine will serve any more.
        """

    @abstractmethod
    def _shut_down(self) -> None:
        """On the event loop: drain at the first call, end at the second."""


class HttpServer(HttpProcess):
    """HTTP for the engines behind a coordinator."""

    def __init__(
        self,
        settings: ServerConfig,
        *,
        coordinator: str,
        key: bytes | None = None,
        tokenizer: Tokenizer | None,
        model: str,
        supervisor: Supervisor | None = None,
        frontend: FrontendLink | None = None,
        started: float | None = None,
        modules: Sequence[Module] = (),
    ) -> None:
        """coordinator: its address; key: its shared key. supervisor: of the engines' processes, if started here.

        frontend: of one of several HTTP processes, to their parent. started: when the server was, on time.time's clock;
        None: now. modules: register operations and fields after those of the package.
        """
        super().__init__()
        self._settings, self._coordinator, self._key = settings, coordinator, key
        self._tokenizer, self._model, self._supervisor = tokenizer, model, supervisor
        self._frontend, self._started = frontend, time.time() if started is None else started
        self._modules = modules
        self._draining: asyncio.Task[None] | None = None
        self.metrics_url: str | None = None
        """URL of a separate metrics server, which needs no key; None: this process has none."""
        self._running: tuple[_UvicornServer, EngineClient] | None = None

    def run(self, listening: socket.socket, *, on_ready: Callable[[str], None]) -> None:
        """See `HttpProcess`. The loop is uvloop's where it is installed, which sends small events faster."""
        with full_collections_by_hand(), short_turns, asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self.serve(listening, on_ready=on_ready))

    async def serve(self, listening: socket.socket, *, on_ready: Callable[[str], None]) -> None:
        """See `run`."""
        coordinator = AsyncInferenceClient(self._coordinator, key=self._key, name="http")
        async with contextlib.AsyncExitStack() as stack:
            endpoint, names = self._settings.otlp_traces_endpoint, self._settings.served_model_name or (self._model,)
            tracing = stack.enter_context(tracing_to(endpoint, model=names[0]))
            await stack.enter_async_context(coordinator)
            client = await stack.enter_async_context(
                EngineClient(
                    coordinator,
                    self._tokenizer,
                    self._settings,
                    model=self._model,
                    processes=self._supervisor or self._frontend,
                    started=self._started,
                    tracing=tracing,
                )
            )
            if self._frontend is not None:
                await stack.enter_async_context(self._frontend.joined(client))
            client.frontend = self._frontend
            exporter = metrics_exporter(client.meter.families, self._settings)
            self.metrics_url = getattr(exporter, "url", None)
            limit = raise_descriptor_limit()
            log.info("at most %d connections at once (the hard limit of open files)", limit)
            app = create_app(client, self._settings, modules=self._modules)
            connections = Connections(limit, reply_timeout_s=self._settings.request_timeout_s)
            server = _UvicornServer(_uvicorn_config(app, connections))
            self._running = (server, client)
            stack.enter_context(self._handling_signals())
            ticking = asyncio.create_task(self._tick())
            watching = asyncio.create_task(self._watch(server, client, lambda: on_ready(url_of(listening))))
            with exporter:
                await server.serve(sockets=[listening])
            ticking.cancel()
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _tick(self) -> None:
        while True:
            self._last_pass = time.monotonic()
            await asyncio.sleep(TICK_S)

    async def _watch(self, server: _UvicornServer, client: EngineClient, on_ready: Callable[[], None]) -> None:
        is_announced = False
        while self._supervisor is None or (failure := self._supervisor.failure()) is None:
            if not is_announced and client.state == "ok":
                is_announced = True
                on_ready()
            await asyncio.sleep(TICK_S if is_announced else 0.05)
        client.fail_all(unavailable(failure, "engine_failed"))
        server.should_exit = True
        raise EnginesFailed(failure)

    def _shut_down(self) -> None:
        assert self._running is not None
        server, client = self._running
        if self._draining is not None:
            self.was_forced = True
            server.should_exit = server.force_exit = True
            return
        log.info("shutting down: %d calls are running", client.num_calls)
        client.begin_drain()
        self._draining = asyncio.create_task(self._drain(server, client))

    async def _drain(self, server: _UvicornServer, client: EngineClient) -> None:
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await client.wait_idle()
        except TimeoutError:
            log.warning("%d calls have not finished within %g s", client.num_calls, self._settings.drain_timeout_s)
            client.fail_all(unavailable("the server is shutting down", "shutting_down"))
        if self._supervisor is not None:  # they end while the connections are closed
            self._supervisor.terminate_workers()
        server.should_exit = True


def metrics_exporter(
    read: Callable[[], list[Family]], settings: ServerConfig
) -> contextlib.AbstractContextManager[Any]:
    """The separate metrics server, if prometheus_metrics_mode asks for one. Raises ConfigError for a taken port."""
    if settings.prometheus_metrics_mode == "instrument_only":
        return contextlib.nullcontext()
    from megatron_infer.engine.metrics.prometheus import PrometheusExporter

    exporter = PrometheusExporter(
        read,
        mode=settings.prometheus_metrics_mode,
        port=settings.metrics_port,
        registry=prometheus_client.CollectorRegistry(),
    )
    if exporter.url is not None:
        log.info("metrics at %s", exporter.url)
    return exporter


def _uvicorn_config(app: Any, connections: Connections) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol_of(connections),
        log_config=None,
        log_level="error",  # else a line for every piece of bad HTTP that a stranger sends
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=int(IDLE_TIMEOUT_S),
        timeout_graceful_shutdown=int(CLOSE_TIMEOUT_S),
    )

"""The HTTP process: a port, the application, and how both end.

SIGTERM or Ctrl-C: new calls are answered 503, those under way go on for drain_timeout_s at most. A second one ends all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from megatron_infer.server.requirements import require
from megatron_infer.utils.stderr_log import log_to_stderr

require()

# ruff: noqa: E402
import prometheus_client
import uvicorn

from megatron_infer.coordinator.client import AsyncInferenceClient
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.server.app import Module, create_app
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import unavailable
from megatron_infer.server.model_card import read_card
from megatron_infer.server.settings import ServerConfig
from megatron_infer.server.supervisor import Supervisor
from megatron_infer.text.tokenizer import Tokenizer

log = logging.getLogger("megatron_infer.server")

CLOSING_S = 5.0
"""How long replies that are all made may take to be sent."""


class EnginesFailed(InferenceError, RuntimeError):
    """No engine has come up."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigError when the address is taken or not this machine's."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        one = socket.socket(family, kind, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only where TCP is named
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
    """None: asyncio's own."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # ours do more than end it


class HttpProcess:
    """HTTP in front of a coordinator, until told to end."""

    def __init__(
        self,
        settings: ServerConfig,
        *,
        coordinator: str,
        key: bytes | None = None,
        tokenizer: Tokenizer | None,
        model: str,
        fleet: Supervisor | None = None,
        modules: Sequence[Module] = (),
    ) -> None:
        """modules: of routes and fields beside the package's own."""
        self._modules = modules
        self._settings, self._coordinator, self._key = settings, coordinator, key
        self._tokenizer, self._model, self._fleet = tokenizer, model, fleet
        self._ending: asyncio.Task[None] | None = None
        self.metrics_url: str | None = None
        """Where metrics are served without a key; None: at /metrics alone, or by another process."""
        self.was_forced = False
        """Whether it was told a second time, and nothing was waited for."""
        self._running: tuple[asyncio.AbstractEventLoop, _Server, EngineClient] | None = None

    def run(self, listening: socket.socket, *, on_ready: Callable[[str], None]) -> None:
        """`serve` on an event loop of its own: uvloop's where it is installed, which sends small events for less."""
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self.serve(listening, on_ready=on_ready))

    async def serve(self, listening: socket.socket, *, on_ready: Callable[[str], None]) -> None:
        """Until `end`, SIGTERM or Ctrl-C. on_ready: given the URL once an engine serves.

        Raises EnginesFailed if none ever does. Signals are taken where this is the main thread.
        """
        client = AsyncInferenceClient(self._coordinator, key=self._key, name="http")
        async with (
            client,
            EngineClient(client, self._tokenizer, self._settings, model=self._model, fleet=self._fleet) as service,
        ):
            exporting = _exporter(service, self._settings)
            self.metrics_url = getattr(exporting, "url", None)
            server = _Server(_uvicorn_config(create_app(service, self._settings, modules=self._modules)))
            loop = asyncio.get_running_loop()
            self._running = (loop, server, service)
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, self._told_to_end)
            watching = asyncio.create_task(self._watch(server, service, lambda: on_ready(url_of(listening))))
            with exporting:
                await server.serve(sockets=[listening])
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    def end(self) -> None:
        """What SIGTERM does; from any thread."""
        if self._running is not None and not self._running[0].is_closed():
            self._running[0].call_soon_threadsafe(self._told_to_end)

    async def _watch(self, server: _Server, service: EngineClient, on_ready: Callable[[], None]) -> None:
        while service.state == "loading":
            await asyncio.sleep(0.05)
        if service.state == "ok":
            on_ready()
            return
        if self._fleet is not None and not self._fleet.was_ready and service.state == "failed":
            server.should_exit = True
            raise EnginesFailed(self._fleet.failure() or "no engine has come up")

    def _told_to_end(self) -> None:
        assert self._running is not None
        _, server, service = self._running
        if self._ending is not None:
            self.was_forced = True
            server.should_exit = server.force_exit = True
            return
        log.info("shutting down: %d calls are under way", service.num_calls)
        service.begin_drain()
        self._ending = asyncio.create_task(self._end(server, service))

    async def _end(self, server: _Server, service: EngineClient) -> None:
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await service.idle()
        except TimeoutError:
            log.warning("%d calls are not done within %g s", service.num_calls, self._settings.drain_timeout_s)
            service.end_all(unavailable("the server is shutting down", "shutting_down"))
        server.should_exit = True


def _exporter(service: EngineClient, settings: ServerConfig) -> contextlib.AbstractContextManager[Any]:
    """A metrics server of its own, where one is asked for. Raises ConfigError for a taken port."""
    if settings.prometheus_metrics_mode == "instrument_only":
        return contextlib.nullcontext()
    from megatron_infer.metrics.prometheus import PrometheusExporter

    exporter = PrometheusExporter(
        service.meter.families,
        mode=settings.prometheus_metrics_mode,
        port=settings.metrics_port,
        registry=prometheus_client.CollectorRegistry(),
    )
    if exporter.url is not None:
        log.info("metrics at %s", exporter.url)
    return exporter


def _uvicorn_config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(CLOSING_S),
    )


def serve_beside(
    *,
    settings: dict[str, Any],
    coordinator: str,
    key: str | None,
    card: dict[str, Any],
    folder: str,
    model: str,
) -> None:
    """The HTTP process of engines that others start."""
    from megatron_infer.server.subprocess_main import tell

    log_to_stderr(log.name, times=True)
    config = ServerConfig(**settings)
    tokenizer = read_card(folder, **card)
    front = HttpProcess(
        config,
        coordinator=coordinator,
        key=None if key is None else key.encode(),
        tokenizer=tokenizer,
        model=model,
    )
    front.run(listen(config.host, config.port), on_ready=lambda url: tell(ready={"url": url}))

"""`serve` on one machine: a coordinator, engines and HTTP, each in a process of its own; how they start and end.

main thread            HTTP (HttpServer), or with `http_workers` the parent of several HTTP processes (HttpFrontend)
supervisor thread      starts and restarts the others:
    coordinator        spreads requests; needs no model
    replica0 ... N-1   one engine each
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

from megatron_infer.errors import ConfigError
from megatron_infer.server.http_server import HttpProcess, HttpServer, listen
from megatron_infer.server.http_workers import HttpFrontend
from megatron_infer.server.process_options import EngineOptions, HttpOptions, allowed_by
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.socket_base import ServerFolder
from megatron_infer.server.speech import speech_modules, speech_processes, with_voices
from megatron_infer.server.supervisor import Process, ProcessSpec, Supervisor, coordinator_process
from megatron_infer.server.tokenizer_files import load_tokenizer

STOP_TIMEOUT_S = 10.0
TOKENIZER_TIMEOUT_S = 300.0


def serve(options: EngineOptions, settings: ServerConfig, *, note: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. note: shows a line to the user. Raises InferenceError when it cannot serve."""
    settings = with_voices(options.model, settings)
    with (
        contextlib.closing(listen(settings.host, settings.port)) as listening,  # fails before a model is loaded
        ServerFolder(options.endpoint_base) as folder,
    ):
        supervisor = Supervisor(
            [
                coordinator_process({"bind": folder.coordinator, "max_queue": settings.max_queue}),
                *(options.process(index, folder.coordinator, settings) for index in range(options.dp)),
                *speech_processes(options.model, folder.path, settings),
            ]
        )
        is_drained = False
        before = signal.signal(signal.SIGTERM, _interrupt)  # until the HTTP server handles it
        try:
            supervisor.start()
            http = http_options(options, settings, folder.path, coordinator=folder.coordinator)
            server = http_server(http, supervisor)
            server.run(listening, on_ready=lambda url: note(f"serving {options.model} at {url}"))
            is_drained = not server.was_forced
        finally:
            signal.signal(signal.SIGTERM, before)
            supervisor.stop(number=signal.SIGTERM if is_drained else signal.SIGKILL, timeout_s=STOP_TIMEOUT_S)


def _interrupt(*_: Any) -> None:
    """SIGTERM before there are calls to drain."""
    raise KeyboardInterrupt


def attach(
    options: EngineOptions, settings: ServerConfig, coordinator: str, key: bytes | None, note: Callable[[str], None]
) -> None:
    """Serve HTTP for a coordinator whose replicas are started separately."""
    if settings.voice:
        raise ConfigError("voice is given with --coordinator, which serves no speech; leave it out")
    with contextlib.closing(listen(settings.host, settings.port)) as listening, ServerFolder() as folder:
        server = http_server(http_options(options, settings, folder.path, coordinator=coordinator, key=key))
        server.run(listening, on_ready=lambda url: note(f"serving {options.model} at {url}"))


def join(options: EngineOptions, settings: ServerConfig, key: bytes | None, note: Callable[[str], None]) -> None:
    """Serve one engine, without HTTP, as a replica of the coordinator at `endpoint_base`. SIGTERM drains."""
    from megatron_infer.server.engine_replica import engine_replica, load_engine  # imports torch

    (role,), coordinator = options.roles, options.endpoint_base
    assert coordinator is not None, "a role without a coordinator"
    engine = load_engine(options)
    replica = engine_replica(engine, coordinator, name="", key=key, role=role, **allowed_by(settings))
    signal.signal(signal.SIGTERM, lambda *_: replica.drain())
    note(f"serving for {coordinator}, {role}; HTTP: megatron-infer serve {options.model} --coordinator {coordinator}")
    with replica:
        replica.run()


def http_options(
    options: EngineOptions, settings: ServerConfig, folder: str, *, coordinator: str, key: bytes | None = None
) -> HttpOptions:
    """What HTTP processes need. Writes the model's tokenizer into the folder. Raises ModelError."""
    tokenizer = save_tokenizer_in_subprocess(options.model, folder, options.chat_template)
    return HttpOptions(
        settings=settings,
        coordinator=coordinator,
        key=key,
        tokenizer=tokenizer,
        folder=folder,
        model=options.model,
    )


def http_server(options: HttpOptions, supervisor: Supervisor | None = None) -> HttpProcess:
    """HTTP in this process, or with `http_workers` in several. supervisor: of the engines, if they are started here."""
    if options.settings.http_workers > 1:
        return HttpFrontend(options, supervisor=supervisor)
    return one_http_server(options, supervisor=supervisor)


def one_http_server(options: HttpOptions, **about: Any) -> HttpServer:
    """HTTP in this process. about: further arguments of `HttpServer`."""
    return HttpServer(
        options.settings,
        coordinator=options.coordinator,
        key=options.key,
        tokenizer=load_tokenizer(options.folder, **options.tokenizer),
        model=options.model,
        modules=speech_modules(options.folder),
        **about,
    )


def save_tokenizer_in_subprocess(model: str, folder: str, chat_template: str | None = None) -> dict[str, Any]:
    """Run `save_tokenizer` in a process of its own, so that this one imports no torch. Raises ModelError."""
    options = {"model": model, "folder": folder, "chat_template": chat_template}
    process = Process(ProcessSpec(name="tokenizer", role="tokenizer", options=options))
    process.start()
    try:
        return process.wait_ready(TOKENIZER_TIMEOUT_S)
    finally:
        process.end()

"""`serve` on one machine: a coordinator, engines and HTTP, each in a process of its own; how they start and end.

main thread            HTTP (HttpServer), or with `http_workers` the parent of several HTTP processes (HttpFrontend)
supervisor thread      starts and restarts the others:
    coordinator        spreads requests; needs no model
    replica0 ... N-1   one engine each
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_infer.errors import ConfigError
from megatron_infer.server.http_server import HttpServer, listen
from megatron_infer.server.http_workers import HttpFrontend
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.socket_base import SocketBase
from megatron_infer.server.speech import speech_modules, speech_processes, with_voices
from megatron_infer.server.supervisor import Process, ProcessSpec, Supervisor, coordinator_process
from megatron_infer.server.tokenizer_files import load_tokenizer

STOP_TIMEOUT_S = 10.0
TOKENIZER_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What each engine is built from."""

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    """Options of InferenceConfig; the others are chosen for the machine."""
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    use_legacy_module: bool = False
    """See `build_model`."""
    dp: int = 1
    """Engines, each a replica."""
    chat_template: str | None = None
    """Goes before the model's own."""
    loader: str | None = None
    """module:function that makes the engine from `loader_options`, in place of one of `model`."""
    loader_options: dict[str, Any] = field(default_factory=dict)
    endpoint_base: str | None = None
    """What the addresses of the processes begin with (see `SocketBase`); None: a folder of their own."""

    def __post_init__(self) -> None:
        if self.dp < 1:
            raise ConfigError(f"dp is {self.dp}, it must be at least 1")

    def process(self, index: int, coordinator: str, settings: ServerConfig) -> ProcessSpec:
        threads = self.threads
        if threads is None and self.dp > 1:
            cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            threads = max(1, cpus // self.dp)
        options = {
            "model": self.model,
            "coordinator": coordinator,
            "name": f"replica{index}",
            "config": self.config,
            "dtype": self.dtype,
            "device": self.device,
            "threads": threads,
            "use_legacy_module": self.use_legacy_module,
            "control": settings.control,
            "weights_root": settings.weights_root,
            "lora_root": settings.lora_root,
            "loader": self.loader,
            "loader_options": self.loader_options,
        }
        return ProcessSpec(name=f"replica{index}", role="engine", options=options, is_worker=True, hang_timeout_s=30.0)


def serve(options: EngineOptions, settings: ServerConfig, *, note: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. note: shows a line to the user. Raises InferenceError when it cannot serve."""
    settings = with_voices(options.model, settings)
    listening = listen(settings.host, settings.port)  # fails for a taken port before a model is loaded
    folder = tempfile.mkdtemp(prefix="megatron-infer-")  # readable by this user only
    base = None if options.endpoint_base is None else SocketBase(options.endpoint_base)
    address = f"ipc://{folder}/coordinator" if base is None else base.coordinator
    coordinator = {"bind": address, "max_queue": settings.max_queue}
    supervisor = Supervisor(
        [
            coordinator_process(coordinator),
            *(options.process(index, address, settings) for index in range(options.dp)),
            *speech_processes(options.model, folder, settings),
        ]
    )
    is_drained = False
    before = signal.signal(signal.SIGTERM, _interrupt)  # until the HTTP server handles it
    try:
        supervisor.start()
        tokenizer = save_tokenizer_in_subprocess(options.model, folder, options.chat_template)
        server = http_server(
            settings,
            coordinator=address,
            tokenizer=tokenizer,
            folder=folder,
            model=options.model,
            supervisor=supervisor,
        )
        server.run(listening, on_ready=lambda url: note(f"serving {options.model} at {url}"))
        is_drained = not server.was_forced
    finally:
        signal.signal(signal.SIGTERM, before)
        supervisor.stop(number=signal.SIGTERM if is_drained else signal.SIGKILL, timeout_s=STOP_TIMEOUT_S)
        listening.close()
        shutil.rmtree(folder, ignore_errors=True)
        if base is not None:
            base.close()


def http_server(
    settings: ServerConfig,
    *,
    coordinator: str,
    tokenizer: dict[str, Any],
    folder: str,
    model: str,
    key: bytes | None = None,
    supervisor: Supervisor | None = None,
) -> HttpServer | HttpFrontend:
    """HTTP in this process, or with `http_workers` in several. tokenizer: arguments of `load_tokenizer`."""
    if settings.http_workers > 1:
        return HttpFrontend(
            settings,
            coordinator=coordinator,
            key=key,
            tokenizer=tokenizer,
            folder=folder,
            model=model,
            supervisor=supervisor,
        )
    loaded = load_tokenizer(folder, **tokenizer)
    return HttpServer(
        settings,
        coordinator=coordinator,
        key=key,
        tokenizer=loaded,
        model=model,
        supervisor=supervisor,
        modules=speech_modules(folder),
    )


def _interrupt(*_: Any) -> None:
    """SIGTERM before there are calls to drain."""
    raise KeyboardInterrupt


def attach(
    options: EngineOptions, settings: ServerConfig, coordinator: str, key: bytes | None, note: Callable[[str], None]
) -> None:
    """Serve HTTP for a coordinator whose replicas are started separately."""
    if settings.voice:
        raise ConfigError("voice is given with --coordinator, which serves no speech; leave it out")
    listening = listen(settings.host, settings.port)
    folder = tempfile.mkdtemp(prefix="megatron-infer-")
    try:
        tokenizer = save_tokenizer_in_subprocess(options.model, folder, options.chat_template)
        server = http_server(
            settings, coordinator=coordinator, key=key, tokenizer=tokenizer, folder=folder, model=options.model
        )
        server.run(listening, on_ready=lambda url: note(f"serving {options.model} at {url}"))
    finally:
        listening.close()
        shutil.rmtree(folder, ignore_errors=True)


def save_tokenizer_in_subprocess(model: str, folder: str, chat_template: str | None = None) -> dict[str, Any]:
    """Run `save_tokenizer` in a process of its own, so that this one imports no torch. Raises ModelError."""
    options = {"model": model, "folder": folder, "chat_template": chat_template}
    process = Process(ProcessSpec(name="tokenizer", role="tokenizer", options=options))
    process.start()
    try:
        return process.wait_ready(TOKENIZER_TIMEOUT_S)
    finally:
        process.signal(signal.SIGKILL)
        process.wait(STOP_TIMEOUT_S)

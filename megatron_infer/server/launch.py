"""`serve` as a whole: coordinator, engines and HTTP, a process each, and their order of coming and going."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.server.http_process import HttpProcess, listen
from megatron_infer.server.model_card import read_card
from megatron_infer.server.settings import ServerConfig
from megatron_infer.server.supervisor import Process, Role, Supervisor

STOP_S = 10.0
CARD_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What each engine is made of."""

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    """Options of InferenceConfig; what is left open suits the machine."""
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    dp: int = 1

    def __post_init__(self) -> None:
        if self.dp < 1:
            raise ConfigError(f"dp is {self.dp}, it must be at least 1")

    def worker(self, index: int, coordinator: str) -> Role:
        """The process of one engine."""
        threads = self.threads
        if threads is None and self.dp > 1:
            cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            threads = max(1, cpus // self.dp)
        told = {
            "model": self.model,
            "coordinator": coordinator,
            "name": f"replica{index}",
            "config": self.config,
            "dtype": self.dtype,
            "device": self.device,
            "threads": threads,
        }
        return Role(name=f"replica{index}", role="worker", told=told, reported=True)


def serve(options: EngineOptions, settings: ServerConfig, *, note: Callable[[str], None]) -> None:
    """Until SIGTERM or Ctrl-C. note: says a line to the person watching. Raises InferenceError when it cannot serve."""
    listening = listen(settings.host, settings.port)  # a taken port is told before a model is loaded
    folder = tempfile.mkdtemp(prefix="megatron-infer-")  # nobody else can look into it
    address = f"ipc://{folder}/coordinator"
    roles = [Role(name="coordinator", role="coordinator", told={"bind": address, "max_queue": settings.max_queue})]
    fleet = Supervisor([*roles, *(options.worker(index, address) for index in range(options.dp))])
    clean = False
    before = signal.signal(signal.SIGTERM, _interrupted)  # until HTTP takes it
    try:
        fleet.start()
        card = make_card(options.model, folder)
        front = HttpProcess(
            settings,
            coordinator=address,
            tokenizer=read_card(folder, **card),
            model=options.model,
            fleet=fleet,
        )
        front.run(listening, on_ready=lambda url: note(f"serving {options.model} at {url}"))
        clean = not front.was_forced
    finally:
        signal.signal(signal.SIGTERM, before)
        fleet.stop(number=signal.SIGTERM if clean else signal.SIGKILL, patience_s=STOP_S)
        listening.close()
        shutil.rmtree(folder, ignore_errors=True)


def _interrupted(*_: Any) -> None:
    """Told to end before there is anything to drain."""
    raise KeyboardInterrupt


def attach(options: EngineOptions, settings: ServerConfig, coordinator: str, key: bytes | None, note: Any) -> None:
    """HTTP alone, in front of a coordinator whose engines others start."""
    listening = listen(settings.host, settings.port)
    folder = tempfile.mkdtemp(prefix="megatron-infer-")
    try:
        card = make_card(options.model, folder)
        front = HttpProcess(
            settings, coordinator=coordinator, key=key, tokenizer=read_card(folder, **card), model=options.model
        )
        front.run(listening, on_ready=lambda url: note(f"serving {options.model} at {url}"))
    finally:
        listening.close()
        shutil.rmtree(folder, ignore_errors=True)


def make_card(model: str, folder: str) -> dict[str, Any]:
    """The model's tokenizer put into `folder`, by a process of its own. Raises ModelError."""
    process = Process(Role(name="card", role="card", told={"model": model, "folder": folder}))
    process.start()
    try:
        return told_by(process, CARD_TIMEOUT_S)
    finally:
        process.signal(signal.SIGKILL)
        process.wait(STOP_S)


def told_by(process: Process, timeout_s: float) -> dict[str, Any]:
    """What a process says once it is ready. Raises ModelError with its reason when it ends before or says nothing."""
    deadline = time.monotonic() + timeout_s
    while process.ready is None:
        if not process.is_running:
            process.heard_out()
            if process.ready is None:
                raise ModelError(process.error or f"{process.role.name} ended with code {process.exit_code}")
        if time.monotonic() > deadline:
            process.signal(signal.SIGKILL)
            raise ModelError(f"{process.role.name} is not ready after {timeout_s:g} s")
        time.sleep(0.02)
    return process.ready

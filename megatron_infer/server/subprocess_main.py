"""Subprocesses of `serve`: `python -m megatron_infer.server.subprocess_main ROLE`.

A subprocess starts with a link to its parent as its standard input. It gets its options over the link, as every user of
the machine can see arguments. It reports over the link: {"ready": {...}} once it serves, {"beat": true} every second,
{"error": "..."} when it cannot. It ends with the process that started it, see `utils.child_process`.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_infer.distributed.wire import Link
from megatron_infer.engine.metrics.wandb import LOGGER as METRICS_LOGGER
from megatron_infer.errors import InferenceError
from megatron_infer.utils.process_memory import full_collections_by_hand, loading_for_good
from megatron_infer.utils.short_turns import short_turns
from megatron_infer.utils.stderr_log import log_to_stderr

if TYPE_CHECKING:
    from megatron_infer.server.http_server import HttpProcess

BEAT_S = 1.0
MAX_PASS_S, MAX_HTTP_PASS_S = 5.0, 30.0
"""Seconds in one pass of its loop after which a coordinator, and an HTTP process, sends no more beats."""


@functools.cache
def _parent() -> Link:
    """The link to the parent process. From the first call on, standard input is empty."""
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), 0)  # what this process starts reads nothing from the link
    return Link(connection)


_reporting = threading.Lock()


def report(**message: Any) -> None:
    """Report to the parent process, from any thread."""
    with _reporting:
        _parent().send(message, wait_s=None)


class ParentHeartbeat:
    """Tells the parent process every BEAT_S seconds that this one runs, from a thread, while `is_alive` says so."""

    def __init__(self) -> None:
        self.is_alive: Callable[[], bool] = lambda: True
        threading.Thread(target=self._run, name="megatron-infer-beat", daemon=True).start()

    def _run(self) -> None:
        while True:
            if self.is_alive():
                report(beat=True)
            time.sleep(BEAT_S)


def main() -> int:
    """0: done; 1: failed, and the error was reported."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides when to end
    options: Any = _parent().receive(None)
    try:
        ROLES[sys.argv[1]](**options)
    except (InferenceError, NotImplementedError) as error:
        report(error=str(error))
        return 1
    if "torch" in sys.modules:
        _leave()
    return 0


def _leave() -> None:
    """End this process with code 0, without the interpreter's teardown: with torch that takes seconds."""
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def coordinator(*, bind: str, max_queue: int, key: str | None = None) -> None:
    """Run a coordinator until SIGTERM."""
    from megatron_infer.config.coordinator_options import CoordinatorOptions
    from megatron_infer.coordinator.coordinator import Coordinator

    log_to_stderr("megatron_infer.coordinator")
    options = CoordinatorOptions(max_queue=max_queue, key=None if key is None else key.encode())
    with full_collections_by_hand(), Coordinator(bind, options) as one:
        signal.signal(signal.SIGTERM, lambda *_: one.stop())
        report(ready={"address": one.address})
        ParentHeartbeat().is_alive = lambda: one.pass_s < MAX_PASS_S
        one.run()


def tokenizer(*, model: str, folder: str, chat_template: str | None = None) -> None:
    """Write a model's tokenizer to a folder. chat_template: goes before the model's own."""
    from megatron_infer.server.tokenizer_files import save_tokenizer

    report(ready=save_tokenizer(model, folder, chat_template))


def engine(*, options: dict[str, Any], allowed: dict[str, Any], coordinator: str, name: str, role: str) -> None:
    """Load a model and serve the coordinator's requests until SIGTERM, which lets running requests finish.

    options: of `EngineOptions`. allowed: see `allowed_by`. role: of `ReplicaRole`.
    """
    beat = ParentHeartbeat()
    with loading_for_good():
        from megatron_infer.config.coordinator_options import MAX_STEP_S
        from megatron_infer.server.engine_replica import engine_replica, load_engine  # imports torch
        from megatron_infer.server.process_options import EngineOptions

    what = EngineOptions(**options)
    if what.config.get("logging_step_interval"):
        log_to_stderr(METRICS_LOGGER)
    own = load_engine(what)
    replica = engine_replica(own, coordinator, name=name, role=role, **allowed)
    signal.signal(signal.SIGTERM, lambda *_: replica.drain())
    shape = own.shape
    report(ready={"parameters": shape.num_parameters, "dtype": shape.dtype})
    beat.is_alive = lambda: replica.step_s < MAX_STEP_S
    with replica, short_turns:
        replica.run()


def http(**options: Any) -> None:
    """Serve HTTP for the engines of all ranks until SIGTERM. options: of `HttpOptions`."""
    beat = ParentHeartbeat()
    from megatron_infer.server.http_server import listen
    from megatron_infer.server.launch import http_server
    from megatron_infer.server.process_options import HttpOptions

    log_to_stderr("megatron_infer.server", times=True)
    one = HttpOptions.from_json(**options)
    _serve(http_server(one), listen(one.settings.host, one.settings.port), beat)


def http_worker(*, name: str, listening: int, started: float, **options: Any) -> None:
    """One of several HTTP processes. listening: the descriptor of their socket. started: see `HttpServer`.

    options: of `HttpOptions`.
    """
    beat = ParentHeartbeat()
    from megatron_infer.server.http_workers import FrontendLink
    from megatron_infer.server.launch import one_http_server
    from megatron_infer.server.process_options import HttpOptions

    log_to_stderr("megatron_infer.server", times=True)
    shared = socket.socket(fileno=listening)
    shared.set_inheritable(False)
    one = HttpOptions.from_json(**options)
    server = one_http_server(one, frontend=FrontendLink(one.folder, name=name), started=started)
    _serve(server, shared, beat)


def _serve(server: HttpProcess, listening: socket.socket, beat: ParentHeartbeat) -> None:
    beat.is_alive = lambda: server.pass_s < MAX_HTTP_PASS_S
    server.run(listening, on_ready=lambda url: report(ready={"url": url}))


def audio_decoder(*, model: str, path: str, voices: dict[str, str], own: str) -> None:
    """Decode speech tokens of a model that speaks, for HTTP processes that connect to `path`, until SIGTERM."""
    beat = ParentHeartbeat()
    from megatron_infer.utils.openmp import limit_spinning

    limit_spinning()
    from megatron_infer.server.audio_decoder import MAX_CALL_S, DecoderServer, run_decoder

    def on_ready(server: DecoderServer) -> None:
        beat.is_alive = lambda: server.call_s < MAX_CALL_S
        report(ready={"path": path})

    log_to_stderr("megatron_infer", times=True)
    signal.signal(signal.SIGTERM, lambda *_: _leave())
    run_decoder(model, path, voices, own, on_ready)


ROLES: dict[str, Callable[..., None]] = {
    "coordinator": coordinator,
    "tokenizer": tokenizer,
    "engine": engine,
    "audio_decoder": audio_decoder,
    "http": http,
    "http_worker": http_worker,
}

if __name__ == "__main__":
    sys.exit(main())

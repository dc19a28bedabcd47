"""megatron-core's text generation server: this package's HTTP server on a thread of the process that starts it."""

from __future__ import annotations

import socket
import tempfile
import threading
import warnings
from typing import Any

from megatron_infer.config.inference import ConfigWarning
from megatron_infer.errors import ConfigError, InferenceError, TransitionTimeout
from megatron_infer.mcore.listening import HERE
from megatron_infer.mcore.results import ledger_entry
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_server import HttpServer, listen
from megatron_infer.server.routes import Routes
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.text.tokenizer import Tokenizer

PARSERS = {"deepseek-r1-reasoning": {"reasoning_parser": "deepseek_r1"}}
"""megatron-core's name of a parser -> our options. Tool calls are read in the chat template's format without one."""
DEFAULT_REPLICAS = 4
"""megatron-core's default number of server processes."""
START_TIMEOUT_S = 60.0
_running: _ServerThread | None = None
"""The server of this process: megatron-core's calls start and stop one without naming it."""


class _ServerThread:
    def __init__(self, server: HttpServer, listening: socket.socket) -> None:
        self._server = server
        self._listening = listening
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="megatron-infer-http", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S):
            raise TransitionTimeout(f"the HTTP server does not serve after {START_TIMEOUT_S:g} s")
        if self._failure is not None:
            raise InferenceError(f"the HTTP server has ended: {self._failure}") from self._failure

    def _run(self) -> None:
        try:
            self._server.run(self._listening, on_ready=lambda _: self._ready.set())
        except BaseException as error:  # raised at the caller that waits for the start
            self._failure = error
        finally:
            self._ready.set()

    def stop(self) -> None:
        self._server.shut_down()
        self._server.shut_down()  # running calls are not waited for: their engines stop
        self._thread.join(START_TIMEOUT_S)
        self._listening.close()


class _Ledger:
    """A module of the server: finished requests of whole replies enter the ledger of this process's engine."""

    def __init__(self, address: str) -> None:
        self._address = address

    def register(self, routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
        client.reply_hooks.append(self._note)

    def _note(self, reply_id: str, outputs: list[RequestOutput]) -> None:
        listening = HERE.get(self._address)
        if listening is not None and listening.engine.local_metadata_ledger_enabled:
            for output in outputs:
                listening.engine.local_metadata_ledger[reply_id] = ledger_entry(output)


def start_text_gen_server(
    coordinator_addr: str,
    tokenizer: Any,
    rank: int,
    server_port: int,
    parsers: list[str] | None = None,
    verbose: bool = False,
    num_replicas: int = DEFAULT_REPLICAS,
    hostname: str | None = None,
    sock: socket.socket | None = None,
    chat_template: str | None = None,
) -> None:
    """Serve HTTP for the engines behind a coordinator; returns once it serves. A second call does nothing.

    One thread serves; another number of replicas than the default has no effect, and a warning says so. verbose: a line
    in the log for each call. hostname: None is 127.0.0.1. sock: bound to a port already. Raises ConfigError for a
    parser that is not known here.
    """
    global _running
    if _running is not None:
        return
    if num_replicas not in (1, DEFAULT_REPLICAS):
        warnings.warn(f"num_replicas={num_replicas} has no effect: one thread serves", ConfigWarning, stacklevel=2)
    options: dict[str, Any] = {}
    for name in parsers or ():
        if name not in PARSERS:
            raise ConfigError(f"parser {name!r} is not known here; known are {', '.join(PARSERS)}")
        options |= PARSERS[name]
    settings = ServerConfig(host=hostname or "127.0.0.1", port=server_port, log_requests=verbose, **options)
    listening = HERE.get(coordinator_addr)
    server = HttpServer(
        settings,
        coordinator=coordinator_addr,
        key=None if listening is None else listening.key,
        tokenizer=http_tokenizer(tokenizer, chat_template),
        model="megatron",
        modules=(_Ledger(coordinator_addr),),
    )
    _running = _ServerThread(server, listen(settings.host, settings.port) if sock is None else sock)


def stop_text_gen_server() -> None:
    """End the server; calls that are running get no answer. Without one it does nothing."""
    global _running
    if _running is not None:
        _running.stop()
        _running = None


def http_tokenizer(tokenizer: Any, chat_template: str | None = None) -> Tokenizer | None:
    """Our tokenizer of megatron-core's, which is one of Hugging Face inside -> None for any other.

    Without one the server takes prompts as token ids only.
    """
    inner = tokenizer
    while inner is not None and not hasattr(inner, "backend_tokenizer"):
        inner = next((getattr(inner, name) for name in ("_tokenizer", "tokenizer") if hasattr(inner, name)), None)
    if inner is None:
        if chat_template is not None:
            raise ConfigError("chat_template: this tokenizer is not one of Hugging Face, so that no chat is served")
        return None
    with tempfile.TemporaryDirectory() as directory:
        inner.save_pretrained(directory)
        found = Tokenizer.from_directory(directory, name="megatron")
    if chat_template is not None:
        found.set_chat_template(chat_template)
    return found

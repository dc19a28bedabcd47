"""Shared by tests of the server: a server on its own port, in threads, in front of given engines."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import threading
import time
from concurrent.futures import Future
from functools import lru_cache, partial
from types import SimpleNamespace
from unittest import mock

import httpx
import tokenizers
from coordinator_case import coordinator, replica, wait_for
from echo import EchoEngine
from tokenizers import decoders, models, pre_tokenizers

from megatron_infer.server import output_detokenizer, supervisor
from megatron_infer.server.http_server import HttpServer, listen, url_of
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.text.detokenizer import byte_level_alphabet
from megatron_infer.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)
START, END = 256, 257


@lru_cache(maxsize=4)
def tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """One token per byte, and the two ChatML marks."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend, eos_ids=[END], template=template, name="tiny")


@contextlib.contextmanager
def running(server, config, *, fails=()):
    """A server in a thread: .url, .port, .server, .thread; .failure is the error of the kind `fails` that ended it."""
    ready, error = threading.Event(), None
    with contextlib.closing(listen(config.host, config.port)) as listening:
        case = SimpleNamespace(url=url_of(listening), port=listening.getsockname()[1], server=server, failure=None)

        def run():
            nonlocal error
            try:
                server.run(listening, on_ready=lambda url: ready.set())
            except fails as failure:
                case.failure = failure
            except BaseException as unexpected:
                error = unexpected
                raise

        case.thread = threading.Thread(target=run, daemon=True)
        case.thread.start()
        try:
            assert ready.wait(60), "it did not come up"
            yield case
        finally:
            server.shut_down()
            case.thread.join(3)
            if case.thread.is_alive():
                server.shut_down()
                case.thread.join(10)
            assert not case.thread.is_alive() and error is None, error


@contextlib.contextmanager
def serving(
    *engines,
    modules=(),
    coordinator_options=None,
    address=None,
    text=True,
    encoder=None,
    commands_of=None,
    decodes=None,
    **settings,
):
    """A server for engines (one EchoEngine by default): .url, .port, .http (a client), .server, .coordinator.

    address: of a coordinator that is there already. commands_of: engine -> commands of its replica besides the engine's
    controls. decodes: whether the server detokenizes; None: except for an EchoEngine, whose tokens have no text.
    """
    engines = engines or (EchoEngine(),)
    if decodes is None:
        decodes = not any(isinstance(engine, EchoEngine) for engine in engines)
    config = ServerConfig(**{"port": 0, "log_requests": False, **settings})
    with contextlib.ExitStack() as stack:
        if not decodes:
            stack.enter_context(mock.patch.object(output_detokenizer, "is_detokenized_here", lambda params: False))
        options = {"timeout_s": 20.0, "max_queue": config.max_queue, **(coordinator_options or {})}
        one = stack.enter_context(coordinator(**options)) if address is None else SimpleNamespace(address=address)
        replicas = []
        for i, engine in enumerate(engines):
            commands = None if commands_of is None else commands_of(engine)
            replicas.append(stack.enter_context(replica(one.address, engine, name=f"r{i}", commands=commands)))
        encoder = (encoder or tokenizer()) if text else None
        server = HttpServer(config, coordinator=one.address, tokenizer=encoder, model="tiny", modules=modules)
        case = stack.enter_context(running(server, config))
        case.http = stack.enter_context(httpx.Client(base_url=case.url, timeout=60))
        case.coordinator, case.replicas, case.engines, case.config = one, replicas, engines, config
        yield case


def client_of(case, *, api_key=None):
    """OpenAI's client of a server. api_key: by default the server's."""
    import openai

    key = api_key or case.config.api_key or "none"
    return openai.OpenAI(base_url=f"{case.url}/v1", api_key=key, max_retries=0)


def tiny_model(**settings):
    """A small model with random weights, for the tokenizer of bytes."""
    from megatron_infer.testing.tiny import tiny_gpt

    return tiny_gpt(**{"vocab_size": 320, "max_sequence_length": 256, "init_method_std": 0.2, **settings})


def tiny_engine(model=None, **settings):
    """An engine of a model, a small one by default, and the tokenizer of bytes."""
    from engines import make_engine

    asked = {"max_sequence_length": 256, "max_tokens": None, "buffer_size_gb": 0.02, **settings}
    model = model or tiny_model(max_sequence_length=asked["max_sequence_length"])
    return make_engine(model, tokenizer=tokenizer(), **{"check_invariants": False, **asked})


def post(case, path, **body):
    return case.http.post(path, json=body)


def events(lines):
    """The JSON values of a stream; behind them must be [DONE], unless the last one is an error."""
    *data, last = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    values = [json.loads(line) for line in data]
    assert not any("error" in value for value in values)
    return values if last == "[DONE]" else [*values, {"error": json.loads(last)["error"]}]


def stream(case, path, **body):
    with case.http.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        return events(list(reply.iter_lines()))


class Background:
    """A call in a thread; `.result()` waits for its reply."""

    def __init__(self, case, path, body, **headers):
        self._call = partial(case.http.post, path, json=body, headers=headers)
        self._done = Future()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        try:
            self._done.set_result(self._call())
        except Exception as error:
            self._done.set_exception(error)

    @property
    def is_done(self):
        return self._done.done()

    def result(self, timeout_s=30):
        return self._done.result(timeout_s)


class Streams:
    """Streams of completions in threads, one connection each; `begun` has the places of those that have begun."""

    def __init__(self, url, bodies, *, field="token_ids"):
        """field: of the choices, which `join` puts together."""
        self.found, self.begun = [None] * len(bodies), set()
        self._url, self._field = f"{url}/v1/completions", field
        self._threads = [threading.Thread(target=self._run, args=work) for work in enumerate(bodies)]
        for thread in self._threads:
            thread.start()

    def _run(self, place, body):
        lines = []
        try:
            with httpx.stream("POST", self._url, json={**body, "stream": True}, timeout=100) as reply:
                for line in reply.iter_lines():
                    self.begun.add(place)
                    lines.append(line)
        except httpx.HTTPError as error:
            self.found[place] = error
        else:
            pieces = [chunk["choices"][0][self._field] for chunk in events(lines)]
            self.found[place] = "".join(pieces) if self._field == "text" else [one for piece in pieces for one in piece]

    def join(self):
        """The text or the tokens of each stream, or its error."""
        for thread in self._threads:
            thread.join()
        return self.found


def raw_stream(case, path, *, receive_buffer=None, **body):
    """A socket with a stream request sent and no reply read."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", case.port))
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def free_blocks(case):
    """Free blocks of each engine, as the engines count."""
    return [engine.context.num_free_blocks for engine in case.engines]


__all__ = [
    "Background",
    "Streams",
    "client_of",
    "events",
    "free_blocks",
    "post",
    "raw_stream",
    "running",
    "serving",
    "stream",
    "time",
    "tiny_engine",
    "tiny_model",
    "tokenizer",
    "wait_for",
]


def coordinator_at(folder):
    return supervisor.coordinator_process({"bind": f"ipc://{folder}/c", "max_queue": 7})


@contextlib.contextmanager
def supervised(*specs, number=signal.SIGTERM):
    """A supervisor and its processes, which `number` ends."""
    one = supervisor.Supervisor(specs)
    one.start()
    try:
        yield one
    finally:
        one.stop(number=number, timeout_s=5)


@contextlib.contextmanager
def supervised_coordinator(folder, **changes):
    with supervised(dataclasses.replace(coordinator_at(folder), is_worker=True, **changes)) as one:
        (process,) = one.processes
        wait_for(lambda: process.ready)
        yield process

"""A peer's connection to the coordinator: one thread owns the socket, says hello, beats, and passes messages on."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import zmq

from megatron_infer.coordinator import protocol

log = logging.getLogger("megatron_infer.coordinator")

FINAL = ("schema", "key", "role")
"""Refusals of a hello that saying it again does not mend."""
HELLO_AGAIN_S = 1.0


class Party(Protocol):
    """Whose link it is; called on the link's thread."""

    def on_welcome(self, welcome: protocol.Welcome) -> Sequence[protocol.Message]:
        """A new incarnation begins: what to say first."""

    def on_message(self, message: protocol.Message) -> None: ...

    def on_lost(self, error: protocol.CoordinatorError, final: bool) -> None:
        """The coordinator does not know or not answer us; unless `final`, hello is said again."""

    def beat(self) -> protocol.Message:
        """What to say every heartbeat."""


class CoordinatorLink:
    """Messages go out with `send`, from any thread, in order; they are dropped while there is no welcome."""

    def __init__(
        self,
        address: str,
        party: Party,
        *,
        role: str,
        name: str = "",
        key: bytes | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """timeout_s: silence of the coordinator before the first welcome; later it says so itself."""
        self.address, self.role = protocol.checked_address(address), role
        self.name = name or f"{socket.gethostname()}"
        self.max_message = protocol.MAX_MESSAGE
        self.welcomed = threading.Event()
        self._party, self._key = party, key
        self._timeout_s, self._heartbeat_s = timeout_s, min(0.5, timeout_s / 4)
        self._nonce, self._challenge = b"", b""
        self._outbox: deque[bytes] = deque()
        self._stopping = False
        self._last_heard = self._last_hello = 0.0
        self._context = zmq.Context()
        self._bell = self._context.socket(zmq.PAIR)
        self._bell.bind(f"inproc://bell-{id(self)}")
        self._bell_lock = threading.RLock()  # a signal handler may come while it is held
        self._thread = threading.Thread(target=self._run, name=f"megatron-infer-{role}-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: protocol.Message) -> None:
        """Raises MessageTooLarge; the message leaves as soon as the thread gets to it."""
        self._outbox.append(protocol.encode(message, limit=self.max_message))
        self.ring()

    def ring(self) -> None:
        """Wake the thread."""
        with self._bell_lock, contextlib.suppress(zmq.Again):
            if not self._stopping:
                self._bell.send(b"", zmq.NOBLOCK)

    def close(self, last: protocol.Message | None = None) -> None:
        """Say `last` and end."""
        if last is not None:
            self._outbox.append(protocol.encode(last))
        self.ring()
        with self._bell_lock:
            self._stopping = True
            with contextlib.suppress(zmq.ZMQError):
                self._bell.send(b"", zmq.NOBLOCK)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        with self._bell_lock:
            self._bell.close(0)
        if not self._thread.is_alive():
            self._context.term()

    def _run(self) -> None:
        line = self._context.socket(zmq.DEALER)
        line.setsockopt(zmq.LINGER, 500)
        line.setsockopt(zmq.SNDHWM, 0)  # what is too much is refused by the coordinator's queue
        line.setsockopt(zmq.RECONNECT_IVL, 50)
        line.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        bell = self._context.socket(zmq.PAIR)
        bell.connect(f"inproc://bell-{id(self)}")
        poller = zmq.Poller()
        poller.register(line, zmq.POLLIN)
        poller.register(bell, zmq.POLLIN)
        try:
            line.connect(self.address)
            self._last_heard = time.monotonic()
            self._serve(line, bell, poller)
        except Exception as error:  # reported to whoever waits, then the thread ends
            log.exception("the link to the coordinator failed")
            self.welcomed.clear()
            lost = protocol.ConnectionLost(f"the link to {self.address} failed: {type(error).__name__}: {error}")
            self._party.on_lost(lost, True)
        finally:
            line.close()
            bell.close(0)

    def _serve(self, line: zmq.Socket[bytes], bell: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        next_beat = 0.0
        while True:
            now = time.monotonic()
            if now >= next_beat:
                self._beat(line, now)
                next_beat = now + self._heartbeat_s
            stopping = self._stopping  # before the flush: what was said before the stop is sent
            self._flush(line)
            if stopping:
                return
            ready = dict(poller.poll(max(1, int((next_beat - now) * 1000))))
            if bell in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        bell.recv(zmq.NOBLOCK)
            if line in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        frames = line.recv_multipart(zmq.NOBLOCK)
                        self._last_heard = time.monotonic()
                        for frame in frames:
                            self._receive(line, frame)

    def _beat(self, line: zmq.Socket[bytes], now: float) -> None:
        if not self.welcomed.is_set():
            if now - self._last_hello >= HELLO_AGAIN_S:
                self._hello(line)
        elif now - self._last_heard > self._timeout_s:
            silent = now - self._last_heard
            self._lose(protocol.ConnectionLost(f"the coordinator at {self.address} was silent for {silent:.1f} s"))
            self._hello(line)
        else:
            line.send(protocol.encode(self._party.beat()))

    def _flush(self, line: zmq.Socket[bytes]) -> None:
        if not self.welcomed.is_set():
            return
        while self._outbox:
            frames = [self._outbox.popleft() for _ in range(min(len(self._outbox), 256))]
            line.send_multipart(frames)

    def _hello(self, line: zmq.Socket[bytes]) -> None:
        self._last_hello = self._last_heard = time.monotonic()
        self._nonce, self._challenge = protocol.new_nonce(), b""
        line.send(protocol.encode(protocol.Hello(protocol.SCHEMA, self.role, self.name, self._nonce)))

    def _lose(self, error: protocol.CoordinatorError, *, final: bool = False) -> None:
        """What was to be said belongs to an incarnation that is over."""
        self.welcomed.clear()
        self._outbox.clear()
        self._party.on_lost(error, final)

    def _receive(self, line: zmq.Socket[bytes], frame: bytes) -> None:
        message = protocol.decode(frame, limit=1 << 30)
        if isinstance(message, protocol.Challenge):
            if self._key is None:
                self._lose(
                    protocol.AccessRefused("the coordinator asks for a key; give it (key=, --key-file)"), final=True
                )
                return
            self._challenge = message.nonce
            line.send(protocol.encode(protocol.Proof(protocol.proof(self._key, self.role, self._nonce, message.nonce))))
        elif isinstance(message, protocol.Welcome):
            self._welcome(line, message)
        elif isinstance(message, protocol.Refused):
            self._refused(line, message)
        elif isinstance(message, protocol.Ping):
            line.send(protocol.encode(self._party.beat()))
        elif self.welcomed.is_set() and not isinstance(message, protocol.Pong):
            self._party.on_message(message)

    def _welcome(self, line: zmq.Socket[bytes], welcome: protocol.Welcome) -> None:
        if self._key is not None and not protocol.proves(
            welcome.mac, self._key, "coordinator", self._nonce, self._challenge
        ):
            text = f"the coordinator at {self.address} does not know the key; nothing is sent to it"
            self._lose(protocol.AccessRefused(text), final=True)
            return
        self._heartbeat_s, self._timeout_s = welcome.heartbeat_s, welcome.timeout_s
        self.max_message = welcome.max_message
        self._outbox.clear()
        for message in self._party.on_welcome(welcome):
            line.send(protocol.encode(message, limit=self.max_message))
        self.welcomed.set()

    def _refused(self, line: zmq.Socket[bytes], refused: protocol.Refused) -> None:
        if refused.code in FINAL and not self.welcomed.is_set():
            self._lose(
                protocol.AccessRefused(f"the coordinator at {self.address} refuses: {refused.message}"), final=True
            )
        elif refused.code in ("hello", "fenced"):
            if self.welcomed.is_set():
                self._lose(protocol.ConnectionLost(f"the coordinator at {self.address} says: {refused.message}"))
                self._hello(line)
        else:
            log.warning("the coordinator at %s refuses a message: %s", self.address, refused.message)
            self._party.on_message(refused)

"""A peer's connection to the coordinator: one thread owns the socket, does the handshake and sends heartbeats."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_infer.config.coordinator_options import MAX_MESSAGE
from megatron_infer.coordinator import access, protocol
from megatron_infer.distributed.wire import Silence

log = logging.getLogger("megatron_infer.coordinator")

FINAL = ("schema", "role")
"""Codes of refusals for which another hello is useless."""
HELLO_INTERVAL_S = 1.0
MAX_CLOSED_HANDSHAKES = 4
"""Times in a row that the other side closes an unfinished handshake until the key counts as wrong: it may be ending."""


class ConnectionHandler(Protocol):
    """The owner of a connection; called on the connection's thread."""

    def on_welcome(self, welcome: protocol.Welcome) -> Sequence[protocol.Message]:
        """A new incarnation has begun -> the messages to send first. What is unsent is dropped (`drop_unsent`)."""

    def on_message(self, message: protocol.Message) -> None: ...

    def on_lost(self, error: protocol.CoordinatorError, final: bool) -> None:
        """The coordinator does not answer, or does not know this peer; unless `final`, the handshake is repeated."""

    def beat(self) -> protocol.Message:
        """The message to send every heartbeat."""


class CoordinatorConnection:
    """`send` sends messages in order, from any thread; until the welcome they are dropped."""

    def __init__(
        self,
        address: str,
        handler: ConnectionHandler,
        *,
        role: str,
        name: str = "",
        key: bytes | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """key: None takes the user's own where the address asks for one (see `access`). timeout_s: longest silence of
        the coordinator until its welcome, which sets the timeout then. Raises ConfigError.
        """
        self.address, self.role = protocol.checked_address(address), role
        self.name = name or f"{socket.gethostname()}"
        self.max_message = MAX_MESSAGE
        self.welcomed = threading.Event()
        self._handler, self._key = handler, access.peer_key(address, key)
        self._timeout_s, self._heartbeat_s = timeout_s, min(0.5, timeout_s / 4)
        self._nonce = protocol.new_nonce()
        self._num_closed_handshakes = 0
        self._outbox: deque[bytes] = deque()
        self._stopping = self._is_holding = False
        self._silence = Silence(2 * self._heartbeat_s)
        self._last_hello = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._wake_socket: zmq.Socket[bytes] | None = None
        """None before `start`."""
        self._wake_lock = threading.RLock()  # reentrant: a signal handler may send while it is held
        self._thread = threading.Thread(target=self._run, name=f"megatron-infer-{role}-link", daemon=True)

    def start(self) -> None:
        self._context = zmq.Context()
        wake_socket = self._context.socket(zmq.PAIR)
        wake_socket.bind(f"inproc://wake-{id(self)}")
        self._wake_socket = wake_socket
        self._thread.start()

    def send(self, message: protocol.Message) -> None:
        """Queue a message for the connection's thread. Raises BadMessage, MessageTooLarge."""
        self._outbox.append(protocol.encode(message, limit=self.max_message))
        if not self._is_holding:
            self.wake()

    @contextlib.contextmanager
    def one_batch(self) -> Iterator[None]:
        """What is sent within leaves together at its end: the connection's thread does not interrupt the caller's for
        every message."""
        self._is_holding = True
        try:
            yield
        finally:
            self._is_holding = False
            self.wake()

    def drop_unsent(self) -> None:
        """Drop the queued messages, which belong to an earlier incarnation."""
        self._outbox.clear()

    def wake(self) -> None:
        """Wake the connection's thread."""
        with self._wake_lock, contextlib.suppress(zmq.Again):
            if self._wake_socket is not None and not self._stopping:
                self._wake_socket.send(b"", zmq.NOBLOCK)

    def close(self, last: protocol.Message | None = None) -> None:
        """Send `last` and end the thread."""
        if self._wake_socket is None:
            return
        if last is not None:
            self._outbox.append(protocol.encode(last))
        self.wake()
        with self._wake_lock:
            self._stopping = True
            with contextlib.suppress(zmq.ZMQError):
                self._wake_socket.send(b"", zmq.NOBLOCK)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        with self._wake_lock:
            self._wake_socket.close(0)
        if not self._thread.is_alive():
            self._context.term()

    def _run(self) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 500)
        dealer.setsockopt(zmq.SNDHWM, 0)  # unlimited: the coordinator refuses requests beyond its queue
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        access.protect_connection(dealer, self._key)
        handshakes = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | access.HANDSHAKE_FAILURES)
        wake = self._context.socket(zmq.PAIR)
        wake.connect(f"inproc://wake-{id(self)}")
        poller = zmq.Poller()
        for one in (dealer, wake, handshakes):
            poller.register(one, zmq.POLLIN)
        try:
            dealer.connect(self.address)
            self._silence.heard()
            self._serve(dealer, wake, handshakes, poller)
        except Exception as error:  # reported to the handler, then the thread ends
            log.exception("the connection to the coordinator failed")
            self.welcomed.clear()
            lost = protocol.ConnectionLost(f"the connection to {self.address} failed: {type(error).__name__}: {error}")
            self._handler.on_lost(lost, True)
        finally:
            dealer.disable_monitor()
            handshakes.close(0)
            dealer.close()
            wake.close(0)

    def _serve(
        self, dealer: zmq.Socket[bytes], wake: zmq.Socket[bytes], handshakes: zmq.Socket[bytes], poller: zmq.Poller
    ) -> None:
        next_beat = 0.0
        while True:
            now = time.monotonic()
            if now >= next_beat:
                self._beat(dealer, now)
                next_beat = now + self._heartbeat_s
            stopping = self._stopping  # read before the flush, so that messages queued before the stop are sent
            self._flush(dealer)
            if stopping:
                return
            ready = dict(poller.poll(max(1, int((next_beat - now) * 1000))))
            if wake in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        wake.recv(zmq.NOBLOCK)
            if handshakes in ready:
                self._count_handshake(recv_monitor_message(handshakes)["event"])
            if dealer in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        frames = dealer.recv_multipart(zmq.NOBLOCK)
                        self._silence.heard()
                        for data in protocol.messages_of(frames):
                            self._receive(dealer, data)

    def _beat(self, dealer: zmq.Socket[bytes], now: float) -> None:
        silent = self._silence.seconds()
        if not self.welcomed.is_set():
            if now - self._last_hello >= HELLO_INTERVAL_S:
                self._hello(dealer)
        elif silent > self._timeout_s:
            self._lose(protocol.ConnectionLost(f"the coordinator at {self.address} was silent for {silent:.1f} s"))
            self._hello(dealer)
        else:
            _send(dealer, self._handler.beat())

    def _flush(self, dealer: zmq.Socket[bytes]) -> None:
        if not self.welcomed.is_set():
            return
        while self._outbox:
            messages = [self._outbox.popleft() for _ in range(min(len(self._outbox), 256))]
            dealer.send_multipart(protocol.frames_of(messages))

    def _count_handshake(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_closed_handshakes = 0
            return
        self._num_closed_handshakes += 1
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._num_closed_handshakes < MAX_CLOSED_HANDSHAKES:
            return
        if self._key is None:
            text = f"the coordinator at {self.address} asks for a key; give it (key=, --key-file)"
        else:
            text = f"what listens at {self.address} does not know this key; give coordinator and peers the same one"
        self._lose(protocol.AccessRefused(text), final=True)

    def _hello(self, dealer: zmq.Socket[bytes]) -> None:
        self._last_hello = time.monotonic()
        self._silence.heard()
        _send(dealer, protocol.Hello(protocol.SCHEMA, self.role, self.name, self._nonce))

    def _lose(self, error: protocol.CoordinatorError, *, final: bool = False) -> None:
        """End the incarnation; unsent messages belong to it and are dropped. The next hello is a new one."""
        self.welcomed.clear()
        self.drop_unsent()
        self._nonce = protocol.new_nonce()
        self._stopping |= final
        self._handler.on_lost(error, final)

    def _receive(self, dealer: zmq.Socket[bytes], data: bytes) -> None:
        message = protocol.decode(data, limit=protocol.MAX_PASSED_ON)
        if isinstance(message, protocol.Welcome):
            if message.nonce == self._nonce and not self.welcomed.is_set():  # the last hello's, for the first time
                self._welcome(dealer, message)
        elif isinstance(message, protocol.Refused):
            self._refused(dealer, message)
        elif isinstance(message, protocol.Ping):
            _send(dealer, self._handler.beat())
        elif self.welcomed.is_set() and not isinstance(message, protocol.Pong):
            self._handler.on_message(message)

    def _welcome(self, dealer: zmq.Socket[bytes], welcome: protocol.Welcome) -> None:
        self._heartbeat_s, self._timeout_s = welcome.heartbeat_s, welcome.timeout_s
        self._silence.max_pass_s = 2 * welcome.heartbeat_s
        self.max_message = welcome.max_message
        for message in self._handler.on_welcome(welcome):
            _send(dealer, message, limit=self.max_message)
        self.welcomed.set()

    def _refused(self, dealer: zmq.Socket[bytes], refused: protocol.Refused) -> None:
        if refused.code in FINAL and not self.welcomed.is_set():
            self._lose(
                protocol.AccessRefused(f"the coordinator at {self.address} refuses: {refused.message}"), final=True
            )
        elif refused.code in ("hello", "fenced"):
            if self.welcomed.is_set():
                self._lose(protocol.ConnectionLost(f"the coordinator at {self.address} says: {refused.message}"))
                self._hello(dealer)
        else:
            log.warning("the coordinator at %s refuses a message: %s", self.address, refused.message)
            self._handler.on_message(refused)


def _send(dealer: zmq.Socket[bytes], message: protocol.Message, *, limit: int = MAX_MESSAGE) -> None:
    dealer.send_multipart(protocol.frames_of([protocol.encode(message, limit=limit)]))

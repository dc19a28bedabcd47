"""The coordinator process: one ROUTER socket, the handshake with new peers, and CoordinatorCore, which decides.

    with Coordinator("tcp://127.0.0.1:5757") as coordinator:
        coordinator.run()                    # until stop(), from a signal handler or another thread

One poll loop: read all messages, decide, then send one batch of messages to each peer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import zmq

from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.core import CoordinatorCore
from megatron_infer.coordinator.peers import CoordinatorOptions
from megatron_infer.errors import ConfigError

__all__ = ["Coordinator", "CoordinatorOptions"]

log = logging.getLogger("megatron_infer.coordinator")

DEFAULT_ADDRESS = f"tcp://127.0.0.1:{protocol.DEFAULT_PORT}"
MAX_BATCH = 4096
"""Most batches that are read before replies are sent."""
MAX_FRAMES = 256
"""Most messages in one batch."""
MAX_UNSENT = 1 << 14
"""Most unsent batches for a peer that does not read; beyond, it is removed."""
MAX_UNPROVEN = 1024
"""Most peers between hello and proof."""
ROLES = ("client", "replica")


class HandshakeListener:
    """Checks hellos: schema, role and, if there is a key, that the peer knows it."""

    def __init__(
        self, options: CoordinatorOptions, send: Callable[[bytes, protocol.Message], None], core: CoordinatorCore
    ) -> None:
        self._options, self._send, self._core = options, send, core
        self._unproven: OrderedDict[bytes, tuple[protocol.Hello, bytes]] = OrderedDict()

    def hello(self, peer: bytes, hello: protocol.Hello) -> None:
        if hello.schema != protocol.SCHEMA:
            self.refuse_schema(peer, hello.schema)
        elif hello.role not in ROLES:
            self._send(
                peer, protocol.Refused("role", f"role {hello.role[:40]!r} is unknown; one of {', '.join(ROLES)}")
            )
        elif self._core.has_entered(peer, hello.nonce):
            return  # sent before the welcome came
        elif self._options.key is None:
            self._welcome(peer, hello, b"")
        else:
            before, nonce = self._unproven.get(peer, (None, b""))
            if before is None or before.nonce != hello.nonce:
                nonce = protocol.new_nonce()
            self._unproven[peer] = (hello, nonce)
            if len(self._unproven) > MAX_UNPROVEN:
                self._unproven.popitem(last=False)
            self._send(peer, protocol.Challenge(nonce))

    def prove(self, peer: bytes, proof: protocol.Proof) -> None:
        hello, nonce = self._unproven.pop(peer, (None, b""))
        key = self._options.key
        if hello is None or key is None:
            self._send(peer, protocol.Refused("hello", "a proof without a challenge; say hello"))
        elif not protocol.proves(proof.mac, key, hello.role, hello.nonce, nonce):
            log.warning("%s %s was refused: it has another key", hello.role, hello.name)
            self._send(
                peer, protocol.Refused("key", "the key is not the coordinator's; give the same one to every peer")
            )
        else:
            self._welcome(peer, hello, protocol.proof(key, "coordinator", hello.nonce, nonce))

    def refuse_schema(self, peer: bytes, schema: int) -> None:
        text = f"it speaks schema {schema}, the coordinator schema {protocol.SCHEMA}; install the same megatron_infer"
        self._send(peer, protocol.Refused("schema", text))

    def _welcome(self, peer: bytes, hello: protocol.Hello, mac: bytes) -> None:
        options, incarnation = self._options, self._core.enter(peer, hello.role, hello.name[:200], hello.nonce)
        self._send(
            peer, protocol.Welcome(incarnation, mac, options.heartbeat_s, options.timeout_s, options.max_message)
        )


class Coordinator:
    """Binds `address` when constructed, and serves within `run`. Only `stop` may be called from another thread."""

    def __init__(self, bind: str = DEFAULT_ADDRESS, options: CoordinatorOptions | None = None) -> None:
        """bind: tcp://HOST:PORT (port 0 or *: a free one, see `address`) or ipc://PATH.

        Raises ConfigError when it cannot be bound.
        """
        protocol.checked_address(bind)
        self.options = CoordinatorOptions() if options is None else options
        self._outbox: dict[bytes, list[bytes]] = {}
        self.core = CoordinatorCore(self.options, self._put)
        self._handshakes = HandshakeListener(self.options, self._put, self.core)
        self._stopping = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a peer that is gone raises an error
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        # A message up to twice the limit gets a reply; for a larger one libzmq drops the connection.
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * self.options.max_message)
        try:
            if bind.startswith("tcp://") and bind.endswith((":0", ":*")):
                bind = bind.rpartition(":")[0] + ":*"
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen at {bind}: {error}") from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def run(self) -> None:
        """Serve until `stop`."""
        interval = min(0.1, self.options.heartbeat_s / 4)
        next_tick = time.monotonic()
        while not self._stopping:
            now = time.monotonic()
            if self._socket.poll(max(0, int((next_tick - now) * 1000))):
                self._read()
            if time.monotonic() >= next_tick:
                self.core.tick()
                next_tick = time.monotonic() + interval
            self._flush()

    def stop(self) -> None:
        """End `run` within a tick; callable from any thread or a signal handler."""
        self._stopping = True

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _put(self, peer: bytes, message: protocol.Message) -> None:
        """Queue a message for the next flush."""
        try:
            frame = protocol.encode(message, limit=self.options.max_message)
        except protocol.MessageTooLarge as error:
            frame = protocol.encode(protocol.Refused("size", f"a message for you is too large: {error}"))
        frames = self._outbox.get(peer)
        if frames is None:
            self._outbox[peer] = [frame]
        else:
            frames.append(frame)

    def _read(self) -> None:
        for _ in range(MAX_BATCH):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for frame in frames:
                self._receive(peer, frame)

    def _receive(self, peer: bytes, frame: bytes) -> None:
        try:
            message = protocol.decode(frame, limit=self.options.max_message)
        except protocol.BadMessage as error:
            schema = protocol.schema_of(frame) if len(frame) < 4096 else None
            if schema is not None and schema != protocol.SCHEMA:
                self._handshakes.refuse_schema(peer, schema)
            else:
                code = "size" if isinstance(error, protocol.MessageTooLarge) else "message"
                self._put(peer, protocol.Refused(code, str(error)))
            return
        if isinstance(message, protocol.Hello):
            self._handshakes.hello(peer, message)
        elif isinstance(message, protocol.Proof):
            self._handshakes.prove(peer, message)
        elif self.core.knows(peer):
            self.core.receive(peer, message)
        else:
            self.core.counts.fenced += 1
            self._put(peer, protocol.Refused("hello", "you are not known here (any more); say hello"))

    def _flush(self) -> None:
        """Send all batches. Removing a peer that cannot be reached may queue more."""
        while self._outbox:
            outbox, self._outbox = self._outbox, {}
            for peer, frames in outbox.items():
                for start in range(0, len(frames), MAX_FRAMES):
                    try:
                        self._socket.send_multipart([peer, *frames[start : start + MAX_FRAMES]], zmq.NOBLOCK)
                    except zmq.Again:
                        self.core.unreachable(peer, "it reads nothing of what is sent to it")
                        break
                    except zmq.ZMQError as error:
                        if error.errno != zmq.EHOSTUNREACH:
                            raise
                        self.core.unreachable(peer)
                        break


@contextlib.contextmanager
def running(coordinator: Coordinator) -> Iterator[Coordinator]:
    """Run a coordinator in a thread of this process."""
    thread = threading.Thread(target=coordinator.run, name="megatron-infer-coordinator", daemon=True)
    thread.start()
    try:
        yield coordinator
    finally:
        coordinator.stop()
        thread.join()
        coordinator.close()

"""The coordinator process: one ROUTER socket, the hellos of new peers, and CoordinatorCore, which decides.

    with Coordinator("tcp://127.0.0.1:5757") as coordinator:
        coordinator.run()                    # until stop(), from a signal handler or another thread

One poll loop: read all messages, decide, then send one batch of messages to each peer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

import zmq

from megatron_infer.config.coordinator_options import CoordinatorOptions
from megatron_infer.coordinator import access, protocol
from megatron_infer.coordinator.core import CoordinatorCore
from megatron_infer.errors import ConfigError

__all__ = ["Coordinator", "CoordinatorOptions"]

log = logging.getLogger("megatron_infer.coordinator")

DEFAULT_ADDRESS = f"tcp://127.0.0.1:{protocol.DEFAULT_PORT}"
MAX_BATCH = 4096
"""Most batches that are read before replies are sent."""
MAX_MESSAGES = 256
"""Most messages in one batch."""
MAX_UNSENT = 1 << 14
"""Most unsent batches for a peer that does not read; beyond, it is removed."""
ROOM = 64
"""See `protocol.decode`: what a replica tells of itself is a few levels deeper in a Report."""
ROLES = ("client", "replica")


class Coordinator:
    """Binds `address` when constructed, and serves within `run`. Only `stop` may be called from another thread."""

    def __init__(self, bind: str = DEFAULT_ADDRESS, options: CoordinatorOptions | None = None) -> None:
        """bind: tcp://HOST:PORT (port 0 or *: a free one, see `address`) or ipc://PATH.

        Raises ConfigError when it cannot be bound.
        """
        self.key: bytes | None
        """What every peer must prove to hold; None: its folder is the check (see `access`)."""
        protocol.checked_address(bind)
        self.options = CoordinatorOptions() if options is None else options
        self._outbox: dict[bytes, list[bytes]] = {}
        self.core = CoordinatorCore(self.options, self._put)
        self.key = access.coordinator_key(bind, self.options.key)
        self._stopping = False
        self._last_pass = time.monotonic()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a peer that is gone raises an error
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        access.protect_listener(self._socket, self.key)
        self._check = None if self.key is None else access.PeerCheck(self._context, self.key)
        self._refused_peers = access.RefusedPeers(self._socket)
        self._poller = zmq.Poller()
        try:
            if bind.startswith("tcp://") and bind.endswith((":0", ":*")):
                bind = bind.rpartition(":")[0] + ":*"
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen at {bind}: {error}") from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        for one in (self._socket, self._refused_peers.socket):
            self._poller.register(one, zmq.POLLIN)
        if self._check is not None:
            self._poller.register(self._check.socket, zmq.POLLIN)

    def run(self) -> None:
        """Serve until `stop`."""
        interval = min(0.1, self.options.heartbeat_s / 4)
        next_tick = time.monotonic()
        while not self._stopping:
            now = self._last_pass = time.monotonic()
            ready = dict(self._poller.poll(max(0, int((next_tick - now) * 1000))))
            if self._check is not None and self._check.socket in ready:
                self._check.answer()
            if self._refused_peers.socket in ready:
                self._refused_peers.count()
            if self._socket in ready:
                self._read()
            if time.monotonic() >= next_tick:
                self.core.tick()
                self._refused_peers.tick()
                next_tick = time.monotonic() + interval
            self._flush()

    def stop(self) -> None:
        """End `run` within a tick; callable from any thread or a signal handler."""
        self._stopping = True

    @property
    def pass_s(self) -> float:
        """Seconds that the present pass of the loop has taken. From any thread."""
        return time.monotonic() - self._last_pass

    def close(self) -> None:
        self._socket.disable_monitor()
        self._refused_peers.socket.close(0)
        self._socket.close()
        if self._check is not None:
            self._check.socket.close()
        self._context.term()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _put(self, peer: bytes, message: protocol.Message) -> None:
        """Queue a message for the next flush."""
        try:
            data = protocol.encode(message, limit=protocol.MAX_PASSED_ON)
        except protocol.MessageTooLarge as error:
            data = protocol.encode(protocol.Refused("size", f"a message for you is too large: {error}"))
        messages = self._outbox.get(peer)
        if messages is None:
            self._outbox[peer] = [data]
        else:
            messages.append(data)

    def _read(self) -> None:
        for _ in range(MAX_BATCH):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for data in protocol.messages_of(frames):
                self._receive(peer, data)

    def _receive(self, peer: bytes, data: bytes) -> None:
        try:
            message = protocol.decode(data, limit=self.options.max_message, room=ROOM)
        except protocol.BadMessage as error:
            schema = protocol.schema_of(data) if len(data) < 4096 else None
            if schema is not None and schema != protocol.SCHEMA:
                self._refuse_schema(peer, schema)
            else:
                code = "size" if isinstance(error, protocol.MessageTooLarge) else "message"
                self._put(peer, protocol.Refused(code, str(error)))
            return
        if isinstance(message, protocol.Hello):
            self._hello(peer, message)
        elif self.core.knows(peer):
            self.core.receive(peer, message)
        else:
            self.core.counts.fenced += 1
            self._put(peer, protocol.Refused("hello", "you are not known here (any more); say hello"))

    def _hello(self, peer: bytes, hello: protocol.Hello) -> None:
        """Welcome a peer of this schema. The same hello again, while its welcome is on its way, gets the same one."""
        if hello.schema != protocol.SCHEMA:
            self._refuse_schema(peer, hello.schema)
        elif hello.role not in ROLES:
            text = f"role {hello.role[:40]!r} is unknown; one of {', '.join(ROLES)}"
            self._put(peer, protocol.Refused("role", text))
        else:
            options, incarnation = self.options, self.core.enter(peer, hello.role, hello.name[:200], hello.nonce)
            limits = (options.heartbeat_s, options.timeout_s, options.max_message)
            self._put(peer, protocol.Welcome(incarnation, hello.nonce, *limits))

    def _refuse_schema(self, peer: bytes, schema: int) -> None:
        text = f"it speaks schema {schema}, the coordinator schema {protocol.SCHEMA}; install the same megatron_infer"
        self._put(peer, protocol.Refused("schema", text))

    def _flush(self) -> None:
        """Send all batches. Removing a peer that cannot be reached may queue more."""
        while self._outbox:
            outbox, self._outbox = self._outbox, {}
            for peer, messages in outbox.items():
                for start in range(0, len(messages), MAX_MESSAGES):
                    frames = protocol.frames_of(messages[start : start + MAX_MESSAGES])
                    try:
                        self._socket.send_multipart([peer, *frames], zmq.NOBLOCK)
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

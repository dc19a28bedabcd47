"""The way of parcels from replica to replica, next to the coordinator's wire: the receiver fetches, the sender serves.

    receiver                              sender
      get, id, tokens it has published ->      the parcel without the blocks of these tokens
      <- size, bytes                           refused by the receiver if it is more than its cache may hold
      <- part, bytes (WINDOW of them)
      more ->          one for each part       so that WINDOW parts are on their way at most
      done ->                                  the sender forgets the parcel
      <- gone                                  in the place of size or a part: another one gets it, or it is not there

Both sides prove the coordinator's key, or share its private folder (`access`). A parcel has a checksum over all of it.
A receiver connects where replicas of its coordinator listen: to TCP ports, or to sockets in the coordinator's folder.
What listens there proves the key first: before that it is sent nothing of the request or of the key.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket as sockets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_infer.coordinator import access
from megatron_infer.coordinator.protocol import CoordinatorError, ParcelPlace
from megatron_infer.errors import ConfigError

if TYPE_CHECKING:
    from megatron_infer.engine.durable.parcel import Parcel

log = logging.getLogger("megatron_infer.coordinator")

PART_BYTES = 1 << 20
WINDOW = 8
"""Parts on their way at once."""
TRANSFER_TIMEOUT_S = 30.0
"""Seconds for which a parcel waits to be fetched, and for which a receiver waits for the next part."""
CONNECT_TIMEOUT_S = 5.0
"""Seconds for a connection to the sender."""
FETCHES = 4
"""Parcels that are fetched at once."""
MAX_WAITING_BYTES = 4 << 30
"""Most bytes of all parcels that wait at a replica to be fetched, and of those that wait there for rows; the tokens of
further requests move alone."""
S_PER_BYTE = 5e-9
"""Seconds that a byte of a parcel takes, until some are measured: 1,024 tokens of SmolLM2, see docs/roles.md."""
SMOOTHING = 0.2
"""Weight of a new reading."""
_POLL_MS = 200
_MAX_DIGITS = 15
"""Of a number in a message."""
_GONE = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED | access.HANDSHAKE_FAILURES


class ParcelLost(CoordinatorError):
    """A parcel that cannot be fetched: its request goes on from its tokens."""


@dataclass(slots=True)
class ParcelCounts:
    """Parcels of one direction that have arrived whole, and those that have not."""

    parcels: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """From the request for the parcel to its last part."""
    failures: int = 0

    def arrived(self, num_bytes: int, seconds: float) -> None:
        self.parcels += 1
        self.bytes += num_bytes
        self.seconds += seconds


@dataclass(slots=True)
class _Sending:
    """A parcel on its way to one peer."""

    parcel_id: str
    content: memoryview
    began: float
    sent: int = 0


@dataclass(slots=True)
class _Waiting:
    parcel: Parcel
    copy_s: float
    until: float = field(default_factory=lambda: time.monotonic() + TRANSFER_TIMEOUT_S)


class _Sender:
    """A receiver's connection to the replica that has a parcel."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: bytes | None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.SNDTIMEO, int(1000 * TRANSFER_TIMEOUT_S))
        self.socket.setsockopt(zmq.MAXMSGSIZE, PART_BYTES + access.ENCRYPTION_BYTES)
        access.protect_connection(self.socket, key)
        self.is_connected = False
        self._events = self.socket.get_monitor_socket(zmq.EVENT_CONNECTED | _GONE)

    def has_sent(self) -> bool:
        """Whether a message is there, within _POLL_MS. Raises ParcelLost once the sender is gone."""
        ready, _, _ = zmq.select([self.socket, self._events], [], [], _POLL_MS / 1000)
        if self._events in ready and self.socket not in ready:
            if recv_monitor_message(self._events)["event"] & _GONE:
                raise ParcelLost("the sender is gone")
            self.is_connected = True
        return self.socket in ready

    def close(self) -> None:
        self.socket.disable_monitor()
        self._events.close(0)
        self.socket.close()


class ParcelTransfer:
    """One replica's side: a thread serves what is in `offer`; `fetch` gets a parcel of another replica."""

    def __init__(self, coordinator: str, key: bytes | None) -> None:
        """coordinator: its address, which says where to listen. key: as peers have it."""
        self._key = key
        self._address = _address_next_to(coordinator)
        self._waiting: dict[str, _Waiting] = {}
        self._sending: dict[bytes, _Sending] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self.address = ""
        """Where others fetch, from `start` on."""
        self._sent = ParcelCounts()
        self._received = ParcelCounts()
        self.s_per_byte = S_PER_BYTE
        """What a byte takes from one engine to another, as measured with parcels of a part or more."""

    def start(self) -> None:
        """Listen. Raises ConfigError."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        access.protect_listener(self._socket, self._key)
        self._check = None if self._key is None else access.PeerCheck(self._context, self._key)
        try:
            self._socket.bind(self._address)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(f"cannot listen at {self._address} for parcels: {error}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._pool = ThreadPoolExecutor(FETCHES, thread_name_prefix="megatron-infer-fetch")
        self._thread = threading.Thread(target=self._run, name="megatron-infer-parcels", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def counts(self) -> dict[str, dict[str, float]]:
        """The counts of parcels that left ("out") and of those that arrived ("in")."""
        with self._lock:
            return {"out": asdict(self._sent), "in": asdict(self._received)}

    def offer(self, parcel: Parcel, *, copy_s: float = 0.0) -> str | None:
        """Keep a parcel until it is fetched, TRANSFER_TIMEOUT_S at most -> its id. None: too much waits already.
        copy_s: what it took to hand it out; to take it in takes about as long."""
        parcel_id = secrets.token_hex(16)
        with self._lock:
            if parcel.num_bytes + sum(one.parcel.num_bytes for one in self._waiting.values()) > MAX_WAITING_BYTES:
                return None
            self._waiting[parcel_id] = _Waiting(parcel, copy_s)
        return parcel_id

    def fetch(self, place: ParcelPlace, *, num_published: int, max_bytes: int) -> Future[Parcel | None]:
        """Begin to fetch a parcel without the blocks of its first `num_published` tokens. None: it cannot be had."""
        return self._pool.submit(self._fetched, place, num_published, max_bytes)

    def _fetched(self, place: ParcelPlace, num_published: int, max_bytes: int) -> Parcel | None:
        from megatron_infer.engine.durable.parcel import Parcel

        began = time.monotonic()
        try:
            content = self._fetch(place.address, place.id, num_published, max_bytes)
            parcel = Parcel.of_bytes(content)
        except Exception as error:  # such as bytes that are no parcel, or a lack of memory
            log.info("a parcel is lost, its request goes on from its tokens: %s: %s", type(error).__name__, error)
            with self._lock:
                self._received.failures += 1
            return None
        with self._lock:
            self._received.arrived(len(content), time.monotonic() - began)
        return parcel

    def _fetch(self, address: str, parcel_id: str, num_published: int, max_bytes: int) -> bytes:
        if _road(address) != _road(self.address):  # such as inproc://, which would lead to sockets of this process
            raise ParcelLost(f"{address[:60]!r} is no address of a replica of this coordinator")
        with contextlib.closing(_Sender(self._context, self._key)) as sender:
            sender.socket.connect(address)
            sender.socket.send_multipart([b"get", parcel_id.encode(), str(num_published).encode()])
            content = b"".join(self._parts(sender, max_bytes))
            sender.socket.send(b"done")
        return content

    def close(self) -> None:
        if not self.address:
            return
        self._stopping = True
        self._pool.shutdown(cancel_futures=True)  # a fetch looks every _POLL_MS
        self._thread.join()
        self._socket.close()
        if self._check is not None:
            self._check.socket.close()
        self._context.term()
        if self.address.startswith("ipc:///"):
            with contextlib.suppress(OSError):
                os.unlink(self.address.removeprefix("ipc://"))

    def _parts(self, sender: _Sender, max_bytes: int) -> Iterator[bytes]:
        kind, size = self._receive(sender)
        if kind != b"size":
            raise ParcelLost("the sender does not have it any more")
        left = int(size)
        if not 0 <= left <= max_bytes:
            raise ParcelLost(f"a parcel of {left:,} bytes, the limit is {max_bytes:,}")
        while left:
            kind, part = self._receive(sender)
            if kind != b"part" or not 0 < len(part) <= left:
                raise ParcelLost(f"{kind[:20]!r} of {len(part):,} bytes came, {left:,} bytes were left")
            left -= len(part)
            sender.socket.send(b"more")
            yield part

    def _receive(self, sender: _Sender) -> list[bytes]:
        began = time.monotonic()
        while not sender.has_sent():
            waited = time.monotonic() - began
            if self._stopping or waited > (TRANSFER_TIMEOUT_S if sender.is_connected else CONNECT_TIMEOUT_S):
                raise ParcelLost(f"nothing came for {waited:.1f} s")
        frames = sender.socket.recv_multipart()
        if len(frames) != 2 or (frames[0] == b"size" and not _is_number(frames[1])):
            raise ParcelLost(f"a message of {len(frames)} frames came, it has two")
        return frames

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if self._check is not None:
            poller.register(self._check.socket, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(_POLL_MS))
            if self._check is not None and self._check.socket in ready:
                self._check.answer()
            if self._socket in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                        self._answer(peer, frames)
            self._forget_old()

    def _answer(self, peer: bytes, frames: list[bytes]) -> None:
        if len(frames) == 3 and frames[0] == b"get" and _is_number(frames[2]):
            self._begin(peer, frames[1].decode("ascii", "replace"), int(frames[2]))
        elif frames == [b"more"] and peer in self._sending:
            self._send_part(peer)
        elif frames == [b"done"] and peer in self._sending:
            sent = self._sending.pop(peer)
            way_s = time.monotonic() - sent.began
            with self._lock:
                waiting = self._waiting.pop(sent.parcel_id, None)
                if waiting is not None:
                    self._sent.arrived(len(sent.content), way_s)
            if waiting is not None and len(sent.content) >= PART_BYTES:
                seconds = way_s + 2 * waiting.copy_s
                # One slow parcel must not make moves too dear: without another parcel nothing would measure again.
                reading = min(seconds / len(sent.content), 2 * self.s_per_byte)
                self.s_per_byte += SMOOTHING * (reading - self.s_per_byte)

    def _begin(self, peer: bytes, parcel_id: str, num_published: int) -> None:
        waiting = self._waiting.get(parcel_id)
        if waiting is None:
            self._send(peer, b"gone", b"")
            return
        for other in [one for one, sending in self._sending.items() if sending.parcel_id == parcel_id]:
            del self._sending[other]  # one copy of each parcel, which MAX_WAITING_BYTES bounds: the last to ask has it
            if other != peer:
                self._send(other, b"gone", b"")
        began = time.monotonic()
        try:
            content = memoryview(waiting.parcel.without(num_published).to_bytes())
        except Exception:  # such as a lack of memory: this request goes on from its tokens, and others are served
            log.exception("a parcel cannot be sent")
            self._send(peer, b"gone", b"")
            return
        self._sending[peer] = _Sending(parcel_id, content, began)
        self._send(peer, b"size", str(len(content)).encode())
        for _ in range(WINDOW):
            self._send_part(peer)

    def _send_part(self, peer: bytes) -> None:
        sending = self._sending.get(peer)
        if sending is None:  # a part before this one could not be sent
            return
        part = sending.content[sending.sent : sending.sent + PART_BYTES]
        if part:
            sending.sent += len(part)
            if (waiting := self._waiting.get(sending.parcel_id)) is not None:
                waiting.until = time.monotonic() + TRANSFER_TIMEOUT_S
            self._send(peer, b"part", part)

    def _send(self, peer: bytes, kind: bytes, content: bytes | memoryview) -> None:
        try:
            self._socket.send_multipart([peer, kind, content], zmq.NOBLOCK)
        except zmq.ZMQError:  # the peer is gone, or does not read
            self._sending.pop(peer, None)

    def _forget_old(self) -> None:
        now = time.monotonic()
        with self._lock:
            num_before = len(self._waiting)
            self._waiting = {name: one for name, one in self._waiting.items() if one.until > now}
            self._sent.failures += num_before - len(self._waiting)
        self._sending = {peer: one for peer, one in self._sending.items() if one.parcel_id in self._waiting}


def _road(address: str) -> str:
    """The same for all replicas of a coordinator: the scheme, and of sockets their folder or the coordinator's name."""
    if address.startswith("ipc://@"):
        return address.rpartition("-")[0]
    return os.path.dirname(address) if address.startswith("ipc://") else address.partition("/")[0]


def _is_number(content: bytes) -> bool:
    return content.isdigit() and len(content) <= _MAX_DIGITS


def _address_next_to(coordinator: str) -> str:
    """Where a replica listens: next to the coordinator's socket, or at the interface that leads to the coordinator.

    Raises ConfigError.
    """
    if coordinator.startswith("ipc://"):
        path, own = coordinator.removeprefix("ipc://"), f"p{secrets.token_hex(4)}"
        if path.startswith("@"):  # a name of Linux, in no folder
            return f"ipc://{path}-{own}"
        return "ipc://" + os.path.join(os.path.abspath(os.path.dirname(path)), own)
    where = urlsplit(coordinator)
    try:
        family = sockets.getaddrinfo(where.hostname, where.port)[0]
        with sockets.socket(family[0], sockets.SOCK_DGRAM) as probe:
            probe.connect(family[4])  # sends nothing
            host = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"no way to the coordinator at {coordinator}: {error}") from None
    return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"

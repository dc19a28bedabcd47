"""The way of parcels from replica to replica, next to the coordinator's wire: the receiver fetches, the sender serves.

    receiver                              sender
      get, id, tokens it has published ->      the parcel without the blocks of these tokens
      <- size, bytes                           refused by the receiver if it is more than its cache may hold
      <- part, bytes (WINDOW of them)
      more ->          one for each part       so that WINDOW parts are on their way at most
      done ->                                  the sender forgets the parcel
      <- gone                                  in the place of size: the sender does not have it (any more)

Both sides prove the coordinator's key, or share its private folder (`access`). A parcel has a checksum over all of it.
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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import zmq

from megatron_infer.coordinator import access
from megatron_infer.coordinator.protocol import CoordinatorError, ParcelPlace

if TYPE_CHECKING:
    from megatron_infer.engine.durable.parcel import Parcel

log = logging.getLogger("megatron_infer.coordinator")

PART_BYTES = 1 << 20
WINDOW = 8
"""Parts on their way at once."""
TRANSFER_TIMEOUT_S = 30.0
"""Seconds for which a parcel waits to be fetched, and for which a receiver waits for the next part."""
FETCHES = 4
"""Parcels that are fetched at once."""
MAX_WAITING_BYTES = 4 << 30
"""Most bytes of all parcels that wait at a replica; the tokens of further requests move alone."""
_POLL_MS = 200


class ParcelLost(CoordinatorError):
    """A parcel that cannot be fetched: its request goes on from its tokens."""


@dataclass(slots=True)
class _Sending:
    """A parcel on its way to one peer."""

    parcel_id: str
    content: memoryview
    sent: int = 0


@dataclass(slots=True)
class _Waiting:
    parcel: Parcel
    until: float = field(default_factory=lambda: time.monotonic() + TRANSFER_TIMEOUT_S)


class ParcelTransfer:
    """One replica's side: a thread serves what is in `offer`; `fetch` gets a parcel of another replica."""

    def __init__(self, coordinator: str, key: bytes | None) -> None:
        """coordinator: its address, which says where to listen. key: as peers have it."""
        self._key = key
        self._waiting: dict[str, _Waiting] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._check = None
        access.protect_listener(self._socket, key)
        if key is not None:
            self._check = access.PeerCheck(self._context, key)
        self._socket.bind(_address_beside(coordinator))
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._sending: dict[bytes, _Sending] = {}
        self._pool = ThreadPoolExecutor(FETCHES, thread_name_prefix="megatron-infer-fetch")
        self._thread = threading.Thread(target=self._run, name="megatron-infer-parcels", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def offer(self, parcel: Parcel) -> ParcelPlace | None:
        """Keep a parcel until it is fetched, TRANSFER_TIMEOUT_S at most. None: too much waits already."""
        parcel_id = secrets.token_hex(16)
        with self._lock:
            if parcel.num_bytes + sum(one.parcel.num_bytes for one in self._waiting.values()) > MAX_WAITING_BYTES:
                return None
            self._waiting[parcel_id] = _Waiting(parcel)
        return ParcelPlace(self.address, parcel_id)

    def fetch(self, place: ParcelPlace, *, num_published: int, max_bytes: int) -> Future[bytes | None]:
        """Begin to fetch a parcel without the blocks of its first `num_published` tokens. None: it cannot be had."""
        return self._pool.submit(self._fetched, place, num_published, max_bytes)

    def _fetched(self, place: ParcelPlace, num_published: int, max_bytes: int) -> bytes | None:
        try:
            return self._fetch(place.address, place.id, num_published, max_bytes)
        except ParcelLost as error:
            log.info("a parcel is lost, its request goes on from its tokens: %s", error)
            return None

    def _fetch(self, address: str, parcel_id: str, num_published: int, max_bytes: int) -> bytes:
        with contextlib.closing(self._context.socket(zmq.DEALER)) as peer:
            peer.setsockopt(zmq.LINGER, 1000)
            peer.setsockopt(zmq.SNDTIMEO, int(1000 * TRANSFER_TIMEOUT_S))
            peer.setsockopt(zmq.MAXMSGSIZE, PART_BYTES + access.ENCRYPTION_BYTES)
            access.protect_connection(peer, self._key)
            try:
                peer.connect(address)
                peer.send_multipart([b"get", parcel_id.encode(), str(num_published).encode()])
                content = b"".join(self._parts(peer, max_bytes))
                peer.send(b"done")
            except zmq.ZMQError as error:
                raise ParcelLost(f"{address}: {error}") from None
        return content

    def close(self) -> None:
        self._stopping = True
        self._pool.shutdown(cancel_futures=True)  # a fetch looks every _POLL_MS
        self._thread.join()
        self._socket.close()
        if self._check is not None:
            self._check.socket.close()
        self._context.term()

    def _parts(self, peer: zmq.Socket[bytes], max_bytes: int) -> Iterator[bytes]:
        kind, size = self._receive(peer)
        if kind != b"size":
            raise ParcelLost("the sender does not have it any more")
        left = int(size)
        if not 0 <= left <= max_bytes:
            raise ParcelLost(f"a parcel of {left:,} bytes, the limit is {max_bytes:,}")
        while left:
            kind, part = self._receive(peer)
            if kind != b"part" or not 0 < len(part) <= left:
                raise ParcelLost(f"{kind[:20]!r} of {len(part):,} bytes came, {left:,} bytes were left")
            left -= len(part)
            peer.send(b"more")
            yield part

    def _receive(self, peer: zmq.Socket[bytes]) -> list[bytes]:
        deadline = time.monotonic() + TRANSFER_TIMEOUT_S
        while not peer.poll(_POLL_MS):
            if self._stopping or time.monotonic() > deadline:
                raise ParcelLost(f"nothing came for {TRANSFER_TIMEOUT_S:g} s")
        frames = peer.recv_multipart()
        if len(frames) != 2 or (frames[0] == b"size" and not frames[1].isdigit()):
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
        if len(frames) == 3 and frames[0] == b"get" and frames[2].isdigit() and len(frames[2]) < 16:
            self._begin(peer, frames[1].decode("ascii", "replace"), int(frames[2]))
        elif frames == [b"more"] and peer in self._sending:
            self._send_part(peer)
        elif frames == [b"done"] and peer in self._sending:
            with self._lock:
                self._waiting.pop(self._sending.pop(peer).parcel_id, None)

    def _begin(self, peer: bytes, parcel_id: str, num_published: int) -> None:
        waiting = self._waiting.get(parcel_id)
        if waiting is None:
            self._send(peer, b"gone", b"")
            return
        try:
            content = memoryview(waiting.parcel.without(num_published).to_bytes())
        except Exception:  # such as a lack of memory: this request goes on from its tokens, and others are served
            log.exception("a parcel cannot be sent")
            self._send(peer, b"gone", b"")
            return
        self._sending[peer] = _Sending(parcel_id, content)
        self._send(peer, b"size", str(len(content)).encode())
        for _ in range(WINDOW):
            self._send_part(peer)

    def _send_part(self, peer: bytes) -> None:
        sending = self._sending[peer]
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
            self._waiting = {name: one for name, one in self._waiting.items() if one.until > now}
        self._sending = {peer: one for peer, one in self._sending.items() if one.parcel_id in self._waiting}


def _address_beside(coordinator: str) -> str:
    """Where a replica listens: next to the coordinator's socket, or at the interface that leads to the coordinator."""
    if coordinator.startswith("ipc://"):
        return os.path.join(os.path.dirname(coordinator), f"p{secrets.token_hex(4)}")
    where = urlsplit(coordinator)
    family = sockets.getaddrinfo(where.hostname, where.port)[0]
    with sockets.socket(family[0], sockets.SOCK_DGRAM) as probe:
        probe.connect(family[4])  # sends nothing
        host = probe.getsockname()[0]
    return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"

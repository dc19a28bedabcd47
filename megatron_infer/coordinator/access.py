"""Who may connect to a coordinator: the holders of its key, or the user whose folder its socket is in.

    tcp://HOST:PORT, ipc://PATH                     the key is asked for; default: the user's own, `user_key_file`
    ipc://PATH in a folder that only its user enters          no key: the folder is the check

With a key every connection is a CurveZMQ one: libzmq checks both sides before a message is taken, and encrypts and
authenticates every message after that. Both key pairs are derived from the shared key.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import tempfile
import time
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from megatron_infer.coordinator.protocol import MAX_FRAME
from megatron_infer.errors import ConfigError

log = logging.getLogger("megatron_infer.coordinator")

MIN_KEY_BYTES = 16
HANDSHAKE_TIMEOUT_S = 30.0
"""Seconds that a connection has to prove its key."""
ENCRYPTION_BYTES = 256
"""Most bytes that CurveZMQ adds to a frame, with room to spare."""
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_LOG_INTERVAL_S = 10.0
_ZAP_ADDRESS, _ZAP_DOMAIN = "inproc://zeromq.zap.01", b"megatron_infer"


def is_private(address: str) -> bool:
    """Whether only this user's processes reach the address: ipc:// in a folder of this user with mode 0700."""
    if not address.startswith("ipc://") or address.startswith("ipc://@"):  # @: Linux's own names, in no folder
        return False
    try:
        folder = os.stat(os.path.dirname(address.removeprefix("ipc://")) or ".")
    except OSError:
        return False
    return folder.st_uid == os.getuid() and not folder.st_mode & 0o077


def user_key_file() -> Path:
    """The file of the key that this user's coordinators, replicas and clients share where none is given."""
    return Path.home() / ".megatron_infer" / "coordinator.key"


def read_key(path: str | Path) -> bytes:
    """The key in a file, without white space around it. Raises ConfigError."""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"the key file: {error}") from None
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"the key file {path} holds {len(key)} bytes, a key has at least {MIN_KEY_BYTES}")
    return key


def coordinator_key(address: str, given: bytes | None) -> bytes | None:
    """The key that a coordinator asks for: the one given, else the user's own, made where it is missing.

    None: the address is private and no key was given. Raises ConfigError.
    """
    if given is not None or is_private(address):
        return given
    try:
        path = user_key_file()
        if not path.exists():
            _make_key(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        raise ConfigError(f"cannot make a key for {address}: {error}; give one (--key-file, key=)") from None
    return _read_own_key(path)


def _make_key(path: Path) -> None:
    """A new key with mode 0600; if another process is quicker, its key counts."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:  # its mode is 0600
        file.write(secrets.token_hex(32).encode())
    with contextlib.suppress(FileExistsError):
        os.link(file.name, path)
    os.unlink(file.name)


def peer_key(address: str, given: bytes | None) -> bytes | None:
    """The key of a client or replica: the one given, else the user's own if there is one. Raises ConfigError."""
    if given is not None or is_private(address):
        return given
    try:
        return _read_own_key(user_key_file()) if user_key_file().exists() else None
    except (OSError, RuntimeError):  # a home that is not there or not this user's: a coordinator with a key will refuse
        return None


def _read_own_key(path: Path) -> bytes:
    about = path.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        mode = stat.filemode(about.st_mode)
        raise ConfigError(f"others can read or write the key file {path} ({mode}); remove it, and a new one is made")
    return read_key(path)


def protect_listener(socket: zmq.Socket[bytes], key: bytes | None) -> None:
    """Have a listening socket take only peers that hold the key, and frames of bounded size."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME + ENCRYPTION_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_TIMEOUT_S))
    if key is None:
        return
    socket.curve_publickey, socket.curve_secretkey = _curve_pair(key, b"coordinator")
    socket.curve_server = True
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)


def protect_connection(socket: zmq.Socket[bytes], key: bytes | None) -> None:
    """Have a connecting socket prove the key, and send nothing to a coordinator that does not hold it."""
    if key is not None:
        socket.curve_publickey, socket.curve_secretkey = _curve_pair(key, b"peer")
        socket.curve_serverkey = _curve_pair(key, b"coordinator")[0]


class RefusedPeers:
    """Logs how many connections of a listening socket did not prove the key, every 10 s at most."""

    def __init__(self, listener: zmq.Socket[bytes]) -> None:
        self.socket = listener.get_monitor_socket(HANDSHAKE_FAILURES)
        self._num_refused = 0
        self._next_log = 0.0

    def count(self) -> None:
        """Count what has come."""
        with contextlib.suppress(zmq.Again):
            while True:
                recv_monitor_message(self.socket, zmq.NOBLOCK)
                self._num_refused += 1

    def tick(self) -> None:
        now = time.monotonic()
        if self._num_refused and now >= self._next_log:
            log.warning("%d connections did not prove the key and were closed", self._num_refused)
            self._num_refused, self._next_log = 0, now + _LOG_INTERVAL_S


class PeerCheck:
    """Answers libzmq whether a connection's key pair is that of peers (ZeroMQ RFC 27), on the coordinator's thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: bytes) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.bind(_ZAP_ADDRESS)
        self._expected = z85.decode(_curve_pair(key, b"peer")[0])

    def answer(self) -> None:
        """Answer every request that has come."""
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
                if b"" not in frames or frames.index(b"") + 2 >= len(frames):
                    continue  # libzmq sends more
                start = frames.index(b"") + 1  # after the address of libzmq's own socket
                is_peer = secrets.compare_digest(frames[-1], self._expected)
                reply = [b"1.0", frames[start + 1], b"200" if is_peer else b"400", b"", b"", b""]
                self.socket.send_multipart([*frames[:start], *reply])


def _curve_pair(key: bytes, side: bytes) -> tuple[bytes, bytes]:
    """(public, secret) key of one side, in Z85. Raises ConfigError."""
    if not zmq.has("curve"):
        raise ConfigError("this libzmq was built without CURVE, which keys need; install pyzmq's own wheel")
    secret = z85.encode(hashlib.blake2b(key, digest_size=32, person=side).digest())
    return zmq.curve_public(secret), secret

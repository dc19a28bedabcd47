"""What coordinator, replicas and clients say to each other: typed messages in msgpack, one to a frame. No pickle.

    client                      coordinator                       replica
      Hello ------------------->           <------------------- Hello
      <-- Challenge, Proof -->   (with a shared key)   <-- Proof, Challenge -->
      <--------------- Welcome             Welcome ------------------>
                                           <---- Register (what it is, what it has cached)
      Submit ------------------>           Run --------------------->
      <---------------- Output             <---- Output, Beat, PrefixNews
      Control ----------------->           Command ----------------->
      <--------- ControlResult             <---- Done

A message is an array whose first item names its type. A type that schema SCHEMA does not have, a field of another type
and a frame beyond the limit are refused with a `Refused` that says which. Token ids travel as int32, little endian.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sys
from array import array
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from megatron_infer.errors import ConfigError, InferenceError

for _needed in ("msgspec", "zmq"):
    if find_spec(_needed) is None:
        raise ModuleNotFoundError(
            f"the coordinator, its replicas and clients need {_needed}: pip install 'megatron-infer[coordinator]'",
            name=_needed,
        )

import msgspec  # noqa: E402

SCHEMA = 2
"""Raised with every change that an older peer would misread; peers of another schema are refused at the hello."""
MAX_MESSAGE = 16 << 20
"""Bytes of one message: a prompt of a million tokens with room to spare."""
DEFAULT_PORT = 5757
WEIGHT_COMMANDS = (
    "load_weights",
    "begin_weights",
    "write_weights",
    "finish_weights",
    "settle_weights",
    "cancel_weights",
    "check_weights",
)
COMMANDS = ("pause", "unpause", "suspend", "resume", "set_weight_version", "reset_prefix_cache", *WEIGHT_COMMANDS)
"""What a `Control` may ask of replicas; those about weights of replicas that were given them."""
assert sys.byteorder == "little", "token ids travel as they lie in memory, which is little endian"


def checked_address(address: str) -> str:
    """`address` as it is. Raises ConfigError when it is not one that can be reached or listened at."""
    if not address.startswith(("tcp://", "ipc://", "inproc://")) or (
        address.startswith("tcp://") and ":" not in address[len("tcp://") :]
    ):
        raise ConfigError(f"address {address!r} of a coordinator; it is like tcp://127.0.0.1:{DEFAULT_PORT}")
    return address


class CoordinatorError(InferenceError):
    """Root of what can go wrong between a client, the coordinator and its replicas."""


class BadMessage(CoordinatorError, ValueError):
    """Bytes that are no message of this schema."""


class MessageTooLarge(BadMessage):
    """A message beyond the limit."""


class AccessRefused(CoordinatorError, PermissionError):
    """A wrong or missing key, or a peer of another schema."""


class Overloaded(CoordinatorError):
    """The coordinator's queue is full; the request was not taken."""


class ConnectionLost(CoordinatorError, ConnectionError):
    """The coordinator does not answer, or has forgotten this peer."""


class ReplicaLost(CoordinatorError):
    """Every replica that took the request has died."""


class ControlFailed(CoordinatorError, RuntimeError):
    """A control that some replicas did not carry out; `results` has every replica's answer."""

    def __init__(self, message: str, results: dict[str, Answer]) -> None:
        super().__init__(message)
        self.results = results


class _Message(msgspec.Struct, array_like=True, tag=str.lower, gc=False):
    pass


# ---------------------------------------------------------------------- hello


class Hello(_Message):
    """First message of every peer. role: "client" or "replica"."""

    schema: int
    role: str
    name: str
    nonce: bytes


class Challenge(_Message):
    """The coordinator has a key: prove that you know it."""

    nonce: bytes


class Proof(_Message):
    mac: bytes


class Welcome(_Message):
    """mac: the coordinator's own proof, b"" without a key. incarnation: of this peer; a replica says it with all it
    sends, and what carries an older one is dropped."""

    incarnation: int
    mac: bytes
    heartbeat_s: float
    timeout_s: float
    max_message: int


class Refused(_Message):
    """code: "schema", "key", "message", "size", "role" (final for what was sent), "hello" or "fenced" (say hello)."""

    code: str
    message: str


class Ping(_Message):
    pass


class Pong(_Message):
    pass


# ---------------------------------------------------------------------- requests


class Kept(_Message):
    """What a sample has so far; the request goes on behind it."""

    tokens: bytes
    num_chars: int = 0
    """Characters of text that were handed out."""
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Submit(_Message):
    """A client's request; exactly one of prompt (token ids) and text. id: the client's own number."""

    id: int
    prompt: bytes | None
    text: str | None
    salt: str
    params: dict[str, Any]
    seed: int | None
    stream: bool


class Run(_Message):
    """A request for a replica. number: the coordinator's, new with every attempt. kept: one a sample, [] at first."""

    number: int
    incarnation: int
    prompt: bytes | None
    text: str | None
    salt: str
    params: dict[str, Any]
    seed: int
    stream: bool
    kept: list[Kept]


class Piece(_Message):
    """What is new of one sample. offset: tokens of it that came before."""

    index: int
    offset: int
    tokens: bytes
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[list[tuple[int, float, int | None, str | None]]] | None = None
    """Of each token: (token id, logprob, rank, text), the drawn one first."""
    spans: list[tuple[int, int, int, int]] = []
    raw_logprobs: bytes | None = None
    """Of each token, fp32; the processed ones likewise."""
    processed_logprobs: bytes | None = None
    support: tuple[int, bytes, bytes] | None = None
    """Of a TokenSupport of these tokens: vocabulary size, words of each token and the words, int32."""
    routing: tuple[str, list[int], bytes] | None = None
    """With the last piece: dtype (uint8, uint16), shape and content of the whole sample's."""


class Failure(_Message):
    """An error by the name of its class."""

    kind: str
    message: str


class Output(_Message):
    """News of a request. number: the coordinator's on its way there, the client's own on its way to the client."""

    number: int
    incarnation: int
    pieces: list[Piece]
    finished: bool
    refused: Failure | None = None
    """It was not taken at all."""
    error: Failure | None = None
    prompt: bytes | None = None
    """Token ids of a prompt that came as text, with the first output."""
    num_cached: int = 0
    prompt_logprobs: list[list[tuple[int, float, int | None, str | None]] | None] | None = None
    pooled: bytes | None = None
    """fp32, with the last output."""


class Abort(_Message):
    """Client to coordinator: end a request; what it has comes as its last output."""

    id: int


class Cancel(_Message):
    """Coordinator to replica. silent: nobody waits for what it has."""

    number: int
    silent: bool


class Goodbye(_Message):
    """A client leaves (its requests are aborted), or a replica does: draining ends what it has and takes no more."""

    draining: bool = False
    reason: str = ""


# ---------------------------------------------------------------------- replicas


class Register(_Message):
    """What a replica is. Its cached prefixes follow as PrefixNews."""

    incarnation: int
    block_size: int
    capacity: int
    root: bytes
    weight_version: int
    state: str
    model: str
    policy: str
    alpha: float
    limits: dict[str, int] = {}
    """What requests are held against: max_sequence_length, vocab_size, num_blocks."""
    dtype: str = ""
    """Of the weights."""


class Beat(_Message):
    """I am alive. step_s: how long the engine has been in the step it is in."""

    incarnation: int
    free_rows: int
    foreign: int
    """Requests it has that no coordinator sent."""
    root: bytes
    weight_version: int
    state: str
    step_s: float
    stats: dict[str, Any] = {}
    """Its engine's own figures, see `served.stats_of`; {}: as they were."""


class PrefixNews(_Message):
    """Apply in this order: root, reset, forgotten, published (digests one behind the other)."""

    incarnation: int
    root: bytes
    reset: bool
    forgotten: bytes
    published: bytes


# ---------------------------------------------------------------------- controls


class Control(_Message):
    """A client's command to all replicas."""

    id: int
    command: str
    args: dict[str, Any]
    timeout_s: float


class Command(_Message):
    number: int
    incarnation: int
    command: str
    args: dict[str, Any]
    timeout_s: float


class Answer(_Message):
    """What a replica made of a command. kind: the error's class."""

    ok: bool
    kind: str = ""
    message: str = ""
    value: Any = None


class Done(_Message):
    number: int
    incarnation: int
    answer: Answer


class ControlResult(_Message):
    """Every replica's answer, by its name."""

    id: int
    answers: dict[str, Answer]


class Query(_Message):
    """How do you stand?"""

    id: int


class Report(_Message):
    id: int
    stats: dict[str, Any]


Message = (
    Hello
    | Challenge
    | Proof
    | Welcome
    | Refused
    | Ping
    | Pong
    | Submit
    | Run
    | Output
    | Abort
    | Cancel
    | Goodbye
    | Register
    | Beat
    | PrefixNews
    | Control
    | Command
    | Done
    | ControlResult
    | Query
    | Report
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_tags = {kind.__name__.lower() for kind in Message.__args__}


def encode(message: Message, *, limit: int = MAX_MESSAGE) -> bytes:
    """The frame of a message. Raises MessageTooLarge."""
    frame = _encoder.encode(message)
    if len(frame) > limit:
        kind = type(message).__name__
        raise MessageTooLarge(f"a {kind} of {len(frame):,} bytes, the limit is {limit:,}; send less at once")
    return frame


def decode(frame: bytes, *, limit: int = MAX_MESSAGE) -> Message:
    """The message in a frame. Raises BadMessage, which says what is wrong with it."""
    if len(frame) > limit:
        raise MessageTooLarge(f"a message of {len(frame):,} bytes, the limit is {limit:,}; send less at once")
    try:
        return _decoder.decode(frame)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise BadMessage(_what_is_wrong(frame, error)) from None


def _what_is_wrong(frame: bytes, error: BaseException) -> str:
    try:
        tag = msgspec.msgpack.decode(frame)[0]
    except Exception:  # whatever these bytes are, they are not ours
        return f"{len(frame):,} bytes that are no message (msgpack array expected)"
    if not isinstance(tag, str) or tag not in _tags:
        return f"messages of type {str(tag)[:40]!r} are unknown to schema {SCHEMA}; known: {', '.join(sorted(_tags))}"
    return f"a {tag} message that schema {SCHEMA} does not allow: {error}"


def schema_of(frame: bytes) -> int | None:
    """The schema that a hello names, of whichever schema the hello itself is; None: it is no hello."""
    try:
        tag, schema = msgspec.msgpack.decode(frame)[:2]
    except Exception:
        return None
    return schema if tag == "hello" and isinstance(schema, int) else None


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def bytes_to_ids(data: bytes) -> list[int]:
    """Raises BadMessage when these are no whole int32."""
    if len(data) % 4:
        raise BadMessage(f"{len(data)} bytes of token ids, no multiple of 4")
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


def floats_to_bytes(values: Sequence[float] | None) -> bytes | None:
    """As fp32, which log probabilities are."""
    return None if values is None else array("f", values).tobytes()


def bytes_to_floats(data: bytes) -> list[float]:
    """Raises BadMessage when these are no whole fp32."""
    if len(data) % 4:
        raise BadMessage(f"{len(data)} bytes of fp32 numbers, no multiple of 4")
    values = array("f")
    values.frombytes(data)
    return values.tolist()


# ---------------------------------------------------------------------- the shared key


def new_nonce() -> bytes:
    return secrets.token_bytes(16)


def proof(key: bytes, side: str, peer_nonce: bytes, coordinator_nonce: bytes) -> bytes:
    """Shows knowledge of the key without sending it; side ("client", "replica", "coordinator") keeps it from being
    sent back. It guards the hello: what follows is neither signed nor hidden (use a private network or a tunnel)."""
    return hmac.new(key, b"|".join([side.encode(), peer_nonce, coordinator_nonce]), hashlib.sha256).digest()


def proves(mac: bytes, key: bytes, side: str, peer_nonce: bytes, coordinator_nonce: bytes) -> bool:
    return hmac.compare_digest(mac, proof(key, side, peer_nonce, coordinator_nonce))


def failure_of(error: BaseException) -> Failure:
    return Failure(type(error).__name__, str(error))


def error_of(failure: Failure) -> InferenceError:
    """An error of the class of that name with that message; of the family's root when the class is not known here."""
    known: list[type[InferenceError]] = [InferenceError]
    for cls in known:
        known += cls.__subclasses__()
    cls = next((cls for cls in known if cls.__name__ == failure.kind), CoordinatorError)
    return cls.__new__(cls, failure.message)  # its own arguments are gone, its message is not

"""The messages between coordinator, replicas and clients: typed, in msgpack; no pickle.

    client                      coordinator                       replica
      Hello ------------------->           <------------------- Hello
      <--------------- Welcome             Welcome ------------------>
                                           <---- Register (its sizes), PrefixNews
      Submit ------------------>           Run --------------------->
      <---------------- Output             <---- Output, Beat, PrefixNews
                                           HandOut ----------------->
                                           <---- HandedOut; the next Run says where its parcel is
                                           <---- EvictsNext: blocks run out, a HandOut would help
      Control ----------------->           Command ----------------->
      <--------- ControlResult             <---- Done

A message is an array whose first item is its type: the class name in lower case. An unknown type, a field of another
type and a message beyond the limit are refused with a `Refused` that says which. Token ids are int32, little endian.

Who may connect is checked below these messages, before the first of them (`access.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import msgspec

from megatron_infer.config.coordinator_options import MAX_MESSAGE, ReplicaRole
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.outputs import schema
from megatron_infer.outputs.schema import Failure, Piece, PromptRecord

if find_spec("zmq") is None:
    raise ModuleNotFoundError(
        "the coordinator, its replicas and clients need zmq: pip install 'megatron-infer[coordinator]'", name="zmq"
    )

SCHEMA = 13
"""Increased with every change that an older peer would misread; peers of another schema are refused at the hello."""
MAX_FRAME = 64 << 10
"""Bytes of one frame; a longer message is sent in several. It bounds what a peer without a key makes libzmq hold."""
MAX_NAMED = 4
"""Requests that an EvictsNext names."""
MAX_PASSED_ON = 1 << 30
"""Bytes of a message from the coordinator: one that it passes on grows, such as by the tokens that a client has."""
SHALLOW = 512
"""A message of fewer bytes has too few levels for any limit of a stack."""
DEFAULT_PORT = 5757


def checked_address(address: str) -> str:
    """`address`, unchanged. Raises ConfigError unless it is tcp://HOST:PORT, ipc://PATH or inproc://NAME."""
    if not address.startswith(("tcp://", "ipc://", "inproc://")) or (
        address.startswith("tcp://") and ":" not in address[len("tcp://") :]
    ):
        raise ConfigError(f"address {address!r} of a coordinator; give one like tcp://127.0.0.1:{DEFAULT_PORT}")
    return address


class CoordinatorError(InferenceError):
    """Base of errors between clients, the coordinator and its replicas."""


class BadMessage(CoordinatorError, ValueError):
    """Bytes that are not a message of this schema."""


class MessageTooLarge(BadMessage):
    """A message beyond the limit."""


class AccessRefused(CoordinatorError, PermissionError):
    """A wrong or missing key, a peer of another schema, or a command to a replica that takes none."""


class Overloaded(CoordinatorError):
    """The coordinator's queue is full; the request was refused."""


class ConnectionLost(CoordinatorError, ConnectionError):
    """The coordinator does not answer, or has removed this peer."""


class ReplicaLost(CoordinatorError):
    """Every replica that the request was sent to has died."""


class ControlFailed(CoordinatorError, RuntimeError):
    """A control that some replicas did not carry out; `results` has every replica's answer."""

    def __init__(self, message: str, results: dict[str, Answer]) -> None:
        super().__init__(message)
        self.results = results


class _Message(msgspec.Struct, array_like=True, tag=str.lower, gc=False):
    pass


# ---------------------------------------------------------------------- hello


class Hello(_Message):
    """First message of every peer, repeated with the same nonce until the welcome. role: "client" or "replica"."""

    schema: int
    role: str
    name: str
    nonce: bytes


class Welcome(_Message):
    """incarnation: of this peer; a replica sends it with every message, and messages with an older one are dropped.
    nonce: of the hello that it answers."""

    incarnation: int
    nonce: bytes
    heartbeat_s: float
    timeout_s: float
    max_message: int


class Refused(_Message):
    """code: "schema", "message", "size", "role" (final for what was sent), "hello" or "fenced" (say hello)."""

    code: str
    message: str


class Ping(_Message):
    pass


class Pong(_Message):
    pass


# ---------------------------------------------------------------------- requests


class Kept(_Message):
    """The output of one sequence that the client has; the request continues after it."""

    tokens: bytearray = msgspec.field(default_factory=bytearray)
    num_chars: int = 0
    """Characters of text that the client has."""
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, piece: Piece) -> None:
        self.tokens += piece.tokens
        self.num_chars += len(piece.text)
        if piece.cumulative_logprob is not None:
            self.cumulative_logprob = piece.cumulative_logprob
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason

    def copy(self) -> Kept:
        return msgspec.structs.replace(self, tokens=bytearray(self.tokens))


class Submit(_Message):
    """A client's request, with either prompt (token ids) or text. id: the client's own number.

    caller: whom it comes from, among all clients of the client's name; call: of the caller's calls. See `FairQueue`.
    kept: None for a new request; for one that is handed in again after its coordinator was lost, the output that the
    client has of each sequence, [] where there is none.
    """

    id: int
    prompt: bytes | None
    text: str | None
    salt: str
    params: dict[str, Any]
    seed: int | None
    stream: bool
    caller: str = ""
    call: str = ""
    kept: list[Kept] | None = None


class ParcelPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a request's parcel waits to be fetched, see `parcel_transfer`."""

    address: str
    id: str


class Run(_Message):
    """A request for a replica. number: the coordinator's, new for each attempt. kept: one per sequence, [] at first.
    caller: a number of its caller's, the same at each replica; see `CallerShares`. parcel: the request with its memory,
    where another replica has handed it out. hands_out: this one hands it out after its first token."""

    number: int
    incarnation: int
    prompt: bytes | None
    text: str | None
    salt: str
    params: dict[str, Any]
    seed: int
    stream: bool
    kept: list[Kept]
    caller: int = 0
    parcel: ParcelPlace | None = None
    hands_out: bool = False


class StageTimes(msgspec.Struct, array_like=True, gc=False):
    """When a request came to its replica, and when its stages there were over: in seconds before the message was sent,
    which needs no common clock. None: not yet."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_pauses: int = 0
    num_evictions: int = 0
    replica: str = ""
    """Its name; the coordinator writes it, and `attempt`."""
    attempt: int = 0
    """How many replicas the coordinator has sent the request to, this one included."""


class Output(_Message):
    """New output of a request. number: the coordinator's from a replica, the client's own to the client."""

    number: int
    incarnation: int
    pieces: list[Piece]
    finished: bool
    refused: Failure | None = None
    """Why the request was not accepted."""
    error: Failure | None = None
    prompt: bytes | None = None
    """Token ids of a prompt given as text, with the first output."""
    num_cached: int = 0
    prompt_logprobs: PromptRecord | None = None
    pooled: bytes | None = None
    """fp32, with the last output."""
    seed: int | None = None
    """To the client: the seed of the request, with which it can be handed in again."""
    times: StageTimes | None = None
    """With a replica's first and last tokens of the request."""


class Abort(_Message):
    """Client to coordinator: end a request; its last output has the tokens so far."""

    id: int


class Cancel(_Message):
    """Coordinator to replica: end a request. silent: without a last output."""

    number: int
    silent: bool


class HandOut(_Message):
    """Coordinator to replica: hand a request out, for another replica. Nothing if it has ended."""

    number: int


class HandedOut(_Message):
    """The replica has let a request go; all its outputs were sent before. parcel: the id of its parcel at the replica's
    address (`Register.parcels`). None: its tokens move alone."""

    number: int
    incarnation: int
    parcel: str | None = None


class EvictsNext(_Message):
    """A replica's: its blocks run out. The next eviction costs more than to move one of these requests, of which the
    first one would be evicted next. The answer is a HandOut of the first one that may move and has a place, or nothing.
    """

    numbers: list[int]
    incarnation: int


class Drain(_Message):
    """A client's: a replica takes no more requests. move: those it has go elsewhere. end: it takes requests again.
    The answer is a ControlResult."""

    id: int
    replica: str
    move: bool = False
    end: bool = False


class Goodbye(_Message):
    """A client leaves and its requests are aborted; or a replica leaves. draining: once its requests have finished."""

    draining: bool = False
    reason: str = ""


# ---------------------------------------------------------------------- replicas


class EngineNow(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False):
    """What may change of a replica's engine; a change is sent at once."""

    root: bytes = b""
    weight_version: int = 0
    state: str = "running"
    adapters: dict[str, str] = {}
    """Loaded LoRA adapters: name -> hash of the content."""
    weights: float = 0.0
    """The stamp of its weights, see `weights_in_force.Weights`; its replica knows."""


class EngineInfo(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False):
    """An engine's description."""

    block_size: int
    capacity: int
    """Most requests in one step."""
    model: str
    policy: str
    alpha: float
    limits: dict[str, int] = {}
    """Limits on requests: max_sequence_length (prompt and output), vocab_size, num_blocks, num_ranks (processes of the
    engine), and where it takes LoRA adapters max_loras and max_lora_rank."""
    dtype: str = "float32"
    """Dtype of the weights."""
    now: EngineNow
    num_requests: int = 0
    """Unfinished requests, also of others than the coordinator."""


class Register(_Message):
    """A replica's engine, and what it does for coordinators. Its cached prefixes follow as PrefixNews."""

    incarnation: int
    info: EngineInfo
    in_force: dict[str, dict[str, Any]] = {}
    """Commands of a coordinator that it still carries out (pause, suspend), with their arguments."""
    set_version: int = 0
    """Version that a coordinator's command has set last."""
    adapter_changes: dict[str, tuple[float, dict[str, Any] | None]] = {}
    """Adapters that a coordinator's commands have changed, see `broadcast.AdapterChange`."""
    undone: list[str] = []
    """Changes of adapters that were undone."""
    weights: dict[str, Any] = {}
    """`WeightsInForce.to_dict` of the weight updates that coordinators' commands have brought."""
    role: ReplicaRole = ReplicaRole.BOTH
    parcels: str = ""
    """Where other replicas fetch its parcels; "": its requests move by their tokens."""
    takes_commands: bool = False
    """It was started with `control`."""


class Beat(_Message):
    """A replica's heartbeat. step_s: seconds that the engine has been in its present step."""

    incarnation: int
    now: EngineNow
    free_rows: int
    foreign: int
    """Requests that the coordinator did not send."""
    step_s: float
    stats: dict[str, Any] = {}
    """Figures of its engine, see `served_engine.stats_of`; {}: unchanged."""


class PrefixNews(_Message):
    """Changes of a prefix cache, in this order: root, reset, forgotten, published (concatenated digests)."""

    incarnation: int
    root: bytes
    reset: bool
    forgotten: bytes
    published: bytes


# ---------------------------------------------------------------------- controls


class Control(_Message):
    """A client's command to all replicas, one of `lifecycle_commands.COMMANDS`."""

    id: int
    command: str
    args: dict[str, Any]
    timeout_s: float


class Command(_Message):
    """stamp: orders the changes of an adapter and of the weights; see `broadcast.CommandsInForce.stamp`."""

    number: int
    incarnation: int
    command: str
    args: dict[str, Any]
    timeout_s: float
    stamp: float = 0.0


class Answer(_Message):
    """A replica's answer to a command. kind: the name of the error's class."""

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
    """Asks for a Report."""

    id: int


class Report(_Message):
    id: int
    stats: dict[str, Any]


Message = (
    Hello
    | Welcome
    | Refused
    | Ping
    | Pong
    | Submit
    | Run
    | Output
    | Abort
    | Cancel
    | HandOut
    | HandedOut
    | EvictsNext
    | Drain
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


def frames_of(messages: Iterable[bytes]) -> list[bytes]:
    """The frames of a batch: a frame of MAX_FRAME bytes is continued by the next one, a shorter one ends a message."""
    frames: list[bytes] = []
    for message in messages:
        if len(message) < MAX_FRAME:
            frames.append(message)
        else:
            frames += [message[start : start + MAX_FRAME] for start in range(0, len(message) + 1, MAX_FRAME)]
    return frames


def messages_of(frames: Sequence[bytes]) -> list[bytes]:
    """The messages of a batch's frames."""
    messages: list[bytes] = []
    parts: list[bytes] = []
    for frame in frames:
        if len(frame) == MAX_FRAME:
            parts.append(frame)
        else:
            messages.append(b"".join([*parts, frame]) if parts else frame)
            parts = []
    return [*messages, b"".join(parts)] if parts else messages


def encode(message: Message, *, limit: int = MAX_MESSAGE) -> bytes:
    """Encode a message. Raises BadMessage for numbers, texts and depths that no message can have, MessageTooLarge."""
    kind = type(message).__name__
    try:
        frame = _encoder.encode(message)
    except (OverflowError, UnicodeError, RecursionError) as error:
        raise BadMessage(f"a {kind} cannot be sent: {error}") from None
    if len(frame) > limit:
        raise MessageTooLarge(f"a {kind} of {len(frame):,} bytes, the limit is {limit:,}; send less at once")
    return frame


def decode(frame: bytes, *, limit: int = MAX_MESSAGE, room: int = 0) -> Message:
    """Decode a message. Raises BadMessage, which says what is wrong with it. room: levels that it may be deeper nested,
    or encoded deeper in the stack, when it is passed on."""
    if len(frame) > limit:
        raise MessageTooLarge(f"a message of {len(frame):,} bytes, the limit is {limit:,}; send less at once")
    try:
        message = _decoder.decode(frame)
        if room and len(frame) >= SHALLOW:
            _encoder.encode(_nested(message, room))
        return message
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise BadMessage(_what_is_wrong(frame, error)) from None


def _nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


def _what_is_wrong(frame: bytes, error: BaseException) -> str:
    try:
        tag = msgspec.msgpack.decode(frame)[0]
    except Exception:  # not msgpack, or not an array
        return f"{len(frame):,} bytes that are no message (msgpack array expected)"
    if not isinstance(tag, str) or tag not in _tags:
        return f"messages of type {str(tag)[:40]!r} are unknown to schema {SCHEMA}; known: {', '.join(sorted(_tags))}"
    return f"a {tag} message that schema {SCHEMA} does not allow: {error}"


def schema_of(frame: bytes) -> int | None:
    """The schema in a hello of any schema; None: the frame is no hello."""
    try:
        tag, schema = msgspec.msgpack.decode(frame)[:2]
    except Exception:
        return None
    return schema if tag == "hello" and isinstance(schema, int) else None


# ---------------------------------------------------------------------- the shared key


def new_nonce() -> bytes:
    return secrets.token_bytes(16)


def error_of(failure: Failure) -> InferenceError:
    """An InferenceError of the class of that name; a CoordinatorError when the class is not known here."""
    return schema.error_of(failure, CoordinatorError)

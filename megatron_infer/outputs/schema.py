"""Outputs and samples in files and messages: one msgspec schema, in msgpack.

    CompletionOutput --piece_of--> Piece --append--> CompletionOutput          one sequence, or what is new in it
    RequestOutput --output_record--> OutputRecord --output_of--> RequestOutput  a request that has ended

Per-token outputs are `Piece.token_outputs`, packed by their rows of TOKEN_OUTPUTS. Token ids are int32 and numbers
fp32, little endian. No pickle.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from megatron_infer.errors import InferenceError
from megatron_infer.outputs.embeddings import flattened, unflattened
from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestEvent, RequestMetrics, RequestOutput
from megatron_infer.outputs.token_outputs import TOKEN_OUTPUTS, TokenValues, values_in
from megatron_infer.scheduler.request import VersionSpan

SCHEMA = 2
"""Version of this schema in files and in messages of samples. It increases with every change that an earlier release
would misread; another per-token output is no such change. The coordinator's messages have a version of their own."""
assert sys.byteorder == "little", "numbers are written as they are in memory, which must be little endian"


class BadRecord(InferenceError, ValueError):
    """Bytes that are no part of an output."""


LogprobRecord = list[tuple[int, float, int | None, str | None]]
"""(token id, logprob, rank, text) of the tokens of one position, the sampled one first."""
PromptRecord = list[LogprobRecord | None]
"""For each position of a prompt; None: the first."""


class Piece(msgspec.Struct, array_like=True, gc=False):
    """Consecutive tokens of one sequence, and what belongs to them. A whole sequence is one piece."""

    index: int
    offset: int
    """Number of the sequence's tokens before the piece."""
    tokens: bytes
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[LogprobRecord] | None = None
    """For each token."""
    spans: list[VersionSpan] = []
    token_outputs: dict[str, TokenValues] = {}
    """By the name of the output."""

    def joined(self, new: Piece) -> Piece:
        """This piece and the one after it as one; fields that are not joined are the second's."""
        token_outputs = {
            name: values if (before := self.token_outputs.get(name)) is None else before.joined(values)
            for name, values in new.token_outputs.items()
        }
        return msgspec.structs.replace(
            new,
            offset=self.offset,
            tokens=self.tokens + new.tokens,
            text=self.text + new.text,
            logprobs=None if new.logprobs is None else [*(self.logprobs or []), *new.logprobs],
            token_outputs=token_outputs,
        )


class Failure(msgspec.Struct, array_like=True, gc=False):
    """An error. kind: the name of its class."""

    kind: str
    message: str


class OutputRecord(msgspec.Struct, gc=False):
    """A request that has ended, with whole sequences."""

    id: str
    prompt: str | None
    prompt_ids: bytes
    pieces: list[Piece]
    metrics: RequestMetrics
    """With ages, see `aged`."""
    events: list[RequestEvent]
    num_cached_tokens: int
    prompt_logprobs: PromptRecord | None = None
    pooled: bytes | None = None
    pooling: str | None = None
    """`SamplingParams.pooling` of `pooled`, as far as its shape depends on it."""
    error: Failure | None = None
    metadata: dict[str, bool | int | float] | None = None


# ---------------------------------------------------------------------- sequences


def piece_of(one: CompletionOutput, *, offset: int = 0) -> Piece:
    """The tokens of `one`. offset: see Piece."""
    return Piece(
        one.index,
        offset,
        ids_to_bytes(one.token_ids),
        one.text,
        one.finish_reason,
        one.stop_reason,
        one.cumulative_logprob,
        None if one.logprobs is None else [logprob_record(entry) for entry in one.logprobs],
        one.spans,
        {output.name: output.pack(value) for output, value in values_in(one)},
    )


def append(one: CompletionOutput, piece: Piece) -> None:
    """Add a piece to the sequence that it goes on. Raises ValueError or TypeError for fields that make no sense."""
    one.token_ids = one.token_ids + bytes_to_ids(piece.tokens)
    one.text += piece.text
    one.finish_reason, one.stop_reason = piece.finish_reason, piece.stop_reason
    if piece.cumulative_logprob is not None:
        one.cumulative_logprob = piece.cumulative_logprob
    if piece.logprobs is not None:
        one.logprobs = [*(one.logprobs or []), *(logprobs_of(entry) for entry in piece.logprobs)]
    for output in TOKEN_OUTPUTS if piece.token_outputs else ():
        if (values := piece.token_outputs.get(output.name)) is not None:
            before, new = getattr(one, output.name), output.unpack(values)
            setattr(one, output.name, new if before is None else output.extended(before, new))
    if piece.spans:  # a replica that took over has spans of its own tokens only
        first = piece.spans[0].first_token
        one.spans = [span for span in one.spans if span.first_token < first]
        one.spans += piece.spans


def sequence_of(piece: Piece) -> CompletionOutput:
    """The sequence that one piece has all tokens of."""
    one = CompletionOutput(index=piece.index, text="", token_ids=[])
    append(one, piece)
    return one


def logprob_record(entry: Mapping[int, Logprob]) -> LogprobRecord:
    return [(token, one.logprob, one.rank, one.decoded_token) for token, one in entry.items()]


def logprobs_of(record: LogprobRecord) -> dict[int, Logprob]:
    return {token: Logprob(value, rank, text) for token, value, rank, text in record}


def prompt_record(positions: Sequence[Mapping[int, Logprob] | None] | None) -> PromptRecord | None:
    """Log probabilities of a prompt."""
    if positions is None:
        return None
    return [None if entry is None else logprob_record(entry) for entry in positions]


def prompt_logprobs_of(record: PromptRecord | None) -> list[dict[int, Logprob] | None] | None:
    return None if record is None else [None if entry is None else logprobs_of(entry) for entry in record]


# ---------------------------------------------------------------------- requests


def output_record(output: RequestOutput, *, now: float) -> OutputRecord:
    """A request that has ended, whose sequences are whole and no deltas."""
    return OutputRecord(
        id=output.request_id,
        prompt=output.prompt,
        prompt_ids=ids_to_bytes(output.prompt_token_ids),
        pieces=[piece_of(one) for one in output.outputs],
        metrics=aged(output.metrics, now),
        events=output.events,
        num_cached_tokens=output.num_cached_tokens,
        prompt_logprobs=prompt_record(output.prompt_logprobs),
        pooled=floats_to_bytes(flattened(output.pooled)),
        pooling="all" if output.pooled and isinstance(output.pooled[0], list) else None,
        error=None if output.error is None else failure_of(output.error),
        metadata=None if output.metadata is None else dict(output.metadata),
    )


def output_of(record: OutputRecord, *, now: float) -> RequestOutput:
    """The request that `output_record` was given."""
    prompt_ids = bytes_to_ids(record.prompt_ids)
    pooled = None if record.pooled is None else bytes_to_floats(record.pooled)
    return RequestOutput(
        request_id=record.id,
        prompt=record.prompt,
        prompt_token_ids=prompt_ids,
        prompt_logprobs=prompt_logprobs_of(record.prompt_logprobs),
        outputs=[sequence_of(piece) for piece in record.pieces],
        finished=True,
        metrics=aged(record.metrics, now),
        metadata=record.metadata,
        num_cached_tokens=record.num_cached_tokens,
        events=record.events,
        error=None if record.error is None else error_of(record.error),
        pooled=None if pooled is None else unflattened(pooled, record.pooling, len(prompt_ids)),
    )


def aged(metrics: RequestMetrics, now: float) -> RequestMetrics:
    """Times of time.monotonic as ages at `now`, and ages as times: another process has another clock."""

    def turned(time_s: float | None) -> float | None:
        return None if time_s is None else now - time_s

    return replace(
        metrics,
        arrival_time=now - metrics.arrival_time,
        first_scheduled_time=turned(metrics.first_scheduled_time),
        first_token_time=turned(metrics.first_token_time),
        finished_time=turned(metrics.finished_time),
    )


def failure_of(error: BaseException) -> Failure:
    return Failure(type(error).__name__, str(error))


def error_of(failure: Failure, unknown: type[InferenceError] = InferenceError) -> InferenceError:
    """An InferenceError of the class of that name, or of the class `unknown` where there is none of that name here."""
    known: list[type[InferenceError]] = [InferenceError]
    for cls in known:
        known += cls.__subclasses__()
    cls = next((cls for cls in known if cls.__name__ == failure.kind), unknown)
    return cls.__new__(cls, failure.message)  # without __init__, whose arguments are not saved


# ---------------------------------------------------------------------- numbers


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def bytes_to_ids(data: bytes) -> list[int]:
    """Raises BadRecord when these are no whole int32."""
    return _numbers("i", data, "token ids")


def floats_to_bytes(values: Sequence[float] | None) -> bytes | None:
    """fp32, the precision of log probabilities."""
    return None if values is None else array("f", values).tobytes()


def bytes_to_floats(data: bytes) -> list[float]:
    """Raises BadRecord when these are no whole fp32."""
    return _numbers("f", data, "fp32 numbers")


def _numbers(typecode: str, data: bytes, what: str) -> list[Any]:
    if len(data) % 4:
        raise BadRecord(f"{len(data)} bytes of {what}, no multiple of 4")
    numbers: array[Any] = array(typecode)
    numbers.frombytes(data)
    return numbers.tolist()


# ---------------------------------------------------------------------- arrays of a step


class ArrayRecord(msgspec.Struct, array_like=True, gc=False):
    """An array of a step's result, from one rank to another."""

    name: str
    is_tensor: bool
    """Whether both ranks have it as a tensor, not as an array of numpy."""
    dtype: str
    shape: list[int]
    content: bytearray


_array_decoder = msgspec.msgpack.Decoder(list[ArrayRecord])


def encode_arrays(records: Sequence[ArrayRecord]) -> bytes:
    return msgspec.msgpack.encode(records)


def decode_arrays(content: bytes) -> list[ArrayRecord]:
    """The records that `encode_arrays` was given. Raises ValueError."""
    return _array_decoder.decode(content)

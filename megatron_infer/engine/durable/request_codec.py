"""Saved requests as msgpack and back: `outputs.schema` with what continues a request in another process.

Times of time.monotonic become ages, because another process has another clock: differences between them are kept.
Events have wall-clock times, which stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.requests.drawn_sequence import DrawnSequence
from megatron_infer.engine.requests.input_processor import TextCodec, sequence_id
from megatron_infer.engine.requests.pooled_prompt import PooledPrompt
from megatron_infer.engine.requests.request_state import RequestState, SequenceState, StreamMode
from megatron_infer.engine.requests.token_details import TokenDetails
from megatron_infer.errors import RequestError, SnapshotError
from megatron_infer.outputs.request_output import RequestEvent, RequestMetrics
from megatron_infer.outputs.schema import (
    Failure,
    OutputRecord,
    Piece,
    PromptRecord,
    aged,
    bytes_to_ids,
    error_of,
    failure_of,
    ids_to_bytes,
    logprob_record,
    logprobs_of,
    prompt_logprobs_of,
    prompt_record,
)
from megatron_infer.outputs.token_outputs import TOKEN_OUTPUTS, TokenValues
from megatron_infer.scheduler.request import CacheUse, FinishReason, History, Request, Status

_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedKV:
    """The computed part of one sequence: its first `num_tokens` tokens, in these blocks of the file but for the first
    `num_left_out`."""

    num_tokens: int
    blocks: list[int]
    """Empty for a model without attention layers."""
    state: int | None = None
    """Index of the recurrent state behind those tokens; None for a model without recurrent states."""
    num_left_out: int = 0
    """Leading tokens whose blocks are not there, because the engine that the request goes to has published them."""
    publishes: bool = False
    """Whether the weights in force have computed all of it, so that its blocks may be published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSequence:
    """Where a saved sequence was, next to the sequence itself."""

    arrival: int
    sent: tuple[int, int]
    """(tokens, characters) that were handed out."""
    begun: bool
    """Whether any of its keys and values had been computed."""
    kv: SavedKV | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRequest:
    """An unfinished request in a file, not yet in an engine, and where its sequences were."""

    state: RequestState
    saved: list[SavedSequence]

    def forget_memory(self) -> None:
        """Its tokens alone are used."""
        self.saved[:] = [replace(one, kv=None) for one in self.saved]

    def rename(self, request_id: str) -> None:
        """It has this id in the engine that it comes to."""
        self.state.id = request_id
        for sequence in self.state.sequences:
            sequence.request.id = sequence_id(request_id, sequence.index, len(self.state.sequences))

    def resume_behind(self, drawn: Sequence[DrawnSequence]) -> None:
        """Its caller has these outputs, whatever was handed out. SnapshotError: its own do not begin with them."""
        sequences = self.state.sequences
        own = [sequence.request.tokens[sequence.request.prompt_len :] for sequence in sequences]
        if len(drawn) != len(own) or any(
            tokens[: len(one.token_ids)] != one.token_ids for tokens, one in zip(own, drawn, strict=True)
        ):
            text = "its tokens do not begin with those that its caller has"
            raise SnapshotError(f"request {self.state.id!r}", text)
        sent = [(len(one.token_ids), one.num_chars) for one in drawn]
        self.saved[:] = [replace(saved, sent=one) for saved, one in zip(self.saved, sent, strict=True)]


class SequenceRecord(msgspec.Struct, gc=False):
    """One sequence of an unfinished request. Its text is no part of the record: the tokens have it."""

    id: str
    piece: Piece
    """Its tokens. `cumulative_logprob` is always there."""
    positions: dict[str, list[TokenValues | None]]
    """By name of an output with an entry for each position, those of the prompt and those of the output."""
    seed: int
    place: SavedSequence
    history: History


class RequestRecord(msgspec.Struct, gc=False):
    """An unfinished request."""

    id: str
    prompt: str | None
    prompt_ids: bytes
    params: dict[str, Any]
    mode: StreamMode
    max_total: int
    stop_ids: bytes
    cache: CacheUse
    sequences: list[SequenceRecord]
    metrics: RequestMetrics
    """With ages."""
    events: list[RequestEvent]
    prompt_logprobs: PromptRecord | None = None
    pooling: tuple[int, bytes] | None = None
    """(positions that have come, `PooledPrompt.values_D`)."""
    error: Failure | None = None


class Records(msgspec.Struct, gc=False):
    """All requests of a snapshot."""

    requests: list[RequestRecord]
    finished: list[OutputRecord]


def encode_request(
    state: RequestState,
    *,
    now: float,
    unsent: Mapping[int, tuple[int, int]] | None = None,
    kv: Mapping[str, SavedKV] | None = None,
) -> RequestRecord:
    """Everything that is needed to continue a request in another process.

    unsent: by index of the sequence, (tokens, characters) of delta outputs that no caller has seen yet.
    """
    unsent, kv = unsent or {}, kv or {}
    leader = state.sequences[0].request
    return RequestRecord(
        id=state.id,
        prompt=state.prompt,
        prompt_ids=ids_to_bytes(state.prompt_ids),
        params=state.params.to_dict(),
        mode=state.mode,
        max_total=leader.max_total,
        stop_ids=ids_to_bytes(sorted(leader.stop_ids)),
        cache=leader.cache,
        sequences=[
            _encode_sequence(one, unsent.get(one.index, (0, 0)), kv.get(one.request.id)) for one in state.sequences
        ],
        metrics=aged(state.metrics, now),
        events=state.events,
        prompt_logprobs=prompt_record(state.prompt_logprobs),
        pooling=_encode_pooling(state.pooling),
        error=None if state.error is None else failure_of(state.error),
    )


def _encode_sequence(sequence: SequenceState, unsent: tuple[int, int], kv: SavedKV | None) -> SequenceRecord:
    request, details, logprobs = sequence.request, sequence.token_details, sequence.logprobs
    sent_tokens, sent_chars = sequence.sent
    return SequenceRecord(
        id=request.id,
        piece=Piece(
            sequence.index,
            0,
            ids_to_bytes(request.tokens[request.prompt_len :]),
            "",
            None if request.finish_reason is None else request.finish_reason.value,
            request.stop_reason,
            sequence.cumulative_logprob,
            None if logprobs is None else [logprob_record(entry) for entry in logprobs],
            token_outputs={} if details is None else _encode_values(details),
        ),
        positions={} if details is None else _encode_positions(details),
        seed=request.seed,
        place=SavedSequence(
            arrival=request.arrival,
            sent=(max(0, sent_tokens - unsent[0]), max(0, sent_chars - unsent[1])),
            begun=request.scheduled > 0,
            kv=kv,
        ),
        history=request.history,
    )


def decode_request(record: RequestRecord, *, tokenizer: TextCodec | None, now: float) -> SavedRequest:
    """The request that `encode_request` described; it is in no scheduler and its texts are not made yet."""
    params, prompt_ids = SamplingParams.from_saved(record.params), bytes_to_ids(record.prompt_ids)
    stop_ids = frozenset(bytes_to_ids(record.stop_ids))
    sequences: list[SequenceState] = []
    for index, one in enumerate(record.sequences):
        piece = one.piece
        if piece.index != index:
            raise ValueError(f"request {record.id!r}: sequence {piece.index} in place {index}")
        request = Request(
            id=one.id,
            tokens=prompt_ids + bytes_to_ids(piece.tokens),
            prompt_len=len(prompt_ids),
            params=params,
            max_total=record.max_total,
            seed=one.seed,
            stop_ids=stop_ids,
            cache=record.cache,
            status=Status.WAITING if piece.finish_reason is None else Status.FINISHED,
            history=one.history,
            finish_reason=None if piece.finish_reason is None else FinishReason(piece.finish_reason),
            stop_reason=piece.stop_reason,
        )
        sequence = SequenceState(request, index, params, tokenizer, sequences[0] if sequences else None)
        sequence.logprobs = None if piece.logprobs is None else [logprobs_of(entry) for entry in piece.logprobs]
        sequence.cumulative_logprob = piece.cumulative_logprob or 0.0
        if sequence.token_details is not None:
            _decode_token_details(sequence.token_details, one)
        sequences.append(sequence)
    if len(sequences) != params.n:
        raise ValueError(f"request {record.id!r}: {len(sequences)} sequences of {params.n}")
    state = RequestState(
        id=record.id,
        prompt=record.prompt,
        prompt_ids=prompt_ids,
        params=params,
        mode=record.mode,
        sequences=sequences,
        metrics=aged(record.metrics, now),
        prompt_logprobs=prompt_logprobs_of(record.prompt_logprobs),
        pooling=_decode_pooling(params, record.pooling, len(prompt_ids)),
        events=record.events,
        error=None if record.error is None else error_of(record.error),
    )
    return SavedRequest(state=state, saved=[one.place for one in record.sequences])


def _encode_pooling(log: PooledPrompt | None) -> tuple[int, bytes] | None:
    if log is None or log.values_D is None:
        return None
    return log.num_positions, np.asarray(log.values_D, dtype=np.float32).tobytes()


def _decode_pooling(params: SamplingParams, record: tuple[int, bytes] | None, num_prompt: int) -> PooledPrompt | None:
    if params.pooling is None:
        return None
    log = PooledPrompt(params.pooling, num_prompt)
    if record is not None:
        log.num_positions, content = record
        values = np.frombuffer(content, dtype=np.float32)
        log.values_D = values.reshape(log.num_positions, -1) if params.pooling == "all" else values
    return log


def _encode_values(details: TokenDetails) -> dict[str, TokenValues]:
    values = ((output, details.value(output)) for output in TOKEN_OUTPUTS)
    return {output.name: output.pack(value) for output, value in values if value is not None}


def _encode_positions(details: TokenDetails) -> dict[str, list[TokenValues | None]]:
    return {
        output.name: [output.pack(log.rows) if log.count else None for log in details.logs[output.key]]
        for output in TOKEN_OUTPUTS
        if output.key in details.logs
    }


def _decode_token_details(details: TokenDetails, record: SequenceRecord) -> None:
    """Fill those of a new sequence; the record of each sequence has the positions of their common prompt."""
    for output in TOKEN_OUTPUTS:
        if output.per_position:
            logs, parts = details.logs.get(output.key), record.positions.get(output.name, (None, None))
            for log, rows in () if logs is None else zip(logs, parts, strict=True):
                if rows is not None:
                    log.take(log.first, output.unpack(rows))
        elif (values := record.piece.token_outputs.get(output.name)) is not None:
            details.set_value(output, output.unpack(values))


def to_bytes(record: Records | RequestRecord | OutputRecord) -> bytes:
    """Raises RequestError for a text that is no Unicode, and for a number of more than 64 bits."""
    try:
        return msgspec.msgpack.encode(record)
    except UnicodeEncodeError as error:
        raise RequestError(
            f"a request with a text that holds half of a surrogate pair cannot be saved: {error}"
        ) from error
    except OverflowError as error:
        raise RequestError(f"a request with a number of more than 64 bits cannot be saved: {error}") from error


def of_bytes(content: bytes, kind: type[_R]) -> _R:
    """The record that `to_bytes` was given. Raises ValueError."""
    return msgspec.msgpack.decode(content, type=kind)

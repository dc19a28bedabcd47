"""Requests and outputs as JSON values and back. Long lists of numbers are stored as the file needs them.

A snapshot collects numbers in two columns (tensors), a journal line contains them: `Columns` and `Inline`.
Times of time.monotonic become ages, because another process has another clock: differences between them are kept.
Events have wall-clock times, which stay as they are.
"""

from __future__ import annotations

import dataclasses
import math
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InferenceError
from megatron_infer.outputs.embeddings import flattened, unflattened
from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestEvent, RequestMetrics, RequestOutput
from megatron_infer.outputs.token_outputs import TOKEN_OUTPUTS, Kind, Packed, TokenOutput, pack, unpack
from megatron_infer.requests.input_processor import TextCodec
from megatron_infer.requests.pooled_prompt import PooledPrompt
from megatron_infer.requests.request_state import RequestState, SequenceState
from megatron_infer.requests.token_details import TokenDetails
from megatron_infer.scheduler.request import CacheUse, FinishReason, History, Request, Status, VersionSpan

Logprobs = Sequence[Mapping[int, Logprob] | None]
_LEAST_TIME = 1e9
"""A wall-clock time of this century; no age of an event is as long."""
_TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "finished_time")


class Numbers(Protocol):
    """Where the numbers of records are: `put_*` returns a reference to a list, `get_*` takes one."""

    def put_ints(self, values: Sequence[int]) -> Any: ...

    def put_floats(self, values: Sequence[float]) -> Any: ...

    def get_ints(self, ref: Any) -> list[int]: ...

    def get_floats(self, ref: Any) -> list[float]: ...


class Inline:
    """Numbers stay in the record. JSON writes the shortest text that reads back as the same float."""

    def put_ints(self, values: Sequence[int]) -> Any:
        return list(values)

    def put_floats(self, values: Sequence[float]) -> Any:
        return list(values)

    def get_ints(self, ref: Any) -> list[int]:
        return list(ref)

    def get_floats(self, ref: Any) -> list[float]:
        return list(ref)


class Columns:
    """Numbers of all records in one int64 and one float64 column; a record holds [start, count]."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        """tensors: as `tensors()` returned them, to read; None: to write."""
        self._ints, self._floats = array("q"), array("d")
        if tensors is not None:
            self._ints.frombytes(tensors["ints"].numpy().tobytes())
            self._floats.frombytes(tensors["floats"].numpy().tobytes())

    def tensors(self) -> dict[str, Tensor]:
        return {
            "ints": torch.from_numpy(np.array(self._ints, dtype=np.int64)),
            "floats": torch.from_numpy(np.array(self._floats, dtype=np.float64)),
        }

    def put_ints(self, values: Sequence[int]) -> Any:
        start = len(self._ints)
        self._ints.extend(values)
        return [start, len(values)]

    def put_floats(self, values: Sequence[float]) -> Any:
        start = len(self._floats)
        self._floats.extend(values)
        return [start, len(values)]

    def get_ints(self, ref: Any) -> list[int]:
        return _cut(self._ints, ref).tolist()

    def get_floats(self, ref: Any) -> list[float]:
        return _cut(self._floats, ref).tolist()


def _cut(column: array[Any], ref: Any) -> array[Any]:
    start, count = ref
    if not 0 <= start <= start + count <= len(column):
        raise ValueError(f"numbers {start} to {start + count} of {len(column)}")
    return column[start : start + count]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedKV:
    """The computed part of one sequence: its first `num_tokens` tokens, in these blocks of the file."""

    num_tokens: int
    blocks: list[int]
    """Empty for a model without attention layers."""
    state: int | None = None
    """Index of the recurrent state behind those tokens; None for a model without recurrent states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSequence:
    """Where a saved sequence was, beside the sequence itself."""

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


# ---------------------------------------------------------------------- unfinished requests


def encode_request(
    state: RequestState,
    numbers: Numbers,
    *,
    now: float,
    unsent: Mapping[int, tuple[int, int]] | None = None,
    kv: Mapping[str, SavedKV] | None = None,
) -> dict[str, Any]:
    """Everything that is needed to continue a request in another process.

    unsent: by index of the sequence, (tokens, characters) of delta outputs that no caller has seen yet.
    """
    unsent, kv = unsent or {}, kv or {}
    samples = []
    for sequence in state.sequences:
        request, held_back = sequence.request, unsent.get(sequence.index, (0, 0))
        reason, stored, details = request.finish_reason, kv.get(request.id), sequence.token_details
        samples.append(
            {
                "id": request.id,
                "index": sequence.index,
                "tokens": numbers.put_ints(request.tokens[request.prompt_len :]),
                "seed": request.seed,
                "arrival": request.arrival,
                "begun": request.scheduled > 0,
                "finish_reason": None if reason is None else reason.value,
                "stop_reason": request.stop_reason,
                "sent": [max(0, sent - held) for sent, held in zip(sequence.sent, held_back, strict=True)],
                "logprobs": None if sequence.logprobs is None else encode_logprobs(sequence.logprobs, numbers),
                "cumulative_logprob": sequence.cumulative_logprob,
                "carried": None if details is None else _encode_token_details(details, numbers),
                "history": dataclasses.asdict(request.history),
                "kv": None if stored is None else _encode_kv(stored, numbers),
            }
        )
    leader = state.sequences[0].request
    return {
        "id": state.id,
        "prompt": state.prompt,
        "prompt_ids": numbers.put_ints(state.prompt_ids),
        "params": state.params.to_dict(),
        "mode": state.mode,
        "max_total": leader.max_total,
        "stop_ids": numbers.put_ints(sorted(leader.stop_ids)),
        "cache": [leader.cache.allowed, leader.cache.salt],
        "prompt_logprobs": _maybe_logprobs(state.prompt_logprobs, numbers),
        "pooling": _encode_pooling(state.pooling, numbers),
        "metrics": _encode_metrics(state.metrics, now),
        "events": _encode_events(state.events),
        "error": encode_error(state.error),
        "samples": samples,
    }


def decode_request(
    record: Mapping[str, Any], numbers: Numbers, *, tokenizer: TextCodec | None, now: float
) -> SavedRequest:
    """The request that `encode_request` described; it is in no scheduler and its texts are not made yet."""
    params, prompt_ids = SamplingParams.from_saved(record["params"]), numbers.get_ints(record["prompt_ids"])
    stop_ids = frozenset(numbers.get_ints(record["stop_ids"]))
    codec = tokenizer if params.detokenize else None
    sequences: list[SequenceState] = []
    saved: list[SavedSequence] = []
    for index, one in enumerate(record["samples"]):
        reason = one["finish_reason"]
        history = dict(one["history"])
        history["spans"] = [VersionSpan(*span) for span in history["spans"]]
        if history["kv_versions"] is not None:
            history["kv_versions"] = tuple(history["kv_versions"])
        if history.get("adapter") is not None:
            history["adapter"] = tuple(history["adapter"])
        request = Request(
            id=one["id"],
            tokens=prompt_ids + numbers.get_ints(one["tokens"]),
            prompt_len=len(prompt_ids),
            params=params,
            max_total=record["max_total"],
            seed=one["seed"],
            stop_ids=stop_ids,
            cache=CacheUse(allowed=record["cache"][0], salt=record["cache"][1]),
            status=Status.WAITING if reason is None else Status.FINISHED,
            history=History(**history),
            finish_reason=None if reason is None else FinishReason(reason),
            stop_reason=one["stop_reason"],
        )
        if one["index"] != index:
            raise ValueError(f"request {record['id']!r}: sample {one['index']} in place {index}")
        sequence = SequenceState(request, index, params, tokenizer, sequences[0] if sequences else None)
        sequence.logprobs = None if one["logprobs"] is None else _filled(one["logprobs"], numbers, codec)
        sequence.cumulative_logprob = one["cumulative_logprob"]
        if sequence.token_details is not None and one.get("carried") is not None:  # earlier files have none
            _decode_token_details(sequence.token_details, one["carried"], numbers)
        sequences.append(sequence)
        tokens_sent, chars_sent = one["sent"]
        kv = None if one["kv"] is None else _decode_kv(one["kv"], numbers)
        saved.append(SavedSequence(arrival=one["arrival"], sent=(tokens_sent, chars_sent), begun=one["begun"], kv=kv))
    if len(sequences) != params.n:
        raise ValueError(f"request {record['id']!r}: {len(sequences)} samples of {params.n}")
    state = RequestState(
        id=record["id"],
        prompt=record["prompt"],
        prompt_ids=prompt_ids,
        params=params,
        mode=record["mode"],
        sequences=sequences,
        metrics=_decode_metrics(record["metrics"], now),
        prompt_logprobs=_maybe_decoded(record["prompt_logprobs"], numbers, codec),
        pooling=_decode_pooling(params, record.get("pooling"), len(prompt_ids), numbers),
        events=_decode_events(record["events"]),
        error=decode_error(record["error"]),
    )
    return SavedRequest(state=state, saved=saved)


def _encode_pooling(log: PooledPrompt | None, numbers: Numbers) -> list[Any] | None:
    """[positions, their sum]."""
    if log is None or log.values_D is None:
        return None
    return [log.num_positions, numbers.put_floats(log.values_D.ravel().tolist())]


def _decode_pooling(params: SamplingParams, record: Any, num_prompt: int, numbers: Numbers) -> PooledPrompt | None:
    if params.pooling is None:
        return None
    log = PooledPrompt(params.pooling, num_prompt)
    if record is not None:
        log.num_positions = record[0]
        values = np.asarray(numbers.get_floats(record[1]), dtype=np.float32)
        log.values_D = values.reshape(log.num_positions, -1) if params.pooling == "all" else values
    return log


def _encode_kv(kv: SavedKV, numbers: Numbers) -> list[Any]:
    """[tokens, blocks], and the state if there is one."""
    return [kv.num_tokens, numbers.put_ints(kv.blocks), *(() if kv.state is None else (kv.state,))]


def _decode_kv(record: Sequence[Any], numbers: Numbers) -> SavedKV:
    num_tokens, blocks, *state = record
    return SavedKV(num_tokens=num_tokens, blocks=numbers.get_ints(blocks), state=state[0] if state else None)


# ---------------------------------------------------------------------- finished outputs


def encode_output(output: RequestOutput, numbers: Numbers, *, now: float) -> dict[str, Any]:
    """A finished output, a whole one and not a delta."""
    return {
        "id": output.request_id,
        "prompt": output.prompt,
        "prompt_ids": numbers.put_ints(output.prompt_token_ids),
        "prompt_logprobs": _maybe_logprobs(output.prompt_logprobs, numbers),
        "pooled": _maybe_floats(flattened(output.pooled), numbers),
        **({"pooling": "all"} if output.pooled and isinstance(output.pooled[0], list) else {}),
        "outputs": [
            {
                "index": one.index,
                "text": one.text,
                "tokens": numbers.put_ints(one.token_ids),
                "cumulative_logprob": one.cumulative_logprob,
                "logprobs": _maybe_logprobs(one.logprobs, numbers),
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
                "spans": one.spans,
                **{kind.name: _encode_value(kind, getattr(one, kind.name), numbers) for kind in TOKEN_OUTPUTS},
            }
            for one in output.outputs
        ],
        "metrics": _encode_metrics(output.metrics, now),
        "num_cached_tokens": output.num_cached_tokens,
        "events": _encode_events(output.events),
        "error": encode_error(output.error),
        **({} if output.metadata is None else {"metadata": dict(output.metadata)}),
    }


def decode_output(
    record: Mapping[str, Any], numbers: Numbers, *, tokenizer: TextCodec | None, now: float
) -> RequestOutput:
    return RequestOutput(
        request_id=record["id"],
        prompt=record["prompt"],
        prompt_token_ids=numbers.get_ints(record["prompt_ids"]),
        prompt_logprobs=_maybe_decoded(record["prompt_logprobs"], numbers, tokenizer),
        outputs=[
            CompletionOutput(
                index=one["index"],
                text=one["text"],
                token_ids=numbers.get_ints(one["tokens"]),
                cumulative_logprob=one["cumulative_logprob"],
                logprobs=None if one["logprobs"] is None else _filled(one["logprobs"], numbers, tokenizer),
                finish_reason=one["finish_reason"],
                stop_reason=one["stop_reason"],
                spans=[VersionSpan(*span) for span in one["spans"]],
                **{kind.name: _decode_value(kind, one.get(kind.name), numbers) for kind in TOKEN_OUTPUTS},
            )
            for one in record["outputs"]
        ],
        finished=True,
        metrics=_decode_metrics(record["metrics"], now),
        metadata=record.get("metadata"),
        num_cached_tokens=record["num_cached_tokens"],
        events=_decode_events(record["events"]),
        error=decode_error(record["error"]),
        pooled=None
        if record.get("pooled") is None
        else unflattened(numbers.get_floats(record["pooled"]), record.get("pooling"), record["prompt_ids"][1]),
    )


# ---------------------------------------------------------------------- parts of both


def encode_logprobs(positions: Logprobs, numbers: Numbers) -> dict[str, Any]:
    """Four lists: entries at each position (0: None, a first prompt token), and id, rank, value of each entry."""
    counts: list[int] = []
    ids: list[int] = []
    ranks: list[int] = []
    values: list[float] = []
    for entry in positions:
        counts.append(0 if entry is None else len(entry))
        for token, logprob in () if entry is None else entry.items():
            ids.append(token)
            ranks.append(0 if logprob.rank is None else logprob.rank)
            values.append(logprob.logprob)
    put = numbers.put_ints
    return {"counts": put(counts), "ids": put(ids), "ranks": put(ranks), "values": numbers.put_floats(values)}


def decode_logprobs(
    record: Mapping[str, Any], numbers: Numbers, tokenizer: TextCodec | None
) -> list[dict[int, Logprob] | None]:
    """The positions; tokens' texts come from the tokenizer again."""
    counts, ids, ranks = (numbers.get_ints(record[name]) for name in ("counts", "ids", "ranks"))
    entries = zip(ids, ranks, numbers.get_floats(record["values"]), strict=True)
    positions: list[dict[int, Logprob] | None] = []
    for count in counts:
        entry: dict[int, Logprob] = {}
        for _ in range(count):
            token, rank, value = next(entries)
            entry[token] = Logprob(value, rank or None, None if tokenizer is None else tokenizer.token_str(token))
        positions.append(entry or None)
    return positions


def _filled(record: Mapping[str, Any], numbers: Numbers, tokenizer: TextCodec | None) -> list[dict[int, Logprob]]:
    return [entry for entry in decode_logprobs(record, numbers, tokenizer) if entry is not None]


def _maybe_logprobs(positions: Logprobs | None, numbers: Numbers) -> dict[str, Any] | None:
    return None if positions is None else encode_logprobs(positions, numbers)


def _maybe_decoded(
    record: Mapping[str, Any] | None, numbers: Numbers, tokenizer: TextCodec | None
) -> list[dict[int, Logprob] | None] | None:
    return None if record is None else decode_logprobs(record, numbers, tokenizer)


# ---------------------------------------------------------------------- token details


def _encode_token_details(details: TokenDetails, numbers: Numbers) -> dict[str, Any]:
    """By key. Of positions: those of the prompt and those of the output."""
    record: dict[str, Any] = {}
    for output in TOKEN_OUTPUTS:
        if output.kind is Kind.POSITION:
            logs = (details.of_prompt, details.of_output)
            record[output.key] = [
                None if log is None or not log.count else _encode_value(output, log.rows, numbers) for log in logs
            ]
        else:
            record[output.key] = _encode_value(output, details.value(output), numbers)
    return record


def _decode_token_details(details: TokenDetails, record: Mapping[str, Any], numbers: Numbers) -> None:
    """Fill those of a new sequence; the record of each sequence has the routing of their common prompt."""
    for output in TOKEN_OUTPUTS:
        found: Any = record.get(output.key)  # a file from before the output was added has none
        if output.kind is Kind.POSITION:
            for log, rows in zip((details.of_prompt, details.of_output), found, strict=True):
                if log is not None and rows is not None:
                    log.take(log.first, _decode_value(output, rows, numbers))
        elif found is not None:
            details.set_value(output, _decode_value(output, found, numbers))


def _encode_value(output: TokenOutput, value: Any, numbers: Numbers) -> Any:
    """Numbers as a list, positions as an array, sets of ids as [vocabulary size, offsets, ids]; None: None."""
    if value is None or output.kind is Kind.NUMBER:
        return _maybe_floats(value, numbers)
    packed = pack(output, value)
    if packed.offsets is None:
        return _encode_array(packed.content, numbers)
    return [packed.vocab_size, _encode_array(packed.offsets, numbers), _encode_array(packed.content, numbers)]


def _decode_value(output: TokenOutput, record: Any, numbers: Numbers) -> Any:
    if record is None or output.kind is Kind.NUMBER:
        return _found_floats(record, numbers)
    if output.kind is Kind.POSITION:
        return unpack(output, Packed(_decode_array(record, numbers)))
    vocab_size, offsets, ids = record
    return unpack(output, Packed(_decode_array(ids, numbers), _decode_array(offsets, numbers), vocab_size))


def _maybe_floats(values: Sequence[float] | None, numbers: Numbers) -> Any:
    return None if values is None else numbers.put_floats(values)


def _found_floats(ref: Any, numbers: Numbers) -> list[float] | None:
    return None if ref is None else numbers.get_floats(ref)


def _encode_array(array: np.ndarray, numbers: Numbers) -> list[Any]:
    """[dtype, shape, bytes as int64, the last one padded with zeros]."""
    content = array.tobytes()
    words = np.frombuffer(content + bytes(-len(content) % 8), dtype=np.int64)
    return [array.dtype.name, list(array.shape), numbers.put_ints(words.tolist())]


def _decode_array(record: Sequence[Any], numbers: Numbers) -> np.ndarray:
    name, shape, words = record
    count = math.prod(shape)
    content = np.array(numbers.get_ints(words), dtype=np.int64).view(np.uint8)
    array: np.ndarray = content[: count * np.dtype(name).itemsize].view(name).reshape(shape)
    return array


def _encode_metrics(metrics: RequestMetrics, now: float) -> dict[str, Any]:
    values = dataclasses.asdict(metrics)
    return values | {name: None if values[name] is None else now - values[name] for name in _TIMES}


def _decode_metrics(record: Mapping[str, Any], now: float) -> RequestMetrics:
    ages = {name: None if record[name] is None else now - record[name] for name in _TIMES}
    return RequestMetrics(**{**record, **ages})


def _encode_events(events: Sequence[RequestEvent]) -> list[Any]:
    return [[event.kind, event.time_s, event.payload] for event in events]


def _decode_events(records: Sequence[Any]) -> list[RequestEvent]:
    """Earlier files have the age of an event at the save in place of its time: it is counted from now."""
    now = time.time()
    return [
        RequestEvent(kind, number if number > _LEAST_TIME else now - number, payload)
        for kind, number, payload in records
    ]


def encode_error(error: InferenceError | None) -> list[str] | None:
    return None if error is None else [type(error).__name__, str(error)]


def decode_error(record: Sequence[str] | None) -> InferenceError | None:
    """An error of the class of that name with that message; an InferenceError if the class is unknown here."""
    if record is None:
        return None
    name, message = record
    known: list[type[InferenceError]] = [InferenceError]
    for cls in known:
        known += cls.__subclasses__()
    cls = next((cls for cls in known if cls.__name__ == name), InferenceError)
    return cls.__new__(cls, message)  # its arguments are not saved, its message is

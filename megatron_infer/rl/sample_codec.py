"""One sample as msgpack, for streams and queues between processes; `sample_file` stores whole groups."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from megatron_infer.outputs.token_support import TokenSupport
from megatron_infer.rl.sample_file import SampleError, check_sample, check_support
from megatron_infer.rl.samples import RolloutSample
from megatron_infer.scheduler.request import VersionSpan

SCHEMA = 1
MAX_SAMPLE_BYTES = 256 << 20
"""A larger message is refused unless the caller allows it."""


class _Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A sample with its arrays as little-endian bytes: ids int32, log probabilities float32, masks as bits."""

    schema: int
    length: int
    prompt_ids: bytes
    token_ids: bytes
    text: str
    logprobs: bytes
    raw_logprobs: bytes | None
    spans: list[tuple[int, int, int, int]]
    finish_reason: str
    stop_reason: int | str | None
    loss_mask: bytes
    support: tuple[int, bytes, bytes] | None
    """Vocabulary size, offsets (int32), words (int32)."""
    routing: tuple[str, tuple[int, int, int], bytes] | None
    reward: float | None
    info: dict[str, Any]


def encode_sample(sample: RolloutSample) -> bytes:
    """A sample as bytes. `info` must be JSON. Raises SampleError."""
    check_sample("sample", sample)
    support, routing = sample.support, sample.routing
    message = _Message(
        schema=SCHEMA,
        length=len(sample.token_ids),
        prompt_ids=_bytes(sample.prompt_ids, "<i4"),
        token_ids=_bytes(sample.token_ids, "<i4"),
        text=sample.text,
        logprobs=_bytes(sample.logprobs, "<f4"),
        raw_logprobs=None if sample.raw_logprobs is None else _bytes(sample.raw_logprobs, "<f4"),
        spans=[(span[0], span[1], span[2], span[3]) for span in sample.spans],
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        loss_mask=np.packbits(np.array(sample.loss_mask, dtype=np.uint8), bitorder="little").tobytes(),
        support=None
        if support is None
        else (support.vocab_size, _bytes(support.offsets, "<i4"), _bytes(support.ids, "<i4")),
        routing=None
        if routing is None
        else (routing.dtype.name, (routing.shape[0], routing.shape[1], routing.shape[2]), routing.tobytes()),
        reward=sample.reward,
        info=sample.info,
    )
    try:
        return msgspec.msgpack.encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise SampleError(f"sample: it cannot be encoded: {error}") from error


def decode_sample(content: bytes, *, max_bytes: int = MAX_SAMPLE_BYTES) -> RolloutSample:
    """The sample from the bytes of `encode_sample`. Raises SampleError with the reason."""
    if len(content) > max_bytes:
        raise SampleError(f"{len(content):,} bytes, limit is {max_bytes:,} (max_bytes)")
    try:
        message = msgspec.msgpack.decode(content, type=_Message)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise SampleError(f"no sample, or damaged: {error}") from error
    if message.schema != SCHEMA:
        raise SampleError(f"schema {message.schema}, this code reads {SCHEMA}; read it with its own version")
    mask = np.frombuffer(message.loss_mask, dtype=np.uint8)
    if not 0 <= message.length <= 8 * len(mask) < message.length + 8:
        raise SampleError(f"loss_mask has {len(mask)} bytes for {message.length} tokens")
    sample = RolloutSample(
        prompt_ids=_list("prompt_ids", message.prompt_ids, "<i4"),
        token_ids=_list("token_ids", message.token_ids, "<i4"),
        text=message.text,
        logprobs=_list("logprobs", message.logprobs, "<f4"),
        raw_logprobs=None if message.raw_logprobs is None else _list("raw_logprobs", message.raw_logprobs, "<f4"),
        spans=[VersionSpan(*span) for span in message.spans],
        finish_reason=message.finish_reason,
        stop_reason=message.stop_reason,
        loss_mask=np.unpackbits(mask, count=message.length, bitorder="little").tolist(),
        support=None if message.support is None else _support(*message.support),
        routing=None if message.routing is None else _routing(*message.routing),
        reward=message.reward,
        info=message.info,
    )
    if len(sample.token_ids) != message.length:
        raise SampleError(f"token_ids has {len(sample.token_ids)} entries, the message says {message.length}")
    check_sample("sample", sample)
    return sample


def _bytes(values: Any, dtype: str) -> bytes:
    try:
        return np.asarray(values, dtype=dtype).tobytes()
    except OverflowError as error:
        raise SampleError(f"sample: a value does not fit: {error}") from error


def _array(name: str, content: bytes, dtype: str) -> np.ndarray:
    if len(content) % np.dtype(dtype).itemsize:
        raise SampleError(f"{name} has {len(content)} bytes, not a whole number of entries")
    return np.frombuffer(content, dtype=dtype)


def _list(name: str, content: bytes, dtype: str) -> list[Any]:
    values: list[Any] = _array(name, content, dtype).tolist()
    return values


def _support(vocab_size: int, offsets: bytes, words: bytes) -> TokenSupport:
    ends, ids = _array("support offsets", offsets, "<i4"), _array("support words", words, "<i4")
    check_support(vocab_size, ends, ids)
    return TokenSupport(vocab_size, ends.copy(), ids.copy())


def _routing(dtype: str, shape: tuple[int, int, int], content: bytes) -> np.ndarray:
    if dtype not in ("uint8", "uint16") or min(shape) < 0:
        raise SampleError(f"routing is {dtype} {list(shape)}, not uint8 or uint16 [positions, layers, k]")
    values = _array("routing", content, dtype)
    if values.size != shape[0] * shape[1] * shape[2]:
        raise SampleError(f"routing has {values.size} entries for shape {list(shape)}")
    return values.reshape(shape).copy()

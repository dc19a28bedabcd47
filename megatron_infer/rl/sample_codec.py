"""One sample as msgpack, for streams and queues between processes; `sample_file` stores whole groups."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

from megatron_infer.outputs.token_outputs import Kind, Packed, TokenOutput, pack, unpack
from megatron_infer.rl.sample_file import SampleError, check_sample, check_support
from megatron_infer.rl.samples import SAMPLE_OUTPUTS, RolloutSample
from megatron_infer.scheduler.request import VersionSpan

SCHEMA = 1
MAX_SAMPLE_BYTES = 256 << 20
"""A larger message is refused unless the caller allows it."""

_Span = Annotated[list[int], msgspec.Meta(min_length=4, max_length=5)]
"""A VersionSpan; of versions without adapters without its last field."""


class _Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A sample with its arrays as little-endian bytes: ids int32, log probabilities float32, masks as bits."""

    schema: int
    length: int
    prompt_ids: bytes
    token_ids: bytes
    text: str
    logprobs: bytes
    spans: list[_Span]
    finish_reason: str
    stop_reason: int | str | None
    loss_mask: bytes
    reward: float | None
    info: dict[str, Any]


_PACKED: dict[Kind, Any] = {
    Kind.NUMBER: bytes,
    Kind.IDS: tuple[int, bytes, bytes],  # vocabulary size, offsets (int32), words (int32)
    Kind.POSITION: tuple[str, tuple[int, int, int], bytes],
}
_Message = msgspec.defstruct(
    "_Message",
    [(output.name, _PACKED[output.kind] | None, None) for output in SAMPLE_OUTPUTS],
    bases=(_Fields,),
    kw_only=True,
    forbid_unknown_fields=True,
)
"""With the per-token outputs, None where the sample, or the version that wrote it, has none."""


def encode_sample(sample: RolloutSample) -> bytes:
    """A sample as bytes. `info` must be JSON. Raises SampleError."""
    check_sample("sample", sample)
    message = _Message(
        schema=SCHEMA,
        length=len(sample.token_ids),
        prompt_ids=_bytes(sample.prompt_ids, "<i4"),
        token_ids=_bytes(sample.token_ids, "<i4"),
        text=sample.text,
        logprobs=_bytes(sample.logprobs, "<f4"),
        spans=[[*span] for span in sample.spans],
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        loss_mask=np.packbits(np.array(sample.loss_mask, dtype=np.uint8), bitorder="little").tobytes(),
        reward=sample.reward,
        info=sample.info,
        **{output.name: _packed(output, getattr(sample, output.name)) for output in SAMPLE_OUTPUTS},
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
        message: Any = msgspec.msgpack.decode(content, type=_Message)
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
        spans=[VersionSpan(*span) for span in message.spans],
        finish_reason=message.finish_reason,
        stop_reason=message.stop_reason,
        loss_mask=np.unpackbits(mask, count=message.length, bitorder="little").tolist(),
        reward=message.reward,
        info=message.info,
        **{output.name: _value(output, getattr(message, output.name)) for output in SAMPLE_OUTPUTS},
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


def _packed(output: TokenOutput, value: Any) -> Any:
    if value is None:
        return None
    if output.kind is Kind.NUMBER:
        return _bytes(value, "<f4")
    packed = pack(output, value)
    if packed.offsets is not None:
        return packed.vocab_size, _bytes(packed.offsets, "<i4"), _bytes(packed.content, "<i4")
    return packed.content.dtype.name, packed.content.shape, packed.content.tobytes()


def _value(output: TokenOutput, packed: Any) -> Any:
    if packed is None:
        return None
    name = output.name
    if output.kind is Kind.NUMBER:
        return _list(name, packed, "<f4")
    if output.kind is Kind.POSITION:
        return unpack(output, Packed(_positions(output, *packed)))
    vocab_size, ends, words = packed
    offsets, ids = _array(f"{name} offsets", ends, "<i4"), _array(f"{name} words", words, "<i4")
    check_support(vocab_size, offsets, ids)
    return unpack(output, Packed(ids.copy(), offsets.copy(), vocab_size))


def _positions(output: TokenOutput, dtype: str, shape: tuple[int, int, int], content: bytes) -> np.ndarray:
    name = output.name
    if dtype not in output.dtypes or min(shape) < 0:
        dtypes = " or ".join(output.dtypes)
        raise SampleError(f"{name} is {dtype} {list(shape)}, not {dtypes} [positions, layers, k]")
    values = _array(name, content, dtype)
    if values.size != shape[0] * shape[1] * shape[2]:
        raise SampleError(f"{name} has {values.size} entries for shape {list(shape)}")
    return values.reshape(shape).copy()

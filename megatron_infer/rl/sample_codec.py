"""One sample as msgpack, for streams and queues between processes; `sample_file` stores whole groups."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from megatron_infer.outputs.schema import SCHEMA, Piece, bytes_to_ids, ids_to_bytes
from megatron_infer.outputs.token_outputs import values_in
from megatron_infer.rl.sample_file import SampleError, check_sample
from megatron_infer.rl.samples import LOGPROBS, SAMPLE_OUTPUTS, RolloutSample

MAX_SAMPLE_BYTES = 256 << 20
"""A larger message is refused unless the caller allows it."""


class _Version(msgspec.Struct):
    schema: int


class _Sample(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    schema: int
    prompt_ids: bytes
    piece: Piece
    """Its log probabilities are the token output LOGPROBS."""
    loss_mask: bytes
    """A bit for each token, the first token's the lowest of the first byte."""
    reward: float | None
    info: dict[str, Any]


def encode_sample(sample: RolloutSample) -> bytes:
    """A sample as bytes. `info` must be JSON. Raises SampleError."""
    check_sample("sample", sample)
    try:
        token_outputs = {output.name: output.pack(value) for output, value in values_in(sample, SAMPLE_OUTPUTS)}
        if sample.logprobs:
            token_outputs[LOGPROBS.name] = LOGPROBS.pack(sample.logprobs)
        message = _Sample(
            schema=SCHEMA,
            prompt_ids=ids_to_bytes(sample.prompt_ids),
            piece=Piece(
                0,
                0,
                ids_to_bytes(sample.token_ids),
                sample.text,
                sample.finish_reason,
                sample.stop_reason,
                spans=sample.spans,
                token_outputs=token_outputs,
            ),
            loss_mask=np.packbits(np.array(sample.loss_mask, dtype=np.uint8), bitorder="little").tobytes(),
            reward=sample.reward,
            info=sample.info,
        )
        return msgspec.msgpack.encode(message)
    except OverflowError as error:
        raise SampleError(f"sample: a value does not fit: {error}") from error
    except (TypeError, UnicodeEncodeError) as error:
        raise SampleError(f"sample: it cannot be encoded: {error}") from error


def decode_sample(content: bytes, *, max_bytes: int = MAX_SAMPLE_BYTES) -> RolloutSample:
    """The sample from the bytes of `encode_sample`. Raises SampleError with the reason."""
    if len(content) > max_bytes:
        raise SampleError(f"{len(content):,} bytes, limit is {max_bytes:,} (max_bytes)")
    try:
        schema = msgspec.msgpack.decode(content, type=_Version).schema
        if schema != SCHEMA:
            raise SampleError(f"schema {schema}, this code reads {SCHEMA}; read it with its own version")
        sample = _sample_of(msgspec.msgpack.decode(content, type=_Sample))
    except SampleError:
        raise
    except (ValueError, TypeError, RecursionError) as error:  # a DecodeError is a ValueError
        raise SampleError(f"no sample, or damaged: {error}") from error
    check_sample("sample", sample)
    return sample


def _sample_of(message: _Sample) -> RolloutSample:
    piece, token_ids = message.piece, bytes_to_ids(message.piece.tokens)
    mask = np.frombuffer(message.loss_mask, dtype=np.uint8)
    if not 0 <= len(token_ids) <= 8 * len(mask) < len(token_ids) + 8:
        raise SampleError(f"loss_mask has {len(mask)} bytes for {len(token_ids)} tokens")
    packed = dict(piece.token_outputs)
    logprobs = packed.pop(LOGPROBS.name, None)
    outputs = {
        output.name: output.unpack(packed.pop(output.name)) for output in SAMPLE_OUTPUTS if output.name in packed
    }
    if packed:
        raise SampleError(f"it has outputs that are unknown here: {', '.join(packed)}")
    return RolloutSample(
        prompt_ids=bytes_to_ids(message.prompt_ids),
        token_ids=token_ids,
        text=piece.text,
        logprobs=[] if logprobs is None else LOGPROBS.unpack(logprobs),
        spans=piece.spans,
        finish_reason=piece.finish_reason or "",
        stop_reason=piece.stop_reason,
        loss_mask=np.unpackbits(mask, count=len(token_ids), bitorder="little").tolist(),
        reward=message.reward,
        info=message.info,
        **outputs,
    )

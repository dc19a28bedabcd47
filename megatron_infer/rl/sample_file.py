"""Groups of samples in one compact binary file: safetensors, with a header that names the format. No pickle.

    tensor            dtype    shape                    content
    prompt_ids        int32    [sum of prompt lengths]  one prompt for all samples of a group, group after group
    prompt_lengths    int32    [groups]
    sample_group      int32    [samples]                index of the sample's group
    token_ids         int32    [T = sum of lengths]     sample after sample, as in all tensors below
    lengths           int32    [samples]
    logprobs, raw     float32  [T of samples with them]
    loss_mask         uint8    [ceil(T / 8)]            bits, the first token's the lowest of the first byte
    spans             int32    [spans, 5]               VersionSpan; 4 in earlier files
    span_counts       int32    [samples]
    support_counts    int32    [T of samples with it]   words of each token (see outputs.TokenSupport)
    support_words     int32    [sum of support_counts]
    routing           uint8/16 [positions, layers, k]   only samples with it
    routing_counts    int32    [samples]                positions
    rewards           float64  [samples]                0 for a sample without one
    texts             uint8    [bytes]                  UTF-8
    text_lengths      int32    [samples]                bytes
    parts             uint8    [samples]                which of the optional parts a sample has (see PARTS); wider
                                                        where a sample has a part beyond the eighth
    about             uint8    [bytes]                  JSON: fields of groups and samples that are no arrays

Later entries of SAMPLE_OUTPUTS have arrays by their keys like raw, support or routing, where any sample has them.
All of it is checked when it is read: sizes, dtypes, lengths against each other, and a digest of the whole content.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from megatron_infer.errors import InferenceError
from megatron_infer.outputs.request_output import OnError, check_on_error
from megatron_infer.outputs.token_outputs import Columns, TokenOutput, values_in
from megatron_infer.rl.samples import SAMPLE_OUTPUTS, RolloutGroup, RolloutSample, checked_groups
from megatron_infer.scheduler.request import VersionSpan
from megatron_infer.utils.files import regular

FORMAT = "megatron_infer.rollouts"
SCHEMA = 1
MAX_BYTES = 8 << 30
"""A larger file is refused unless the caller allows it."""
MAX_HEADER_BYTES = 1 << 20
PARTS = {"logprobs": 1, "raw": 2, "support": 4, "routing": 8, "reward": 16}
ADDED_OUTPUTS = [output for output in SAMPLE_OUTPUTS if output.key not in PARTS]
"""Their arrays may be absent."""
PARTS |= {output.key: 32 << i for i, output in enumerate(ADDED_OUTPUTS)}
FINISH_REASONS = ("stop", "length", "abort", "error")
DTYPES: dict[str, tuple[str, ...]] = {
    "prompt_ids": ("int32",),
    "prompt_lengths": ("int32",),
    "sample_group": ("int32",),
    "token_ids": ("int32",),
    "lengths": ("int32",),
    "logprobs": ("float32",),
    "loss_mask": ("uint8",),
    "spans": ("int32",),
    "span_counts": ("int32",),
    "rewards": ("float64",),
    "texts": ("uint8",),
    "text_lengths": ("int32",),
    "parts": ("uint8", "uint16", "uint32"),
    "about": ("uint8",),
}
NUM_DIMS = {"spans": 2} | {output.column: output.num_dims for output in SAMPLE_OUTPUTS}
Arrays = dict[str, np.ndarray]


def _dtypes_of(output: TokenOutput) -> dict[str, tuple[str, ...]]:
    """The arrays of an output."""
    counts: dict[str, tuple[str, ...]] = {output.counts_column: ("int32",)} if output.counts_column else {}
    return {output.column: output.dtypes} | counts


for _output in SAMPLE_OUTPUTS:
    DTYPES |= _dtypes_of(_output)


class SampleError(InferenceError, ValueError):
    """Bytes that are not samples of this schema, or are damaged; or samples that cannot be encoded."""


class SavedGroupError(InferenceError):
    """The message of a failed group's error, read from a file."""


# ------------------------------------------------------------------ files
def save(path: str | os.PathLike[str], groups: Iterable[RolloutGroup]) -> int:
    """Write groups to a file, which at any time is complete or absent -> its size in bytes.

    Ranks that have the same groups may all write the same file.
    """
    path, content = Path(path), encode(groups)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return len(content)


def load(
    path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, on_error: OnError = "raise"
) -> list[RolloutGroup]:
    """Read the groups of a file. Raises SampleError that names the file.

    Raises RolloutError, which has all groups, if there are failed ones, unless on_error is "return".
    """
    check_on_error(on_error)
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise SampleError(f"{size:,} bytes, limit is {max_bytes:,} (max_bytes); raise it if the file is yours")
        groups = decode(regular(path).read_bytes(), max_bytes=max_bytes)
    except OSError as error:
        raise SampleError(f"{path}: cannot be read: {error.strerror}") from error
    except SampleError as error:
        raise SampleError(f"{path}: {error}") from error
    return checked_groups(groups, on_error)


# ------------------------------------------------------------------ writing
def encode(groups: Iterable[RolloutGroup]) -> bytes:
    """Groups as bytes. `info` must be JSON. Raises SampleError that names the sample."""
    groups = list(groups)
    samples = [sample for group in groups for sample in group.samples]
    for group in groups:
        for index, sample in enumerate(group.samples):
            check_sample(f"group {group.group_id!r}, sample {index}", sample)
            if sample.prompt_ids != group.prompt_ids:
                raise SampleError(f"group {group.group_id!r}, sample {index}: its prompt is not that of the group")
    # The support of a sample without a token has no vocabulary size.
    drawn = [sample for sample in samples if sample.token_ids]
    vocab_sizes = {
        size
        for sample in drawn
        for output, value in values_in(sample, SAMPLE_OUTPUTS)
        if (size := output.vocab_size_of(value))
    }
    if len(vocab_sizes) > 1:
        raise SampleError(f"supports of different vocabularies ({sorted(vocab_sizes)}); write them to separate files")
    texts = [sample.text.encode("utf-8", "surrogatepass") for sample in samples]
    parts = [_parts_of(sample) for sample in samples]
    arrays: Arrays = {
        "prompt_ids": _flat([group.prompt_ids for group in groups], np.int32),
        "prompt_lengths": _lengths([group.prompt_ids for group in groups]),
        "sample_group": np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups]).astype(np.int32),
        "token_ids": _flat([sample.token_ids for sample in samples], np.int32),
        "lengths": _lengths([sample.token_ids for sample in samples]),
        "logprobs": _flat([sample.logprobs for sample in samples], np.float32),
        "loss_mask": np.packbits(_flat([s.loss_mask for s in samples], np.uint8), bitorder="little"),
        "spans": _flat([span for sample in samples for span in sample.spans], np.int32).reshape(-1, 5),
        "span_counts": _lengths([sample.spans for sample in samples]),
        "rewards": np.array([sample.reward or 0.0 for sample in samples], dtype=np.float64),
        "texts": np.frombuffer(b"".join(texts), dtype=np.uint8),
        "text_lengths": _lengths(texts),
        "parts": np.array(parts, dtype=np.min_scalar_type(max(parts, default=0))),
        "about": np.frombuffer(_about(groups), dtype=np.uint8),
    }
    for output in SAMPLE_OUTPUTS:
        values = [getattr(sample, output.name) for sample in samples]
        if output not in ADDED_OUTPUTS or any(value is not None for value in values):
            arrays |= _arrays_of(output, values)
    metadata = {
        "format": FORMAT,
        "schema": str(SCHEMA),
        "groups": str(len(groups)),
        "samples": str(len(samples)),
        "vocab_size": str(vocab_sizes.pop() if vocab_sizes else 0),
    }
    return bytes(safetensors.numpy.save(arrays, metadata | {"digest": _digest(arrays, metadata)}))


def _flat(rows: Sequence[Sequence[Any]], dtype: Any) -> np.ndarray:
    flat = [value for row in rows for value in row]
    try:
        return np.array(flat, dtype=dtype)
    except OverflowError as error:
        raise SampleError(f"a value does not fit into {np.dtype(dtype).name}: {error}") from error


def _lengths(rows: Sequence[Sequence[Any]]) -> np.ndarray:
    return np.array([len(row) for row in rows], dtype=np.int32)


def _parts_of(sample: RolloutSample) -> int:
    present = {
        "logprobs": bool(sample.logprobs) or not sample.token_ids,
        "reward": sample.reward is not None,
        **{output.key: getattr(sample, output.name) is not None for output in SAMPLE_OUTPUTS},
    }
    return sum(PARTS[name] for name, is_present in present.items() if is_present)


def _arrays_of(output: TokenOutput, values: list[Any]) -> Arrays:
    """The arrays of an output, from its value in each sample."""
    found = [output.columns(value) for value in values if value is not None]
    entries = [one.entries for one in found if len(one.entries)]  # a sample that was never computed has no layers
    kinds = {(one.dtype.name, one.shape[1:]) for one in entries}
    if len(kinds) > 1:
        raise SampleError(
            f"{output.name} of different models ({sorted(map(str, kinds))}); write them to separate files"
        )
    none: np.ndarray = np.empty((0,) * output.num_dims, dtype=output.dtypes[0])
    arrays = {output.column: np.concatenate(entries or [none])}
    if output.per_position:
        arrays[output.counts_column] = _lengths([() if value is None else value for value in values])
    elif output.counts_column:
        arrays[output.counts_column] = np.concatenate([np.empty(0, np.int32), *(one.counts for one in found)])
    return arrays


def _about(groups: list[RolloutGroup]) -> bytes:
    about = [
        {
            "id": group.group_id,
            "index": group.index,
            "begun_version": group.begun_version,
            "num_cached_tokens": group.num_cached_tokens,
            "error": None if group.error is None else str(group.error),
            "info": group.info,
            "samples": [[s.finish_reason, s.stop_reason, s.info] for s in group.samples],
        }
        for group in groups
    ]
    try:
        return json.dumps(about, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise SampleError(
            f"info of a group or sample is not JSON: {error}; keep numbers, texts, lists, dicts"
        ) from error


def check_sample(name: str, sample: RolloutSample) -> None:
    """Raise SampleError unless the sample is consistent; before it is written and after it is read."""
    length = len(sample.token_ids)
    optional = {
        "logprobs": len(sample.logprobs) if sample.logprobs else length,
        "loss_mask": len(sample.loss_mask),
    }
    for output, value in values_in(sample, SAMPLE_OUTPUTS):
        if not output.per_position:
            optional[output.name] = len(value)
    for what, got in optional.items():
        if got != length:
            raise SampleError(f"{name}: {what} has {got} entries for {length} tokens")
    if sample.finish_reason not in FINISH_REASONS:
        raise SampleError(f"{name}: finish_reason is {sample.finish_reason!r}; known: {', '.join(FINISH_REASONS)}")
    if not set(sample.loss_mask) <= {0, 1}:
        raise SampleError(f"{name}: loss_mask holds values other than 0 and 1")
    firsts = [span.first_token for span in sample.spans]
    if firsts != sorted(set(firsts)) or (firsts and not 0 <= firsts[0] <= firsts[-1] < max(1, length)):
        raise SampleError(f"{name}: spans begin at {firsts} in {length} tokens")
    for output, value in values_in(sample, SAMPLE_OUTPUTS):
        if fault := output.fault(value):
            raise SampleError(f"{name}: {fault}")
        if output.per_position and len(value) > len(sample.prompt_ids) + length:
            raise SampleError(f"{name}: {output.name} has {len(value)} positions, more than the sequence has tokens")


def _digest(arrays: Arrays, metadata: dict[str, str]) -> str:
    total = hashlib.blake2b(json.dumps(metadata, sort_keys=True).encode(), digest_size=16)
    for name in sorted(arrays):
        total.update(f"{name} {arrays[name].dtype} {arrays[name].shape};".encode())
        total.update(np.ascontiguousarray(arrays[name]).data if arrays[name].size else b"")
    return total.hexdigest()


# ------------------------------------------------------------------ reading
def decode(content: bytes, *, max_bytes: int = MAX_BYTES) -> list[RolloutGroup]:
    """Groups from the bytes of `encode`. Raises SampleError with the reason."""
    if len(content) > max_bytes:
        raise SampleError(f"{len(content):,} bytes, limit is {max_bytes:,} (max_bytes)")
    metadata = _metadata(content)
    try:
        arrays: Arrays = safetensors.numpy.load(content)
    except safetensors.SafetensorError as error:
        raise SampleError(f"damaged: {error}") from error
    complete = _checked_arrays(arrays)
    digest = metadata.pop("digest")
    if _digest(arrays, metadata) != digest:
        raise SampleError("damaged: the digest of its content is not the one in its header")
    return _Reader(complete, metadata).groups()


def _metadata(content: bytes) -> dict[str, str]:
    """The header's metadata, checked for format and schema."""
    if len(content) < 8:
        raise SampleError(f"{len(content)} bytes are no sample file")
    (length,) = struct.unpack("<Q", content[:8])
    if length > min(MAX_HEADER_BYTES, len(content) - 8):
        raise SampleError("no sample file, or truncated: its header is longer than the content")
    try:
        header = json.loads(content[8 : 8 + length])
        metadata = dict(header.get("__metadata__", {}))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SampleError(f"no sample file: its header is not that of a safetensors file: {error}") from error
    if metadata.get("format") != FORMAT:
        raise SampleError(f"no sample file: its safetensors format is {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata.get("schema") != str(SCHEMA):
        raise SampleError(f"schema {metadata.get('schema')!r}, this code reads {SCHEMA}; read it with its own version")
    numbers = ("groups", "samples", "vocab_size")
    if not all(_is_count(metadata.get(name)) for name in numbers) or "digest" not in metadata:
        raise SampleError(f"its header lacks one of {', '.join(numbers)}, digest")
    return metadata


def _is_count(text: Any) -> bool:
    return isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 19


def _checked_arrays(arrays: Arrays) -> Arrays:
    """All arrays of the schema: those of later outputs are empty where the file has none."""
    arrays = dict(arrays)
    for output in ADDED_OUTPUTS:
        for name, dtypes in _dtypes_of(output).items():
            arrays.setdefault(name, np.empty((0,) * NUM_DIMS.get(name, 1), dtype=dtypes[0]))
    missing = [name for name in DTYPES if name not in arrays]
    if missing:
        raise SampleError(f"lacks {', '.join(missing)}")
    for name, known in DTYPES.items():
        array = arrays[name]
        if array.dtype.name not in known:
            raise SampleError(f"{name} is {array.dtype.name}, not {' or '.join(known)}")
        if array.ndim != NUM_DIMS.get(name, 1):
            raise SampleError(f"{name} has shape {list(array.shape)}, not {NUM_DIMS.get(name, 1)} dimensions")
    return arrays


class _Reader:
    """Splits flat arrays into samples; every split is checked against the array's length."""

    def __init__(self, arrays: Arrays, metadata: dict[str, str]) -> None:
        self._arrays = arrays
        self._parts = arrays["parts"].astype(np.int64)
        self._num_groups, self._num_samples = int(metadata["groups"]), int(metadata["samples"])
        self._vocab_size = int(metadata["vocab_size"])

    def groups(self) -> list[RolloutGroup]:
        arrays = self._arrays
        about = self._about()
        for name in ("sample_group", "lengths", "span_counts", "rewards", "text_lengths", "parts"):
            self._expect(name, len(arrays[name]), self._num_samples)
        self._expect("prompt_lengths", len(arrays["prompt_lengths"]), self._num_groups)
        members = np.repeat(np.arange(self._num_groups), [len(entry["samples"]) for entry in about])
        if not np.array_equal(members, arrays["sample_group"]):
            raise SampleError("sample_group does not match the groups' own lists of samples")
        prompts = self._split("prompt_ids", arrays["prompt_lengths"])
        samples = iter(self._samples([prompts[group] for group in arrays["sample_group"].tolist()]))
        groups = [
            RolloutGroup(
                group_id=entry["id"],
                prompt_ids=prompt.tolist(),
                samples=[self._described(next(samples), about) for about in entry["samples"]],
                info=entry["info"],
                index=entry["index"],
                begun_version=entry["begun_version"],
                num_cached_tokens=entry["num_cached_tokens"],
                error=None if entry["error"] is None else SavedGroupError(entry["error"]),
            )
            for prompt, entry in zip(prompts, about, strict=True)
        ]
        for group in groups:
            for index, sample in enumerate(group.samples):
                check_sample(f"group {group.group_id!r}, sample {index}", sample)
        return groups

    def _samples(self, prompts: list[np.ndarray]) -> list[RolloutSample]:
        arrays, lengths = self._arrays, self._arrays["lengths"]
        tokens = self._split("token_ids", lengths)
        num_tokens = len(arrays["token_ids"])
        self._expect("loss_mask", len(arrays["loss_mask"]), -(-num_tokens // 8))
        bits = np.unpackbits(arrays["loss_mask"], count=num_tokens, bitorder="little")
        masks = _pieces(bits, lengths)
        if (width := arrays["spans"].shape[1]) not in (4, 5):
            raise SampleError(f"spans has {width} columns, not 4 or 5")
        spans = self._split("spans", arrays["span_counts"])
        texts = self._split("texts", arrays["text_lengths"])
        logprobs = self._optional("logprobs", lambda having: self._split("logprobs", lengths[having]))
        outputs = {
            output.name: self._optional(output.key, partial(self._values, output, lengths)) for output in SAMPLE_OUTPUTS
        }
        rewarded = self._parts & PARTS["reward"] > 0
        return [
            RolloutSample(
                prompt_ids=prompts[i].tolist(),
                token_ids=tokens[i].tolist(),
                text=_text(texts[i]),
                logprobs=[] if (found := logprobs[i]) is None else found.tolist(),
                spans=[VersionSpan(*span) for span in spans[i].tolist()],
                loss_mask=masks[i].tolist(),
                reward=float(arrays["rewards"][i]) if rewarded[i] else None,
                **{name: values[i] for name, values in outputs.items()},
            )
            for i in range(self._num_samples)
        ]

    def _described(self, sample: RolloutSample, about: list[Any]) -> RolloutSample:
        sample.finish_reason, sample.stop_reason, sample.info = about
        return sample

    def _optional(self, part: str, read: Callable[[np.ndarray], list[Any]]) -> list[Any]:
        """A value for each sample that has the part, None for the others. read: takes the mask of those samples."""
        having = self._parts & PARTS[part] > 0
        values = iter(read(having))
        return [next(values) if has else None for has in having.tolist()]

    def _values(self, output: TokenOutput, lengths: np.ndarray, having: np.ndarray) -> list[Any]:
        """The values of the samples that have the output."""
        counts: list[np.ndarray] = []
        sizes = lengths[having]
        if output.per_position:
            sizes = self._arrays[output.counts_column]
            if output not in ADDED_OUTPUTS or len(sizes) or having.any():
                self._expect(output.counts_column, len(sizes), self._num_samples)
                sizes = sizes[having]
        elif output.counts_column:
            counts = self._split(output.counts_column, sizes)
            sizes = np.array([piece.sum() for piece in counts], dtype=np.int64)
        vocab_size = self._vocab_size if counts else 0
        return [
            output.of_columns(Columns(entries.copy(), counts[place] if counts else b"", vocab_size))
            for place, entries in enumerate(self._split(output.column, sizes))
        ]

    def _split(self, name: str, lengths: np.ndarray) -> list[np.ndarray]:
        """An array in pieces of these lengths, which must add up to its own."""
        if len(lengths) and lengths.min() < 0:
            raise SampleError(f"{name}: a length is {lengths.min()}")
        self._expect(name, len(self._arrays[name]), int(lengths.sum(dtype=np.int64)))
        return _pieces(self._arrays[name], lengths)

    def _expect(self, name: str, got: int, wanted: int) -> None:
        if got != wanted:
            raise SampleError(f"{name} has {got:,} entries, the rest of the file says {wanted:,}")

    def _about(self) -> list[dict[str, Any]]:
        try:
            about = json.loads(self._arrays["about"].tobytes())
        except (ValueError, RecursionError) as error:
            raise SampleError(f"'about' is not JSON: {error}") from error
        keys = {"id", "index", "begun_version", "num_cached_tokens", "error", "info", "samples"}
        if not isinstance(about, list) or len(about) != self._num_groups:
            raise SampleError(f"'about' does not list the {self._num_groups} groups")
        for entry in about:
            is_group = isinstance(entry, dict) and set(entry) == keys and isinstance(entry["samples"], list)
            if not is_group or not all(isinstance(sample, list) and len(sample) == 3 for sample in entry["samples"]):
                raise SampleError("'about' does not describe its groups in this schema's form")
        return about


def _pieces(array: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum(lengths, dtype=np.int64)
    return [array[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


def _text(piece: np.ndarray) -> str:
    try:
        return piece.tobytes().decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise SampleError(f"a text is not UTF-8: {error}") from error

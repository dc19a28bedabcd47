"""Sources of new weights: a path below `weights_root`, or a request body in safetensors format."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_infer.coordinator.weight_paths import WeightsPathRefused, weights_path
from megatron_infer.server.http_errors import ApiError, bad_request

MAX_HEADER_BYTES = 16 << 20
MAX_NAME_CHARS = 512
CHUNK_BYTES = 4 << 20
"""Bytes of a tensor in one message to the replicas."""
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def checked_path(path: str, root: str | None) -> str:
    """`weights_path`, with its refusals as ApiError 400, or 403 where the path is not allowed."""
    try:
        return weights_path(path, root)
    except WeightsPathRefused as error:
        status = 403 if error.code in ("no_weights_root", "outside_weights_root") else 400
        raise ApiError(status, str(error), param="path", code=error.code) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor in a safetensors body, at data[start:end]."""

    name: str
    dtype: str
    shape: list[int]
    start: int
    end: int

    def chunks(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Arguments of `write_weights` for each chunk; a tensor without elements has one."""
        tensor = {"name": self.name, "dtype": self.dtype, "shape": self.shape}
        for at in range(self.start, max(self.end, self.start + 1), CHUNK_BYTES):
            yield {**tensor, "offset": at - self.start, "data": data[at : min(at + CHUNK_BYTES, self.end)]}


def entries_of(data: bytes) -> list[TensorEntry]:
    """The tensors of a safetensors body, in the order of their bytes. Raises ApiError 400 for another format.

    Format: eight bytes with the header's length, a JSON header, the tensors' bytes without gaps. No code is executed.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 0 < length <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise _no_safetensors("it does not begin with the length of a header")
    try:
        header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _no_safetensors("its header is no JSON object of tensors") from None
    header.pop("__metadata__", None)
    base = 8 + length
    found = [_entry(name, about, base) for name, about in header.items()]
    found.sort(key=lambda entry: (entry.start, entry.end))
    at = base
    for entry in found:
        if entry.start != at:
            raise _no_safetensors(f"{entry.name} does not begin where the tensor before it ends")
        at = entry.end
    if at != len(data):
        raise _no_safetensors(f"{len(data) - at:,} bytes do not belong to a tensor")
    return found


def entries_of_base64(given: Iterable[str], field: str) -> tuple[list[TensorEntry], bytes]:
    """The tensors of safetensors bytes in base64, and these bytes. Raises ApiError 400.

    given: one text for each rank of a server of SGLang; here all are equal. SGLang's own clients send pickles: nothing
    that comes over a network is unpickled.
    """
    different = set(given)
    if len(different) != 1:
        text = f"{field} has {len(different)} different values; each rank takes its part of the same one"
        raise bad_request(text, field, "invalid_value")
    try:
        data = base64.b64decode(different.pop(), validate=True)
    except (binascii.Error, ValueError):
        raise bad_request(f"{field} is no base64", field, "invalid_value") from None
    if data[:1] == b"\x80":
        text = "a pickle is not loaded, as it may run any command; send safetensors bytes in base64"
        raise bad_request(f"{field}: {text}", field, "pickle_refused")
    return entries_of(data), data


def _entry(name: str, about: dict[str, Any], base: int) -> TensorEntry:
    """about: the tensor's part of the header. base: where the tensors' bytes begin."""
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise _no_safetensors(f"a name has {len(name)} characters, the limit is {MAX_NAME_CHARS}")
    dtype: Any = about.get("dtype")
    shape: Any = about.get("shape")
    offsets: Any = about.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _no_safetensors(f"{name} is {str(dtype)[:40]}; known are {', '.join(DTYPE_BYTES)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > 8:
        raise _no_safetensors(f"{name} has no shape and data_offsets")
    size = DTYPE_BYTES[dtype]
    for dimension in shape:
        size *= dimension
    if offsets[1] - offsets[0] != size:
        raise _no_safetensors(f"{name} has {offsets[1] - offsets[0]:,} bytes, its shape and dtype make {size:,}")
    return TensorEntry(name=name, dtype=dtype, shape=shape, start=base + offsets[0], end=base + offsets[1])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def _no_safetensors(what: str) -> ApiError:
    return bad_request(f"the body is no safetensors file: {what}", None, "invalid_safetensors")

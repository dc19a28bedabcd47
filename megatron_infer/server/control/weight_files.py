"""Sources of new weights: a path below `weights_root`, or a request body in safetensors format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_infer.server.http_errors import ApiError, bad_request

MAX_HEADER_BYTES = 16 << 20
MAX_NAME_CHARS = 512
CHUNK_BYTES = 4 << 20
"""Bytes of a tensor in one message to the replicas."""
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def checked_path(path: str, root: str | None) -> str:
    """The real path of weights below `root`: a .safetensors file, a directory of them, or a torch_dist checkpoint.

    Raises ApiError 400, or 403 for a path outside the root, whose files it does not reveal.
    """
    if root is None:
        text = "this server reads no weights from files: start it with --weights-root DIR, or send them as a body"
        raise ApiError(403, text, param="path", code="no_weights_root")
    if not path or "\0" in path:
        raise bad_request("path is empty or no path", "path", "invalid_value")
    real_root = os.path.realpath(root)
    real = os.path.realpath(os.path.join(real_root, path))
    if not _is_below(real, real_root):
        raise ApiError(403, "path leads out of the weights root", param="path", code="outside_weights_root")
    if os.path.isfile(real):
        if not real.endswith(".safetensors"):
            raise bad_request("path is a file of another kind than .safetensors", "path", "invalid_value")
        return real
    if not os.path.isdir(real):
        raise bad_request(f"path: there is nothing at {path[:200]!r} below the weights root", "path", "not_found")
    if os.path.isfile(os.path.join(real, "metadata.json")):
        files = [os.path.join(real, name) for name in os.listdir(real)]
    else:
        files = [os.path.join(real, name) for name in os.listdir(real) if name.endswith(".safetensors")]
        if not files:
            text = "path is a directory without .safetensors files that is no torch_dist checkpoint either"
            raise bad_request(text, "path", "invalid_value")
    if not all(_is_below(os.path.realpath(file), real_root) for file in files):
        text = "path holds a link that leads out of the weights root"
        raise ApiError(403, text, param="path", code="outside_weights_root")
    return real


def _is_below(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root


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


def _entry(name: str, about: dict[str, Any], base: int) -> TensorEntry:
    """about: the tensor's part of the header. base: where the tensors' bytes begin."""
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise _no_safetensors(f"a name has {len(name)} characters, the limit is {MAX_NAME_CHARS}")
    dtype: Any = about.get("dtype")
    shape: Any = about.get("shape")
    offsets: Any = about.get("data_offsets")
    if dtype not in DTYPE_BYTES:
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

"""The GGUF container: metadata and tensors of a file, read through a memory map.

The `gguf` package's reader takes two seconds to index a vocabulary of 49k tokens, with an array object for each string;
this one reads the bytes once. Dequantisation is the package's. Format: the GGUF specification, versions 2 and 3,
little-endian.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from megatron_infer.errors import ModelError
from megatron_infer.kernels.native import native_build
from megatron_infer.utils.files import regular

_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_LENGTH = struct.Struct("<Q")
_LEFT_OUT = object()
"""The value of an entry that is not read."""
_SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """Place and type of one tensor. `shape` is row-major as in torch (GGUF stores the fastest dimension first)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file: `metadata` by key, `tensors` by name, and `read`, which dequantises.

    with_vocabulary: False leaves lists of strings (tokens, merges) out of `metadata`, which take most of the time.
    Raises ModelError naming the file when it is no GGUF file, is cut short or has a type that cannot be read.
    """

    def __init__(self, path: str | Path, *, with_vocabulary: bool = True) -> None:
        self.path = Path(path)
        self._with_vocabulary = with_vocabulary
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with regular(self.path).open("rb") as file:
                size = file.seek(0, 2)
                if size < 24:
                    raise ModelError(f"{self.path}: not a GGUF file ({size} bytes)")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be read: {error.strerror}") from error
        if self._map[:4] != _MAGIC:
            raise ModelError(
                f"{self.path}: not a GGUF file (it begins with {bytes(self._map[:4])!r}, expected {_MAGIC!r})"
            )
        self._position = 4
        try:
            self._read_header()
        except (struct.error, IndexError, OverflowError) as error:
            raise ModelError(f"{self.path}: truncated: the file ends within its header") from error
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: damaged: a string of its header is not UTF-8") from error

    def main_encoding(self) -> str:
        """The type that holds most numbers, in lower case: "q4_k"."""
        from gguf import GGMLQuantizationType

        numbers: Counter[int] = Counter()
        for tensor in self.tensors.values():
            numbers[tensor.type_id] += math.prod(tensor.shape)
        if not numbers:
            raise ModelError(f"{self.path}: has no tensors")
        return GGMLQuantizationType(numbers.most_common(1)[0][0]).name.lower()

    def read(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """A tensor (or rows start..stop of its first dimension) as float32, dequantised."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        kind = GGMLQuantizationType(tensor.type_id)
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        shape = tensor.shape
        raw = raw.reshape(shape[0] if len(shape) > 1 else 1, -1)
        if rows is not None:
            if len(shape) == 1:
                return self.read(name)[slice(*rows)]
            assert 0 <= rows[0] <= rows[1] <= shape[0], f"rows {rows} of {shape[0]}"
            raw, shape = raw[slice(*rows)], (rows[1] - rows[0], *shape[1:])
        if kind == GGMLQuantizationType.F32:
            return raw.copy().view("<f4").reshape(shape)
        if kind == GGMLQuantizationType.F16:
            return raw.copy().view("<f2").reshape(shape).astype(np.float32)
        values = np.empty(shape, np.float32)
        if _dequantised(tensor.type_id, raw, values):
            return values
        try:
            return dequantize(raw, kind).reshape(shape)
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: tensor {name} has type {kind.name}, which cannot be dequantised") from error

    def release_pages(self) -> None:
        """Give the file's pages back to the system's cache; they are read again where they are needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            with contextlib.suppress(OSError):  # of a process that locks its memory
                self._map.madvise(mmap.MADV_DONTNEED)

    def _read_header(self) -> None:
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version}, supported are 2 and 3 (little-endian)")
        num_tensors, num_entries = self._scalar("<Q"), self._scalar("<Q")
        for _ in range(num_entries):
            key = self._string()
            value = self._value(self._scalar("<I"))
            if value is not _LEFT_OUT:
                self.metadata[key] = value
        infos = []
        for _ in range(num_tensors):
            name = self._string()
            num_dims = self._scalar("<I")
            dims = [self._scalar("<Q") for _ in range(num_dims)]
            infos.append((name, tuple(reversed(dims)), self._scalar("<I"), self._scalar("<Q")))
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-self._position // alignment) * alignment
        for name, shape, type_id, offset in infos:
            self.tensors[name] = self._place(name, shape, type_id, start + offset)

    def _place(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError as error:
            raise ModelError(f"{self.path}: tensor {name} has unknown type {type_id}") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ModelError(
                f"{self.path}: tensor {name} of shape {shape} is not whole blocks of {block} ({kind.name})"
            )
        num_bytes = math.prod(shape) // block * block_bytes
        if offset + num_bytes > len(self._map):
            raise ModelError(
                f"{self.path}: truncated: tensor {name} ends at byte {offset + num_bytes:,}, "
                f"the file has {len(self._map):,}"
            )
        return GGUFTensor(name=name, shape=shape, type_id=type_id, offset=offset, num_bytes=num_bytes)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._map, self._position)
        self._position += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        start = self._position
        if start + length > len(self._map):
            raise IndexError
        self._position = start + length
        return self._map[start : start + length].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: damaged: unknown metadata type {kind}")
        return self._numbers(kind, 1)[0]

    def _array(self) -> Any:
        kind, count = self._scalar("<I"), self._scalar("<Q")
        if kind == _STRING:
            return self._strings(count) if self._with_vocabulary else self._skip_strings(count)
        if kind == _ARRAY:
            return [self._array() for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: damaged: unknown metadata array type {kind}")
        return self._numbers(kind, count)

    def _strings(self, count: int) -> list[str]:
        position, length_at, buffer, strings = self._position, _LENGTH.unpack_from, self._map, []
        for _ in range(count):
            start = position + 8
            position = start + length_at(buffer, position)[0]
            strings.append(buffer[start:position].decode("utf-8"))
        if position > len(buffer):
            raise IndexError
        self._position = position
        return strings

    def _skip_strings(self, count: int) -> Any:
        position, length_at, buffer = self._position, _LENGTH.unpack_from, self._map
        for _ in range(count):
            position += 8 + length_at(buffer, position)[0]
        if position > len(buffer):
            raise IndexError
        self._position = position
        return _LEFT_OUT

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        end = self._position + dtype.itemsize * count
        if end > len(self._map):
            raise IndexError
        values = np.frombuffer(self._map, dtype, count, self._position).tolist()
        self._position = end
        return [bool(v) for v in values] if kind == _BOOL else values


@functools.cache
def _native() -> Callable[..., int] | None:
    """The native function that widens blocks; None where it cannot be built."""
    try:
        function = native_build.load().mi_gguf_dequantise
    except native_build.NativeUnavailable:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    function.restype = ctypes.c_int
    return cast(Callable[..., int], function)


def _dequantised(type_id: int, raw: np.ndarray, values: np.ndarray) -> bool:
    """Whether a native function for this type has filled `values` with those of the blocks in `raw`."""
    import torch

    function = _native()
    return function is not None and bool(
        function(type_id, raw.ctypes.data, values.ctypes.data, values.size, torch.get_num_threads())
    )

"""Tensors that a checkpoint stores in MXFP4, dequantised as they are read: those of gpt-oss's experts.

A tensor `name` of [E, in, out] is two of the file. `name_blocks`, uint8 [E, out, in / 32, 16], has two values of four
bits in a byte, the lower one first. `name_scales`, uint8 [E, out, in / 32], is the exponent of each 32 values plus 127.
Source: OCP Microscaling Formats (MX) v1.0; the layout is that of transformers' `convert_moe_packed_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_infer.models.loading.hf_names import Span, TensorReader

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What four bits mean without their sign, which is the highest of them."""
_BLOCKS, _SCALES = "_blocks", "_scales"


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """[E, out, G, 16] and [E, out, G] uint8 -> bf16 [E, in, out], exactly what the bits mean."""
    table = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=torch.bfloat16)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    values = torch.ldexp(table[codes.int()], scales.int().unsqueeze(-1) - 127)
    return values.flatten(-2).transpose(-1, -2).contiguous()


class Mxfp4Reader:
    """A TensorReader that gives quantised tensors by the names that they have in a file that is not quantised."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        stored = reader.shapes()
        bases = (name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS))
        self._quantised = {base for base in bases if base + _SCALES in stored}
        parts = {base + part for base in self._quantised for part in (_BLOCKS, _SCALES)}
        self._shapes = {name: shape for name, shape in stored.items() if name not in parts}
        for base in self._quantised:
            experts, rows, groups, size = stored[base + _BLOCKS]
            self._shapes[base] = (experts, 2 * groups * size, rows)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        """rows of a quantised tensor are experts, of which no others are read."""
        if name not in self._quantised:
            return self._reader.read(name, rows, columns)
        value = dequantised(*(self._reader.read(name + part, rows) for part in (_BLOCKS, _SCALES)))
        return value if columns is None else value[:, columns[0] : columns[1]]

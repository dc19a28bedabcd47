"""Linears of every kind that a CPU has, and their product as it is defined; what codes of 8 and 4 bits stand for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_infer.kernels import packing
from megatron_infer.kernels.native.cpu_native import NativeOps, panel_layout, quantised_layout
from megatron_infer.kernels.packing import PackedLinears
from megatron_infer.kernels.torch.cpu_torch import TorchOps

BLOCK = 32
QUANTISED = ("int8", "int4")
KINDS = ("torch", "live", "oneDNN", "panels", *QUANTISED)
"""torch's by the weight itself, and the native one; by packed copies: oneDNN's, our panels, codes."""
ONE_ORDER = ("live", "panels", *QUANTISED)
"""Those whose sums have one order, whatever else is in the step."""


@dataclass(frozen=True)
class Linear:
    kind: str
    dtype: torch.dtype
    library: object
    ops: TorchOps
    copies: PackedLinears

    def pack(self, *weights: Tensor) -> None:
        """So that the operations multiply by copies of these, where the kind has copies."""
        self.copies.pack(weights if self.kind not in ("torch", "live") else ())

    def want(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """(the product in float64, the sum of the sizes of what is added)."""
        values = weight.double()
        if self.kind in QUANTISED:
            codes = self.copies.get(id(weight))
            values = rounded_values(self.library, self.kind, codes, tuple(weight.shape)).flatten(1)
            a, at = rounded_inputs(x)
            x = (a * at[..., None]).flatten(1)
        x, bias = x.double(), torch.zeros(len(values)) if bias is None else bias
        return x @ values.T + bias.double(), x.abs() @ values.abs().T + bias.double().abs()


def make_linear(kind: str, dtype: torch.dtype, library: object) -> Linear:
    if kind in ("torch", "oneDNN"):
        if kind == "oneDNN" and (reason := packing.unavailable(dtype)):
            pytest.skip(reason)
        copies = PackedLinears()
        return Linear(kind, dtype, library, TorchOps(copies), copies)
    layout = quantised_layout(library, dtype, kind) if kind in QUANTISED else panel_layout(library, dtype)
    copies = PackedLinears(layout=layout)
    return Linear(kind, dtype, library, NativeOps(library, dtype, copies), copies)


def fp16_up(x: Tensor) -> Tensor:
    """To the next fp16 that is not smaller."""
    values = x.numpy()
    half = values.astype(np.float16)
    up = np.nextafter(half, np.float16(np.inf))
    return torch.from_numpy(np.where(half.astype(np.float32) < values, up, half).astype(np.float32))


def in_blocks(values: Tensor) -> Tensor:
    """[rows, inner] -> fp32 [rows, blocks, 32], zero behind the last entry."""
    values = values.float()
    return torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def rounded_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [rows, blocks, 32], scales [rows, blocks])."""
    blocks = in_blocks(weight)
    scale = fp16_up(blocks.abs().amax(-1) / 127)
    factor = torch.where(scale > 0, 1 / scale, 0)
    return (blocks.double() * factor[..., None].double()).round().float(), scale


def rounded_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = in_blocks(x)
    most = blocks.abs().amax(-1)
    factor = torch.where(most > 1e-30, torch.full_like(most, 127) / most, 0)  # 127 / most is rounded twice
    return (blocks.double() * factor[..., None].double()).round().float(), most / 127


def columns(library, weight_dtype: str, panels: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [rows, blocks, 32], scales and minima [rows, blocks] in the order of the weight."""
    (rows, inner), width = shape, library.mi_panel_rows()
    blocks, count = -(-inner // BLOCK), -(-rows // width)
    num_bytes, num_halves = (BLOCK, 1) if weight_dtype == "int8" else (BLOCK // 2, 2)
    size = (num_bytes + 2 * num_halves) * width
    own = panels.view(count, -1)[:, : blocks * size].reshape(count, blocks, size)
    codes = own[..., : num_bytes * width].reshape(count, blocks, num_bytes // 4, width, 4)
    codes = codes.permute(0, 3, 1, 2, 4).reshape(count * width, blocks, num_bytes)[:rows]
    if weight_dtype == "int4":
        codes = torch.cat([codes & 15, codes >> 4], -1).float()
    else:
        one, _ = quantised_layout(library, torch.float32, weight_dtype).pack(torch.ones(1, BLOCK), None)
        codes = codes.float() - 128 if int(one[0]) == 255 else codes.view(torch.int8).float()
    halves = own[..., num_bytes * width :].contiguous().view(torch.float16).view(count, blocks, num_halves, width)
    halves = halves.permute(2, 0, 3, 1).reshape(num_halves, count * width, blocks)[:, :rows].float()
    return codes, halves[0], halves[1] if num_halves == 2 else torch.zeros_like(halves[0])


def rounded_values(library, weight_dtype: str, panels: Tensor, shape: tuple[int, int]) -> Tensor:
    """float64 [rows, blocks, 32]."""
    codes, scales, minima = (part.double() for part in columns(library, weight_dtype, panels, shape))
    return codes * scales[..., None] + minima[..., None]

"""A linear in torch whose sums stay in fp32, as logits do: a product of half precision rounds its own to that."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WIDENED_ROWS = 4096
"""Rows of a half-precision weight that exist in fp32 at once, where torch has no such product (on a CPU)."""


def fp32_linear(x_SX: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """See `Ops.fp32_linear`. Without autograd where inputs are of half precision."""
    weight, bias = weight[:rows], None if bias is None else bias[:rows]
    if x_SX.dtype.itemsize >= torch.float32.itemsize:
        return F.linear(x_SX, weight, bias).float()
    if x_SX.is_cuda:
        out_SV = torch.mm(x_SX, weight.t(), out_dtype=torch.float32)
    else:
        out_SV, wide_SX = x_SX.new_empty(len(x_SX), rows, dtype=torch.float32), x_SX.float()
        for first in range(0, rows, WIDENED_ROWS):
            part = slice(first, first + WIDENED_ROWS)
            out_SV[:, part] = wide_SX @ weight[part].float().t()
    return out_SV if bias is None else out_SV.add_(bias)

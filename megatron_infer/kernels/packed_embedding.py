"""Rows of an embedding, of which the packed copy may be all there is (native/packed_weight.cpp)."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.native.native_call import bind_threaded
from megatron_infer.kernels.packing import PackedLinears

_P, _I = ctypes.c_void_p, ctypes.c_int64


class PackedEmbedding:
    """`Ops.embedding` of one dtype."""

    def __init__(self, library: ctypes.CDLL, suffix: str, packed: PackedLinears) -> None:
        self._packed_of = packed.get
        self._select = bind_threaded(library, f"mi_select_rows_{suffix}", [_P, _P, _P, _I, _I, _I], ctypes.c_int)

    def __call__(self, ids: Tensor, weight: Tensor) -> Tensor:
        """From the packed copy where the weight is freed. Raises IndexError for ids beyond its rows."""
        data = weight.detach()  # which keeps its memory meanwhile
        packed = None if any(data.stride()) else self._packed_of(id(weight))
        if packed is None:
            return F.embedding(ids, data)
        which, (rows, width) = ids.to(torch.int64).contiguous(), weight.shape
        out = torch.empty(*ids.shape, width, dtype=weight.dtype)
        if not self._select(packed, which, out, which.numel(), width, rows):
            raise IndexError(f"token ids of {int(which.min())} to {int(which.max())}, the embedding has {rows:,} rows")
        return out

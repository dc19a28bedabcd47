"""Choosing keys by an indexer, and attention to them, over the paged cache of latents (native/decode.cpp).

Legend: kernels/torch/sparse_attention.py.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, IndexSpec
from megatron_infer.kernels.native.cpu_native import (
    CALL,
    MAX_HEAD_DIM,
    SUFFIXES,
    AttentionStep,
    NativePagedAttention,
)
from megatron_infer.kernels.native.native_call import bind
from megatron_infer.kernels.torch.sparse_attention import SparseQueries

_P, _I = ctypes.c_void_p, ctypes.c_int64


class _Choice(ctypes.Structure):
    """Choice in native/decode.cpp."""

    _fields_ = [
        *((name, _I) for name in ("count", "heads", "dim", "relu", "top_k")),
        *((name, _P) for name in ("q", "weights", "num_keys", "table")),
        ("table_stride", _I),
        ("keys", _P),
        *((name, _I) for name in ("key_stride", "block_size")),
        ("chosen", _P),
        ("threads", _I),
    ]


class NativeChosenKeys:
    """`sparse_attention.ChosenKeys`; a query has the same bits, and chooses the same keys, alone and among others."""

    def __init__(self, library: ctypes.CDLL, attention: NativePagedAttention, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._attention = attention
        """Its workspace, and the structs of its layers."""
        suffix = SUFFIXES[dtype]
        self._attend = bind(library, f"mi_attend_chosen_{suffix}", [_P, _P, _P, _P, _P, _I])
        self._choose = bind(library, f"mi_choose_keys_{suffix}", [_P, _P])
        self._call = ctypes.create_string_buffer(CALL.size)

    def refuses(self, indexer: IndexSpec) -> str | None:
        if indexer.dim % 16 or indexer.dim > MAX_HEAD_DIM:
            return f"needs index keys of a multiple of 16 dims up to {MAX_HEAD_DIM}, got {indexer.dim}"
        return None

    def choose(
        self, q_SIH: Tensor, weights_SI: Tensor, queries: SparseQueries, pages: Tensor, indexer: IndexSpec
    ) -> Tensor:
        q_SIH, weights_SI = q_SIH.contiguous(), weights_SI.float().contiguous()
        table_SW, width = queries.table_SW, pages.shape[-1]
        assert q_SIH.dtype is pages.dtype is self._dtype and pages.is_contiguous() and table_SW.stride(1) == 1
        chosen = torch.empty(len(q_SIH), indexer.top_k, dtype=torch.int32)
        choice = _Choice(
            count=len(q_SIH),
            heads=indexer.num_heads,
            dim=indexer.dim,
            relu=int(indexer.relu),
            top_k=indexer.top_k,
            q=q_SIH.data_ptr(),
            weights=weights_SI.data_ptr(),
            num_keys=queries.num_keys_S.data_ptr(),
            table=table_SW.data_ptr(),
            table_stride=table_SW.stride(0),
            keys=pages.data_ptr() + (width - indexer.dim) * pages.itemsize,
            key_stride=width,
            block_size=pages.shape[1],
            chosen=chosen.data_ptr(),
            threads=torch.get_num_threads(),
        )
        self._choose(self._attention.context, ctypes.addressof(choice))
        return chosen

    def attend(
        self, q_SGH: Tensor, chosen_SC: Tensor, queries: SparseQueries, pages: Tensor, *, spec: AttendSpec
    ) -> Tensor:
        count, width = chosen_SC.shape
        table_SW = queries.table_SW
        assert q_SGH.dtype is pages.dtype is self._dtype and q_SGH.stride(2) == table_SW.stride(1) == 1
        assert chosen_SC.dtype is torch.int32 and chosen_SC.is_contiguous() and pages.is_contiguous()
        rows = torch.arange(count, dtype=torch.int32)
        step = AttentionStep(
            num_tokens=count,
            num_rows=count,
            threads=torch.get_num_threads(),
            table_row=rows.data_ptr(),
            block_table=table_SW.data_ptr(),
            table_stride=table_SW.stride(0),
        )
        out = torch.empty(count, spec.group_size, spec.value_dim, dtype=self._dtype)
        keys, (q_token, q_group, _) = pages.data_ptr(), q_SGH.stride()
        values = keys + (spec.value_start or 0) * pages.itemsize
        CALL.pack_into(
            self._call, 0, q_SGH.data_ptr(), 0, 0, out.data_ptr(), keys, values, q_token, 0, q_group, 0, 0, 0, 0
        )
        kind = self._attention.kind_of(spec, pages.shape[1])
        where = ctypes.addressof(step), kind.address, ctypes.addressof(self._call)
        self._attend(self._attention.context, *where, chosen_SC.data_ptr(), width)
        return out

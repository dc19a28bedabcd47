"""Latent attention whose long chunks of prompts attend to full keys and values, which are made of the latents.

    short chunks, outputs   queries in the latents' space, against the cache as it is                  absorbed
    long chunks             keys and values of each head, made of the latents of all positions         expanded

An absorbed product of query and key takes R + 2 L multiplications a head, an expanded one H + V, where a key and value
cost L * (H - R + V) to make, however many queries see them (`LatentShape.expands_from`). The two sum in different
orders. Keys and values are made of some heads at a time, so that they take a bounded part of the memory.
Legend: kernels/base.py; L latent width, R rotary part, H a head's full key, V its value, C positions of a row.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, StepMetadata
from megatron_infer.kernels.native.cpu_native import (
    CALL,
    AttentionSpec,
    AttentionStep,
    NativePagedAttention,
    point_at,
)

CHUNK_BYTES = 1 << 25
"""Full keys and values in memory at once, or those of one head."""


@dataclass(slots=True, kw_only=True)
class _LongRow:
    """The prompt queries of a row as a step of their own, whose keys lie in one block."""

    first: int
    """Their first token in the step."""
    q_len: np.ndarray
    kv_len: np.ndarray
    cu_q: np.ndarray
    table_row: np.ndarray
    table: Tensor
    """The row of the block table."""

    @property
    def count(self) -> int:
        return int(self.q_len[0])

    @property
    def num_keys(self) -> int:
        return int(self.kv_len[0])


class NativeLatentAttention(NativePagedAttention):
    """`NativePagedAttention` that leaves prompt queries of long chunks to `run_expanded`."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, *, expands_from: int) -> None:
        """expands_from: prompt queries of a long chunk, at least."""
        super().__init__(library, dtype)
        self._expands_from = expands_from
        self._long: list[_LongRow] = []
        self._elsewhere = np.empty(0, dtype=np.int32)
        self.absorbed_S: Tensor | None = None
        """Tokens of the planned step that `run` computes; None: all of them."""

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        self._long, self.absorbed_S = [], None
        prompts = step.num_prompt_queries[: step.num_rows]
        is_long = prompts >= self._expands_from
        if not is_long.any():
            return
        self._elsewhere = is_long.astype(np.int32)
        self._step_struct.elsewhere = self._elsewhere.ctypes.data
        absorbed = np.ones(step.num_tokens, dtype=bool)
        for row in np.flatnonzero(is_long).tolist():
            first, count = int(step.cu_q[row]), int(prompts[row])
            num_keys = int(step.kv_len[row] - step.q_len[row]) + count
            absorbed[first : first + count] = False
            arrays = {"q_len": [count], "kv_len": [num_keys], "cu_q": [0, count], "table_row": [0]}
            own = {name: np.array(values, dtype=np.int32) for name, values in arrays.items()}
            table = step.block_table[int(step.table_row[row])]
            self._long.append(_LongRow(first=first, table=table, **own))
        self.absorbed_S = torch.from_numpy(np.flatnonzero(absorbed))

    def run_expanded(
        self, q_TNH: Tensor, weight_XL: Tensor, out_TX: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> None:
        """Attention of the other tokens, after `run` -> their rows of out [T, N * V].

        q: a head's key part and then its rotary part, which is not rotated. weight: the key and value projections of
        all heads, [N * (H - R + V), L], as `models.latent_attention.UpProjection` has them.
        """
        for row in self._long:
            self._run_row(row, q_TNH, weight_XL, out_TX, kv_cache[layer, 0], spec)

    def _run_row(
        self, row: _LongRow, q_TNH: Tensor, weight_XL: Tensor, out_TX: Tensor, pages: Tensor, spec: AttendSpec
    ) -> None:
        assert spec.value_start is not None and weight_XL.dtype is pages.dtype is self._dtype
        rotary, heads, tokens = spec.value_start, spec.group_size, slice(row.first, row.first + row.count)
        own = q_TNH[tokens]
        q_tNH = torch.cat((own[..., -rotary:], own[..., :-rotary]), dim=-1)
        head_dim, made = q_tNH.shape[2], weight_XL.shape[0] // heads
        width = rotary + made
        out_tNV = out_TX[tokens].unflatten(1, (heads, -1))
        blocks = row.table[: -(-row.num_keys // pages.shape[1])]
        kept_CW = pages.index_select(0, blocks).flatten(0, 2)[: row.num_keys]
        latent_CL = kept_CW[:, rotary:].contiguous()
        at_once = max(1, min(heads, CHUNK_BYTES // (row.num_keys * width * pages.itemsize)))
        keys_CKW = pages.new_empty(row.num_keys, at_once, width)
        for first in range(0, heads, at_once):
            count = min(at_once, heads - first)
            if count < keys_CKW.shape[1]:
                keys_CKW = pages.new_empty(row.num_keys, count, width)
            keys_CKW[..., :rotary] = kept_CW[:, None, :rotary]
            weight = weight_XL[first * made : (first + count) * made]
            keys_CKW[..., rotary:] = F.linear(latent_CL, weight).unflatten(1, (count, made))
            some = slice(first, first + count)
            out_tNV[:, some] = self._attend_to(row, q_tNH[:, some], keys_CKW, spec, head_dim)

    def _attend_to(self, row: _LongRow, q_tKH: Tensor, keys_CKW: Tensor, spec: AttendSpec, head_dim: int) -> Tensor:
        """keys: a head's key, whose rotary part is first, and its value -> [t, K, V]."""
        step = self._step
        count, heads, width, item = row.count, keys_CKW.shape[1], keys_CKW.shape[2], self._dtype.itemsize
        own = AttentionStep(num_tokens=count, num_rows=1, threads=self._step_struct.threads, table_stride=1)
        point_at(own, row, ("q_len", "kv_len", "cu_q", "table_row"))
        own.num_prompt_queries, own.block_table = own.q_len, own.table_row
        if step.cos_TR is not None and step.sin_TR is not None:
            ahead = row.first * step.cos_TR.stride(0) * item
            own.cos, own.sin = step.cos_TR.data_ptr() + ahead, step.sin_TR.data_ptr() + ahead
            own.rotary_stride = step.cos_TR.stride(0)
        form = AttentionSpec(
            num_kv=heads,
            group=1,
            head_dim=head_dim,
            key_stride=width,
            value_dim=width - head_dim,
            block_size=row.num_keys,
            rotary_dim=spec.rotary_dim,
            interleaved=int(spec.rotary_interleaved),
            rotary_at=spec.rotary_at,
            scale=spec.scale,
        )
        out = torch.empty(count, heads, width - head_dim, dtype=self._dtype)
        keys, (q_token, q_head, _) = keys_CKW.data_ptr(), q_tKH.stride()
        values = keys + head_dim * item
        CALL.pack_into(
            self._call, 0, q_tKH.data_ptr(), 0, 0, out.data_ptr(), keys, values, q_token, q_head, 0, 0, 0, 0, 0
        )
        self._attend(self.context, ctypes.addressof(own), ctypes.addressof(form), self._call_address)
        return out

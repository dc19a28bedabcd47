"""Sparse attention over latents: a query that sees more than top_k keys attends to those that its indexer chooses.

    position   0 ......... top_k-1 | top_k ...........
    attends    to all it sees      | to top_k chosen keys
    by         a dense backend     | this module, in torch

The boundary is a query's position and not the step's shape: an answer does not depend on how its prompt was chunked.
Dense queries have zeros in the place of index keys, so that a dense backend needs to know nothing of them.
Legend: kernels/base.py; I index heads, C chosen keys, W width of what the cache keeps of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.base import (
    AttendSpec,
    AttentionBackend,
    GraphSupport,
    IndexQueries,
    IndexSpec,
    StateCaptures,
    StepMetadata,
)
from megatron_infer.kernels.kv_rounding import movable
from megatron_infer.kernels.torch.cpu_torch import apply_rotary, rotate_and_append

MOST_ENTRIES = 1 << 24
"""Numbers of scores or gathered keys in memory at once."""


def dense_spec(spec: AttendSpec) -> AttendSpec:
    """The layer as a dense backend sees it: index keys are part of keys and values, and queries have zeros there."""
    return replace(spec, index=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SparseQueries:
    """The queries of a row that attend to chosen keys: its last ones."""

    first: int
    stop: int
    """Their tokens in the step."""
    kv_len: int
    """Keys that the last of them sees."""
    table: Tensor
    """The row of the block table."""


class SparseAttention:
    """kernels.base.SparseAttentionBackend around a dense backend that does not run in captured steps."""

    graphs = GraphSupport.NONE
    plan_on_host = None

    def __init__(self, dense: AttentionBackend, *, top_k: int) -> None:
        self.name = f"{dense.name}, sparse"
        self._dense = dense
        self._top_k = top_k
        self._step: StepMetadata | None = None
        self._sparse: list[_SparseQueries] = []
        self._dense_T: Tensor | None = None
        """Tokens of the queries that attend to all keys, where others do not; None: there are none."""
        self._chosen: list[Tensor] = []
        """Positions of the top-k keys, [t, C] for each of `_sparse`, by the last layer with an indexer."""
        self._specs: dict[int, tuple[AttendSpec, AttendSpec]] = {}
        """By identity, as the dense backend keeps them."""

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        if spec.index is None or spec.value_start is None or spec.window or spec.softcap or spec.sinks_N is not None:
            return "needs an indexer and latents, and no window, softcap or sinks"
        if spec.index.top_k != self._top_k:
            return f"chooses {self._top_k} keys in every layer, one asks for {spec.index.top_k}"
        return self._dense.supports(dense_spec(spec), dtype=dtype, block_size=block_size, kv_dtype=kv_dtype)

    def plan(self, step: StepMetadata) -> None:
        self._step = step
        self._sparse = []
        self._dense_T = None
        self._chosen = []
        kv_len, q_len = step.kv_len[: step.num_rows], step.q_len[: step.num_rows]
        dense_len = np.clip(self._top_k - (kv_len - q_len), 0, q_len)
        for row in np.flatnonzero(dense_len < q_len).tolist():
            self._sparse.append(
                _SparseQueries(
                    first=int(step.cu_q[row] + dense_len[row]),
                    stop=int(step.cu_q[row + 1]),
                    kv_len=int(kv_len[row]),
                    table=step.block_table[int(step.table_row[row])],
                )
            )
        if not self._sparse:
            self._dense.plan(step)
        elif dense_len.any():
            part, self._dense_T = _leading_queries(step, dense_len)
            self._dense.plan(part)

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        raise AssertionError("a layer without an indexer: supports() refuses it")

    def run_sparse(
        self,
        q_TKGH: Tensor,
        k_TKH: Tensor,
        kv_cache: Tensor,
        *,
        layer: int,
        spec: AttendSpec,
        index: IndexQueries | None,
    ) -> Tensor:
        step, indexer = self._step, spec.index
        assert step is not None and indexer is not None, "run() before plan()"
        turn = _index_rotation(step, spec, indexer)
        if index is not None and turn is not None:
            key_TKI = k_TKH[..., -indexer.dim :]
            key_TKI.copy_(apply_rotary(key_TKI, *turn, dim=indexer.rotary_dim, interleaved=indexer.rotary_interleaved))
        if not self._sparse:
            return self._run_dense(q_TKGH, k_TKH, kv_cache, layer, spec)
        out_TGV = q_TKGH.new_zeros(len(q_TKGH), spec.group_size, spec.value_dim)
        turned_TKGH, _, _ = rotate_and_append(q_TKGH, k_TKH, k_TKH, kv_cache[layer], step, spec)
        if self._dense_T is not None:
            # Appends its keys once more: those that a step of dense queries alone would leave, to the bit.
            mixed = self._run_dense(q_TKGH[self._dense_T], k_TKH[self._dense_T], kv_cache, layer, spec)
            out_TGV[self._dense_T] = mixed.unflatten(1, (spec.group_size, -1))
        pages = kv_cache[layer, 0]
        if index is not None:
            q_TIH = index.q_TIH
            if turn is not None:
                turned = {"dim": indexer.rotary_dim, "interleaved": indexer.rotary_interleaved}
                q_TIH = apply_rotary(q_TIH, *turn, **turned)
            self._chosen = [
                _choose(q_TIH[part.first : part.stop], index.weights_TI[part.first : part.stop], part, pages, indexer)
                for part in self._sparse
            ]
        assert self._chosen, "a layer attends to an earlier layer's choice, and none has chosen"
        for part, chosen_tC in zip(self._sparse, self._chosen, strict=True):
            tokens = slice(part.first, part.stop)
            out_TGV[tokens] = _attend(turned_TKGH[tokens, 0], chosen_tC, part, pages, spec)
        return out_TGV.flatten(1)

    def _run_dense(self, q_TKGH: Tensor, k_TKH: Tensor, kv_cache: Tensor, layer: int, spec: AttendSpec) -> Tensor:
        """The queries given, each against all keys it sees -> [T, G * V]."""
        assert spec.index is not None
        pair = self._specs.get(id(spec))
        if pair is None:
            pair = self._specs[id(spec)] = (spec, dense_spec(spec))
        q_TKGH = F.pad(q_TKGH, (0, spec.index.dim))
        value_TKH = k_TKH[..., spec.value_start :]
        out_TX = self._dense.run(q_TKGH, k_TKH, value_TKH, kv_cache, layer=layer, spec=pair[1])
        return out_TX.unflatten(1, (spec.group_size, -1))[..., : spec.value_dim].flatten(1)


def _leading_queries(step: StepMetadata, count_R: np.ndarray) -> tuple[StepMetadata, Tensor]:
    """(a step of the first count queries of each row, without rows that have none; its tokens in `step`)."""
    rows = np.flatnonzero(count_R)
    q_len = count_R[rows].astype(np.int32)
    start = step.kv_len[rows] - step.q_len[rows]
    kv_len = (start + q_len).astype(np.int32)
    cu_q = np.concatenate(([0], np.cumsum(q_len))).astype(np.int32)
    table_row = np.ascontiguousarray(step.table_row[rows])
    tokens = np.concatenate([np.arange(step.cu_q[row], step.cu_q[row] + count_R[row]) for row in rows])
    device = step.block_table.device
    mirrors = {
        name: torch.from_numpy(array).to(device)
        for name, array in (("q_len_R", q_len), ("kv_len_R", kv_len), ("cu_q_R1", cu_q), ("table_row_R", table_row))
    }
    token_T = torch.from_numpy(tokens).to(device)

    def of_tokens(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor[token_T]

    part = replace(
        step,
        num_tokens=len(tokens),
        num_rows=len(rows),
        num_decode=int((rows < step.num_decode).sum()),
        q_len=q_len,
        kv_len=kv_len,
        cu_q=cu_q,
        table_row=table_row,
        num_prompt_queries=np.minimum(step.num_prompt_queries[rows], q_len),
        **mirrors,
        positions_T=step.positions_T[token_T],
        kv_pos_T=step.kv_pos_T[token_T],
        cos_TR=of_tokens(step.cos_TR),
        sin_TR=of_tokens(step.sin_TR),
        captures=StateCaptures(),
        max_q_len=0,
        max_kv_len=0,
    )
    return part, token_T


def _index_rotation(step: StepMetadata, spec: AttendSpec, indexer: IndexSpec) -> tuple[Tensor, Tensor] | None:
    """(cos, sin) of index queries and keys: those of the layer's keys, in the order in which the indexer turns dims."""
    rotation = step.rotation(spec)
    if rotation is None or indexer.rotary_interleaved is spec.rotary_interleaved:
        return rotation
    assert spec.rotary_interleaved, "latent attention turns neighbouring dims"
    cos, sin = (torch.cat((part[:, ::2],) * 2, dim=-1) for part in rotation)
    return cos, sin


def _choose(q_tIH: Tensor, weights_tI: Tensor, part: _SparseQueries, pages: Tensor, indexer: IndexSpec) -> Tensor:
    """Positions [t, C] of the keys that each query attends to. pages: a layer's [blocks, B, 1, W]."""
    num_blocks = -(-part.kv_len // pages.shape[1])
    keys = movable(pages)[:, :, 0, -indexer.dim :].index_select(0, part.table[:num_blocks].long()).view(pages.dtype)
    key_PH = keys.flatten(0, 1)[: part.kv_len].float()
    position_P = torch.arange(part.kv_len, device=pages.device)
    first = part.kv_len - len(q_tIH)
    at_once = max(1, MOST_ENTRIES // (indexer.num_heads * part.kv_len))
    chosen = []
    for begin in range(0, len(q_tIH), at_once):
        some = slice(begin, begin + at_once)
        scores_tIP = q_tIH[some].float() @ key_PH.t()
        if indexer.relu:
            scores_tIP = scores_tIP.relu_()
        scores_tP = (scores_tIP * weights_tI[some].float().unsqueeze(-1)).sum(1)
        own_t1 = first + begin + torch.arange(len(scores_tP), device=pages.device)[:, None]
        scores_tP.masked_fill_(position_P > own_t1, -torch.inf)
        chosen.append(scores_tP.sort(dim=-1, descending=True, stable=True).indices[:, : indexer.top_k])
    return torch.cat(chosen)


def _attend(q_tGH: Tensor, chosen_tC: Tensor, part: _SparseQueries, pages: Tensor, spec: AttendSpec) -> Tensor:
    """Rotated queries against their chosen keys -> [t, G, V]."""
    size = pages.shape[1]
    place_tC = part.table.long()[chosen_tC // size] * size + chosen_tC % size
    rows = movable(pages).flatten(0, 2)[:, : spec.query_dim]
    at_once = max(1, MOST_ENTRIES // (spec.head_dim * chosen_tC.shape[1]))
    mixed = []
    for q, place in zip(q_tGH.float().split(at_once), place_tC.split(at_once), strict=True):
        kept = rows.index_select(0, place.flatten()).view(pages.dtype)
        key_tCH = kept.float().unflatten(0, place.shape)
        weight_tGC = (q @ key_tCH.transpose(1, 2) * spec.scale).softmax(-1)
        mixed.append(weight_tGC @ key_tCH[..., spec.value_start :])
    return torch.cat(mixed).to(q_tGH.dtype)

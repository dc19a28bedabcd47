"""Sparse attention over latents: a query that sees more than top_k keys attends to those that its indexer chooses.

    position   0 ......... top_k-1 | top_k ...........
    attends    to all it sees      | to top_k chosen keys
    by         a dense backend     | this module, in torch, or a native kernel

The boundary is a query's position and not the step's shape: an answer does not depend on how its prompt was chunked.
A dense backend passes over index keys (`AttendSpec.unread_dim`). A query's chosen keys are in the order of positions.
Legend: kernels/base.py; I index heads, C chosen keys, W width of what the cache keeps of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels.base import (
    AttendSpec,
    AttentionBackend,
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
    """The layer as a dense backend sees it: no query reads the index keys."""
    return spec if spec.index is None else replace(spec, index=None, unread_dim=spec.index.dim)


def refusal(spec: AttendSpec) -> str | None:
    """Why the layer is none of sparse attention over latents; None: it is."""
    if spec.index is None or spec.value_start is None or spec.window or spec.softcap or spec.sinks_N is not None:
        return "needs an indexer and latents, and no window, softcap or sinks"
    return None


def turn_index(x_TKI: Tensor, step: StepMetadata, spec: AttendSpec) -> Tensor:
    """Rotated index queries or index keys [T, *, I] of the step's tokens."""
    indexer = spec.index
    assert indexer is not None
    turn = _index_rotation(step, spec, indexer)
    how = {"dim": indexer.rotary_dim, "interleaved": indexer.rotary_interleaved}
    return x_TKI if turn is None else apply_rotary(x_TKI, *turn, **how)


def turn_index_keys(k_TKH: Tensor, step: StepMetadata, spec: AttendSpec) -> None:
    """Rotate the index keys, which are the last dims of keys [T, K, H], in place."""
    assert spec.index is not None
    key_TKI = k_TKH[..., -spec.index.dim :]
    key_TKI.copy_(turn_index(key_TKI, step, spec))


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseRow:
    """The queries of a row that attend to chosen keys: its last ones."""

    first: int
    stop: int
    """Their tokens in the step."""
    kv_len: int
    """Keys that the last of them sees."""
    table: Tensor
    """The row of the block table."""

    @property
    def count(self) -> int:
        return self.stop - self.first


class SparseQueries:
    """All queries of a step that attend to chosen keys, one row after the other: S of them."""

    def __init__(self, step: StepMetadata, rows: list[SparseRow]) -> None:
        self.rows = rows
        tables = [row.table.expand(row.count, -1) for row in rows]
        self.table_SW = torch.cat(tables) if len(tables) > 1 else tables[0]
        """Their rows of the block table."""
        keys = [np.arange(row.kv_len - row.count + 1, row.kv_len + 1, dtype=np.int32) for row in rows]
        self.num_keys_S = torch.from_numpy(np.concatenate(keys))
        """int32 keys that each sees, on the host."""
        tokens = np.concatenate([np.arange(row.first, row.stop) for row in rows])
        self.token_S: Tensor | None = None
        """Their tokens; None: all of the step's."""
        self.step = step
        """Their positions and angles."""
        if len(tokens) < step.num_tokens:
            self.token_S = torch.from_numpy(tokens).to(step.block_table.device)
            self.step = _of_tokens(step, self.token_S)

    def of(self, x_TX: Tensor) -> Tensor:
        """The part of these queries."""
        return x_TX if self.token_S is None else x_TX[self.token_S]


class ChosenKeys(Protocol):
    """Chooses keys for single queries, and attends to them. pages: a layer's [blocks, B, 1, W]."""

    def refuses(self, indexer: IndexSpec) -> str | None:
        """Why it cannot choose so; None: it can."""
        ...

    def choose(
        self, q_SIH: Tensor, weights_SI: Tensor, queries: SparseQueries, pages: Tensor, indexer: IndexSpec
    ) -> Tensor:
        """Rotated index queries -> int32 positions [S, top_k] of the keys that each attends to, ascending."""
        ...

    def attend(
        self, q_SGH: Tensor, chosen_SC: Tensor, queries: SparseQueries, pages: Tensor, *, spec: AttendSpec
    ) -> Tensor:
        """Rotated queries against their keys -> [S, G, V]. spec: of `dense_spec`, the same object in each call."""
        ...


class SparseAttention:
    """kernels.base.SparseAttentionBackend around a dense backend that does not run in captured steps."""

    graph_safe = False
    _step: StepMetadata

    def __init__(self, dense: AttentionBackend, *, top_k: int, chosen: ChosenKeys | None = None) -> None:
        """chosen: None: in torch."""
        self.name = f"{dense.name}, sparse"
        self._dense = dense
        self._top_k = top_k
        self._chosen: ChosenKeys = chosen or TorchChosenKeys()
        self._sparse: SparseQueries | None = None
        """None: every query attends to all keys."""
        self._dense_T: Tensor | None = None
        """Tokens of the queries that attend to all keys, where others do not; None: there are none."""
        self._chosen_SC: Tensor | None = None
        """int32 positions of the top-k keys, ascending, by the last layer with an indexer."""
        self._specs: dict[int, tuple[AttendSpec, AttendSpec]] = {}
        """By identity, as the dense backend keeps them."""

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        if (reason := refusal(spec)) is not None or spec.index is None:
            return reason
        if spec.index.top_k != self._top_k:
            return f"chooses {self._top_k} keys in every layer, one asks for {spec.index.top_k}"
        if (reason := self._chosen.refuses(spec.index)) is not None:
            return reason
        return self._dense.supports(dense_spec(spec), dtype=dtype, block_size=block_size, kv_dtype=kv_dtype)

    def plan(self, step: StepMetadata) -> None:
        self._step = step
        self._sparse = self._dense_T = self._chosen_SC = None
        kv_len, q_len = step.kv_len[: step.num_rows], step.q_len[: step.num_rows]
        dense_len = np.clip(self._top_k - (kv_len - q_len), 0, q_len)
        rows = [
            SparseRow(
                first=int(step.cu_q[row] + dense_len[row]),
                stop=int(step.cu_q[row + 1]),
                kv_len=int(kv_len[row]),
                table=step.block_table[int(step.table_row[row])],
            )
            for row in np.flatnonzero(dense_len < q_len).tolist()
        ]
        if not rows:
            self._dense.plan(step)
            return
        self._sparse = SparseQueries(step, rows)
        if dense_len.any():
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
        assert indexer is not None
        if index is not None:
            turn_index_keys(k_TKH, step, spec)
        pair = self._specs.get(id(spec))
        if pair is None:
            pair = self._specs[id(spec)] = (spec, dense_spec(spec))
        dense = pair[1]
        value_TKH = k_TKH[..., spec.value_start :]
        queries, pages = self._sparse, kv_cache[layer, 0]
        if queries is None:
            return self._dense.run(q_TKGH, k_TKH, value_TKH, kv_cache, layer=layer, spec=dense)
        out_TX = q_TKGH.new_zeros(len(q_TKGH), spec.group_size * spec.value_dim)
        if (of_dense := self._dense_T) is not None:
            given = q_TKGH[of_dense], k_TKH[of_dense], value_TKH[of_dense]
            out_TX[of_dense] = self._dense.run(*given, kv_cache, layer=layer, spec=dense)
        k_SKH = queries.of(k_TKH)
        q_SKGH, _, _ = rotate_and_append(queries.of(q_TKGH), k_SKH, k_SKH, kv_cache[layer], queries.step, dense)
        if index is not None:
            q_SIH = turn_index(queries.of(index.q_TIH), queries.step, spec)
            self._chosen_SC = self._chosen.choose(q_SIH, queries.of(index.weights_TI), queries, pages, indexer)
        assert self._chosen_SC is not None, "a layer attends to an earlier layer's choice, and none has chosen"
        mixed_SX = self._chosen.attend(q_SKGH[:, 0], self._chosen_SC, queries, pages, spec=dense).flatten(1)
        if queries.token_S is None:
            return mixed_SX
        out_TX[queries.token_S] = mixed_SX
        return out_TX

    def choice_of_step(self, most: int) -> Tensor:
        step = self._step
        position_C = torch.arange(min(self._top_k, most), dtype=torch.int32, device=step.positions_T.device)
        chosen_TC = position_C.where(position_C <= step.positions_T[:, None], -1)
        if self._sparse is not None:
            assert self._chosen_SC is not None
            if self._sparse.token_S is None:
                return self._chosen_SC
            chosen_TC[self._sparse.token_S] = self._chosen_SC
        return chosen_TC


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
    part = replace(
        _of_tokens(step, token_T),
        num_tokens=len(tokens),
        num_rows=len(rows),
        num_decode=int((rows < step.num_decode).sum()),
        q_len=q_len,
        kv_len=kv_len,
        cu_q=cu_q,
        table_row=table_row,
        num_prompt_queries=np.minimum(step.num_prompt_queries[rows], q_len),
        **mirrors,
        captures=StateCaptures(),
        max_q_len=0,
        max_kv_len=0,
    )
    return part, token_T


def _of_tokens(step: StepMetadata, token_S: Tensor) -> StepMetadata:
    """The step with positions and angles of some of its tokens."""

    def part(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor[token_S]

    return replace(
        step,
        positions_T=part(step.positions_T),
        kv_pos_T=part(step.kv_pos_T),
        cos_TR=part(step.cos_TR),
        sin_TR=part(step.sin_TR),
    )


def _index_rotation(step: StepMetadata, spec: AttendSpec, indexer: IndexSpec) -> tuple[Tensor, Tensor] | None:
    """(cos, sin) of index queries and keys: those of the layer's keys, in the order in which the indexer turns dims."""
    rotation = step.rotation(spec)
    if rotation is None or indexer.rotary_interleaved is spec.rotary_interleaved:
        return rotation
    assert spec.rotary_interleaved, "latent attention turns neighbouring dims"
    cos, sin = (torch.cat((part[:, ::2],) * 2, dim=-1) for part in rotation)
    return cos, sin


class TorchChosenKeys:
    """`ChosenKeys` on any device."""

    def refuses(self, indexer: IndexSpec) -> str | None:
        return None

    def choose(
        self, q_SIH: Tensor, weights_SI: Tensor, queries: SparseQueries, pages: Tensor, indexer: IndexSpec
    ) -> Tensor:
        counts = [row.count for row in queries.rows]
        parts = zip(q_SIH.split(counts), weights_SI.split(counts), queries.rows, strict=True)
        return torch.cat([_choose(*part, pages, indexer) for part in parts])

    def attend(
        self, q_SGH: Tensor, chosen_SC: Tensor, queries: SparseQueries, pages: Tensor, *, spec: AttendSpec
    ) -> Tensor:
        size = pages.shape[1]
        place_SC = queries.table_SW.long().gather(1, chosen_SC.long() // size) * size + chosen_SC % size
        rows = movable(pages).flatten(0, 2)[:, : spec.query_dim]
        at_once = max(1, MOST_ENTRIES // (spec.head_dim * chosen_SC.shape[1]))
        mixed = []
        for q, place in zip(q_SGH.float().split(at_once), place_SC.split(at_once), strict=True):
            kept = rows.index_select(0, place.flatten()).view(pages.dtype)
            key_tCH = kept.float().unflatten(0, place.shape)
            weight_tGC = (q @ key_tCH.transpose(1, 2) * spec.scale).softmax(-1)
            mixed.append(weight_tGC @ key_tCH[..., spec.value_start :])
        return torch.cat(mixed).to(q_SGH.dtype)


def _choose(q_tIH: Tensor, weights_tI: Tensor, part: SparseRow, pages: Tensor, indexer: IndexSpec) -> Tensor:
    """`ChosenKeys.choose` of a row."""
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
        best = scores_tP.sort(dim=-1, descending=True, stable=True).indices[:, : indexer.top_k]
        chosen.append(best.int().sort(dim=-1).values)
    return torch.cat(chosen)

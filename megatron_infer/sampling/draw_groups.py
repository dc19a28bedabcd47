"""Who needs what in a step: rows sorted into lanes that are drawn alike; kept while the rows stay the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_infer.sampling.filters import FEW, MANY, DrawParams, DrawResult
from megatron_infer.sampling.logprobs import processed
from megatron_infer.sampling.penalties import Penalties, TokenEdits
from megatron_infer.sampling.row_params import GREEDY_BELOW, TOUCHED, RowFlags, RowParams
from megatron_infer.sampling.token_masks import Forbid, MaskedRows, TokenMasks
from megatron_infer.sampling.upload import Upload


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOps:
    """What a lane does by the means of its device."""

    stage: Upload
    forbid: Forbid


@dataclass(slots=True, kw_only=True)
class DrawGroup:
    """Rows of a step that go through the same stages."""

    wants: RowFlags
    """DRAW and FILTER, and any of TOUCHED if logits change first."""
    places: np.ndarray
    """Positions in the step's S."""
    places_M: Tensor | None
    """The same on the device; None: the whole step, in order."""
    seed: np.ndarray
    shape: DrawParams | None
    edits: TokenEdits | None
    penalties: Penalties | None
    masked: MaskedRows | None
    ops: DeviceOps

    def take(self, tensor_S: Tensor) -> Tensor:
        """This lane's rows: a view when it is the whole step, else a copy."""
        return tensor_S if self.places_M is None else tensor_S.index_select(0, self.places_M)

    def edited(self, logits_MV: Tensor, positions: np.ndarray, token_pool: Tensor, masks: TokenMasks | None) -> Tensor:
        """The lane's logits after bias, masks and penalties: an fp32 copy. positions [S]; masks: the step's."""
        work = logits_MV.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if self.edits is not None:
            self.edits.apply(work)
        if self.penalties is not None:
            self.penalties.apply(work, positions[self.places], token_pool, self.ops.stage)
        if self.masked is not None:
            assert masks is not None, "rows of structured output without masks"
            self.masked.apply(work, masks, self.ops.stage, self.ops.forbid)
        return work

    def drawn_from(
        self,
        logits_MV: Tensor,
        positions: np.ndarray,
        token_pool: Tensor,
        masks: TokenMasks | None,
        drawn: DrawResult,
        temperature_M: Tensor,
    ) -> Tensor:
        """Logits of the distributions that this lane's tokens were drawn from, fp32 [M, V].

        drawn: the whole step's choices. temperature_M: 1 for greedy rows.
        """
        cut = DrawResult(drawn.token_M, drawn.top_M)
        if self.wants & RowFlags.FILTER and drawn.cut_logit_M is not None and drawn.cut_id_M is not None:
            cut.cut_logit_M, cut.cut_id_M = self.take(drawn.cut_logit_M), self.take(drawn.cut_id_M)
        return processed(self.edited(logits_MV, positions, token_pool, masks), temperature_M, cut)


def split_draw_groups(params: RowParams, rows: np.ndarray, flags: np.ndarray, ops: DeviceOps) -> list[DrawGroup]:
    """Lanes of a step whose rows want `flags`; in all they cover each of its positions once."""
    kinds = flags & (RowFlags.DRAW | RowFlags.FILTER)
    kinds[(flags & TOUCHED) != 0] |= RowFlags.EDIT
    groups = []
    for kind in np.unique(kinds).tolist():
        places = np.flatnonzero(kinds == kind)
        groups.append(make_draw_group(params, rows, flags, places, ops))
    return groups


def make_draw_group(
    params: RowParams, rows: np.ndarray, flags: np.ndarray, places: np.ndarray, ops: DeviceOps
) -> DrawGroup:
    """One lane of the given positions; its wants are the union of theirs."""
    stage = ops.stage
    own_rows, own_flags = rows[places], flags[places]
    wants = RowFlags(int(np.bitwise_or.reduce(own_flags)))
    return DrawGroup(
        wants=wants,
        places=places,
        places_M=None if len(places) == len(rows) else stage(places),
        seed=params.seed[own_rows],
        shape=_shape(params, own_rows, stage) if wants & RowFlags.DRAW else None,
        edits=TokenEdits.build(params, own_rows, own_flags, stage),
        penalties=Penalties(params, own_rows, own_flags, stage) if wants & RowFlags.PENALTY else None,
        masked=MaskedRows.of(flags, places, stage) if wants & RowFlags.GRAMMAR else None,
        ops=ops,
    )


def _shape(params: RowParams, rows: np.ndarray, stage: Upload) -> DrawParams:
    columns = np.empty((5, len(rows)))
    columns[:4] = params.table[:4, rows]
    columns[0] = 1.0 / np.maximum(columns[0], GREEDY_BELOW)
    _, top_k, top_p, _, _ = columns
    return DrawParams(
        columns_5M=stage(columns),
        candidates=FEW if top_k.max() <= FEW else MANY,
        needs_mass=bool(((top_k >= params.vocab_size) & (top_p < 1.0)).any()),
        is_bounded=bool(top_k.max() <= MANY),
    )

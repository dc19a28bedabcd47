"""Rows of a step sorted into groups that go through the same stages; kept while the rows stay the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_infer.runner.sampling.filters import FEW, MANY, DrawParams, DrawResult
from megatron_infer.runner.sampling.logprobs import processed
from megatron_infer.runner.sampling.penalties import Penalties, TokenEdits
from megatron_infer.runner.sampling.row_params import CHANGES_LOGITS, GREEDY_BELOW, RowFlags, RowParams
from megatron_infer.runner.sampling.token_masks import Forbid, MaskedRows, forbid
from megatron_infer.runner.sampling.upload import Upload

if TYPE_CHECKING:
    from megatron_infer.runner.sampling.sampler import SamplerInput


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOps:
    """What the sampler does in another way on each device; by default a CPU's."""

    to_device: Upload = torch.from_numpy
    forbid: Forbid = forbid


@dataclass(slots=True, kw_only=True)
class DrawGroup:
    """Rows of a step that go through the same stages."""

    flags: RowFlags
    """Union of its rows' flags."""
    places: np.ndarray
    """Positions in the step's S."""
    places_M: Tensor | None
    """The same on the device; None: the whole step, in order."""
    seed: np.ndarray
    draw_params: DrawParams | None
    """None: all rows are greedy."""
    edits: TokenEdits | None
    penalties: Penalties | None
    masked: MaskedRows | None
    ops: DeviceOps

    def take(self, tensor_S: Tensor) -> Tensor:
        """The group's rows: a view when they are the whole step, else a copy."""
        return tensor_S if self.places_M is None else tensor_S.index_select(0, self.places_M)

    def edited(self, logits_MV: Tensor, inputs: SamplerInput) -> Tensor:
        """The group's logits after edits, penalties and masks: an fp32 copy. inputs: the whole step's."""
        work = logits_MV.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if self.edits is not None:
            self.edits.apply(work)
        if self.penalties is not None:
            self.penalties.apply(work, inputs.positions[self.places], inputs.token_pool, self.ops.to_device)
        if self.masked is not None:
            assert inputs.masks is not None, "rows of structured output without masks"
            self.masked.apply(work, inputs.masks, self.ops.to_device, self.ops.forbid)
        return work

    def drawn_from(self, logits_MV: Tensor, inputs: SamplerInput, drawn: DrawResult, temperature_M: Tensor) -> Tensor:
        """Logits of the distributions that the group's tokens were drawn from, fp32 [M, V].

        inputs, drawn: the whole step's. temperature_M: 1 for greedy rows.
        """
        cut = DrawResult(drawn.token_M, drawn.top_M)
        if self.flags & RowFlags.FILTER and drawn.cut_logit_M is not None and drawn.cut_id_M is not None:
            cut.cut_logit_M, cut.cut_id_M = self.take(drawn.cut_logit_M), self.take(drawn.cut_id_M)
        return processed(self.edited(logits_MV, inputs), temperature_M, cut)


def split_draw_groups(params: RowParams, rows: np.ndarray, flags: np.ndarray, ops: DeviceOps) -> list[DrawGroup]:
    """The groups of a step whose rows have `flags` in force; together they hold each of its positions once."""
    kinds = flags & (RowFlags.DRAW | RowFlags.FILTER)
    kinds[(flags & CHANGES_LOGITS) != 0] |= RowFlags.EDIT
    groups = []
    for kind in np.unique(kinds).tolist():
        places = np.flatnonzero(kinds == kind)
        groups.append(make_draw_group(params, rows, flags, places, ops))
    return groups


def make_draw_group(
    params: RowParams, rows: np.ndarray, flags: np.ndarray, places: np.ndarray, ops: DeviceOps
) -> DrawGroup:
    """One group of the given positions; its flags are the union of theirs."""
    stage = ops.to_device
    own_rows, own_flags = rows[places], flags[places]
    union = RowFlags(int(np.bitwise_or.reduce(own_flags)))
    return DrawGroup(
        flags=union,
        places=places,
        places_M=None if len(places) == len(rows) else stage(places),
        seed=params.seed[own_rows],
        draw_params=_draw_params(params, own_rows, stage) if union & RowFlags.DRAW else None,
        edits=TokenEdits.build(params, own_rows, own_flags, stage),
        penalties=Penalties(params, own_rows, own_flags, stage) if union & RowFlags.PENALTY else None,
        masked=MaskedRows.of(flags, places, stage) if union & RowFlags.GRAMMAR else None,
        ops=ops,
    )


def _draw_params(params: RowParams, rows: np.ndarray, stage: Upload) -> DrawParams:
    columns = np.empty((5, len(rows)))
    columns[:4] = params.table[:4, rows]
    columns[0] = 1.0 / np.maximum(columns[0], GREEDY_BELOW)
    _, top_k, top_p, _, _ = columns
    return DrawParams(
        columns_5M=stage(columns),
        candidates=FEW if top_k.max() <= FEW else MANY,
        needs_mass=bool(((top_k >= params.vocab_size) & (top_p < 1.0)).any()),
    )

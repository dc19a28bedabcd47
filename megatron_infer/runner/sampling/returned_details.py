"""Details returned with a drawn token: its log probability before and after the sampler's stages, and its support (the
tokens that could have been drawn).

    model's logits --score--------------------------------------------------------> raw
         +-- bias, masks, penalties --> temperature, filters --score--------------> processed
                                                   +-- larger than -inf, as bits --> support

A row with temperature 0 is drawn from one token: its processed log probability is 0 and its support is that token.
Legend: S sampled positions, A those that return details, B those of them with ids cut away, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_infer.runner.sampling.draw_groups import DeviceOps, DrawGroup, make_draw_group
from megatron_infer.runner.sampling.filters import DrawResult
from megatron_infer.runner.sampling.logprobs import Score
from megatron_infer.runner.sampling.row_params import CHANGES_LOGITS, RETURNS, RowFlags, RowParams

if TYPE_CHECKING:
    from megatron_infer.runner.sampling.sampler import SamplerInput

TOKEN_DETAILS = sum(RETURNS.values())
"""Bits of the flags of rows that return details."""
IN_EVERY_DRAW = frozenset(("raw", "processed"))
"""Keys whose values a captured draw finds, so that it need not keep its logits."""
WHOLE, ALONE = -1, -2
"""In TokenDetailsBatch.places: every id is in the set (or the row does not return it); the drawn one alone."""


@dataclass(frozen=True, slots=True)
class TokenDetailsBatch:
    """A step's details; entry a belongs to sampled position index[a].

    The keys are those of outputs.token_outputs; copies and messages of a step take whatever keys there are.
    """

    index: np.ndarray
    values: dict[str, Tensor]
    """fp32 [A], one number per entry. Of a set of ids: its bits, uint8 [B, 8 * ceil(V / 64)], id t is bit t % 8 of byte
    t // 8."""
    places: dict[str, np.ndarray]
    """For each set of ids, int64 [A]: the row of each entry's bits, or WHOLE, or ALONE."""
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDetailsPlan:
    """What follows from the rows' parameters alone: kept while the same rows come back."""

    group: DrawGroup
    columns: dict[str, np.ndarray | None]
    """See `returned_columns`."""
    cut_A: Tensor | None
    """int64: entries whose bits are returned; None: there are none."""
    temperature_A: Tensor
    greedy_A: Tensor
    same: bool
    """The distribution drawn from is the model's, but for temperature 0."""


def num_bytes(vocab_size: int) -> int:
    """Bytes of one token's set of ids."""
    return 8 * -(-vocab_size // 64)


def returned_columns(
    params: RowParams, rows: np.ndarray, flags: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray | None]]:
    """(sampled positions that return details, the keys of their TokenDetailsBatch), from the parameters alone.

    Each key has its `places`, None where it is a number per entry; no position, no key.
    """
    index = np.flatnonzero(flags & TOKEN_DETAILS)
    if not len(index):
        return index, {}
    rows, flags = rows[index], flags[index]
    support: np.ndarray = np.full(len(rows), WHOLE, dtype=np.int64)
    cut = (flags & (RowFlags.FILTER | RowFlags.MIN_TOKENS | RowFlags.GRAMMAR)) != 0
    for place in np.flatnonzero(flags & RowFlags.EDIT).tolist():
        extras = params.extras[int(rows[place])]
        cut[place] |= extras.allowed_ids is not None or len(extras.bad_ids) > 0
    greedy, returned = (flags & RowFlags.DRAW) == 0, (flags & RETURNS["return_support"]) != 0
    support[greedy & returned] = ALONE
    with_bits = np.flatnonzero(cut & returned & ~greedy)
    support[with_bits] = np.arange(len(with_bits))
    columns: dict[str, np.ndarray | None] = {"raw": None, "processed": None, "support": support}
    return index, columns


def needs_logits(params: RowParams, rows: np.ndarray, flags: np.ndarray) -> bool:
    """Whether details need the logits after the draw has found log probabilities."""
    _, columns = returned_columns(params, rows, flags)
    return any(
        key not in IN_EVERY_DRAW if places is None else bool((places >= 0).any()) for key, places in columns.items()
    )


def plan_token_details(
    params: RowParams, rows: np.ndarray, flags: np.ndarray, ops: DeviceOps
) -> TokenDetailsPlan | None:
    """None when no row returns details."""
    places, columns = returned_columns(params, rows, flags)
    if not columns:
        return None
    group, support = make_draw_group(params, rows, flags, places, ops), columns["support"]
    assert support is not None
    cut = np.flatnonzero(support >= 0)
    greedy = (flags[places] & RowFlags.DRAW) == 0
    temperature = params.table[0, rows[places]]
    temperature[greedy] = 1.0
    return TokenDetailsPlan(
        group=group,
        columns=columns,
        cut_A=ops.to_device(cut) if len(cut) else None,
        temperature_A=ops.to_device(temperature),
        greedy_A=ops.to_device(greedy),
        same=not group.flags & (CHANGES_LOGITS | RowFlags.FILTER) and bool((temperature == 1.0).all()),
    )


def collect_token_details(
    plan: TokenDetailsPlan,
    logits_SV: Tensor,
    inputs: SamplerInput,
    drawn: DrawResult,
    score: Score,
    score_model: Score,
) -> TokenDetailsBatch:
    """logits_SV: the model's, real vocabulary. inputs, drawn: the whole step's; log probabilities that the draw has
    found are not computed again. score_model: `score` for the group's rows of the model's logits."""
    group, vocab = plan.group, logits_SV.shape[1]
    token_A = group.take(drawn.token_M)
    raw = score_model(group.take(logits_SV), token_A, 0)[0] if drawn.raw_M is None else group.take(drawn.raw_M)
    own = raw if plan.same else None
    if drawn.own_M is not None:
        own = group.take(drawn.own_M)
    bits = torch.empty(0, num_bytes(vocab), dtype=torch.uint8, device=logits_SV.device)
    if own is None or plan.cut_A is not None:
        values = group.drawn_from(group.take(logits_SV), inputs, drawn, plan.temperature_A)
        if own is None:
            own = score(values, token_A, 0)[0]
        if plan.cut_A is not None:
            bits = pack_bits(values.index_select(0, plan.cut_A) > -torch.inf)
    found = {"raw": raw, "processed": own.masked_fill(plan.greedy_A, 0.0), "support": bits}
    places = {key: places for key, places in plan.columns.items() if places is not None}
    return TokenDetailsBatch(group.places, found, places, vocab)


def pack_bits(kept_BV: Tensor) -> Tensor:
    """bool -> uint8 [B, num_bytes(V)], lowest bit first."""
    rows, vocab = kept_BV.shape
    padded = torch.nn.functional.pad(kept_BV.to(torch.uint8), (0, 8 * num_bytes(vocab) - vocab))
    shifts = torch.arange(8, dtype=torch.uint8, device=kept_BV.device)
    return (padded.view(rows, -1, 8) << shifts).sum(-1, dtype=torch.uint8)

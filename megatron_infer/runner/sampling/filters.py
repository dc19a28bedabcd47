"""Draws from filtered distributions: temperature, top_k, top_p, min_p, inverse CDF.

Weights are integers: floor(2**40 * exp((logit - max) * (1 / temperature))) in float64, the largest being 2**40. Their
sums are exact in int64 for up to 2**22 tokens, so that no sum depends on the order, the chunking or the number of
candidates it is taken over: a row draws the same token alone and among others, by this code and by a kernel. What is
lost is below 2**-40 of the most likely token's weight.

Candidates are ordered by (logit descending, id ascending); every filter keeps a prefix of that order, which the last
kept candidate (the cut) describes. Legend: M rows, V vocab, C candidates, G groups of neighbouring ids.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

SCALE = 2.0**40
FEW, MANY = 64, 256
"""Candidates looked at before a full sort: enough for a small top_k, and for the nucleus of most text."""
GROUP = 64
_LOW_WORD = 0xFFFFFFFF


@dataclass(slots=True, kw_only=True)
class DrawParams:
    """Parameters of the rows of one draw."""

    columns_5M: Tensor
    """float64 on the device: 1 / temperature, top_k (V when off), top_p, min_p, and the step's uniform number."""
    candidates: int
    """How many to try before a full sort: FEW where every row's top_k is within it, else MANY."""
    needs_mass: bool
    """Some row has top_p without top_k: its nucleus is measured against the mass of the whole vocabulary."""

    def take(self, index: Tensor) -> DrawParams:
        """The same for some of the rows."""
        columns = self.columns_5M.index_select(1, index)
        return replace(self, columns_5M=columns)


@dataclass(slots=True)
class DrawResult:
    """Tokens, and what their draw has found out on the way."""

    token_M: Tensor
    top_M: Tensor
    """The row's largest logit: not finite means that the row cannot be drawn from."""
    cut_logit_M: Tensor | None = None
    cut_id_M: Tensor | None = None
    """The last candidate kept by the filters; None: nothing was cut."""
    mass_M: Tensor | None = None
    """int64 sum of the whole row's weights at temperature 1, for rows whose draw has taken it. For others 0, or -1
    where top_M is that of the model's logits."""
    own_M: Tensor | None = None
    """fp32 log probability of the token in the distribution it was drawn from, by the draw's own sums; NaN for rows
    whose draw has not taken them."""
    raw_M: Tensor | None = None
    """fp32 log probability in the model's distribution: from captured draws alone, for rows that return it."""

    def replace(self, index: Tensor, other: DrawResult) -> None:
        """Write `other`'s rows to rows `index`, as far as both have them."""
        for one in fields(self):
            kept, new = getattr(self, one.name), getattr(other, one.name)
            if kept is not None and new is not None:
                kept.index_copy_(0, index, new)


def draw_any(logits_MV: Tensor, params: DrawParams) -> DrawResult:
    """Draw from softmax(logits / temperature) without a filter. fp32 logits; the cumulative sum runs in id order."""
    top_M = logits_MV.amax(-1)
    cumulative_MV = _weights(logits_MV, top_M, params).cumsum(-1)
    return DrawResult(_invert(cumulative_MV, cumulative_MV[:, -1], params), top_M)


def draw_filtered(logits_MV: Tensor, params: DrawParams) -> DrawResult:
    """Draw after top_k, then top_p on what is left (renormalised), then min_p. fp32 logits.

    On a CPU a bounded number of candidates is tried first; rows whose filters reach further are sorted in full. On a
    GPU the host would have to wait to learn which rows those are: every row is sorted in full there.
    """
    vocab = logits_MV.shape[1]
    if logits_MV.is_cuda:
        return draw_sorted(logits_MV, params)
    top_M = logits_MV.amax(-1)
    mass_M = _weights(logits_MV, top_M, params).sum(-1) if params.needs_mass else None
    count = params.candidates
    if 4 * count >= vocab:
        return _draw_from(logits_MV, sorted_ids(logits_MV), top_M, mass_M, params)[0]
    result, reached_M = _draw_from(logits_MV, best_ids(logits_MV, count), top_M, mass_M, params)
    far = (~reached_M & top_M.isfinite()).nonzero().squeeze(1)
    if far.numel():
        rest, top = logits_MV.index_select(0, far), top_M.index_select(0, far)
        mass = None if mass_M is None else mass_M.index_select(0, far)
        full, _ = _draw_from(rest, sorted_ids(rest), top, mass, params.take(far))
        result.replace(far, full)
    return result


def draw_sorted(logits_MV: Tensor, params: DrawParams) -> DrawResult:
    """`draw_filtered` by a full sort: no shape depends on the logits' values, so that the host does not wait."""
    top_M = logits_MV.amax(-1)
    mass_M = _weights(logits_MV, top_M, params).sum(-1) if params.needs_mass else None
    return _draw_from(logits_MV, sorted_ids(logits_MV), top_M, mass_M, params)[0]


def best_ids(logits_MV: Tensor, count: int) -> Tensor:
    """Ids of the `count` best candidates, in order -> [M, count], exact also among equal logits.

    They lie in the `count` groups of GROUP neighbouring ids whose largest logits are best: any other group comes after
    `count` groups, each of which has a candidate that comes before all of its own.
    """
    num_rows, vocab = logits_MV.shape
    whole = vocab // GROUP
    if whole <= 2 * count:
        ids_V = torch.arange(vocab, device=logits_MV.device)
        return ids_of(sort_keys(logits_MV, ids_V).topk(count, dim=-1).values)
    grouped = logits_MV[:, : whole * GROUP].unflatten(1, (whole, GROUP))
    group_ids = torch.arange(whole, device=logits_MV.device)
    best_MG = ids_of(sort_keys(grouped.amax(-1), group_ids).topk(count, dim=-1, sorted=False).values)
    within = torch.arange(GROUP, device=logits_MV.device)
    ids = (best_MG.unsqueeze(-1) * GROUP + within).flatten(1)
    values = grouped[torch.arange(num_rows, device=logits_MV.device).unsqueeze(1), best_MG].flatten(1)
    if whole * GROUP < vocab:  # the ids after the last whole group always take part
        tail = torch.arange(whole * GROUP, vocab, device=logits_MV.device).expand(num_rows, -1)
        ids = torch.cat([ids, tail], 1)
        values = torch.cat([values, logits_MV[:, whole * GROUP :]], 1)
    return ids_of(sort_keys(values, ids).topk(count, dim=-1).values)


def sorted_ids(logits_MV: Tensor) -> Tensor:
    """All ids in candidate order -> [M, V]."""
    ids_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
    return ids_of(sort_keys(logits_MV, ids_V).sort(dim=-1, descending=True).values)


def sort_keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 that sort as (fp32 value, -id): the bits of a float, made monotone, above the complement of the id."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0: they are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(torch.int64) << 32) | (_LOW_WORD - ids)


def ids_of(keys: Tensor) -> Tensor:
    """The ids in `sort_keys`."""
    return _LOW_WORD - (keys & _LOW_WORD)


def _weights(logits: Tensor, top_M: Tensor, params: DrawParams) -> Tensor:
    scaled = (logits.double() - top_M.double().unsqueeze(1)).mul_(params.columns_5M[0].unsqueeze(1))
    return scaled.exp_().mul_(SCALE).to(torch.int64)


def _invert(cumulative: Tensor, total_M: Tensor, params: DrawParams) -> Tensor:
    """First index whose cumulative weight exceeds floor(u * total); an index with no weight is never it."""
    target = torch.minimum((params.columns_5M[4] * total_M.double()).to(torch.int64), total_M - 1).unsqueeze(1)
    found = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return found.clamp_(max=cumulative.shape[1] - 1)


def _draw_from(
    logits_MV: Tensor, ids_MC: Tensor, top_M: Tensor, mass_M: Tensor | None, params: DrawParams
) -> tuple[DrawResult, Tensor]:
    """Filter and draw among the first C candidates -> (result, bool [M]: C candidates were enough)."""
    vocab, count = logits_MV.shape[1], ids_MC.shape[1]
    _, top_k_M, top_p_M, min_p_M, _ = params.columns_5M
    values_MC = logits_MV.gather(1, ids_MC)
    weights_MC = _weights(values_MC, top_M, params)
    cumulative_MC = weights_MC.cumsum(-1)
    last = (top_k_M.clamp(max=count) - 1).to(torch.int64).unsqueeze(1)
    mass_k = cumulative_MC.gather(1, last).squeeze(1)
    if mass_M is not None:
        mass_k = torch.where(top_k_M >= vocab, mass_M, mass_k)
    no_top_p = top_p_M >= 1.0
    bound = torch.where(no_top_p, torch.inf, top_p_M * mass_k.double()).unsqueeze(1)
    kept = torch.arange(count, device=ids_MC.device) <= last
    kept &= (cumulative_MC - weights_MC).double() < bound
    kept &= weights_MC.double() >= (min_p_M * SCALE).unsqueeze(1)
    num_kept = kept.sum(-1).clamp_(min=1)
    last_kept = (num_kept - 1).unsqueeze(1)
    found = _invert(cumulative_MC, cumulative_MC.gather(1, last_kept).squeeze(1), params).unsqueeze(1)
    result = DrawResult(
        ids_MC.gather(1, found).squeeze(1),
        top_M,
        values_MC.gather(1, last_kept).squeeze(1),
        ids_MC.gather(1, last_kept).squeeze(1),
    )
    knows_mass = no_top_p | (top_k_M >= vocab)
    return result, (top_k_M <= count) | ((num_kept < count) & knows_mass)

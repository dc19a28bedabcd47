"""Log probabilities of drawn and of prompt tokens, their ranks, and the most likely alternatives.

Legend: S sampled positions, A those of them that are scored, P prompt positions, N alternatives, V vocab, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_infer.runner.sampling.filters import DrawResult, best_ids, sorted_ids


@dataclass(frozen=True, slots=True)
class LogprobBatch:
    """A step's log probabilities; entry a belongs to sampled position index[a]."""

    index: np.ndarray
    token_logprob: Tensor
    """fp32 [A], of the drawn token."""
    token_rank: Tensor
    """int64 [A]; 1: the most likely, equal ones ranked by id."""
    top_ids: Tensor
    """int64 [A, largest count], most likely first."""
    top_logprobs: Tensor
    counts: np.ndarray
    """How many alternatives entry a returns; further columns belong to entries that return more."""


Score = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]]


def score(logits_AV: Tensor, token_A: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprob, rank, top ids, top logprobs) of each row's token under softmax(logits) in fp32; top <= V."""
    logits_AV = logits_AV.float()
    token = token_A.unsqueeze(1)
    logprobs_AV, own = torch.log_softmax(logits_AV, -1), logits_AV.gather(1, token)
    ids_V = torch.arange(logits_AV.shape[1], device=logits_AV.device)
    rank = (logits_AV > own).sum(-1) + ((logits_AV == own) & (ids_V < token)).sum(-1) + 1
    token_logprob = logprobs_AV.gather(1, token).squeeze(1)
    if top == 0:
        empty = own.new_empty(len(own), 0)
        return token_logprob, rank, empty.to(torch.int64), empty
    top_ids = best_ids(logits_AV, top) if top < logits_AV.shape[1] else sorted_ids(logits_AV)
    return token_logprob, rank, top_ids, logprobs_AV.gather(1, top_ids)


def processed(logits_AV: Tensor, temperature_A: Tensor, cut: DrawResult) -> Tensor:
    """Logits of the distribution a token was drawn from -> fp32 [A, V]: -inf for what the filters cut away.

    logits_AV is fp32, after bias and penalties, and is overwritten. temperature_A is 1 for greedy rows.
    """
    if cut.cut_logit_M is not None and cut.cut_id_M is not None:
        limit, limit_id = cut.cut_logit_M.unsqueeze(1), cut.cut_id_M.unsqueeze(1)
        ids_V = torch.arange(logits_AV.shape[1], device=logits_AV.device)
        logits_AV.masked_fill_((logits_AV < limit) | ((logits_AV == limit) & (ids_V > limit_id)), -torch.inf)
    return logits_AV.div_(temperature_A.float().unsqueeze(1))


def prompt_logprobs(
    hidden_PD: Tensor,
    targets_P: Tensor,
    logits_fn: Callable[[Tensor], Tensor],
    *,
    top: int,
    chunk: int,
    vocab_size: int,
    score: Score = score,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Model log probabilities of targets_P[i], the token after position i -> (logprob, rank, top ids, top logprobs).

    A prompt's first token has none: pass the hidden states of positions 0 .. n-2 and tokens 1 .. n-1. `logits_fn` maps
    [p, D] to [p, padded V], or to the part of it that `score` takes; at most `chunk` positions go through it at once,
    so [chunk, V] is the largest tensor made. score: `StepSampler.score`.
    """
    top = min(top, vocab_size)
    scored = []
    for begin in range(0, len(targets_P), chunk):
        logits = logits_fn(hidden_PD[begin : begin + chunk])[:, :vocab_size]
        scored.append(score(logits, targets_P[begin : begin + chunk], top))
    if not scored:
        none = hidden_PD.new_empty(0, dtype=torch.float32)
        return none, none.to(torch.int64), none.to(torch.int64).view(0, top), none.view(0, top)
    logprob, rank, top_ids, top_logprobs = (torch.cat(parts) for parts in zip(*scored, strict=True))
    return logprob, rank, top_ids, top_logprobs
